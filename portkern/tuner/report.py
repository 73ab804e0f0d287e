"""``TuneReport``: what a tuning run found out, for a person and for a program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tabulate import tabulate

from portkern.config import Config
from portkern.fact import Fact, winner
from portkern.record import Record
from portkern.tuner.lane import Answer
from portkern.tuner.questions import Question

WHY = 120  # characters to a line of the last column
REASONS = 12  # lines of the table of refusals; to_json() has them all

Rejected = tuple[str, str, str]  # config, outcome, reason


@dataclass(frozen=True)
class Line(Record):
    """One problem on one device. ``status`` is that of ``Answer``; ``gain`` is the default's time
    over the winner's; ``copy_fraction`` compares the winner with a large copy on that device."""

    device: str
    op: str
    problem: str
    status: str
    why: str
    default: Config | None = None
    winner: Config | None = None
    default_us: float | None = None
    winner_us: float | None = None
    gain: float | None = None
    copy_fraction: float | None = None
    score: float | None = None
    tried: int = 0
    rejected: tuple[Rejected, ...] = ()

    _nested: ClassVar = {"default": Config, "winner": Config}

    def __post_init__(self) -> None:
        self._set(rejected=tuple((config, outcome, why) for config, outcome, why in self.rejected))


@dataclass(frozen=True)
class TuneReport(Record):
    """All lines of a run. ``unfinished`` counts problems that the budget left for the next run."""

    lines: tuple[Line, ...]
    elapsed_s: float
    budget_s: float
    unfinished: int
    command: str
    unserved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lines = (Line.from_json(each) if isinstance(each, dict) else each for each in self.lines)
        self._set(lines=tuple(lines), unserved=tuple(self.unserved))

    def __str__(self) -> str:
        parts = [self._table(), self._rejections(), self._summary()]
        return "\n\n".join(part for part in parts if part)

    def _table(self) -> str:
        rows = [
            (
                line.device,
                line.problem,
                line.status,
                str(line.winner) if line.winner else "none",
                _number(line.winner_us, ".1f"),
                _number(line.default_us, ".1f"),
                _number(line.gain, ".2f", "x"),
                _number(line.copy_fraction, ".0%"),
                f"{line.tried}/{len(line.rejected)}",
                line.why,
            )
            for line in self.lines
        ]
        headers = (
            "device", "problem", "status", "config", "us", "default us", "gain", "of copy",
            "tried/rejected", "why",
        )  # fmt: skip
        used = [place for place in range(len(headers)) if any(row[place] for row in rows)]
        return tabulate(
            [[row[place] for place in used] for row in rows],
            [headers[place] for place in used],
            disable_numparse=True,
            maxcolwidths=[None if headers[place] != "why" else WHY for place in used],
        )

    def _rejections(self) -> str:
        """The reasons for rejecting candidates, alike ones together, with an example of each."""
        counts: Counter[tuple[str, str]] = Counter()
        examples: dict[tuple[str, str], tuple[str, str]] = {}
        for line in self.lines:
            for config, outcome, reason in line.rejected:
                kind = (outcome, re.sub(r"[\d,.]+", "#", reason))
                counts[kind] += 1
                examples.setdefault(kind, (config, reason))
        rows = [(count, kind[0], *examples[kind]) for kind, count in counts.most_common(REASONS)]
        if not rows:
            return ""
        note = "Rejected candidates are no fault of the configs chosen above:\n"
        return note + tabulate(rows, ("count", "outcome", "for example", "reason"))

    def _summary(self) -> str:
        counts = Counter(line.status for line in self.lines)
        told = {
            "measured": "measured", "predicted": "predicted without a measurement",
            "known": "already known", "unanswered": "without a config that runs", "failed": "failed",
        }  # fmt: skip
        parts = [f"{counts[status]} {words}" for status, words in told.items() if counts[status]]
        text = f"{', '.join(parts) or 'nothing decided'} in {self.elapsed_s:.0f} s."
        if counts["known"] and counts["known"] == len(self.lines) and not self.unfinished:
            text += " Nothing was timed: every problem was known."
        if self.unfinished:
            left = f"{self.unfinished} problem{'' if self.unfinished == 1 else 's'}"
            text += (
                f" The budget of {self.budget_s:g} s ended with {left} to do: "
                f"run the same command again to go on ({self.command}), or give a larger budget."
            )
        if self.unserved:
            text += f" No plugin serves {', '.join(self.unserved)}."
        return text


def line_of(answer: Answer, facts: Iterable[Fact]) -> Line:
    """The line for one answered question, from all the facts about it."""
    question = answer.question
    facts = list(facts)
    best = winner(facts)
    measured = [fact for fact in facts if fact.outcome == "measured"]
    default = min(
        (fact for fact in measured if fact.role == "default"),
        key=lambda fact: fact.time_us or 0.0,
        default=None,
    )
    rejected = _rejected(question, facts)
    winner_us = best.time_us if best else None
    default_us = default.time_us if default else None
    work = question.situation.work
    fraction = None
    ceiling_gbps = best.provenance.get("copy_gbps") if best else None
    if winner_us and ceiling_gbps:
        fraction = (work.reads + work.writes) / winner_us / 1e3 / ceiling_gbps
    return Line(
        device=question.place.label,
        op=question.op.name,
        problem=str(question.situation.problem),
        status=answer.status,
        why=_why(answer, best, default, facts, rejected),
        default=question.default,
        winner=best.config if best else None,
        default_us=default_us,
        winner_us=winner_us,
        gain=default_us / winner_us if default_us and winner_us else None,
        copy_fraction=fraction,
        score=best.score if best else None,
        tried=len({fact.config for fact in measured}) or int(best is not None),
        rejected=rejected,
    )


def _rejected(question: Question, facts: Sequence[Fact]) -> tuple[Rejected, ...]:
    """What the plugin's model refuses, which no database has to hold, and what was lost or refused when tried."""
    found = {config: (str(config), "refused", reason) for config, reason in question.candidates.refused}
    bad = (fact for fact in facts if fact.outcome not in ("measured", "predicted"))
    found |= {fact.config: (str(fact.config), fact.outcome, fact.reason) for fact in bad}
    return tuple(sorted(found.values()))


def _why(
    answer: Answer, best: Fact | None, default: Fact | None, facts: Sequence[Fact], rejected: Sequence[Rejected]
) -> str:
    if best is None:
        reasons = Counter(reason for _, _, reason in rejected if reason).most_common(2)
        return "; ".join([answer.reason, *(reason for reason, _ in reasons)])
    if best.outcome == "predicted":
        return best.reason
    if default is None:
        why = "the fastest; the default did not run"
    elif best.config == default.config:
        faster = [
            fact for fact in facts
            if fact.outcome == "measured" and (fact.time_us or 0.0) < (default.time_us or 0.0)
        ]  # fmt: skip
        why = "the default: a faster one gains less than the noise" if faster else "the default is the fastest"
    else:
        why = "beats the default by more than the noise"
    return "; ".join(part for part in (why, answer.reason) if part)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
