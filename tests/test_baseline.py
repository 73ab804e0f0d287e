"""``bench --baseline`` and ``--against`` on the command line, with a clock that is a table of times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from portkern import benchmark, peer, timing
from portkern.baseline import Old, compare, load
from portkern.benchmark import Measurement
from portkern.cli.main import portkern
from portkern.dispatch import reference_device
from portkern.errors import BadArgument
from portkern.runtime import Runtime, using
from portkern.target import Device
from portkern.timing import Calls, Timing
from portkern.tuning_db import Database

FILE = Path("old.json")
HEAD = '{"schema": "portkern.bench/1", "data": {"device": {"slug": "x"}, "measurements": '


def old(problem: str = "p", **changes: Any) -> Old:
    return Old("softmax", problem, **{"time_us": 100.0, "spread_us": 1.0, "of_ceiling": 0.8, "copies": 1.2, **changes})


def new(problem: str = "p", **changes: Any) -> Measurement:
    given = {"time_us": 100.0, "spread_us": 1.0, "of_ceiling": 0.8, "copies": 1.2, **changes}
    return Measurement("softmax", problem, "default", "config", **given)


# ---- what counts as slower ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "by", "ratio", "slower"),
    [
        ({}, {}, "of_ceiling", 1.0, False),
        ({}, {"of_ceiling": 0.4, "time_us": 200.0}, "of_ceiling", 2.0, True),
        ({}, {"of_ceiling": 1.6, "time_us": 50.0}, "of_ceiling", 0.5, False),
        # Another clock: everything takes longer, a copy too.
        ({}, {"time_us": 150.0}, "of_ceiling", 1.0, False),
        ({}, {"of_ceiling": 0.8 / 1.04}, "of_ceiling", 1.04, False),
        ({}, {"of_ceiling": 0.8 / 1.06}, "of_ceiling", 1.06, True),
        # Within the spread of either run: 6 us of 106.
        ({}, {"of_ceiling": 0.8 / 1.06, "time_us": 106.0, "spread_us": 6.1}, "of_ceiling", 1.06, False),
        ({"spread_us": 6.1}, {"of_ceiling": 0.8 / 1.06, "time_us": 106.0}, "of_ceiling", 1.06, False),
        ({"spread_us": 5.9}, {"of_ceiling": 0.8 / 1.06, "time_us": 106.0}, "of_ceiling", 1.06, True),
        # Without a ceiling the copies, without these the time.
        ({"of_ceiling": None}, {"copies": 2.4, "time_us": 200.0}, "copies", 2.0, True),
        ({"of_ceiling": 0.0}, {"copies": 2.4, "time_us": 200.0}, "copies", 2.0, True),
        ({}, {"of_ceiling": None, "copies": None, "time_us": 200.0}, "time_us", 2.0, True),
        ({"spread_us": None}, {"spread_us": None, "of_ceiling": 0.7}, "of_ceiling", 8 / 7, True),
    ],
)
def test_slower(before: Any, now: Any, by: str, ratio: float, slower: bool) -> None:
    report = compare(FILE, [old(**before)], [new(**now)])
    (found,) = report.compared
    assert (found.by, found.slower) == (by, slower) and found.ratio == pytest.approx(ratio)
    assert bool(report.slower) == slower and report.only_old == report.only_new == ()


def test_tolerance() -> None:
    now = [new(of_ceiling=0.8 / 1.3)]
    assert compare(FILE, [old()], now, 0.25).slower and not compare(FILE, [old()], now, 0.35).slower
    assert compare(FILE, [old()], [new(of_ceiling=0.79, spread_us=0.0, time_us=102.0)], 0.0).slower


def test_what_no_longer_runs_is_slower() -> None:
    report = compare(FILE, [old()], [new(time_us=None, of_ceiling=None, copies=None, note="it broke")])
    assert report.slower and report.slower[0].new_us is None and report.slower[0].ratio is None


def test_problems_of_one_run_are_listed() -> None:
    before = [old("a"), old("b"), old("never ran", time_us=None)]
    report = compare(FILE, before, [new("b"), new("c"), new("never ran")])
    assert [each.problem for each in report.compared] == ["b"] and not report.slower
    assert report.only_old == ("a",) and report.only_new == ("c", "never ran")


def test_one_problem_measured_several_times_is_compared_in_order() -> None:
    before = [old(of_ceiling=0.8), old(of_ceiling=0.4)]
    report = compare(FILE, before, [new(of_ceiling=0.8), new(of_ceiling=0.4), new()])
    assert not report.slower and len(report.compared) == 2 and report.only_new == ("p",)
    assert len(compare(FILE, before, [new(of_ceiling=0.4), new(of_ceiling=0.8)]).slower) == 1


# ---- the command --------------------------------------------------------------------------------------------------


class Clock:
    """Each call takes what ``times`` says; the rest takes 10 us."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def interleaved(self, calls: Calls, device: Device, **options: Any) -> dict[str, Timing]:
        return {name: Timing(self.times.get(name, 10.0), 0.1, 30) for name in calls}

    def copy_ceiling(self, device: Device) -> float:
        return 1000.0


class Counter:
    def peak(self, call: Callable[[], Any], device: Device) -> int:
        call()
        return 3 * 1024**2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """``bench`` on the CPU, by this clock."""
    found = Clock()
    on_cpu = partial(benchmark.bench, timer=found, meter=Counter(), where=torch.device("cpu"))
    monkeypatch.setattr(benchmark, "bench", on_cpu)
    monkeypatch.setattr(timing, "copy_ceiling", found.copy_ceiling)
    monkeypatch.setattr(peer.Peer, "installed", property(lambda each: each.module in ("torch", "os")))
    return found


@pytest.fixture
def cli(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Result]]:
    """Runs ``bench`` of one small softmax on a machine that has a GPU, as far as the command can tell."""
    runtime = Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))
    runtime.devices = (dataclasses.replace(reference_device(runtime, "sm90"), index=0),)
    arguments = ["bench", "softmax", "--shape", "4x64", "--dtype", "fp32", "--rounds", "1"]
    with using(runtime):
        yield lambda *args: CliRunner().invoke(portkern, [*arguments, *map(str, args)])


def data_of(result: Result) -> Any:
    answer = json.loads(result.stdout)
    assert answer["schema"] == "portkern.bench/1"
    return answer["data"]


@pytest.fixture
def file(cli: Callable[..., Result], tmp_path: Path) -> Path:
    result = cli("--against", "torch", "--json")
    assert result.exit_code == 0, result.stderr
    (tmp_path / "old.json").write_text(result.stdout)
    return tmp_path / "old.json"


def test_the_output_is_a_baseline(cli: Callable[..., Result], file: Path, clock: Clock) -> None:
    same = cli("--against", "torch", "--baseline", file)
    assert same.exit_code == 0, same.stderr
    assert "0 of 1 problems slower than in" in same.stdout and "by more than 5% and the spread" in same.stdout
    clock.times["portkern"] = 12.0
    slower = cli("--against", "torch", "--baseline", file, "--json")
    assert slower.exit_code == 1
    report = data_of(slower)["baseline"]
    assert report["file"] == str(file) and report["tolerance"] == 0.05 and report["only_old"] == []
    (found,) = report["compared"]
    assert found["slower"] and found["old_us"] == 10.0 and found["new_us"] == 12.0
    assert found["ratio"] == pytest.approx(1.2) and found["by"] == "of_ceiling"
    text = cli("--against", "torch", "--baseline", file)
    assert text.exit_code == 1 and "1.200x" in text.stdout and "1 of 1 problems slower" in text.stdout
    assert cli("--against", "torch", "--baseline", file, "--tolerance", 25).exit_code == 0


def test_problems_that_nobody_measured_before(cli: Callable[..., Result], file: Path) -> None:
    result = cli("--shape", "4x32", "--against", "torch", "--baseline", file)
    assert result.exit_code == 0 and f"not in {file}: softmax 4x32 float32 n16" in result.stdout
    answer = json.loads(file.read_text())
    answer["data"]["measurements"][0]["problem"] = "softmax 9x9 float32 n16"
    file.write_text(json.dumps(answer))
    result = cli("--against", "torch", "--baseline", file)
    assert result.exit_code == 0 and f"only in {file}: softmax 9x9 float32 n16" in result.stdout


def test_a_baseline_of_before_this_option(file: Path) -> None:
    """Times of peers had names of their own: what is compared had not."""
    answer = json.loads(file.read_text())
    for each in answer["data"]["measurements"]:
        each["torch_us"] = each.pop("peer_us")["torch"]
    file.write_text(json.dumps(answer))
    (found,) = load(file, Device.from_json(answer["data"]["device"]))
    assert found.time_us == 10.0 and found.of_ceiling


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is not JSON"),
        ("[1]", "is JSON without a schema"),
        (
            '{"schema": "portkern.bench.host/1", "data": {}}',
            "schema 'portkern.bench.host/1', not portkern.bench/1",
        ),
        ('{"schema": "portkern.bench/2", "data": {}}', "is of schema 'portkern.bench/2'"),
        ('{"schema": "portkern.bench/1", "data": {}}', r"lacks what portkern.bench/1 holds \('device'\)"),
        (HEAD + '[{"op": 3}]}}', "op is 3"),
        (HEAD + '["x"]}}', "is 'x'"),
        (HEAD + '[{"op": "softmax", "problem": "p", "time_us": NaN}]}}', "time_us is nan"),
        (HEAD + '[{"op": "softmax", "problem": "p", "copies": true}]}}', "copies is True"),
        (HEAD + "[]}}", "was measured on x, and"),
    ],
)
def test_what_is_no_baseline(cli: Callable[..., Result], tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BadArgument, match=words):
        load(tmp_path / "other.json", reference_device(Runtime(), "sm90"))
    result = cli("--baseline", tmp_path / "other.json")
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1


def test_a_baseline_that_is_not_there(cli: Callable[..., Result], tmp_path: Path) -> None:
    result = cli("--baseline", tmp_path / "none.json")
    assert result.exit_code == 2 and "none.json: No such file" in result.stderr
    result = cli("--baseline", tmp_path / "none.json", "--host")
    assert result.exit_code == 2 and "leave one of them out" in result.stderr


def test_against(cli: Callable[..., Result]) -> None:
    result = cli("--against", "torch,liger", "--json")
    assert result.exit_code == 0
    assert "note: liger is not installed: pip install liger-kernel" in result.stderr
    data = data_of(result)
    (found,) = data["measurements"]
    assert found["peer_us"] == {"torch": 10.0} and list(data["peers"]) == ["torch"]
    assert data["notes"] == ["liger is not installed: pip install liger-kernel"]
    assert found["extra_bytes"] == found["torch_extra_bytes"] == 3 * 1024**2
    text = cli("--against", "torch").stdout
    assert "torch us" in text and "over torch" in text and "torch MiB" in text and "1.00x torch over 1" in text


def test_against_nobody(cli: Callable[..., Result]) -> None:
    result = cli("--against", "liger")
    assert result.exit_code == 2 and "nothing to compare with: liger is not installed" in result.stderr
    result = cli("--against", "triton")
    assert result.exit_code == 2 and "no peer 'triton'" in result.stderr and "flag_gems" in result.stderr
    result = cli("--against", "compile", "--no-compile")
    assert result.exit_code == 0, "nobody was asked"


def test_without_compile(cli: Callable[..., Result]) -> None:
    assert list(data_of(cli("--no-compile", "--json"))["peers"]) == ["torch"]


def test_peers_that_run_nothing(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    idle = peer.library("idle", "os", "idle", {})
    monkeypatch.setattr(peer, "known_peers", lambda: {"idle": idle})
    result = cli("--against", "idle", "--json")
    assert result.exit_code == 1 and "none of idle ran" in result.stderr
    assert data_of(result)["measurements"][0]["note"] == "idle: offers no softmax"
