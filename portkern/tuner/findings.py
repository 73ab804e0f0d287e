"""What is known of each question of a run: what became of each config, shared by all lanes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portkern.config import Config
from portkern.fact import Fact

Key = tuple[str, str, str, str, str]  # as ``Fact.question``

_RANKS = ("predicted", "refused", "timeout", "crashed", "measured", "wrong")
_HALVES = re.compile("bfloat16|float16")  # as wide as each other, and of the same speed


@dataclass(frozen=True)
class Finding:
    """What became of a config; ``time_us`` where it was measured."""

    outcome: str
    time_us: float | None = None


Known = Mapping[Config, Finding]


class Findings:
    """The outcome of each config, by question. Lanes add to it while others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Key, dict[Config, Finding]] = {}
        self._alike: dict[Key, set[Key]] = {}

    def add(self, facts: Iterable[Fact]) -> None:
        """Of several facts about one config the worst is known, and of times the least."""
        with self._lock:
            for fact in facts:
                self._alike.setdefault(family(fact.question), set()).add(fact.question)
                known = self._known.setdefault(fact.question, {})
                known[fact.config] = max(known.get(fact.config, Finding("predicted")), _finding(fact), key=_weight)

    def of(self, key: Key) -> dict[Config, Finding]:
        """What is known of the question with ``key``: a copy."""
        with self._lock:
            return dict(self._known.get(key, {}))

    def alike(self, key: Key) -> dict[Config, float]:
        """Times of configs for the problem that differs in its 16-bit floats alone, in microseconds.

        Of 219 problems of all ops on one GPU, the config that was best in bfloat16 took 1.005 of
        the best time in float16 in the mean, and 1.06 at most.
        """
        with self._lock:
            others = sorted(self._alike.get(family(key), set()) - {key})
            return {
                config: finding.time_us
                for other in others
                for config, finding in self._known[other].items()
                if finding.outcome == "measured" and finding.time_us is not None
            }


def _finding(fact: Fact) -> Finding:
    return Finding(fact.outcome, fact.time_us)


def _weight(finding: Finding) -> tuple[int, float]:
    return _RANKS.index(finding.outcome), -(finding.time_us or 0.0)


def family(key: Key) -> Key:
    """The key without what ``alike`` overlooks."""
    *where, problem = key
    slug, op, kernel, toolchain = where
    return (slug, op, kernel, toolchain, _HALVES.sub("half", problem))
