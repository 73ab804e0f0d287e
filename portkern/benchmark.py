"""``bench``: an op against its peers and a plain copy, on a GPU of this machine.

Each run times all of them interleaved (``portkern.timing``), and the medians of several runs are
shown: what one run says by chance, three do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from portkern import dispatch, library, peak
from portkern.errors import NotOffered, PortkernError, UnknownName
from portkern.library import altered_by
from portkern.memory import Kept
from portkern.op import Op
from portkern.peak import GpuMeter, Meter
from portkern.peer import Peer, difference
from portkern.record import FrozenMap, Record, frozen_map
from portkern.runtime import Runtime
from portkern.target import Device
from portkern.timing import Calls, GpuTimer, Timer, Timing, copy_like

RUNS = 3
OURS, COPY = "portkern", "copy"


@dataclass(frozen=True)
class Measurement(Record):
    """One op and problem. Times are medians in microseconds; None where something did not run.

    ``peer_us`` holds the time of each peer that ran. ``gbps`` counts the least bytes that the op has to move;
    ``of_ceiling`` divides it by the copy ceiling. ``tflops`` counts the arithmetic of a matrix unit. ``copies`` is the
    op's time over that of a copy of its first tensor, scaled to as many bytes. ``extra_bytes`` is what a call allocates
    at its peak, outputs included, with its derivative if it has one; ``torch_extra_bytes`` what torch eager does.
    ``note`` says what did not run, and why.
    """

    op: str
    problem: str
    layer: str
    config: str
    time_us: float | None = None
    spread_us: float | None = None
    peer_us: FrozenMap[float] = field(default_factory=FrozenMap)
    copy_us: float | None = None
    gbps: float | None = None
    of_ceiling: float | None = None
    tflops: float | None = None
    copies: float | None = None
    extra_bytes: int | None = None
    torch_extra_bytes: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        self._set(peer_us=frozen_map(self, "peer_us", self.peer_us, (int, float)))

    def over(self, peer: str) -> float | None:
        """How many times as fast as the peer of that name; None where one of both did not run."""
        theirs = self.peer_us.get(peer)
        return theirs / self.time_us if theirs and self.time_us else None


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
    against: Sequence[Peer] = (),
    runs: int = RUNS,
    timer: Timer | None = None,
    meter: Meter | None = None,
    where: torch.device | None = None,
    ceiling_gbps: float | None = None,
) -> Iterator[Measurement]:
    """Measure each case on ``device``, one at a time. ``timer``, ``meter`` and ``where`` are for tests."""
    bench_on = Bench(runtime, device, tuple(against), runs, timer or GpuTimer(), meter or GpuMeter())
    where = where or torch.device(f"cuda:{device.index}")
    ceiling = bench_on.timer.copy_ceiling(device) if ceiling_gbps is None else ceiling_gbps
    for case in cases:
        try:
            yield bench_on.measure(case, where, ceiling)
        except torch.OutOfMemoryError:
            note = f"{device.name} has too little free memory"
            yield Measurement(case.op.name, case.label, "", "", note=note)
        if where.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Bench:
    """Where and with what is measured, and against whom."""

    runtime: Runtime
    device: Device
    against: tuple[Peer, ...]
    runs: int
    timer: Timer
    meter: Meter

    def measure(self, case: Case, where: torch.device, ceiling: float) -> Measurement:
        """All about one case, whose arguments are made on ``where``. ``ceiling`` is the copy ceiling in GB/s."""
        op, args = case.op, case.make(where)
        situation = dispatch.situate(self.runtime, op, dispatch.input_key(op, args), self.device)
        choice = dispatch.resolve(self.runtime, situation)
        restore = Kept(args).restore if altered_by(op) else None
        calls, notes = _calls(op, args, self.against, restore)
        found = [self.timer.interleaved(calls, self.device, before=restore) for _ in range(max(1, self.runs))]
        notes += _launched(found)
        times = {name: statistics.median(run[name].median_us for run in found) for name in calls}
        moved, work_us, copy_us = situation.work.reads + situation.work.writes, times.get(OURS), times.get(COPY)
        gbps = moved / work_us / 1e3 if work_us else None
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        copied = 2 * first.numel() * first.element_size() if first is not None else 0
        extra = self._peak(OURS, peak.ours, op, args, notes) if OURS in calls else None
        theirs = self._peak("torch", peak.eager, op, args, notes)
        return Measurement(
            op=op.name,
            problem=str(situation.problem),
            layer=choice.layer,
            config=str(choice.config),
            time_us=work_us,
            spread_us=statistics.median(run[OURS].spread_us for run in found) if OURS in calls else None,
            peer_us=FrozenMap({peer.name: times[peer.name] for peer in self.against if peer.name in times}),
            copy_us=copy_us,
            gbps=gbps,
            of_ceiling=gbps / ceiling if gbps and ceiling else None,
            tflops=situation.work.flops / work_us / 1e6 if work_us and situation.work.flops else None,
            copies=work_us / (copy_us * moved / copied) if work_us and copy_us and moved and copied else None,
            extra_bytes=extra,
            torch_extra_bytes=theirs,
            note="; ".join(notes),
        )

    def _peak(
        self, name: str, make: Callable[[Op, Sequence[Any]], Callable[[], Any]], op: Op, args: Sequence[Any],
        notes: list[str],
    ) -> int | None:  # fmt: skip
        """The peak memory of a call, or None and one more note."""
        try:
            return self.meter.peak(make(op, args), self.device)
        except Exception as error:  # torch raises whatever the derivative of an op's reference raises
            notes.append(f"memory of {name} not measured: {_short(error)}")
            return None


def _calls(
    op: Op, args: Sequence[Any], against: Sequence[Peer], restore: Callable[[], Any] | None
) -> tuple[Calls, list[str]]:
    """What to time; each is run once. What fails is left out and noted; what differs from the reference is noted."""
    wanted: dict[str, Callable[[], Callable[[], Any]]] = {OURS: lambda: partial(library.call, op.name, *args)}
    wanted |= {peer.name: partial(peer.prepare, op, args) for peer in against}
    first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    if first is not None:
        wanted[COPY] = partial(copy_like, first)
    calls, notes, expected = {}, [], None
    for name, prepare in wanted.items():
        try:
            call = prepare()
            found = call()
            # What alters its arguments gives nothing to compare, and verify judges our own.
            if name not in (OURS, COPY) and restore is None:
                expected = op.reference(*args) if expected is None else expected
                words = difference(found, expected, drawn=op.random)
                notes += [f"{name} {words}"] if words else []
            del found
        except NotOffered as error:
            notes.append(f"{name}: {error}")
        except Exception as error:  # a peer raises whatever it raises
            if name == OURS and not isinstance(error, PortkernError):
                raise
            notes.append(f"{name} does not run: {_short(error)}")
        else:
            calls[name] = call
        if restore is not None:
            restore()
    return calls, notes


def _launched(runs: Iterable[Mapping[str, Timing]]) -> list[str]:
    """A note for each call whose time has the host's in it."""
    reasons = {name: timing.launched for run in runs for name, timing in run.items() if timing.launched}
    return [f"{name} is timed with its launch, since no graph of it was made: {why}" for name, why in reasons.items()]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None for none."""
    found = [value for value in values if value]
    return math.exp(statistics.fmean(map(math.log, found))) if found else None
