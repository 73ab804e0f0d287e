"""Executor: compile a plan's kernels for an older architecture and run them on a GPU that can translate its code.

The plugin of the older architecture supplies the translator, under the name ``translate`` among its ``executors()``.
What it shows is that the code is right, never how fast it is where it belongs. Like the compiling executor this one
makes a stand-in driver active while it compiles, so use it only in processes that launch nothing by Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from portkern.backend import Backend
from portkern.errors import UnknownName
from portkern.executors.binding import bind, keywords, named
from portkern.executors.emulate import compile_for
from portkern.executors.launch import allocate, at
from portkern.plan import Buffer, Plan
from portkern.translator import NAME, Translator


def translator_of(backend: Backend) -> Translator:
    """The translator of the target of ``backend``. Raises UnknownName where its plugin has none."""
    found = backend.executors().get(NAME)
    if not isinstance(found, Translator):
        raise UnknownName(
            f"no plugin can run code for {backend.target.arch} on another GPU: it can be compiled for, not run here"
        )
    return found


def execute(
    plan: Plan,
    args: Sequence[Any],
    device: torch.device,
    options: Mapping[str, Any],
    allocate: Callable[[Buffer, torch.device], torch.Tensor] = allocate,
    *,
    backend: Backend,
) -> tuple[torch.Tensor, ...]:
    """Run ``plan`` on tensors of ``device``, a GPU, with code for the target of ``backend``; give its outputs.

    Raises what ``Translator.launch`` does, and UnknownName.
    """
    translator = translator_of(backend)
    outputs = [allocate(buffer, device) for buffer in plan.outputs]
    scratch = [allocate(buffer, device) for buffer in plan.scratch]
    with torch.cuda.device(device):
        # In a thread of autograd no context is current before a call of the runtime.
        torch.cuda.current_stream().query()
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for launch in plan.launches:
            given = bind(launch, args, outputs, scratch, at)
            compiled = compile_for(backend, launch.kernel, given, launch.grid, keywords(launch, options))
            values = named(launch, given)
            typed = [each for name, kind in compiled.src.signature.items() for each in _typed(kind, values.get(name))]
            translator.launch(compiled, (*launch.grid, 1, 1)[:3], typed, stream, launch.coresident)
    return tuple(outputs)


def _typed(kind: Any, value: Any) -> Iterable[tuple[str, Any]]:
    """A parameter as what the kernel receives: nothing for a constant, each item of a tuple."""
    if isinstance(kind, tuple):
        for part, item in zip(kind, value, strict=True):
            yield from _typed(part, item)
    elif kind != "constexpr":
        yield kind, value.data_ptr() if isinstance(value, torch.Tensor) else value
