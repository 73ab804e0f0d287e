"""What a shipped file holds: of each question the winner and the default that it had to beat."""

from __future__ import annotations

import math
from collections.abc import Iterable

from portkern.fact import Fact, winner


def winners_only(facts: Iterable[Fact]) -> list[Fact]:
    """Of each question what ``fact.winner`` picks, plus the default's fact and what was wrong; in export order.

    The default kept is the one that ``winner`` compared with, so that the winner among the facts
    kept is the winner among all; and a config that was wrong here wins nowhere else.
    """
    questions: dict[tuple[str, ...], dict[str, Fact]] = {}
    for fact in facts:
        questions.setdefault(fact.question, {})[fact.key] = fact
    kept: dict[str, Fact] = {}
    for group in questions.values():
        wrong = (fact for fact in group.values() if fact.outcome == "wrong")
        for pick in (winner(group.values()), _default(group.values()), *wrong):
            if pick is not None:
                kept[pick.key] = pick
    return sorted(kept.values(), key=export_order)


def export_order(fact: Fact) -> tuple[tuple[str, ...], str]:
    """Sorts the facts of one question side by side, so that files differ where facts do."""
    return (fact.question, fact.key)


def _default(facts: Iterable[Fact]) -> Fact | None:
    facts = list(facts)
    wrong = {fact.config for fact in facts if fact.outcome == "wrong"}
    fair = [fact for fact in facts if fact.role == "default" and fact.config not in wrong]
    return min(fair, key=_rank, default=None)


def _rank(fact: Fact) -> tuple[bool, bool, float, str]:
    """Measured before predicted before failed; then fastest, then the smaller hash."""
    value = fact.time_us if fact.outcome == "measured" else fact.score
    order = math.inf if value is None else value
    return (fact.outcome != "measured", fact.outcome != "predicted", order, fact.key)
