"""Gradients of a registered op, by autograd, against autograd through its fp64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from portkern import library
from portkern.op import Op, unpack
from portkern.plan import Buffer
from portkern.registry import get
from portkern.testing import Verdict


def differentiable(op: Op, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the arguments of this call that have a gradient: an optional one may be absent."""
    return tuple(position for position in op.differentiated if isinstance(args[position], torch.Tensor))


def gradients(op: Op, args: Sequence[Any], grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of the arguments that have one, by autograd through the registered op."""
    positions = differentiable(op, args)
    leaves = _leaves(args, positions)
    outputs = unpack(library.call(op.name, *leaves))[: len(grads)]
    return torch.autograd.grad(outputs, [leaves[i] for i in positions], grads)


def stride_zero(op: Op, args: Sequence[Any], grads: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Verdict:
    """A gradient of stride 0, as a sum gives, must do what its contiguous copy does. Such gradients
    may cancel to nothing, so the error is measured by the size of ``found``, a usual gradient."""
    expanded = [torch.ones_like(grad[(slice(1),) * grad.dim()]).expand(grad.shape) for grad in grads]
    copies = [grad.contiguous() for grad in expanded]
    pairs = zip(gradients(op, args, expanded), gradients(op, args, copies), found, strict=True)
    worst = 0.0
    for got, wanted, usual in pairs:
        if got.numel():
            allowed = 8 * float(usual.abs().max()) * torch.finfo(got.dtype).eps
            error = float((got.double() - wanted.double()).abs().max())
            worst = max(worst, error / allowed if allowed else math.inf if error else 0.0)
    return Verdict(worst, "" if worst <= 1 else "a gradient of stride 0 gives other values than its copy")


def _leaves(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """``args`` with fresh leaves, of the same memory, that gradients flow to."""
    return [arg.detach().requires_grad_() if i in positions else arg for i, arg in enumerate(args)]


def random_like(buffer: Buffer, where: torch.device) -> torch.Tensor:
    """The gradient of an output: normal values, the same for each shape."""
    generator = torch.Generator(where).manual_seed(math.prod(buffer.shape))
    values = torch.randn(buffer.shape, generator=generator, device=where, dtype=torch.float32)
    return values.to(buffer.dtype)


def differentiated(op: Op, count: int) -> Op:
    """``op``, with the gradient by autograd as its reference; takes the outputs' gradients too."""

    def reference(*args: Any) -> tuple[torch.Tensor, ...]:
        positions = differentiable(op, args[:count])
        leaves = _leaves(args[:count], positions)
        outputs = unpack(op.reference(*leaves))[: len(args) - count]
        given = [grad.to(output.dtype) for grad, output in zip(args[count:], outputs, strict=True)]
        wanted = [leaves[position] for position in positions]
        # Of empty operands an output may be a constant, or leave an operand out.
        pairs = [(each, grad) for each, grad in zip(outputs, given, strict=True) if each.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(each) for each in wanted)
        used, upstream = zip(*pairs, strict=True)
        return torch.autograd.grad(used, wanted, upstream, allow_unused=True, materialize_grads=True)

    def terms(*args: Any) -> tuple[torch.Tensor, ...]:
        # The forward's rounding reaches every element of its gradient by way of the saved output: the largest decides.
        found = reference(*args)
        sizes = [torch.full_like(each, _largest(each)) for each in found]
        if all(each.any() or not each.numel() for each in sizes):
            return tuple(sizes)
        # Where a gradient is 0 by cancellation alone, what its op is a sum of.
        others = _sums_of(op, args, count)
        return tuple(
            each if each.any() or other is None or not other.numel() else torch.full_like(each, _largest(other))
            for each, other in zip(sizes, others, strict=True)
        )

    # The strides of a gradient are for the op of the derivative to declare.
    return replace(op, reference=reference, outputs=lambda *args: (), exact=None, terms=terms)


def _sums_of(op: Op, args: Sequence[Any], count: int) -> list[torch.Tensor | None]:
    """The size of what each gradient is a sum of, as the ops of the derivative state it; None where they do not."""
    positions = differentiable(op, args[:count])
    found: dict[int, torch.Tensor | None] = dict.fromkeys(positions)
    outputs = unpack(op.reference(*args[:count]))
    for part in op.backwards:
        judge = get(part.op).terms if part.op else None
        if judge is None:
            continue
        saved = part.save(tuple(_leaves(args[:count], positions)), outputs)
        sizes = unpack(judge(*part.arguments(saved, (*args[count:], *[None] * op.saved))))
        sizes = part.gradients(saved, sizes) if part.gradients else sizes
        found.update(zip(part.positions(saved) if part.positions else part.inputs, sizes, strict=True))
    return [found[position] for position in positions]


def _largest(values: torch.Tensor) -> float:
    return float(values.detach().abs().max()) if values.numel() else 0.0
