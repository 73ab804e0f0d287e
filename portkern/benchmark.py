"""``bench``: an op against torch eager, torch.compile and a plain copy, on a GPU of this machine.

Each run times all of them interleaved (``portkern.timing``), and the medians of several runs are
shown: what one run says by chance, three do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portkern import dispatch, library
from portkern.errors import PortkernError, UnknownName
from portkern.library import altered_by
from portkern.memory import Kept
from portkern.op import Op
from portkern.record import Record
from portkern.runtime import Runtime
from portkern.target import Device
from portkern.timing import Calls, GpuTimer, Timer, copy_like

RUNS = 3
OURS, EAGER, COMPILED, COPY = "portkern", "torch", "compile", "copy"


@dataclass(frozen=True)
class Measurement(Record):
    """One op and problem. Times are medians in microseconds; None where something did not run.

    ``gbps`` counts the least bytes that the op has to move; ``of_ceiling`` divides it by the copy
    ceiling. ``tflops`` counts the arithmetic of a matrix unit. ``copies`` is the op's time over that
    of a copy of its first tensor, scaled to as many bytes. ``note`` says what did not run, and why.
    """

    op: str
    problem: str
    layer: str
    config: str
    time_us: float | None = None
    spread_us: float | None = None
    torch_us: float | None = None
    compile_us: float | None = None
    copy_us: float | None = None
    gbps: float | None = None
    of_ceiling: float | None = None
    tflops: float | None = None
    copies: float | None = None
    note: str = ""

    @property
    def over_torch(self) -> float | None:
        """How many times as fast as torch eager."""
        return self.torch_us / self.time_us if self.torch_us and self.time_us else None

    @property
    def over_compile(self) -> float | None:
        """How many times as fast as torch.compile."""
        return self.compile_us / self.time_us if self.compile_us and self.time_us else None


@dataclass(frozen=True)
class Case:
    """What to measure: an op and how to make its arguments on a torch device."""

    op: Op
    label: str
    make: Callable[[torch.device], tuple[Any, ...]]


def present_device(runtime: Runtime, index: int | None = None) -> Device:
    """The GPU to measure on. Raises UnknownName, with what works without one."""
    if not runtime.devices:
        raise UnknownName(
            "bench measures, so it needs a GPU, and there is none here; without one, "
            "portkern compile and portkern tune --device ARCH work"
        )
    return runtime.devices[0] if index is None else runtime.device(index)


def bench(
    runtime: Runtime,
    cases: Iterable[Case],
    device: Device,
    *,
    compiled: bool = True,
    runs: int = RUNS,
    timer: Timer | None = None,
    where: torch.device | None = None,
    ceiling_gbps: float | None = None,
) -> Iterator[Measurement]:
    """Measure each case on ``device``, one at a time. ``timer`` and ``where`` are for tests."""
    timer = timer or GpuTimer()
    where = where or torch.device(f"cuda:{device.index}")
    ceiling = timer.copy_ceiling(device) if ceiling_gbps is None else ceiling_gbps
    for case in cases:
        try:
            yield _measure(runtime, case, device, where, timer, compiled, runs, ceiling)
        except torch.OutOfMemoryError:
            note = f"{device.name} has too little free memory"
            yield Measurement(case.op.name, case.label, "", "", note=note)
        if where.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    runtime: Runtime,
    case: Case,
    device: Device,
    where: torch.device,
    timer: Timer,
    compiled: bool,
    runs: int,
    ceiling: float,
) -> Measurement:
    op, args = case.op, case.make(where)
    situation = dispatch.situate(runtime, op, dispatch.input_key(op, args), device)
    choice = dispatch.resolve(runtime, situation)
    calls, notes = _calls(op, args, compiled)
    before = Kept(args).restore if altered_by(op) else None
    found = [timer.interleaved(calls, device, before=before) for _ in range(max(1, runs))]
    times = {name: statistics.median(run[name].median_us for run in found) for name in calls}
    moved, work_us, copy_us = situation.work.reads + situation.work.writes, times.get(OURS), times.get(COPY)
    gbps = moved / work_us / 1e3 if work_us else None
    first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    copied = 2 * first.numel() * first.element_size() if first is not None else 0
    return Measurement(
        op=op.name,
        problem=str(situation.problem),
        layer=choice.layer,
        config=str(choice.config),
        time_us=work_us,
        spread_us=statistics.median(run[OURS].spread_us for run in found) if OURS in calls else None,
        torch_us=times.get(EAGER),
        compile_us=times.get(COMPILED),
        copy_us=copy_us,
        gbps=gbps,
        of_ceiling=gbps / ceiling if gbps and ceiling else None,
        tflops=situation.work.flops / work_us / 1e6 if work_us and situation.work.flops else None,
        copies=work_us / (copy_us * moved / copied) if work_us and copy_us and moved and copied else None,
        note="; ".join(notes),
    )


def _calls(op: Op, args: Sequence[Any], compiled: bool) -> tuple[Calls, list[str]]:
    """What to time; each is run once, and what fails is left out and noted."""
    eager = op.eager or op.reference
    wanted: dict[str, Callable[[], Any]] = {
        OURS: lambda: library.call(op.name, *args),
        EAGER: lambda: eager(*args),
    }
    if compiled:
        torch.compiler.reset()  # else the ninth shape would not be compiled for itself
        function = torch.compile(op.reference, dynamic=False)
        wanted[COMPILED] = lambda: function(*args)
    first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    if first is not None:
        wanted[COPY] = copy_like(first)
    calls, notes = {}, []
    for name, call in wanted.items():
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch.compile raises whatever its backends raise
            if name == OURS and not isinstance(error, PortkernError):
                raise
            notes.append(f"{name} does not run: {' '.join(str(error).split())[:160]}")
        else:
            calls[name] = call
    return calls, notes


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None for none."""
    found = [value for value in values if value]
    return math.exp(statistics.fmean(map(math.log, found))) if found else None
