"""The memory that a call allocates beyond its arguments: at its peak, outputs included.

Of an op with a derivative that is forward and backward, as a training step runs them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from portkern import library
from portkern.op import Op, unpack
from portkern.target import Device

Call = Callable[[], Any]


class Meter(Protocol):
    """What reads the allocator; tests replace it, and nothing else."""

    def peak(self, call: Call, device: Device) -> int:
        """Bytes that ``call`` had allocated at most, beyond what was allocated before it. It runs twice, and the second
        run counts: what is allocated once and kept is no cost of a call."""


class GpuMeter:
    """The Meter that reads torch's allocator."""

    def peak(self, call: Call, device: Device) -> int:
        with torch.cuda.device(device.index):
            call()
            torch.cuda.synchronize()
            gc.collect()  # what is freed during the call would hide what it allocates
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before


def ours(op: Op, args: Sequence[Any]) -> Call:
    """One call of the registered op, and of its derivative if it has one."""
    hidden = op.saved
    return training_step(op, args, lambda *given: unpack(library.call(op.name, *given))[: -hidden or None])


def eager(op: Op, args: Sequence[Any]) -> Call:
    """The same by torch: the op's ``eager``, or its reference."""
    function = op.eager or op.reference
    hidden = op.saved if op.eager is None else 0

    def visible(*given: Any) -> tuple[Any, ...]:
        found = function(*given)
        return (found,) if isinstance(found, torch.Tensor) else tuple(found or ())[: -hidden or None]

    return training_step(op, args, visible)


def training_step(op: Op, args: Sequence[Any], function: Callable[..., tuple[Any, ...]]) -> Call:
    """A call of ``function``, and the gradients of its outputs by autograd where ``op`` has a derivative.

    The upstream gradients are ones, made here: they are arguments of the step. A function that gives nothing to
    differentiate, since it took its derivative itself, is only called.
    """
    leaves, wanted = list(args), []
    for position in op.differentiated:
        if isinstance(args[position], torch.Tensor) and args[position].is_floating_point():
            leaves[position] = args[position].detach().requires_grad_()
            wanted.append(leaves[position])
    grads = [torch.ones_like(each) for each in _differentiable(function(*leaves))] if wanted else []
    if not grads:
        return lambda: function(*args)

    def step() -> tuple[Any, ...]:
        outputs = function(*leaves)
        return torch.autograd.grad(_differentiable(outputs), wanted, grads, allow_unused=True)

    return step


def _differentiable(outputs: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
