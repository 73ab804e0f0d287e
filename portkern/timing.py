"""Measuring on a GPU: interleaved single launches, a cold last-level cache, medians of events.

Only the GPU's own clock is read. What takes under ``GRAPH_BELOW_US`` is measured by replaying a
captured graph of one call, since the host's cost of an eager launch would be in its time.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from portkern.errors import BadArgument
from portkern.record import Record
from portkern.target import Device

Calls = Mapping[str, Callable[[], Any]]

GRAPH_BELOW_US = 200.0  # a captured copy of 1 GB took 1.57 times as long, so what is long is launched
HOST_BELOW_US = 2_000.0  # a first guess up to that may be the host's, beside busy compilers: 16 us were taken for 200
FLUSH_BYTES = 256 * 1024**2  # at least; the largest last-level cache known is that big
LEAST_ROUNDS = 10
MOST_ROUNDS = 200
SLOW = 4.0  # times the fastest: such a call is out of the race after LEAST_ROUNDS, where no other factor is asked for
WARM_UPS = 10  # the least of fewer was the host's time where a compiler still ran: 136 us for a kernel of 9
CEILING_BYTES = 1024**3
LONGEST_REASON = 160  # characters of torch's


@dataclass(frozen=True)
class Timing(Record):
    """Median and interquartile range of one call's GPU times, in microseconds.

    ``launched`` is why a short call was launched each time, with the host's time in its own, instead of replayed.
    """

    median_us: float
    spread_us: float
    samples: int
    launched: str = ""


class Timer(Protocol):
    """What the tuner measures with; tests replace it, and nothing else."""

    def interleaved(
        self,
        calls: Calls,
        device: Device,
        *,
        budget_ms: float = ...,
        before: Callable[[], Any] | None = ...,
        slow: float = ...,
    ) -> dict[str, Timing]:
        """See the function ``interleaved``."""

    def copy_ceiling(self, device: Device) -> float:
        """See the function ``copy_ceiling``."""


class GpuTimer:
    """The Timer that measures."""

    def interleaved(
        self,
        calls: Calls,
        device: Device,
        *,
        budget_ms: float = 500.0,
        before: Callable[[], Any] | None = None,
        slow: float = SLOW,
    ) -> dict[str, Timing]:
        return interleaved(calls, device, budget_ms=budget_ms, before=before, slow=slow)

    def copy_ceiling(self, device: Device) -> float:
        return copy_ceiling(device)


def interleaved(
    calls: Calls,
    device: Device,
    *,
    budget_ms: float = 500.0,
    before: Callable[[], Any] | None = None,
    slow: float = SLOW,
) -> dict[str, Timing]:
    """Time each of ``calls`` on ``device``, one launch of each in turn, the order rotating.

    Drift of clocks and neighbours so falls on all alike. The cache is flushed before every launch.
    About ``budget_ms`` is spent, on 10 rounds at least and 200 at most; what takes ``slow`` times as
    long as the fastest in the first 10 has no more. ``before`` runs ahead of every launch, untimed:
    it restores what the calls alter.
    """
    with torch.cuda.device(_index(device)):
        flush = torch.empty(max(2 * device.cache_bytes, FLUSH_BYTES), dtype=torch.int8, device="cuda")
        restore = before or _nothing

        def once(call: Callable[[], Any]) -> Callable[[], float]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            restore()
            flush.zero_()
            start.record()
            call()
            end.record()
            return lambda: start.elapsed_time(end) * 1e3

        def timed(rounds: Mapping[str, int]) -> dict[str, list[float]]:
            pending: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
            for name in turns(rounds):
                pending[name].append(once(ready[name]))
            torch.cuda.synchronize()
            return {name: [read() for read in reads] for name, reads in pending.items()}

        ready, reasons = {}, {}
        for name, call in calls.items():
            guess = _guess(partial(once, call))
            ready[name], reasons[name] = _replayed(call, restore) if guess < HOST_BELOW_US else (call, "")
            if guess >= GRAPH_BELOW_US and _guess(partial(once, ready[name])) >= GRAPH_BELOW_US:
                ready[name] = call
        overhead = _guess(partial(_between, flush, restore))
        samples = timed(dict.fromkeys(calls, LEAST_ROUNDS))
        medians = {name: statistics.median(found) for name, found in samples.items()}
        counts = round_counts(medians, overhead, budget_ms, slow)
        more = timed({name: count - LEAST_ROUNDS for name, count in counts.items()})
        return {name: summary(samples[name] + more[name], reasons[name]) for name in calls}


def copy_ceiling(device: Device) -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written: the bound to compare with."""
    size = min(CEILING_BYTES, device.memory_bytes // 16)
    with torch.cuda.device(_index(device)):
        source = torch.randint(0, 2**31, (size // 4,), dtype=torch.int32, device="cuda")
        timing = interleaved({"copy": copy_like(source)}, device, budget_ms=50.0)["copy"]
    return 2 * source.nbytes / timing.median_us / 1e3


def copy_like(tensor: torch.Tensor) -> Callable[[], Any]:
    """A call that copies ``tensor`` into memory of its own: torch's ``copy_`` of that very shape."""
    target = torch.empty_like(tensor)
    return lambda: target.copy_(tensor)


def summary(samples: Sequence[float], not_captured: str = "") -> Timing:
    """Median and interquartile range of ``samples``, which are microseconds. ``not_captured`` is why there is no graph
    of the call, which says nothing where such a time would have been launched anyway."""
    middle = statistics.median(samples)
    spread = 0.0
    if len(samples) > 1:
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        spread = third - first
    launched = not_captured if middle < GRAPH_BELOW_US else ""
    return Timing(round(middle, 4), round(spread, 4), len(samples), launched)


def round_counts(
    guesses: Mapping[str, float], overhead_us: float, budget_ms: float, slow: float = SLOW
) -> dict[str, int]:
    """How often to run each call, from a guess of its time; slow ones only ``LEAST_ROUNDS`` times."""
    fastest = min(guesses.values(), default=0.0)
    racing = {name for name, guess in guesses.items() if guess <= slow * fastest}
    one_round = sum(guess + overhead_us for name, guess in guesses.items() if name in racing)
    rounds = int(1e3 * budget_ms / max(one_round, 1.0))
    rounds = min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)
    return {name: rounds if name in racing else LEAST_ROUNDS for name in guesses}


def turns(rounds: Mapping[str, int]) -> Iterator[str]:
    """The order of launches: every name once a round while it has rounds left, starting one later
    in each round, and every other round backwards, so that no call always follows the same one."""
    names = list(rounds)
    for number in range(max(rounds.values(), default=0)):
        first = number % len(names)
        order = names[first:] + names[:first]
        yield from (name for name in order[:: -1 if number % 2 else 1] if rounds[name] > number)


def load_timer(spec: str | None) -> Timer:
    """The timer at ``module:attribute`` or ``file.py:attribute``; the GPU's own for None.

    Raises BadArgument for one that cannot be loaded.
    """
    if spec is None:
        return GpuTimer()
    source, _, attribute = spec.rpartition(":")
    if not source or not attribute:
        raise BadArgument(f"timer {spec!r} must read 'module:attribute' or 'file.py:attribute'")
    try:
        timer: Timer = getattr(_module(source), attribute)
    except (ImportError, OSError, AttributeError) as error:
        raise BadArgument(f"timer {spec!r} cannot be loaded: {error}") from error
    return timer


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    spec = importlib.util.spec_from_file_location(f"portkern_timer_{Path(source).stem}", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _index(device: Device) -> int:
    if device.index is None:
        raise BadArgument(f"{device.name} is not a GPU of this machine: nothing can be timed on it")
    return device.index


def _nothing() -> None:
    """What runs between launches where nothing has to be restored."""


def _between(flush: torch.Tensor, restore: Callable[[], Any]) -> Callable[[], float]:
    """Time what stands between two timed launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    restore()
    flush.zero_()
    end.record()
    return lambda: start.elapsed_time(end) * 1e3


def _guess(run: Callable[[], Callable[[], float]]) -> float:
    """The least time of a few warm-up runs, in microseconds."""
    reads = [run() for _ in range(WARM_UPS)]
    torch.cuda.synchronize()
    return min(read() for read in reads)


def _replayed(call: Callable[[], Any], restore: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """A replay of one captured ``call``; the call itself, and the reason, where it cannot be captured."""
    try:
        try:
            graph = _captured(call, restore)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()  # elsewhere the allocator does so by itself before it gives up, in a capture not
            graph = _captured(call, restore)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises again if the device itself is broken
        first = (str(error).strip() or "no message").splitlines()[0]
        return call, f"{type(error).__name__}: {first[:LONGEST_REASON]}"
    return graph.replay, ""


def _captured(call: Callable[[], Any], restore: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one ``call``. Raises RuntimeError."""
    graph = torch.cuda.CUDAGraph()
    with _side_stream():
        restore()
        call()  # what the first call on a stream sets up must not fall into the capture
        # Not torch.cuda.graph, which first gives all free memory back to the driver.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            call()
        except BaseException:
            with suppress(RuntimeError):  # that the capture failed too would hide what it failed of
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextmanager
def _side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
