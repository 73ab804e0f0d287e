"""``Fact``: one append-only row of the tuning database, and what is decided from many of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from portkern.config import Config
from portkern.problem import Problem
from portkern.record import FrozenMap, Record, canonical, frozen_map

SCHEMA = 1
OUTCOMES = ("measured", "predicted", "refused", "wrong", "crashed", "timeout")
LOST = ("wrong", "crashed", "timeout")  # outcomes that a config must not be handed out after
ROLES = ("default", "candidate")
POWER_LIMIT = "power_limit_mw"  # in Device.extra and in a fact's provenance


@dataclass(frozen=True)
class Fact(Record):
    """What happened to one config for one problem on one device, with its provenance.

    ``device`` is a device slug, or the bare architecture for a prediction about an absent one.
    ``toolchain`` is Triton's major.minor: another one makes the fact stale, not lost. ``role`` says
    whether the config was the plugin's default, which every winner has to beat. Times are
    microseconds of the median; ``spread_us`` is the interquartile range of the samples.
    ``score`` is the plugin model's estimate, which ranks predictions and is never a time.
    """

    device: str
    arch: str
    op: str
    kernel_hash: str
    toolchain: str
    problem: Problem
    config: Config
    outcome: str
    role: str = "candidate"
    time_us: float | None = None
    spread_us: float | None = None
    samples: int = 0
    score: float | None = None
    reason: str = ""
    error: float | None = None  # largest error against fp64, in units of the error budget
    provenance: FrozenMap[Any] = field(default_factory=FrozenMap)
    schema: int = SCHEMA

    _nested: ClassVar = {"problem": Problem, "config": Config}

    def __post_init__(self) -> None:
        for name in ("device", "arch", "op", "kernel_hash", "toolchain"):
            value = getattr(self, name)
            self._require(isinstance(value, str) and bool(value), f"{name} is {value!r}")
        self._require(isinstance(self.problem, Problem), f"problem is {self.problem!r}")
        self._require(self.op == self.problem.op, f"op {self.op!r}, but a problem of {self.problem.op!r}")
        self._require(isinstance(self.config, Config), f"config is {self.config!r}")
        self._require(self.outcome in OUTCOMES, f"outcome {self.outcome!r} is none of {OUTCOMES}")
        self._require(self.role in ROLES, f"role {self.role!r} is none of {ROLES}")
        self._require(self.schema == SCHEMA, f"schema {self.schema!r} is not {SCHEMA}")
        for name in ("time_us", "spread_us", "score", "error"):
            value = getattr(self, name)
            good = value is None or (
                isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
                and math.isfinite(value)
            )  # fmt: skip
            self._require(good, f"{name} is {value!r}, expected a finite number from 0")
        self._require(isinstance(self.reason, str), f"reason is {self.reason!r}")
        self._require(
            isinstance(self.samples, int) and self.samples >= 0,
            f"samples is {self.samples!r}, expected a count from 0",
        )
        measured = self.outcome == "measured"
        self._require(
            measured == (self.time_us is not None),
            f"outcome {self.outcome!r} with time_us {self.time_us!r}: only a measured fact has one",
        )
        self._set(provenance=frozen_map(self, "provenance", self.provenance, (str, int, float, bool)))

    @cached_property
    def key(self) -> str:
        """Content hash: equal facts from two machines are one fact after a merge."""
        return hashlib.sha256(canonical(self).encode()).hexdigest()[:32]

    @property
    def question(self) -> tuple[str, str, str, str, str]:
        """What this fact is evidence about: device, kernel, toolchain and problem."""
        return (self.device, self.op, self.kernel_hash, self.toolchain, self.problem.key)

    @property
    def power_limit(self) -> str | None:
        """In milliwatts, as the driver gave it: times at one limit say little about another."""
        found = self.provenance.get(POWER_LIMIT)
        return None if found is None else str(found)


def noise_us(fact: Fact) -> float:
    """How far a time may move by itself: 2 % of it, or twice the spread of its median."""
    spread = (fact.spread_us or 0.0) / math.sqrt(max(fact.samples, 1))
    return max(0.02 * (fact.time_us or 0.0), 2 * spread)


def comparable(facts: Iterable[Fact]) -> list[list[Fact]]:
    """Groups of facts that ``winner`` may compare: about one question, at one power limit.

    What was lost (``LOST``) is in the group of every limit. Each fact is there once, and the order
    of the groups is that of their first facts.
    """
    groups: dict[tuple[Any, ...], dict[str, Fact]] = {}
    lost: dict[tuple[str, ...], dict[str, Fact]] = {}
    for fact in facts:
        if fact.outcome in LOST:
            lost.setdefault(fact.question, {})[fact.key] = fact
        else:
            groups.setdefault((fact.question, fact.power_limit), {})[fact.key] = fact
    return [[*group.values(), *lost.get(question, {}).values()] for (question, _), group in groups.items()]


def fair(facts: Iterable[Fact]) -> list[Fact]:
    """``facts`` about one question without those of configs that were ever lost there.

    One loss outweighs any number of measurements, later ones too: it may come back.
    """
    facts = list(facts)
    lost = {fact.config for fact in facts if fact.outcome in LOST}
    return [fact for fact in facts if fact.config not in lost]


def winner(facts: Iterable[Fact]) -> Fact | None:
    """The fact to act on among facts about one question: a pure function, so merging commutes.

    The fastest measured config wins if it beats the measured default by more than the noise;
    otherwise the default does. A config that was ever wrong, crashed or timed out is out. Without
    measurements the best-ranked prediction answers. Ties go to the smaller content hash. Times of
    different power limits are compared as they are: ``comparable`` keeps them apart.
    """
    facts = fair(facts)
    measured = [fact for fact in facts if fact.outcome == "measured"]
    if measured:
        best = min(measured, key=lambda fact: (fact.time_us, fact.key))
        defaults = [fact for fact in measured if fact.role == "default"]
        if not defaults:
            return best
        default = min(defaults, key=lambda fact: (fact.time_us, fact.key))
        gain = (default.time_us or 0.0) - (best.time_us or 0.0)
        return best if gain > max(noise_us(default), noise_us(best)) else default
    predicted = [fact for fact in facts if fact.outcome == "predicted"]
    ranked = ((math.inf if fact.score is None else fact.score, fact.key, fact) for fact in predicted)
    return min(ranked, default=(0.0, "", None))[2]
