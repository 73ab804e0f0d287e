"""The winner is a pure function over facts: merging commutes, and a shipped extract decides alike."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portkern.config import Config
from portkern.errors import InvalidRecord
from portkern.fact import LOST, Fact, noise_us, winner
from portkern.problem import Problem
from portkern.record import canonical
from portkern.tuning_db import winners_only

PROBLEM = Problem("softmax", {"M": 8, "N": 4096}, {"x": "bf16"})
FACT = Fact("nvidia_h200", "sm90", "softmax", "k1", "3.9", PROBLEM, Config("resident_row"), "refused")
TIMES = st.sampled_from((1.0, 5.0, 9.7, 9.9, 10.0, 10.3)) | st.floats(0.1, 100.0)
MAYBE = st.none() | st.sampled_from((0.0, 1.0, 2.5))


@st.composite
def facts(draw: st.DrawFn) -> Fact:
    outcome = draw(st.sampled_from(("measured", "predicted", "refused", "wrong", "crashed", "timeout")))
    return dataclasses.replace(
        FACT,
        problem=dataclasses.replace(PROBLEM, sizes={"M": draw(st.sampled_from((8, 16))), "N": 4096}),
        config=Config("resident_row", {"BLOCK_M": draw(st.sampled_from((1, 2, 4)))}),
        outcome=outcome,
        role=draw(st.sampled_from(("default", "candidate", "candidate"))),
        time_us=draw(TIMES) if outcome == "measured" else None,
        spread_us=draw(MAYBE) if outcome == "measured" else None,
        samples=draw(st.integers(0, 20)),
        score=draw(MAYBE),
        provenance=draw(st.sampled_from(({}, {"power_limit_mw": "500000"}, {"power_limit_mw": "700000"}))),
    )


LISTS = st.lists(facts(), max_size=12)


def one_question(some: list[Fact]) -> list[Fact]:
    return [fact for fact in some if fact.problem.sizes["M"] == 8]


@given(LISTS.map(one_question), st.randoms())
def test_winner_knows_no_order_and_no_repetition(some: list[Fact], rng) -> None:
    mixed = some + [fact for fact in some if rng.random() < 0.5]
    rng.shuffle(mixed)
    assert winner(mixed) == winner(some)


@given(LISTS.map(one_question), LISTS.map(one_question))
def test_merge_commutes(one: list[Fact], other: list[Fact]) -> None:
    assert winner(one + other) == winner(other + one)


@given(LISTS.map(one_question))
def test_winner_is_fair(some: list[Fact]) -> None:
    best = winner(some)
    lost = {fact.config for fact in some if fact.outcome in LOST}
    usable = [fact for fact in some if fact.outcome in ("measured", "predicted") and fact.config not in lost]
    assert (best is None) == (not usable)
    if best is None or best.outcome == "predicted":
        assert all(fact.outcome != "measured" for fact in usable)
        return
    defaults = [fact.time_us or 0.0 for fact in usable if fact.role == "default" and fact.outcome == "measured"]
    assert best.role == "default" or all(time - (best.time_us or 0.0) > noise_us(best) for time in defaults)


@given(LISTS)
def test_extract_decides_as_all_facts_do(some: list[Fact]) -> None:
    extract = winners_only(some)
    assert {fact.key for fact in extract} <= {fact.key for fact in some}
    for condition in {(fact.question, fact.power_limit) for fact in some}:
        group, kept = (
            [each for each in every if each.question == condition[0]
             and (each.power_limit == condition[1] or each.outcome in LOST)]
            for every in (some, extract)
        )  # fmt: skip
        assert winner(kept) == winner(group)
        assert len([each for each in kept if each.outcome not in LOST]) <= 2
        # What was lost anywhere must stay known, or it could win elsewhere.
        assert {each.key for each in group if each.outcome in LOST} <= {each.key for each in kept}
    assert winners_only(extract) == extract
    assert winners_only(reversed(some)) == extract


def test_extract_keeps_the_default_that_lost() -> None:
    default = dataclasses.replace(FACT, outcome="measured", role="default", time_us=10.0)
    fast = dataclasses.replace(FACT, outcome="measured", time_us=5.0, config=Config("resident_row", {"BLOCK_M": 2}))
    slow = dataclasses.replace(fast, time_us=20.0, config=Config("looped_row"))
    assert set(winners_only([slow, default, fast])) == {fast, default}


@pytest.mark.parametrize("outcome", LOST)
def test_lost_config_wins_nowhere(outcome: str) -> None:
    fast = dataclasses.replace(FACT, outcome="measured", time_us=5.0, config=Config("looped_row"))
    lost = dataclasses.replace(fast, outcome=outcome, time_us=None, provenance={"power_limit_mw": "500000"})
    slow = dataclasses.replace(FACT, outcome="measured", time_us=10.0)
    assert winner([fast, lost, slow]) == slow and winner([fast, lost]) is None
    assert set(winners_only([fast, lost, slow])) == {lost, slow}


def test_extract_keeps_a_winner_for_each_power_limit() -> None:
    at = [
        dataclasses.replace(FACT, outcome="measured", role=role, time_us=time, config=Config(variant),
                            provenance={"power_limit_mw": limit})
        for limit, times in (("500000", (9.9, 10.0)), ("700000", (4.0, 8.0)))
        for variant, role, time in zip(("looped_row", "resident_row"), ("candidate", "default"), times, strict=True)
    ]  # fmt: skip
    assert set(winners_only(at)) == set(at[1:])  # at 500 W the candidate gained less than the noise


@given(facts())
def test_json_and_pickle_round_trip(fact: Fact) -> None:
    for back in (Fact.from_json(fact.to_json()), pickle.loads(pickle.dumps(fact))):
        assert back == fact and hash(back) == hash(fact)
        assert back.key == fact.key and canonical(back) == canonical(fact)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": "many"}, {"samples": -1}, {"reason": ["x"]}, {"outcome": "won"}, {"role": "boss"},
        {"time_us": 3.0}, {"score": float("nan")}, {"error": float("inf")}, {"schema": 2}, {"op": ""},
        {"provenance": {"x": [1]}}, {"problem": None}, {"config": 3}, {"device": None}, {"extra": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_field_is_refused(change: dict) -> None:
    with pytest.raises(InvalidRecord):
        Fact.from_json({**FACT.to_json(), **change})


def test_pickle_crosses_processes() -> None:
    script = (
        "import pickle, sys; fact = pickle.load(sys.stdin.buffer)\n"
        "from portkern.fact import Fact\n"
        "assert {fact: 1}[Fact.from_json(fact.to_json())]"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(FACT),
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
    )
