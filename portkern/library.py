"""Ops as torch sees them: definition, fake kernel and autograd, all by ``torch.library``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from portkern import batching, dispatch
from portkern.errors import NotDifferentiable
from portkern.op import Backward, Op, Result, pack, qualified, unpack
from portkern.plan import Meta
from portkern.runtime import current, libraries, pins, pins_of_context


def define(op: Op) -> None:
    """Make ``torch.ops.<namespace>.<name>`` exist. What it does is looked up by name at the call, so that an op can be
    registered again, as in a notebook; only the schema is for ever."""
    if op.qualname in libraries():
        return
    namespace, name = op.qualname.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")  # noqa: TOR901
    library.define(f"{name}{op.schema}")

    def run(*args: Any) -> Any:
        return dispatch.run(_now(op), args)

    def fake(*args: Any) -> Any:
        return pack(_fake_outputs(_now(op), args), op.listed)

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(op.qualname, fake, lib=library)
    altered = altered_by(op)
    if altered:
        library.impl(name, _altering(op, altered), "Autograd")
    else:
        torch.library.register_autograd(op.qualname, derive, setup_context=_context_of(op), lib=library)
        torch.library.register_vmap(op.qualname, batching.rule(lambda: _now(op), call), lib=library)
    libraries()[op.qualname] = library


def _now(op: Op) -> Op:
    """The op that is registered under this name by now."""
    return current().ops.get(op.name, op)


def altered_by(op: Op) -> tuple[int, ...]:
    """Positions of the arguments that the op's schema declares as altered in place: ``Tensor(a!)``."""
    schema = torch._C.parse_schema(f"{op.qualname}{op.schema}")
    return tuple(
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _altering(op: Op, altered: Sequence[int]) -> Any:
    """The autograd rule of an op that alters its arguments: refused where a gradient would be wrong, and seen by
    autograd's version counters, so that a saved tensor that it altered raises torch's own error."""

    def run(*args: Any) -> Any:
        for position in altered:
            if torch.is_grad_enabled() and args[position].requires_grad:
                raise NotDifferentiable(
                    f"{op.name} alters argument {position} in place, which requires grad; use it under torch.no_grad()"
                )
        with torch._C._AutoDispatchBelowAutograd():
            result = call(op.name, *args)
        torch.autograd.graph.increment_version([args[position] for position in altered])
        return result

    return run


def refuse_transforms(op: Op, args: Sequence[Any]) -> None:
    """Raise NotDifferentiable where torch would lose or refuse the derivative without naming the op: forward mode, and
    the gradients of torch.func. An op without a derivative passes, as torch's do, if its signature detached what it was
    given: there is none to lose."""
    if torch.compiler.is_compiling():
        return
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    forward = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(each).tangent is not None for each in tensors
    )
    layer = torch._C._functorch.peek_interpreter_stack()
    inside = layer is not None and layer.key() in _DERIVATIVES
    if forward or (inside and (op.backwards or any(_tracked(each, layer.level()) for each in tensors))):
        raise NotDifferentiable(
            f"{op.name} has {'reverse-mode autograd only' if op.backwards else 'no derivative'}: inside "
            "torch.func.grad, jvp or jacfwd and with dual numbers use torch's own function"
        )


def _tracked(tensor: torch.Tensor, level: int) -> bool:
    """Whether a gradient of torch.func may flow to ``tensor``: one of this level, or, of which nothing shows, of a
    level around it."""
    outer = tensor.is_floating_point() and 0 < torch._C._functorch.maybe_get_level(tensor) < level
    return tensor.requires_grad or outer


_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def call(op: str, *args: Any) -> Any:
    """Call the op named ``op`` with canonical arguments, through torch's dispatcher."""
    namespace, name = qualified(op).split("::")
    return getattr(getattr(torch.ops, namespace), name).default(*args)


def _fake_outputs(op: Op, args: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs without data. Sizes may be symbolic, so a Meta is made without a pointer."""
    device = dispatch.common_device(op, args)
    metas = [
        Meta(tuple(arg.shape), tuple(arg.stride()), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args
    ]
    return [
        torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=device)
        for buffer in op.outputs(*metas)
    ]


def _context_of(op: Op) -> Any:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        needed = [position for position, need in enumerate(ctx.needs_input_grad) if need]
        save(_now(op), ctx, needed, tuple(inputs), output)

    return setup_context


def save(op: Op, ctx: Any, needed: Sequence[int], args: tuple[Any, ...], output: Any) -> None:
    """Keep in ``ctx`` what the derivative of a call takes; ``needed`` are the positions of the arguments whose gradient
    is wanted."""
    if op.saved:
        ctx.set_materialize_grads(False)  # what is for the derivative only has no gradient: None, not zeros
    parts: list[tuple[Backward, list[Any]]] = []
    tensors: list[torch.Tensor] = []
    outputs = unpack(output)
    if op.depends and (constant := _constant(op, needed)):
        ctx.mark_non_differentiable(*[outputs[number] for number in constant])
    for part in op.backwards:
        for position in part.inputs:
            if position in needed:
                break
        else:
            continue
        # Tensors are kept by torch; their places are marked beside the constants.
        kept = list(part.save(args, outputs))
        for place, item in enumerate(kept):
            # Asking torch whether a number is a tensor takes a quarter of a microsecond.
            if type(item) not in _NO_TENSORS and isinstance(item, torch.Tensor):
                tensors.append(item)
                kept[place] = _TENSOR
        parts.append((part, kept))
    ctx.save_for_backward(*tensors)
    # Autograd may run the backward in a thread of its own, where this context's pins are not.
    ctx.kept = (op, len(args), parts, pins_of_context.get())  # each attribute of a ctx takes a sixth of a microsecond


def _constant(op: Op, needed: Sequence[int]) -> tuple[int, ...]:
    """The outputs that depend on no argument whose gradient is wanted."""
    return tuple(number for number, positions in op.depends if not any(each in needed for each in positions))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What ``save`` keeps of every call with one key."""

    kept: Any  # for ``ctx.kept``
    tensors: tuple[int, ...]  # their places among arguments and outputs, one after another
    numbers: tuple[tuple[int, int, int], ...]  # (part, place in what it keeps, position of the argument)
    materialize: bool
    constant: tuple[int, ...]  # outputs without a gradient

    def follow(self, ctx: Any, args: tuple[Any, ...], output: Any) -> None:
        """Do what ``save`` does."""
        if not self.materialize:
            ctx.set_materialize_grads(False)
        found = (*args, *output) if type(output) is tuple else (*args, *unpack(output))
        if self.constant:
            ctx.mark_non_differentiable(*[found[len(args) + number] for number in self.constant])
        ctx.save_for_backward(*[found[place] for place in self.tensors])
        if not self.numbers:
            ctx.kept = self.kept
            return
        op, count, parts, pinned = self.kept
        parts = [(part, [*items]) for part, items in parts]
        for number, place, position in self.numbers:
            parts[number][1][place] = args[position]
        ctx.kept = (op, count, parts, pinned)


def recipe(op: Op, needed: Sequence[int], args: tuple[Any, ...], output: Any) -> Recipe | None:
    """The recipe for calls like this one, outside of ``pins``; None where what is kept is a tensor made for it, or is
    computed from numbers that change per call, or one tensor was given twice.

    In the place of such numbers stand objects that can do nothing: a ``save`` that computes with one raises.
    """
    found = [*args, *unpack(output)]
    places = {id(each): place for place, each in enumerate(found) if isinstance(each, torch.Tensor)}
    if len(places) < sum(isinstance(each, torch.Tensor) for each in found):
        return None
    probes = {position: object() for position in op.values}
    real, probed = _Probe(), _Probe()
    save(op, real, needed, args, output)
    try:
        save(op, probed, needed, tuple(probes.get(position, arg) for position, arg in enumerate(args)), output)
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RuntimeError):
        return None  # it is called each time
    numbers, positions = [], {id(probe): position for position, probe in probes.items()}
    for number, ((_, items), (_, others)) in enumerate(zip(real.kept[2], probed.kept[2], strict=True)):
        for place, (item, other) in enumerate(zip(items, others, strict=True)):
            position = positions.get(id(other))
            if position is not None and item is args[position]:
                numbers.append((number, place, position))
            elif item is not other and not (_is_constant(item) and type(item) is type(other) and item == other):
                return None
            elif item is not _TENSOR and not _is_constant(item):
                return None
    tensors = [places.get(id(each), -1) for each in real.tensors]
    if -1 in tensors or tensors != [places.get(id(each)) for each in probed.tensors]:
        return None
    return Recipe((*real.kept[:3], {}), tuple(tensors), tuple(numbers), real.materialize, _constant(op, needed))


def _is_constant(item: Any) -> bool:
    return all(map(_is_constant, item)) if type(item) is tuple else type(item) in _NO_TENSORS


class _Probe:
    """In the place of torch's context."""

    def __init__(self) -> None:
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.kept: Any = None
        self.materialize = True

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """Which these are follows from the op and what is needed alone."""


_NO_TENSORS = frozenset((int, bool, float, str, tuple, type(None), torch.dtype))
_TENSOR = object()  # in the place of a saved tensor


def derive(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """The gradients of the arguments of a call that ``save`` kept. Raises NotDifferentiable."""
    op, count, parts, pinned = ctx.kept
    if not op.backwards:
        first = "give it one where it is declared, or call it under torch.no_grad()"
        remedy = "for a second derivative use torch's own function" if op.signature is None else first
        raise NotDifferentiable(f"portkern defines no derivative of {op.name!r}; {remedy}")
    tensors = iter(ctx.saved_tensors)
    result: list[Any] = [None] * count
    for part, kept in parts:
        saved = tuple([next(tensors) if item is _TENSOR else item for item in kept])
        positions = part.inputs if part.positions is None else part.positions(saved)
        if part.passed is not None:
            for position in part.passed(saved):
                result[position] = grads[0]
            if not positions:
                continue
        found = part.arguments(saved, grads)
        if isinstance(found, Result):
            for position, gradient in zip(positions, found.value, strict=True):
                result[position] = gradient
            continue
        if part.op:
            function = current().functions.get(part.op) or partial(call, part.op)
            with pins(pinned) if pinned else nullcontext():
                found = unpack(function(*found))
        if part.gradients is not None:
            found = part.gradients(saved, found)
        for position, gradient in zip(positions, found, strict=True):
            result[position] = gradient
    return tuple(result)
