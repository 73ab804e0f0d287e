"""Kernels with one instruction taken out: nearly all compute something else, and the tests' inputs show it.

40 seeded samples of each kernel; all instructions with PORTKERN_FULL_SWEEP=1. What survives must stand in
``survivors.py`` with its reason. Removed barriers must be caught, every one.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.emulation.mutants import SUBJECTS, Subject
from tests.emulation.survivors import reason_of

SAMPLES = 10**6 if os.environ.get("PORTKERN_FULL_SWEEP") == "1" else 40
LEAST = 0.9  # of the mutants that some input tells apart


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


def test_mutants_are_caught(subject: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    budget = 2_000 + 2 * subject.steps()
    positions, code = subject.positions(), subject.kernel.program.code
    drawn = random.Random(subject.name).sample(positions, min(SAMPLES, len(positions)))
    survivors = [position for position in sorted(drawn) if not subject.caught(subject.mutant(position), budget)]
    reasons = {position: reason_of(code, position) for position in survivors}
    unexplained = [code[position].text for position, reason in reasons.items() if reason is None]
    assert not unexplained, f"{subject.name}: these survive for no known reason: {unexplained}"
    equivalent = sum(reason is not None and reason.equivalent for reason in reasons.values())
    caught, told_apart = len(drawn) - len(survivors), len(drawn) - equivalent
    with capsys.disabled():
        print(f"\n{subject.name}: {caught} of {len(drawn)} mutants caught; {equivalent} more are equivalent")
    assert caught >= LEAST * told_apart, {code[p].text: reason.why for p, reason in reasons.items() if reason}


def test_removed_barriers_are_caught(subject: Subject) -> None:
    code = subject.kernel.program.code
    barriers = [position for position, each in enumerate(code) if each.name == "s_barrier"]
    assert barriers
    executed_without = [position for position in barriers if not subject.caught(subject.mutant(position))]
    assert not executed_without, [code[position].line for position in executed_without]
