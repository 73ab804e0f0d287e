"""Ops as torch sees them: definition, fake kernel and autograd, all by ``torch.library``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from portkern import dispatch
from portkern.errors import NotDifferentiable
from portkern.op import Backward, Op, qualified
from portkern.plan import Meta
from portkern.runtime import current, current_pins, pins


class _Definitions:
    """torch's registry is process-wide, and a Library undoes its work when collected: hold them."""

    def __init__(self) -> None:
        self.libraries: dict[str, torch.library.Library] = {}


_definitions = _Definitions()


def define(op: Op) -> None:
    """Make ``torch.ops.<namespace>.<name>`` exist. What it does is looked up by name at the call, so that an op can be
    registered again, as in a notebook; only the schema is for ever."""
    if op.qualname in _definitions.libraries:
        return
    namespace, name = op.qualname.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")  # noqa: TOR901
    library.define(f"{name}{op.schema}")

    listed = op.schema.endswith("[]")

    def run(*args: Any) -> Any:
        return pack(dispatch.run(_now(op), args), listed)

    def fake(*args: Any) -> Any:
        return pack(_fake_outputs(_now(op), args), listed)

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(op.qualname, fake, lib=library)
    altered = altered_by(op)
    if altered:
        library.impl(name, _altering(op, altered), "Autograd")
    else:
        torch.library.register_autograd(op.qualname, _backward_of(op), setup_context=_context_of(op), lib=library)
    _definitions.libraries[op.qualname] = library


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
    the gradients of torch.func."""
    if torch.compiler.is_compiling():
        return
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    forward = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(each).tangent is not None for each in tensors
    )
    layer = torch._C._functorch.peek_interpreter_stack()
    if forward or (layer is not None and layer.key() in _DERIVATIVES):
        raise NotDifferentiable(
            f"{op.name} has reverse-mode autograd only: inside torch.func.grad, jvp or jacfwd and with dual numbers "
            "use torch's own function"
        )


_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def call(op: str, *args: Any) -> Any:
    """Call the op named ``op`` with canonical arguments, through torch's dispatcher."""
    namespace, name = qualified(op).split("::")
    return getattr(getattr(torch.ops, namespace), name).default(*args)


def pack(outputs: Sequence[torch.Tensor], listed: bool = False) -> Any:
    """No tensor as None, a single one as itself, several as a tuple; or a list: what a schema promises."""
    if listed:
        return list(outputs)
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def unpack(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The inverse of ``pack``."""
    if outputs is None:
        return ()
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


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
        ctx.pins = current_pins()  # autograd may run the backward in a thread of its own
        tensors: list[torch.Tensor] = []
        ctx.saved_parts = []
        for part in _wanted(_now(op), ctx):
            saved = part.save(inputs, unpack(output))
            # Tensors are kept by torch; their places are marked by None beside the constants.
            slots = [isinstance(item, torch.Tensor) for item in saved]
            constants = [None if isinstance(item, torch.Tensor) else item for item in saved]
            ctx.saved_parts.append((part, slots, constants))
            tensors += [item for item in saved if isinstance(item, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.inputs_count = len(inputs)

    return setup_context


def _wanted(op: Op, ctx: Any) -> list[Backward]:
    """The parts of the derivative that some wanted gradient needs."""
    return [part for part in op.backwards if any(ctx.needs_input_grad[position] for position in part.inputs)]


def _backward_of(op: Op) -> Any:
    def run(ctx: Any, *grads: Any) -> Any:
        if not _now(op).backwards:
            raise NotDifferentiable(
                f"portkern defines no derivative of {op.name!r}; for a second derivative use torch's own function"
            )
        tensors = iter(ctx.saved_tensors)
        result: list[Any] = [None] * ctx.inputs_count
        for part, slots, constants in ctx.saved_parts:
            pairs = zip(slots, constants, strict=True)
            saved = tuple(next(tensors) if is_tensor else item for is_tensor, item in pairs)
            with pins(ctx.pins):
                given = part.arguments(saved, grads)
                found = call(part.op, *given) if part.op else given
            positions = part.positions(saved) if part.positions else part.inputs
            for position, gradient in zip(positions, unpack(found), strict=True):
                result[position] = gradient
        return tuple(result)

    return run
