"""The tuner with real child processes: kernels run in the interpreter, only the GPU's clock is a stub."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from portkern.fact import Fact
from portkern.runtime import Runtime, current, using
from portkern.tuner import TuneReport
from portkern.tuner.report import Line
from portkern.tuning_db import Database
from tests.tuning import OPS, TESTS, TIMER, empty_home, interpreted

__all__ = ["empty_home"]  # a fixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuner")


def facts(op: str = "") -> list[Fact]:
    return [fact for fact in current().database.facts("interpreter") if not op or fact.op == op]


def times(monkeypatch: pytest.MonkeyPatch, **of_block: float) -> None:
    named = {f"BLOCK_N={block.removeprefix('b')} ": us for block, us in of_block.items()}
    monkeypatch.setenv("PORTKERN_TEST_TIMES", json.dumps(named))


def timed(home: Path) -> list[str]:
    log = home / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_a_time_with_the_hosts_launch_in_it_is_recorded_as_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTKERN_TEST_LAUNCH", "BLOCK_N=128 ")
    interpreted("test::shift")
    found = {fact.config.params["BLOCK_N"]: fact.reason for fact in facts("test::shift")}
    assert found == {64: "", 128: "timed with the host's launch: no memory", 256: ""}


# ---- one run over every way to go wrong -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(folder: Path) -> Iterator[tuple[TuneReport, list[Fact]]]:
    """All ops of tests/ops/shift.py; the wrong candidates are the fastest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORTKERN_HOME", str(folder))
        patch.setenv("PORTKERN_ARCH", "gfx942")
        patch.setenv("PORTKERN_TEST_LOG", str(folder / "log"))
        times(patch, b64=10.0, b128=5.0, b256=2.0)
        with using(Runtime(database=Database(folder))):
            yield interpreted(), facts()


def line(everything: tuple[TuneReport, list[Fact]], op: str) -> Line:
    (found,) = (line for line in everything[0].lines if line.op == op)
    return found


def outcomes(everything: tuple[TuneReport, list[Fact]], op: str) -> dict[int, str]:
    return {fact.config.params["BLOCK_N"]: fact.outcome for fact in everything[1] if fact.op == op}


def test_the_fastest_wins_and_the_default_is_measured(everything):
    found = line(everything, "test::shift")
    assert outcomes(everything, "test::shift") == {64: "measured", 128: "measured", 256: "measured"}
    assert found.status == "measured"
    assert found.winner is not None and found.winner.params["BLOCK_N"] == 256
    assert (found.default_us, found.winner_us, found.gain) == (10.0, 2.0, 5.0)
    roles = Counter(fact.role for fact in everything[1] if fact.op == "test::shift")
    assert roles == {"default": 1, "candidate": 2}


def test_a_wrong_candidate_never_wins_though_it_is_fastest(everything):
    found = line(everything, "test::shift_wrong")
    assert outcomes(everything, "test::shift_wrong") == {64: "measured", 128: "wrong"}
    assert found.winner == found.default
    (wrong,) = (fact for fact in everything[1] if fact.op == "test::shift_wrong" and fact.outcome == "wrong")
    assert "times the budget" in wrong.reason and wrong.error is not None and wrong.error > 1


def test_a_candidate_that_aborts_costs_only_itself(everything):
    assert outcomes(everything, "test::shift_aborts") == {64: "measured", 128: "crashed", 256: "measured"}
    (reason,) = (reason for _, _, reason in line(everything, "test::shift_aborts").rejected)
    assert "SIGABRT" in reason and "LLVM ERROR: cannot select" in reason


def test_a_candidate_that_hangs_is_killed(everything):
    assert outcomes(everything, "test::shift_hangs") == {64: "measured", 128: "timeout"}


def test_a_candidate_that_writes_where_it_must_not_is_wrong(everything):
    found = outcomes(everything, "test::shift_scribbles")
    assert found == {64: "measured", 128: "wrong", 256: "wrong"}
    reasons = [reason for _, _, reason in line(everything, "test::shift_scribbles").rejected]
    assert any("altered its inputs" in reason for reason in reasons)
    assert any("outside its outputs" in reason for reason in reasons)


def test_where_nothing_runs_each_reason_is_told_and_there_is_no_winner(everything):
    found = line(everything, "test::shift_misfit")
    assert found.status == "unanswered"
    assert (found.winner, found.winner_us, found.default) == (None, None, None)
    assert len(found.rejected) == 2
    assert outcomes(everything, "test::shift_misfit") == {}, "what the model refuses is no fact"
    assert all("needs a device of another kind" in reason for _, _, reason in found.rejected)
    assert "needs a device of another kind" in found.why
    assert "inf" not in str(everything[0])


def test_an_op_that_works_in_place_sees_fresh_inputs(everything):
    """Without restoring, the second candidate and every timed launch would find x + 1."""
    assert outcomes(everything, "test::bump") == {64: "measured", 128: "measured"}


def test_the_loud_text_is_not_about_the_chosen_configs(everything):
    text = str(everything[0])
    assert "Rejected candidates are no fault of the configs chosen above" in text
    assert text.endswith("s.") and "measured" in text.splitlines()[-1]


def test_the_report_survives_json(everything):
    report = everything[0]
    assert TuneReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_provenance_names_versions_and_no_folder(everything):
    provenance = everything[1][0].provenance
    assert {"torch", "triton", "portkern", "command", "utc", "name"} <= set(provenance)
    assert str(TESTS) not in json.dumps(dict(provenance))


def test_nothing_of_the_interpreter_reaches_dispatch(everything):
    assert {(fact.device, fact.arch) for fact in everything[1]} == {("interpreter", "interpreter")}


# ---- the winner, repetition and resumption ----------------------------------------------------------------------


def test_a_gain_within_the_noise_keeps_the_default(home, monkeypatch):
    times(monkeypatch, b64=10.0, b128=9.9, b256=50.0)
    (found,) = interpreted("test::shift").lines
    assert found.winner == found.default
    assert "less than the noise" in found.why


def test_the_second_run_times_nothing(home):
    assert [line.status for line in interpreted("test::shift", "test::shift_wrong").lines] == ["measured"] * 2
    before, known = timed(home), {fact.key for fact in facts()}
    with using(Runtime(database=Database(home))):
        report = interpreted("test::shift", "test::shift_wrong")
        assert {fact.key for fact in facts()} == known
    assert timed(home) == before
    assert [line.status for line in report.lines] == ["known"] * 2
    assert "Nothing was timed" in str(report)


def test_what_ends_the_process_while_timed_loses_only_itself(home, monkeypatch):
    monkeypatch.setenv("PORTKERN_TEST_ABORT", "BLOCK_N=256 ")
    (found,) = interpreted("test::shift").lines
    found_outcomes = {fact.config.params["BLOCK_N"]: fact.outcome for fact in facts()}
    assert found_outcomes == {64: "measured", 128: "measured", 256: "crashed"}
    assert "while timed" in found.rejected[0][2]


def test_the_limit_measures_the_first_and_a_larger_one_only_the_rest(home):
    interpreted("test::shift", limit=1)
    assert [fact.role for fact in facts()] == ["default"]
    (found,) = interpreted("test::shift", limit=3).lines
    assert found.tried == 3
    again = Counter(name.split()[1] for name in timed(home))
    assert again == {"BLOCK_N=64": 2, "BLOCK_N=128": 1, "BLOCK_N=256": 1}  # the default is the yardstick


def test_the_rest_is_measured_where_the_default_is_beaten_and_a_problem_alike_profits(home, monkeypatch):
    times(monkeypatch, b64=10.0, b256=9.0, b4096=8.0)
    first, alike = interpreted("test::shift_many").lines
    assert (first.tried, alike.tried) == (8, 3)
    assert [line.winner.params["BLOCK_N"] for line in (first, alike)] == [4096, 4096]
    assert (first.status, alike.status) == ("measured", "measured")
    again = interpreted("test::shift_many")
    assert [line.status for line in again.lines] == ["known", "known"]


def test_four_are_measured_where_the_default_is_the_best(home, monkeypatch):
    times(monkeypatch, b64=10.0)
    first, alike = interpreted("test::shift_many").lines
    assert (first.tried, alike.tried) == (4, 3)
    assert first.winner == first.default


def test_a_killed_run_goes_on(home, monkeypatch):
    monkeypatch.setenv("PORTKERN_TEST_SLEEP", "0.3")
    script = (
        "from portkern.tuner import tune; "
        f"tune('test::shift', device='interpreter', timer={TIMER!r}, ops_files=[{OPS!r}], budget='5m')"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=TESTS.parent)
    wait_for(lambda: any(fact.outcome == "measured" for fact in Database(home).facts("interpreter")))
    (child,) = children_of(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not running(child))
    done = {fact.question for fact in Database(home).facts("interpreter") if fact.outcome == "measured"}
    before = len(timed(home))
    monkeypatch.setenv("PORTKERN_TEST_SLEEP", "0")
    report = interpreted("test::shift", shapes=None)
    statuses = Counter(line.status for line in report.lines)
    assert 1 <= len(done) <= 2
    assert statuses == {"known": len(done), "measured": 3 - len(done)}
    assert len(timed(home)) - before == 3 * (3 - len(done))


def test_a_budget_that_ends_early_says_how_to_go_on(home):
    report = interpreted("test::shift", budget=0.001, shapes=None)
    assert (report.lines, report.unfinished) == ((), 3)
    assert "ended with 3 problems to do: run the same command again" in str(report)
    assert "ended with 1 problem to do: " in str(replace(report, unfinished=1))


def wait_for(holds: Any, patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # a child belongs to the thread that started it
    return [int(text) for path in lists for text in path.read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
