"""Executor: compile a plan's kernels for a target, present or absent, and report what they need.

Triton compiles for any target it has a backend for, but asks its active driver which one. So a
stand-in driver is made active while compiling: it is process-wide, which is why this executor must
only be used in processes that never launch (``portkern compile``, the tuner's offline worker).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from portkern.backend import Backend, Resources
from portkern.errors import CompileFailed
from portkern.executors.binding import bind, keywords
from portkern.executors.keys import keyed
from portkern.plan import Buffer, Meta, Plan
from portkern.record import Record
from portkern.target import Device


@dataclass(frozen=True)
class CompiledLaunch(Record):
    """One compiled launch of a plan: its kernel's name, what it needs, and how long it took."""

    kernel: str
    resources: Resources
    num_warps: int
    compile_s: float

    _nested: ClassVar = {"resources": Resources}


def compile_plan(
    plan: Plan,
    args: Sequence[Any],
    backend: Backend,
    device: Device,
    options: Mapping[str, Any],
    kernels: list[Any] | None = None,
) -> list[CompiledLaunch]:
    """Compile every launch of ``plan`` exactly as dispatch would launch it.

    ``args`` are the op's arguments with Metas for tensors. What Triton compiled is added to
    ``kernels``. Raises CompileFailed with the kernel, the target and the compiler's first line.
    """
    found = []
    with standing_in(backend):
        for launch in plan.launches:
            kernel_args = bind(launch, args, plan.outputs, plan.scratch, _pointer)
            start = time.perf_counter()
            compiled = compile_launch(launch.kernel, kernel_args, launch.grid, backend, options, launch)
            if kernels is not None:
                kernels.append(compiled)
            found.append(
                CompiledLaunch(
                    kernel=launch.kernel.fn.__name__,
                    resources=backend.resources(device, compiled, launch.num_warps),
                    num_warps=launch.num_warps,
                    compile_s=round(time.perf_counter() - start, 3),
                )
            )
    return found


def compile_launch(
    kernel: Any, args: Sequence[Any], grid: Sequence[int], backend: Backend, options: Any, launch: Any
) -> Any:
    """One kernel through Triton's own warm-up. Every compiler failure becomes CompileFailed."""
    try:
        words = keywords(launch, options)
        return keyed(kernel, words.values()).warmup(*args, grid=tuple(grid), **words)
    except Exception as error:  # the compiler raises whatever its passes raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CompileFailed(
            f"{kernel.fn.__name__} does not compile for {backend.target} with "
            f"num_warps={launch.num_warps}, {dict(launch.constexprs)}: {first}"
        ) from error


def build_launcher(compiled: Any) -> None:
    """Let Triton make the host's part of a launch of ``compiled``, for the GPU of this machine, and keep it on disk.

    It is C code, made and compiled for each new list of parameter types when a kernel is first launched.
    """
    from triton.runtime.driver import driver

    driver.active.launcher_cls(compiled.src, compiled.metadata)


@contextmanager
def standing_in(backend: Backend) -> Iterator[None]:
    """Let Triton believe that the target of ``backend`` is the active GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(_StandIn(GPUTarget(*backend.compile_target())))
    try:
        yield
    finally:
        with suppress(RuntimeError):  # no GPU here: the stand-in stays, and nothing can launch anyway
            driver.reset_active()


class _StandIn:
    """Answers the few questions that Triton asks its driver on the way to a binary."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        # Triton keys its caches of compiled kernels by the device: one id for each target.
        return str(self._target)

    def get_current_stream(self, device: Any = None) -> int:
        return 0


class _Pointer:
    """What Triton's specialisation looks at in a tensor argument: dtype, address, and how many bytes lie behind it,
    since one backend has instructions of its own for buffers under 2 GB."""

    def __init__(self, dtype: torch.dtype, address: int, extent: int) -> None:
        self.dtype = dtype
        self._address, self._extent = address, extent

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._extent


def _pointer(buffer: Meta | Buffer, offset: int) -> _Pointer:
    meta = buffer.meta if isinstance(buffer, Buffer) else buffer
    start = 0 if meta.aligned else meta.itemsize
    reach = sum((size - 1) * abs(stride) for size, stride in zip(meta.shape, meta.strides, strict=True)) + 1
    return _Pointer(meta.dtype, start + offset * meta.itemsize, max(0, reach - offset) * meta.itemsize)
