"""Kernels with one instruction taken out: nearly all compute something else, and the tests' inputs show it.

Every instruction of the short kernels, 100 drawn ones of a long one; all of them with PORTKERN_FULL_SWEEP=1. 90 % must
be caught, and what survives must stand in ``survivors.py`` with its reason. Removed barriers must be caught, every one.
"""

from __future__ import annotations

import math
import os
import random

import pytest
import triton

from tests.emulation.mutants import SUBJECTS, Subject
from tests.emulation.survivors import reason_of

FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"
LONG, DRAWN = 500, 100  # instructions
LEAST = 0.9


# What is tested are the inputs: the versions of Triton take turns, and all kernels in a full sweep.
OLDEST = triton.__version__.startswith("3.6.")
TURN = list(SUBJECTS) if FULL else list(SUBJECTS)[OLDEST::2]


@pytest.fixture(scope="module", params=TURN)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


def test_mutants_are_caught(subject: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    (positions, steps), code = subject.positions(), subject.kernel.program.code
    needed = LEAST * len(positions)
    drawn = positions
    if len(positions) > LONG and not FULL:
        drawn = sorted(random.Random(subject.name).sample(positions, DRAWN))
        needed = LEAST * DRAWN - 2 * math.sqrt(DRAWN * LEAST * (1 - LEAST))  # two deviations, since chance draws them
    survivors = [each for each in drawn if not subject.caught(subject.mutant(each), 1_000 + 2 * steps)]
    reasons = {position: reason_of(code, position) for position in survivors}
    unexplained = [code[position].text for position, reason in reasons.items() if reason is None]
    assert not unexplained, f"{subject.name}: these survive for no known reason: {unexplained}"
    equivalent = sum(reason is not None and reason.equivalent for reason in reasons.values())
    caught = len(drawn) - len(survivors)
    with capsys.disabled():
        print(f"\n{subject.name}: {caught} of {len(drawn)} mutants caught; {equivalent} more are equivalent")
    assert caught >= needed, {code[p].text: reason.why for p, reason in reasons.items() if reason}


def test_removed_barriers_are_caught(subject: Subject) -> None:
    code = subject.kernel.program.code
    barriers = [position for position, each in enumerate(code) if each.name == "s_barrier"]
    assert barriers
    executed_without = [position for position in barriers if not subject.caught(subject.mutant(position))]
    assert not executed_without, [code[position].line for position in executed_without]
