"""The arithmetic of measuring; what needs a GPU is marked."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from portkern import timing
from portkern.errors import BadArgument
from portkern.runtime import current
from portkern.timing import (
    GRAPH_BELOW_US,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    GpuTimer,
    copy_ceiling,
    copy_like,
    interleaved,
    load_timer,
    round_counts,
    summary,
    turns,
)


def test_summary_is_median_and_interquartile_range():
    timing = summary([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (timing.median_us, timing.spread_us, timing.samples) == (3.0, 2.0, 5)


def test_summary_of_one_sample():
    assert summary([7.0]).spread_us == 0.0


def test_every_call_takes_every_place_in_the_order():
    order = list(turns({"a": 6, "b": 6, "c": 6}))
    rounds = [order[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert {names[0] for names in rounds} == {"a", "b", "c"}
    before = {(first, second) for first, second in zip(order, order[1:], strict=False)}
    assert {second for first, second in before if first == "a"} >= {"b", "c"}


def test_a_call_out_of_rounds_leaves_the_others_to_go_on():
    assert list(turns({"a": 1, "b": 3})).count("b") == 3
    assert list(turns({"a": 1, "b": 3})).count("a") == 1
    assert list(turns({})) == []


def test_rounds_follow_the_budget_within_bounds():
    assert round_counts({"a": 10.0, "b": 30.0}, 60.0, 5.0) == {"a": 31, "b": 31}
    assert round_counts({"a": 10.0}, 0.0, 1e6) == {"a": MOST_ROUNDS}
    assert round_counts({"a": 1e6}, 0.0, 1.0) == {"a": LEAST_ROUNDS}


def test_slow_calls_do_not_take_the_budget_of_the_fast():
    counts = round_counts({"fast": 10.0, "slow": 1e4}, 0.0, 1.0)
    assert counts == {"fast": 100, "slow": LEAST_ROUNDS}


@pytest.mark.parametrize("spec", ["nothing", ":TIMER", "no.such.module:TIMER", "portkern.timing:NO", "no.py:X"])
def test_a_bad_timer_says_what_is_taken(spec: str):
    with pytest.raises(BadArgument, match="timer"):
        load_timer(spec)


def test_a_timer_loads_from_a_file_and_from_a_module():
    file = Path(__file__).with_name("stub_timer.py")
    assert type(load_timer(f"{file}:TIMER")).__name__ == "StubTimer"
    assert load_timer("portkern.timing:GpuTimer") is GpuTimer
    assert isinstance(load_timer(None), GpuTimer)


class Graph:
    def replay(self) -> str:
        return "replayed"


@pytest.mark.parametrize(
    ("failures", "freed", "expected"),
    [(0, 0, ("replayed", "")), (1, 1, ("replayed", "")), (2, 1, ("called", "OutOfMemoryError: CUDA out of memory"))],
)
def test_a_capture_without_memory_is_tried_again_with_what_was_kept_free(
    monkeypatch: pytest.MonkeyPatch, failures: int, freed: int, expected: tuple[str, str]
):
    tries, given_back = iter([True] * failures + [False]), []

    def captured(call, restore):
        if next(tries):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return Graph()

    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    call, reason = timing._replayed(lambda: "called", lambda: None)
    assert (call(), reason) == expected
    assert len(given_back) == freed


class Broken:
    """A graph of a capture that fails with its call, as torch's does."""

    def capture_begin(self, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("raised", [torch.cuda.OutOfMemoryError("out of memory"), KeyboardInterrupt()])
def test_what_a_captured_call_raises_is_not_hidden_by_the_end_of_the_capture(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException
):
    calls = iter([None, raised])  # the first is ahead of the capture

    def call() -> None:
        error = next(calls)
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(timing, "_side_stream", contextlib.nullcontext)
    with pytest.raises(type(raised)) as caught:
        timing._captured(call, lambda: None)
    assert caught.value is raised


def test_a_capture_that_fails_by_itself_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_side_stream", contextlib.nullcontext)
    call, reason = timing._replayed(lambda: "called", lambda: None)
    assert call() == "called" and reason.startswith("RuntimeError: operation failed")


@pytest.mark.parametrize(("time_us", "launched"), [(GRAPH_BELOW_US - 1, "no memory"), (GRAPH_BELOW_US, "")])
def test_only_a_short_calls_launch_is_worth_a_word(time_us: float, launched: str):
    assert summary([time_us], "no memory").launched == launched


@pytest.mark.gpu
def test_a_call_is_captured_where_all_free_memory_is_kept_by_the_allocator():
    """Its output is new memory of the graph's own pool."""
    torch.cuda.empty_cache()
    source = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    call, total = source.clone, torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        kept = torch.empty(192 << 20, dtype=torch.uint8, device="cuda")
        del kept
        replay, _ = timing._replayed(call, lambda: None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert replay is not call


@pytest.mark.gpu
def test_a_large_copy_reaches_a_plausible_share_of_the_nominal_rate():
    device = current().device(0)
    assert 0.75 < copy_ceiling(device) / device.memory_gbps < 1.05  # 0.56 for a copy in a graph


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 8192])  # through a graph, and by eager launches
def test_interleaved_tells_a_copy_from_two(rows: int):
    device = current().device(0)
    x = torch.randn(rows, 32768, device="cuda")
    one = copy_like(x)
    other = copy_like(x)
    timings = interleaved({"one": one, "two": lambda: (one(), other())}, device, budget_ms=50.0)
    assert timings["one"].samples >= LEAST_ROUNDS
    assert timings["one"].median_us < timings["two"].median_us < 3 * timings["one"].median_us


@pytest.mark.gpu
def test_what_calls_alter_is_restored_before_each_launch():
    device = current().device(0)
    x = torch.zeros(1024, device="cuda")
    interleaved({"add": lambda: x.add_(1)}, device, budget_ms=1.0, before=lambda: x.zero_())
    assert float(x.max()) == 1.0
