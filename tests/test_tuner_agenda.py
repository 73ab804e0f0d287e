"""The tuner plans as it goes: what comes later costs nothing before it is asked for, and the budget ends all of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from portkern.errors import BadArgument
from portkern.registry import load_file
from portkern.runtime import current
from portkern.tuner import agenda, tune
from portkern.tuner.agenda import Agenda, asked
from portkern.tuner.questions import ask
from portkern.tuner.requests import cases_of, dtypes_of, ops_of, places_of
from tests.tuning import OPS, TIMER, empty_home, interpreted

__all__ = ["empty_home"]  # a fixture

MUCH = 60.0  # seconds that no test here comes near, unless something is not bounded


def everything(device: str, *names: str) -> list[agenda.Asked]:
    ops = ops_of(names)
    places = places_of(current(), device, TIMER if "interpreter" in device else None)
    return asked(places, ops, dtypes_of(ops, None), cases_of(ops, None))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[agenda.Asked]:
    """What was planned until now."""
    found: list[agenda.Asked] = []

    def noted(runtime, *what):
        found.append(agenda.Asked(*what))
        return ask(runtime, *what)

    monkeypatch.setattr(agenda, "ask", noted)
    return found


def test_the_most_important_comes_first_and_every_place_has_its_turn(home):
    order = everything("sm80,sm90", "softmax", "layer_norm")
    names = list(dict.fromkeys(each.op.name for each in order))
    assert [(each.op.name, each.place.arch) for each in order[: 2 * len(names)]] == [
        (name, arch) for name in names for arch in ("sm80", "sm90")
    ]
    dtypes = list(dict.fromkeys(each.dtype for each in order))
    assert dtypes == ["bfloat16", "float16", "float32"]
    assert [each.dtype for each in order] == sorted((each.dtype for each in order), key=dtypes.index)


def test_one_is_planned_when_one_is_taken_and_all_come_in_order(home, planned):
    order = everything("sm80,sm90", "softmax")
    learned = []
    found = Agenda(current(), order, learned.append, lambda: False)
    work = found.of(None)
    first = work.take()
    assert first is not None and (len(planned), found.count, learned) == (1, len(order), [first])
    rest = list(iter(work.take, None))
    assert [first, *rest] == learned == found.planned
    assert planned == order


def test_what_is_asked_twice_is_one_question(home):
    order = everything("sm90", "softmax")[:3]
    found = Agenda(current(), [*order, *order], lambda question: None, lambda: False)
    assert found.count == 6
    assert len(list(iter(found.of(None).take, None))) == found.count == 3


def test_nothing_is_planned_when_it_is_over(home, planned):
    order = everything("sm90", "softmax")
    found = Agenda(current(), order, lambda question: None, lambda: len(planned) >= 2)
    work = found.of(None)
    assert [question is None for question in (work.take(), work.take(), work.take())] == [False, False, True]
    assert (len(planned), len(found.planned), found.count) == (2, 2, len(order))


def test_what_cannot_be_planned_is_an_error_to_each_who_comes(home, monkeypatch):
    """Who looks ahead may be the first, and nobody listens to it at the end of a run."""

    def broken(*args):
        raise RuntimeError("no plan")

    order = everything("sm90", "softmax")
    found = Agenda(current(), order, lambda question: None, lambda: False)
    monkeypatch.setattr(agenda, "ask", broken)
    with pytest.raises(RuntimeError, match="no plan"):
        list(found.of(None).ahead(1))
    with pytest.raises(RuntimeError, match="no plan"):
        found.of(None).take()
    assert found.count == len(order)


def test_looking_ahead_plans_what_it_looks_at_and_takes_nothing(home, planned):
    found = Agenda(current(), everything("sm90", "softmax"), lambda question: None, lambda: False)
    work = found.of(None)
    ahead = work.ahead(5)
    seen = [next(ahead), next(ahead)]
    assert len(planned) == 2
    assert [work.take(), work.take()] == seen


def test_what_is_put_back_waits_for_others_that_are_planned_for_it(home, planned):
    found = Agenda(current(), everything("sm90", "softmax"), lambda question: None, lambda: False)
    work = found.of(None)
    first = work.take()
    assert first is not None
    work.put_back(first, 3)
    assert len(planned) == 4
    assert [work.take() is first for _ in range(4)] == [False, False, False, True]


def test_each_place_that_measures_has_a_list_of_its_own(home):
    load_file(OPS)
    order = everything("sm90,interpreter", "test::shift")
    found = Agenda(current(), order, lambda question: None, lambda: False)
    (mine,) = {each.place for each in order if each.place.measured}
    taken = list(iter(found.of(mine).take, None))
    assert {question.place for question in taken} == {mine} and len(taken) == 3
    rest = list(iter(found.of(None).take, None))
    assert {question.place.arch for question in rest} == {"sm90"} and len(rest) == 3


def test_answers_are_recorded_before_later_questions_are_planned(home, monkeypatch):
    waited = []

    def patient(runtime, *what):
        """Plans once the three facts about each question before are there, if that comes true."""
        end, wanted = time.monotonic() + MUCH / 2, 3 * len(waited)
        while len(facts := runtime.database.facts("interpreter")) < wanted and time.monotonic() < end:
            time.sleep(0.02)
        waited.append(len(facts) >= wanted)
        return ask(runtime, *what)

    monkeypatch.setattr(agenda, "ask", patient)
    report = interpreted("test::shift", shapes=None)
    assert [line.status for line in report.lines] == ["measured"] * 3
    assert waited == [True] * 3


def test_the_budget_ends_the_planning(home, monkeypatch):
    def slow(*args):
        time.sleep(0.2)
        return ask(*args)

    monkeypatch.setattr(agenda, "ask", slow)
    report = tune(device="all", budget=1.0, progress=False)
    assert report.elapsed_s < MUCH, "to plan everything takes minutes"
    assert report.unfinished + len(report.lines) == len(everything("all"))
    assert "run the same command again" in str(report)


def test_the_budget_ends_a_child_that_does_not_start(home, tmp_path: Path):
    timer = tmp_path / "never.py"
    timer.write_text(f"import time\ntime.sleep({10 * MUCH})\n")
    report = interpreted("test::shift", budget=1.0, timer=f"{timer}:TIMER")
    assert report.elapsed_s < MUCH
    assert (report.lines, report.unfinished) == ((), 1)


def test_what_is_known_of_a_problem_alike_counts_though_it_is_not_asked_for(home, monkeypatch):
    monkeypatch.setenv("PORTKERN_TEST_TIMES", '{"BLOCK_N=64 ": 10.0}')
    (first,) = interpreted("test::shift_many", dtypes=["fp16"]).lines
    (alike,) = interpreted("test::shift_many", dtypes=["bf16"]).lines
    assert (first.tried, alike.tried) == (4, 3)


def test_a_shape_that_an_op_cannot_take_is_an_error_before_anything_starts(home, monkeypatch):
    monkeypatch.setattr("portkern.tuner.session.Agenda", None)
    with pytest.raises(BadArgument, match="matmul is measured at batch dims"):
        tune("softmax", "matmul", device="sm90", shapes=["7"])
