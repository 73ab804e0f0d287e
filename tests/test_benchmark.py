"""``bench`` with the GPU's clock replaced by a table of times; everything else is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern.benchmark import COPY, OURS, Case, Measurement, bench, geometric_mean, present_device
from portkern.cli._bench_table import measured
from portkern.cli.bench import _all_cases, _cases
from portkern.dispatch import reference_device
from portkern.errors import InvalidRecord, NotOffered, UnknownName, UnsupportedDtype
from portkern.peer import Call, Peer, known_peers
from portkern.registry import get, load_file
from portkern.runtime import Runtime, using
from portkern.target import Device
from portkern.timing import Calls, Timing
from portkern.tuning_db import Database

CPU = torch.device("cpu")
TIMES = {
    OURS: (10.0, 30.0, 20.0), "torch": (50.0, 50.0, 50.0), "compile": (40.0, 40.0, 40.0), COPY: (10.0, 10.0, 10.0),
    "other": (25.0, 24.0, 99.0),
}  # fmt: skip
TORCH = known_peers()["torch"]


class Clock:
    """Gives the n-th time of each call in the n-th run."""

    def __init__(self) -> None:
        self.runs = 0

    def interleaved(
        self, calls: Calls, device: Device, *, budget_ms: float = 0.0, before: Callable[[], Any] | None = None
    ) -> dict[str, Timing]:
        for call in calls.values():
            if before:
                before()
            call()
        self.runs += 1
        return {name: Timing(TIMES[name][self.runs - 1], 0.5, 30) for name in calls}

    def copy_ceiling(self, device: Device) -> float:
        return 1000.0


class Counter:
    """A stand-in for the allocator's: the n-th call that it is asked about allocates n MiB."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def peak(self, call: Callable[[], Any], device: Device) -> int:
        self.results.append(call())
        return len(self.results) * 1024**2


def peer(prepare: Callable[..., Call], name: str = "other") -> Peer:
    return Peer(name, "os", name, prepare)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with using(Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))) as found:
        yield found


def measure(runtime: Runtime, name: str, sizes: tuple[int, ...], **changes: Any) -> Measurement:
    op = get(name)
    case = Case(op, f"{name} case", lambda where: op.inputs(sizes, torch.float32, device=where))
    device = reference_device(runtime, "sm90")
    changes = {"against": [TORCH], "meter": Counter(), **changes}
    (found,) = bench(runtime, [case], device, timer=Clock(), where=CPU, **changes)
    return found


def test_forward(runtime: Runtime) -> None:
    found = measure(runtime, "softmax", (64, 128))
    moved = 2 * 64 * 128 * 4
    assert found.time_us == 20.0, "the median of three runs"
    assert found.gbps == pytest.approx(moved / 20e-6 / 1e9)
    assert found.of_ceiling == pytest.approx(found.gbps / 1000.0)
    assert found.copies == pytest.approx(2.0) and found.over("torch") == pytest.approx(2.5)
    assert dict(found.peer_us) == {"torch": 50.0} and found.over("compile") is None and found.note == ""
    assert found.layer == "default" and found.config


def test_backward_counts_one_and_a_half_copies(runtime: Runtime) -> None:
    found = measure(runtime, "softmax_backward", (64, 128))
    assert found.copies == pytest.approx(20.0 / 15.0)


def test_another_random_mask_is_no_difference(runtime: Runtime) -> None:
    assert get("dropout").eager is not None
    found = measure(runtime, "dropout", (64, 128))
    assert dict(found.peer_us) == {"torch": 50.0} and found.note == ""
    part = peer(lambda op, args: lambda: args[0][:3])
    note = measure(runtime, "dropout", (64, 128), against=[part]).note
    assert note == "other differs by its shape [3, 128], expected [64, 128]"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, on importing its compiler
def test_what_does_not_run_is_noted(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C compiler\nfound")

    monkeypatch.setattr(torch, "compile", lambda function, **options: no_compiler)
    found = measure(runtime, "softmax", (8, 16), against=[TORCH, known_peers()["compile"]])
    assert found.time_us == 20.0 and dict(found.peer_us) == {"torch": 50.0}
    assert found.note == "compile does not run: no C compiler found"


def test_what_is_not_offered_is_noted(runtime: Runtime) -> None:
    def prepare(op: Any, args: Any) -> Call:
        raise NotOffered(f"offers no {op.name}")

    found = measure(runtime, "softmax", (8, 16), against=[peer(prepare), TORCH])
    assert found.note == "other: offers no softmax" and dict(found.peer_us) == {"torch": 50.0}


def test_another_function_is_timed_and_noted(runtime: Runtime) -> None:
    other = peer(lambda op, args: lambda: torch.log_softmax(args[0], 1))
    found = measure(runtime, "softmax", (8, 16), against=[TORCH, other])
    assert found.note.startswith("other differs by ") and found.peer_us["other"] == 25.0
    same = measure(runtime, "softmax", (8, 16), against=[peer(lambda op, args: lambda: torch.softmax(args[0], 1))])
    assert same.note == "" and dict(same.peer_us) == {"other": 25.0}


def test_a_time_with_the_hosts_launch_in_it_is_noted(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_graph(self: Clock, calls: Calls, device: Device, **options: Any) -> dict[str, Timing]:
        return {name: Timing(10.0, 0.5, 30, "no memory" if name == "torch" else "") for name in calls}

    monkeypatch.setattr(Clock, "interleaved", without_a_graph)
    found = measure(runtime, "softmax", (8, 16))
    assert found.note == "torch is timed with its launch, since no graph of it was made: no memory"


def test_an_op_that_alters_its_arguments_is_restored(runtime: Runtime) -> None:
    op = get("cross_entropy_backward_rescale")
    args = op.inputs((4, 6), torch.float32)
    before, seen = args[0].clone(), []

    def prepare(op: Any, given: Any) -> Call:
        return lambda: seen.append(given[0].clone()) or given[0].mul_(3)

    device = reference_device(runtime, "sm90")
    case = Case(op, "case", lambda where: args)
    (found,) = bench(runtime, [case], device, timer=Clock(), meter=Counter(), where=CPU, against=[peer(prepare)])
    assert found.note == "" and found.peer_us["other"] == 25.0
    assert len(seen) == 4 and all(torch.equal(each, before) for each in seen)


def test_measurements_survive_json(runtime: Runtime) -> None:
    found = measure(runtime, "softmax", (8, 16))
    assert Measurement.from_json(found.to_json()) == found and found.to_json()["peer_us"] == {"torch": 50.0}
    with pytest.raises(InvalidRecord, match="peer_us"):
        Measurement("softmax", "p", "default", "c", peer_us={"torch": "fast"})  # type: ignore[arg-type]


def test_too_little_memory_costs_one_line(runtime: Runtime) -> None:
    def make(where: torch.device) -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("tried to allocate 99 GiB")

    op = get("softmax")
    cases = [Case(op, "big", make), Case(op, "small", partial(op.inputs, (4, 8), torch.float32))]
    cases[1] = Case(op, "small", lambda where: op.inputs((4, 8), torch.float32, device=where))
    big, small = bench(runtime, cases, reference_device(runtime, "sm90"), timer=Clock(), meter=Counter(), where=CPU)
    assert big.time_us is None and "too little free memory" in big.note and small.time_us == 20.0


def test_empty_input(runtime: Runtime) -> None:
    found = measure(runtime, "softmax", (0, 8))
    assert found.gbps == 0.0 and found.copies is None


def test_an_op_from_a_file(runtime: Runtime) -> None:
    load_file(Path(__file__).parent / "ops" / "scale.py")
    found = measure(runtime, "example::scale", (100,))
    assert found.time_us == 20.0 and found.config.startswith("blocks")


def test_table_and_means(runtime: Runtime) -> None:
    found = [measure(runtime, "softmax", (64, size)) for size in (128, 256)]
    text = measured(found, ["torch", "other"], reference_device(runtime, "sm90"), 1000.0)
    assert "softmax float32: geometric mean 2.50x torch over 2 problems" in text
    assert "copy ceiling 1000 GB/s" in text and "other" not in text, "no column of a peer that ran nowhere"
    headers, _, first, *_ = text.splitlines()
    words = [word for word in ("torch us", "over torch", "MiB", "torch MiB") if word in headers]
    assert len(words) == 4 and {"50.0", "2.50x", "1.0", "2.0"} <= set(first.split())


def test_cases_of_the_command(runtime: Runtime) -> None:
    op = get("softmax")
    proposed = _cases(op, (), (), {}, True)
    assert len(proposed) == len(op.tune_cases) and proposed[0].label == "softmax 4096x1024 bfloat16"
    (one,) = _cases(op, ((4, 8),), ("float32",), {"dim": 0}, True)
    x, dim, dtype = one.make(CPU)
    assert x.shape == (4, 8) and dim == 0 and dtype == torch.float32
    assert torch.equal(one.make(CPU)[0], x), "the same values in every run"
    with pytest.raises(UnsupportedDtype, match="no op takes dtype 'int8'"):  # beside one that is taken
        _all_cases([op], (), ("float32", "int8"), {}, False)


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0, None]) == pytest.approx(4.0) and geometric_mean([None]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_no_gpu(runtime: Runtime) -> None:
    with pytest.raises(UnknownName, match="needs a GPU"):
        present_device(runtime)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the same
def test_on_a_gpu(runtime: Runtime) -> None:
    device = present_device(runtime)
    op = get("softmax")
    case = Case(op, "softmax", lambda where: op.inputs((4096, 4096), torch.bfloat16, device=where))
    (found,) = bench(runtime, [case], device, runs=1)
    assert found.note == "" and found.of_ceiling is not None and 0.1 < found.of_ceiling < 1.5
    assert found.copies is not None and 0.5 < found.copies < 20
    size = 4096 * 4096 * 2
    assert found.extra_bytes is not None and found.torch_extra_bytes is not None
    assert 2 * size <= found.extra_bytes <= 2.2 * size, "an output and a gradient, and nothing as large beside them"
    assert 2 * size <= found.torch_extra_bytes
