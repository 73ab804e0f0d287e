"""The route of plain tensor calls: one dictionary lookup, then the replay of a prepared call.

What torch would have to see goes by ``torch.library`` instead: subclasses, tracing, modes, transforms, autocast, and
tensors that are not on a GPU. Both routes choose and prepare by ``dispatch``; docs/decisions.md says what each step of
this one costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn import Parameter

from portkern import dispatch, library
from portkern.executors.replay import Call
from portkern.op import Op, Result, unpack
from portkern.runtime import Runtime, _process, current, pins_of_context

_PLAIN = dispatch.PLAIN
_INTS = frozenset((int,))
_WANTS = object()  # marks a tensor of a key that requires a gradient
_BARE = object()  # of a key that was given once: the function gave the op's own outputs
_LISTS = frozenset((list, tuple, torch.Size))


@dataclass(slots=True)
class Prepared:
    """What a key of the public function's arguments leads to: the op and the call, and the op's canonical arguments,
    with the place among the given ones for each tensor and each number that changes per call."""

    op: Op
    call: Call  # gives all outputs where a gradient is wanted; else those that the function shows
    constants: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]  # (position among the canonical arguments, among the given ones)
    planned: dispatch.Planned
    bare: bool = True  # the function gives the outputs that it shows as the op made them
    recipe: library.Recipe | bool | None = None  # for what a gradient takes; False: there is none, None: not asked yet

    def canonical(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The op's arguments for a call with those ``given``."""
        found = list(self.constants)
        for position, place in self.places:
            found[position] = given[place]
        return tuple(found)


class _Derived(torch.autograd.Function):
    """A call whose gradient is wanted: what ``library.define`` gives torch, without its dispatcher."""

    @staticmethod
    def forward(ctx: Any, called: tuple[Op, Prepared | None, Any, tuple[Any, ...]], *leaves: Tensor) -> Any:
        """``called`` is what ``_derive`` was given; ``leaves`` are the canonical arguments with a gradient."""
        op, prepared, given, args = called
        outputs = dispatch.run(op, args) if prepared is None else prepared.call(given)
        recipe = None if prepared is None else prepared.recipe
        if isinstance(recipe, library.Recipe):
            recipe.follow(ctx, args, outputs)
            return outputs
        needs = zip(_differentiated(op, args), ctx.needs_input_grad[1:], strict=True)
        needed = [position for position, need in needs if need]
        library.save(op, ctx, needed, args, outputs)
        if prepared is not None and recipe is None:
            prepared.recipe = library.recipe(op, needed, args, outputs) or False
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = library.derive(ctx, *grads)
        op = ctx.kept[0]
        # Of an op without derivative there is no way here: ``derive`` says so.
        return (None, *[found[position] for position in op.differentiated])


def _derive(op: Op, prepared: Prepared | None, given: Any, args: tuple[Any, ...]) -> Any:
    """The call with canonical ``args``, seen by autograd."""
    return _apply((op, prepared, given, args), *[args[position] for position in _differentiated(op, args)])


def _differentiated(op: Op, args: Sequence[Any]) -> Sequence[int]:
    """The arguments that autograd is shown; of an op without derivative all tensors, so that it says so by name."""
    return op.differentiated or [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]


# torch.autograd.Function.apply first looks for transforms and wrappers of torch.func, which ``watched`` has done: 2 us.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Derived).apply


def function(
    op: Op,
    signature: Callable[..., tuple[Any, ...]],
    slow: Callable[..., Any],
    visible: Callable[[Op, Any, Sequence[Any], Mapping[str, Any]], Any] | None = None,
) -> Callable[..., Any]:
    """``op`` as a function of what ``signature`` takes; ``slow`` is the same by torch.library, and ``visible`` makes of
    the op's outputs what the function gives.

    ``signature`` must depend on its arguments (and which of them require a gradient, and whether that is enabled) and
    ``op.settings`` alone, apart from torch's autocast.
    """
    skipped = frozenset(op.values) if signature is _canonical else frozenset()
    # An op may be registered again, which clears what is prepared, and an argument may mean one thing to its public
    # function and another among the canonical ones.
    name, settings = f"{op.name} {id(op)} {id(signature)}", op.settings
    shown = visible if op.saved or op.result is not None else None
    saved = op.saved if shown is not None else 0

    def call(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return slow(*args, **kwargs)
        given = (*args, *kwargs.values()) if kwargs else args
        try:
            wanted, parts = _parts(name, given, kwargs) if not skipped else _without(name, given, skipped)
            if parts is None or watched():
                return slow(*args, **kwargs)
            wanted = wanted and torch.is_grad_enabled()
            parts.append(wanted)
            if settings is not None:
                parts.append(settings())
            runtime = _process.runtime or current()
            parts.append(runtime.database.epoch())
            key = tuple(parts)
            prepared: Prepared | None = runtime.calls.young.get(key) or runtime.calls.get(key)
        except (TypeError, RuntimeError):  # no hash, no strides: torch.library says what is wrong with it
            return slow(*args, **kwargs)
        if prepared is None:
            if not _on_gpu(given):
                return slow(*args, **kwargs)
            canonical = signature(*args, **kwargs)
            if isinstance(canonical, Result):
                return canonical.value
            bare = shown is None or runtime.once.get(key) is _BARE
            hidden = saved if bare and not wanted else 0
            found = _unprepared(runtime, op, key, canonical, given, wanted, skipped, hidden, bare)
            return found if shown is None else _seen(runtime, op, key, found, shown(op, found, args, kwargs))
        if not wanted:
            found = prepared.call(given)
            return found if prepared.bare or shown is None else shown(op, found, args, kwargs)
        found = _derive(prepared.op, prepared, given, prepared.canonical(given))
        if shown is None:
            return found
        if not prepared.bare:
            return shown(op, found, args, kwargs)
        return found if not saved else found[0] if len(found) == saved + 1 else found[:-saved]

    return call


def _on_gpu(given: Sequence[Any]) -> bool:
    """Whether every tensor lies there, and is what its memory says."""
    return all(arg.device.type == "cuda" and not arg.is_neg() for arg in given if isinstance(arg, Tensor))


def _seen(runtime: Runtime, op: Op, key: Any, outputs: Any, result: Any) -> Any:
    """``result``, having noted for the call that prepares whether it is the op's own outputs."""
    if runtime.once.get(key) is True and are_bare(op, outputs, result):
        runtime.once.put(key, _BARE)
    return result


def are_bare(op: Op, outputs: Any, result: Any) -> bool:
    """Whether ``result``, which the public function gives, is nothing but those of the ``outputs`` that it shows. By
    ``Op.result`` this is so for all calls with one key: a norm over one dim need not ask for the shape each time."""
    shown = unpack(outputs)[: -op.saved or None]
    if op.listed or not shown:
        return False
    given = (result,) if len(shown) == 1 else result
    return type(given) is tuple and len(given) == len(shown) and all(map(operator.is_, given, shown))


def _parts(name: str, given: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, list[Any] | None]:
    """Whether a tensor wants a gradient, and what the key is made of; None for what the other route serves."""
    parts: list[Any] = [name, *kwargs] if kwargs else [name]
    wanted = False
    for arg in given:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.requires_grad:  # a signature may ask, to leave out what only a gradient needs
                wanted = True
                parts.append(_WANTS)
            # Of contiguous tensors the strides of unit dims may differ, which are never stepped. Nothing is ever stored
            # under a key with the device of a CPU tensor, or with a negated one.
            strides = arg.is_contiguous() or arg.stride()
            parts += (arg.shape, strides, arg.dtype, arg.device, arg.data_ptr() % 16, arg.is_neg())
        elif kind in _PLAIN:
            parts += (kind, arg)
        elif kind is float:
            parts += (kind, arg if arg > 0.0 else arg.hex())  # 0.0 and -0.0 are equal, and no NaN is
        elif kind in _LISTS and _INTS.issuperset(map(type, arg)):
            parts += (kind, int, *arg)
        elif kind in _LISTS and _PLAIN.issuperset(map(type, arg)):
            parts += (kind, *arg, *map(type, arg))
        else:
            return False, None
    return wanted, parts


_compiling = torch.compiler.is_dynamo_compiling


def _without(name: str, given: Sequence[Any], skipped: frozenset[int]) -> tuple[bool, list[Any] | None]:
    """The same for canonical arguments, some of which change per call and decide nothing but by their type."""
    kept = [type(arg).__name__ if place in skipped else arg for place, arg in enumerate(given)]
    return _parts(name, kept, {})


def canonical(op: Op) -> Callable[..., Any]:
    """``op`` as a function of its canonical arguments."""
    return function(op, _canonical, lambda *args: library.call(op.name, *args))


def _canonical(*args: Any) -> tuple[Any, ...]:
    return args


def watched() -> Any:
    """True where someone listens to torch's dispatcher, or this context pins configs."""
    return (
        _autocast()
        or _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _tracing()
        or pins_of_context.get()
    )


_autocast, _tracing = torch.is_autocast_enabled, torch._C._is_tracing
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def _unprepared(
    runtime: Runtime, op: Op, key: Any, args: tuple[Any, ...], given: Sequence[Any], wanted: bool,
    skipped: frozenset[int], hidden: int, bare: bool = True,
) -> Any:  # fmt: skip
    """The call with canonical ``args``, for which nothing is prepared: all its outputs.

    The second call of a key prepares, if every tensor of ``args`` was given: many shapes, and most numbers that change
    per call, come once, and preparing would cost each of them more. What is prepared leaves the last
    ``hidden`` outputs out. It is a call of the op that has the name of ``op`` by now, as in ``library.define``.
    """
    op = runtime.ops.get(op.name, op)
    if runtime.once.get(key) is None:
        runtime.once.put(key, True)
    else:
        places = _places(args, given)
        if places is None:
            return runtime.functions[op.name](*args)
        places.update((position, position) for position in skipped)
        planned = dispatch.planned(op, args)
        call = None if planned is None else planned.replay(args, places, hidden)
        if planned is not None and call is not None:
            constants = tuple(None if position in places else arg for position, arg in enumerate(args))
            prepared = Prepared(op, call, constants, tuple(places.items()), planned, bare)
            runtime.calls.put(key, prepared)
            if not hidden:
                return _derive(op, prepared, given, args) if wanted else call(given)
    return _derive(op, None, given, args) if wanted else dispatch.run(op, args)


def _places(args: Sequence[Any], given: Sequence[Any]) -> dict[int, int] | None:
    """For the position of each tensor among the canonical ``args`` its place among the ``given`` ones. None where that
    is not known: a tensor was made on the way (a drawn seed, a converted operand), or given twice, as in add(x, x),
    whose key is that of add(x, y). Nor of a tensor that became a number: its value is no part of the key."""
    if len(args) == len(given) and all(arg is each for arg, each in zip(args, given, strict=True)):
        return {position: position for position, arg in enumerate(args) if isinstance(arg, Tensor)}
    among = {id(arg): place for place, arg in enumerate(given) if isinstance(arg, Tensor)}
    if len(among) < sum(isinstance(arg, Tensor) for arg in given):
        return None
    tensors = {position: id(arg) for position, arg in enumerate(args) if isinstance(arg, Tensor)}
    if not among.keys() == set(tensors.values()):
        return None
    return {position: among[each] for position, each in tensors.items()}
