"""The lane of absent targets: the best-ranked candidate that compiles and fits is the prediction."""

from __future__ import annotations

from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

from portkern.backend import Resources
from portkern.config import Config
from portkern.tuner.child import ChildFailed
from portkern.tuner.compilers import Compiled, Compilers
from portkern.tuner.lane import Answer, Lane
from portkern.tuner.questions import Question

# The model errs by about that much: what it ranks less far ahead does not replace the default,
# which rests on what was measured somewhere.
MARGIN = 0.1


@dataclass
class Predicting(Lane):
    """Compiles candidates best first, until one fits: no time is measured."""

    compilers: Compilers

    def close(self) -> None:
        """Nothing of its own: the compilers are shared."""

    def answer(self, question: Question) -> Answer:
        known = self.settings.findings.of(question.key)
        if not question.admitted:
            return Answer(question, "unanswered", "every candidate is refused")
        if any(found.outcome == "predicted" for found in known.values()):
            return Answer(question, "known")
        order = ranked(question)
        for config in order:
            if config in known:
                continue
            try:
                found = self.compilers.submit(question, config).result(self.settings.clock.left_s)
            except NotYet:
                return Answer(question, "unfinished", "the budget ended first")
            except ChildFailed as error:
                return Answer(question, "failed", str(error))
            if found.outcome == "fits":
                why = reason(question, config, order, found)
                score = question.candidates.scores.get(config)
                self.note(question, config, "predicted", score=score, reason=why)
                return Answer(question, "predicted")
            self.note(question, config, found.outcome, reason=found.reason)
        return Answer(question, "unanswered", "no candidate compiles and fits")


def ranked(question: Question) -> list[Config]:
    """Candidates by the model's estimate, the default before those that are not clearly better."""
    default = question.default
    scores = question.candidates.scores
    if default is None or default not in scores:
        return list(question.admitted)
    bound = scores[default] * (1 - MARGIN)
    by_score = sorted(
        (config for config in question.admitted if config != default),
        key=lambda config: scores.get(config, float("inf")),
    )
    ahead = [config for config in by_score if scores.get(config, float("inf")) < bound]
    return [*ahead, default, *(config for config in by_score if config not in ahead)]


def reason(question: Question, config: Config, order: list[Config], compiled: Compiled) -> str:
    """Why ``config`` is the prediction, for a person to read."""
    default, scores = question.default, question.candidates.scores
    place = order.index(config) + 1
    if config == default:
        why = f"of {len(order)} that fit, the model puts none {MARGIN:.0%} ahead of the default"
    elif default is not None and default in scores and config in scores:
        ratio = scores[default] / max(scores[config], 1e-9)
        why = f"number {place} of {len(order)} in the model, which puts the default at {ratio:.2f}x its cost"
    else:
        why = f"number {place} of the op's own {len(order)} candidates"
    return f"{why}; it takes {' and '.join(map(_needs, compiled.resources)) or 'no launch'}"


def _needs(needs: Resources) -> str:
    return f"{needs.registers} registers at occupancy {needs.occupancy:.2f}"
