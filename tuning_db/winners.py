"""What a shipped file holds: of each question and power limit the winner and the default that it had to beat."""

from __future__ import annotations

import math
from collections.abc import Iterable

from portkern.fact import LOST, Fact, comparable, fair, winner


def winners_only(facts: Iterable[Fact]) -> list[Fact]:
    """Of each question and power limit what ``fact.winner`` picks, plus the default's fact and all that was
    lost; in export order.

    The default kept is the one that ``winner`` compared with, so that the winner among the facts
    kept is the winner among all; and a config that was lost here wins nowhere else.
    """
    facts = list(facts)
    kept = {fact.key: fact for fact in facts if fact.outcome in LOST}
    for group in comparable(facts):
        for pick in (winner(group), _default(group)):
            if pick is not None:
                kept[pick.key] = pick
    return sorted(kept.values(), key=export_order)


def export_order(fact: Fact) -> tuple[tuple[str, ...], str]:
    """Sorts the facts of one question side by side, so that files differ where facts do."""
    return (fact.question, fact.key)


def _default(facts: Iterable[Fact]) -> Fact | None:
    return min((fact for fact in fair(facts) if fact.role == "default"), key=_rank, default=None)


def _rank(fact: Fact) -> tuple[bool, bool, float, str]:
    """Measured before predicted before failed; then fastest, then the smaller hash."""
    value = fact.time_us if fact.outcome == "measured" else fact.score
    order = math.inf if value is None else value
    return (fact.outcome != "measured", fact.outcome != "predicted", order, fact.key)
