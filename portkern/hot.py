"""The route of plain tensor calls: one dictionary lookup, then the replay of a prepared call.

What torch would have to see goes by ``torch.library`` instead: subclasses, tracing, modes, transforms, autocast, and
tensors that are not on a GPU. Both routes choose and prepare by ``dispatch``; docs/decisions.md says what each step of
this one costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn import Parameter

from portkern import dispatch, library
from portkern.executors.replay import Call
from portkern.op import Op
from portkern.runtime import Runtime, current, current_pins

_PLAIN = frozenset((int, bool, str, type(None), torch.dtype))  # equal and of one type: the same argument
_LISTS = frozenset((list, tuple, torch.Size))
_GIVEN = 3  # arguments of _Derived before the op's own


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a key of the public function's arguments leads to: the call, and the op's canonical arguments, with the
    place among the given ones for each tensor."""

    call: Call
    constants: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]  # (position of a tensor among the canonical arguments, among the given ones)

    def canonical(self, given: Sequence[Any]) -> list[Any]:
        """The op's arguments for a call with those ``given``."""
        found = list(self.constants)
        for position, place in self.places:
            found[position] = given[place]
        return found


class _Derived(torch.autograd.Function):
    """A call whose gradient is wanted: what ``library.define`` gives torch, without its dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: Op, prepared: Prepared | None, given: Sequence[Any], *args: Any) -> Any:
        outputs = dispatch.run(op, args) if prepared is None else prepared.call(given)
        library.save(op, ctx, ctx.needs_input_grad[_GIVEN:], args, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * _GIVEN + library.derive(ctx, grads)


def function(op: Op, signature: Callable[..., tuple[Any, ...]], slow: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` as a function of what ``signature`` takes; ``slow`` is the same by torch.library.

    ``signature`` must depend on its arguments and ``op.settings`` alone, apart from torch's autocast.
    """
    skipped = frozenset(op.values) if signature is _canonical else frozenset()

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return slow(*args, **kwargs)
        given = (*args, *kwargs.values()) if kwargs else args
        parts: list[Any] = [op.name, *kwargs] if kwargs else [op.name]
        wanted = False
        try:
            for place, arg in enumerate(given):
                kind = type(arg)
                if kind is Tensor or kind is Parameter:
                    if not arg.is_cuda or arg.is_neg():
                        return slow(*args, **kwargs)
                    wanted = wanted or arg.requires_grad
                    parts += (arg.shape, arg.stride(), arg.dtype, arg.get_device(), arg.data_ptr() % 16)
                elif place in skipped:
                    parts.append(kind)
                elif kind in _PLAIN:
                    parts += (kind, arg)
                elif kind is float:
                    parts += (kind, arg.hex())  # 0.0 and -0.0 are equal
                elif kind in _LISTS:
                    parts += (kind, *arg, *map(type, arg))
                else:
                    return slow(*args, **kwargs)
            if _watched():
                return slow(*args, **kwargs)
            if op.settings is not None:
                parts.append(op.settings())
            runtime = current()
            parts.append(runtime.database.epoch())
            key = tuple(parts)
            prepared: Prepared | None = runtime.calls.get(key)
        except (TypeError, RuntimeError):  # no hash, no strides: torch.library says what is wrong with it
            return slow(*args, **kwargs)
        wanted = wanted and torch.is_grad_enabled()
        if prepared is None:
            return _first(runtime, op, key, signature(*args, **kwargs), given, wanted, skipped)
        if wanted:
            return _Derived.apply(op, prepared, given, *prepared.canonical(given))  # type: ignore[no-untyped-call]
        return prepared.call(given)

    return call


def canonical(op: Op) -> Callable[..., Any]:
    """``op`` as a function of its canonical arguments."""
    return function(op, _canonical, lambda *args: library.call(op.name, *args))


def _canonical(*args: Any) -> tuple[Any, ...]:
    return args


def _watched() -> bool:
    """Whether someone listens to torch's dispatcher, or this context pins configs."""
    return bool(
        torch.is_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or current_pins()
    )


def _first(
    runtime: Runtime, op: Op, key: Any, args: Sequence[Any], given: Sequence[Any], wanted: bool, skipped: frozenset[int]
) -> Any:
    """The call with canonical ``args``; what it prepared is kept under ``key`` if every tensor of them was given."""
    if wanted:
        result = _Derived.apply(op, None, given, *args)  # type: ignore[no-untyped-call]
    else:
        result = dispatch.run(op, args)
    among = {id(arg): place for place, arg in enumerate(given) if isinstance(arg, Tensor)}
    tensors = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
    places = {position: among[id(args[position])] for position in tensors if id(args[position]) in among}
    if len(places) == len(tensors):
        call = dispatch.prepared_call(op, args, {**places, **{position: position for position in skipped}})
        if call is not None:
            constants = tuple(None if position in places else arg for position, arg in enumerate(args))
            runtime.calls.put(key, Prepared(call, constants, tuple(places.items())))
    return result
