"""Executor: allocate a plan's buffers and launch its kernels, on a GPU or in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portkern.executors.binding import bind, keywords
from portkern.executors.keys import keyed
from portkern.plan import Buffer, Plan
from portkern.runtime import current


def allocate(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """The memory of ``buffer`` on ``device``, zeroed where it asks for that."""
    tensor = torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=device)
    return tensor if buffer.init is None else tensor.zero_()


def execute(
    plan: Plan,
    args: Sequence[Any],
    device: torch.device,
    options: Mapping[str, Any],
    allocate: Callable[[Buffer, torch.device], torch.Tensor] = allocate,
    launched: list[Any] | None = None,
    start: Callable[..., Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run ``plan`` on ``device`` (the tensors' own) and the current stream; give its outputs.

    ``options`` are the target's launch options. With ``TRITON_INTERPRET=1`` set before Triton was
    imported, the same call interprets the kernels on CPU tensors. Memory comes from ``allocate``
    (torch's allocator; tests poison it), and nothing synchronises. What Triton compiled for each
    launch is added to ``launched``. ``start`` launches a kernel, by default as ``kernel[grid]``.
    """
    outputs = [allocate(buffer, device) for buffer in plan.outputs]
    scratch = [allocate(buffer, device) for buffer in plan.scratch]
    with torch.cuda.device(device) if device.type == "cuda" else current().interpreting:
        for launch in plan.launches:
            kernel_args = bind(launch, args, outputs, scratch, at)
            words = keywords(launch, options)
            kernel = keyed(launch.kernel, words.values())
            if start is None:
                compiled = kernel[launch.grid](*kernel_args, **words)
            else:
                compiled = start(kernel, launch.grid, kernel_args, words)
            if launched is not None:
                launched.append(compiled)
    return tuple(outputs)


def at(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """What starts ``offset`` elements into ``tensor``, for a kernel that takes a pointer."""
    if offset == 0:
        return tensor
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + offset)
