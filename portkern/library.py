"""Ops as torch sees them: definition, fake kernel and autograd, all by ``torch.library``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portkern import dispatch
from portkern.errors import NotDifferentiable
from portkern.op import Op, qualified
from portkern.plan import Meta
from portkern.runtime import current


class _Definitions:
    """torch's registry is process-wide, and a Library undoes its work when collected: hold them."""

    def __init__(self) -> None:
        self.libraries: dict[str, torch.library.Library] = {}


_definitions = _Definitions()


def define(op: Op) -> None:
    """Make ``torch.ops.<namespace>.<name>`` exist. What it runs is looked up by name at the call."""
    if op.qualname in _definitions.libraries:
        return
    namespace, name = op.qualname.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")  # noqa: TOR901
    library.define(f"{name}{op.schema}")

    def run(*args: Any) -> Any:
        return pack(dispatch.run(current().ops.get(op.name, op), args))

    def fake(*args: Any) -> Any:
        return pack(_fake_outputs(op, args))

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(op.qualname, fake, lib=library)
    if "!" not in op.schema:  # torch takes no derivative of an op that alters its arguments
        torch.library.register_autograd(op.qualname, _backward_of(op), setup_context=_context_of(op), lib=library)
    _definitions.libraries[op.qualname] = library


def call(op: str, *args: Any) -> Any:
    """Call the op named ``op`` with canonical arguments, through torch's dispatcher."""
    namespace, name = qualified(op).split("::")
    return getattr(getattr(torch.ops, namespace), name).default(*args)


def pack(outputs: Sequence[torch.Tensor]) -> Any:
    """A single tensor as itself, several as a tuple: what a schema promises."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def unpack(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The inverse of ``pack``."""
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
        if op.backward is None:
            return
        saved = op.backward.save(inputs, unpack(output))
        tensors = [item for item in saved if isinstance(item, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        # Tensors are kept by torch; their places are marked by None beside the constants.
        ctx.saved_slots = [isinstance(item, torch.Tensor) for item in saved]
        ctx.saved_constants = [None if isinstance(item, torch.Tensor) else item for item in saved]
        ctx.inputs_count = len(inputs)

    return setup_context


def _backward_of(op: Op) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:
        if op.backward is None:
            raise NotDifferentiable(
                f"portkern defines no derivative of {op.name!r}; for a second derivative use torch's own function"
            )
        tensors = iter(ctx.saved_tensors)
        pairs = zip(ctx.saved_slots, ctx.saved_constants, strict=True)
        saved = tuple(next(tensors) if is_tensor else item for is_tensor, item in pairs)
        found = call(op.backward.op, *op.backward.arguments(saved, grads))
        result: list[Any] = [None] * ctx.inputs_count
        for position, gradient in zip(op.backward.inputs, unpack(found), strict=True):
            result[position] = gradient
        return tuple(result)

    return backward
