"""The lane of one GPU: check each candidate, then time those that are right, in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from typing import Any

from portkern.config import Config
from portkern.errors import UnknownName, WorkerFailed
from portkern.fact import Fact
from portkern.record import FrozenMap
from portkern.tuner.child import Child, ChildDied, ChildFailed, ChildSlow
from portkern.tuner.compilers import Compilers, processes
from portkern.tuner.findings import Finding, Key
from portkern.tuner.lane import Answer, Lane
from portkern.tuner.questions import Question, request

START_S = 300.0  # a cold machine imports torch and starts its driver for that long
PREPARE_S = 300.0  # inputs of a gigabyte, from a generator
AHEAD = 24  # questions to look at for what to compile while this one is measured,
WAITING = 3  # until so many configs wait for each compiling process: two questions kept half of eight processes idle
LATER = 4  # questions to measure while the rest of this one's candidates is compiled
TIMING_MS = 10.0  # for each candidate of a question; those that are slower by RACING have ten samples, the rest share
RACING = 1.1
PER_CANDIDATE_S = 5.0  # of patience with a timing, for warming up and capturing


class _Lost(Exception):
    """A request ended the child or its patience: the outcome and the reason to record."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


class _Over(Exception):
    """The budget ended before the child was ready."""


@dataclass
class Measuring(Lane):
    """Measures on the GPU with torch's ``index``; on None, in the interpreter with a stub timer."""

    index: int | None = None
    compilers: Compilers | None = None  # None: nothing is compiled, as in the interpreter
    ahead: Future[None] | None = field(default=None, init=False)
    child: Child | None = field(default=None, init=False)
    prepared: Key | None = field(default=None, init=False)
    opened: dict[str, Any] = field(default_factory=dict, init=False)  # provenance: which GPU

    def close(self) -> None:
        if self.child is not None:
            if self.settings.clock.stopped:
                self.child.kill()
            self.child.close()

    def fact(self, question: Question, config: Config, outcome: str, **more: Any) -> Fact:
        fact = super().fact(question, config, outcome, **more)
        return replace(fact, provenance=FrozenMap({**fact.provenance, **self.opened}))

    def answer(self, question: Question) -> Answer:
        known = self.settings.findings.of(question.key)
        if not question.admitted:
            return Answer(question, "unanswered", "every candidate is refused")
        if not self._undecided(question, known):
            return Answer(question, "known")
        try:
            right, complete = self._check_all(question, known)
            if right and (complete or self._comparable(question, known, right)):
                self._time_all(question, known, right)
                complete = complete and not self._undecided(question, known)
            elif not complete:
                return Answer(question, "unfinished", "the budget ended first")
        except ChildFailed as error:
            if error.kind == UnknownName.__name__:
                raise UnknownName(
                    f"the tuner's child process does not know {question.op.name!r}: name the file "
                    "that defines it (ops_files=[...], or --ops FILE)"
                ) from error
            return Answer(question, "failed", str(error))
        except _Lost as error:
            return Answer(question, "failed", f"outside any candidate: {error.reason}")
        except _Over:
            return Answer(question, "unfinished", "the budget ended first")
        if not complete and not self.settings.clock.over:
            self._compile_ahead(question, self._undecided(question, known))
            self.work.put_back(question, LATER)
        status = "measured" if _measured(known.values()) else "unanswered"
        reason = "" if complete else "the budget ended before every candidate was tried"
        return Answer(question, status, reason)

    def _undecided(self, question: Question, known: Mapping[Config, Finding]) -> list[Config]:
        return question.undecided(known, self.settings.limit, self.settings.findings.alike(question.key))

    def _comparable(self, question: Question, known: dict[Config, Finding], right: Sequence[Config]) -> bool:
        """Whether what was checked before the budget ended says something: the default is there."""
        default = question.default
        return default in right or (default in known and _measured([known[default]]))

    def _check_all(self, question: Question, known: dict[Config, Finding]) -> tuple[list[Config], bool]:
        """The candidates that compute right, and whether all were tried; ``known`` grows."""
        right: list[Config] = []
        while todo := [config for config in self._undecided(question, known) if config not in right]:
            self._compile_ahead(question, todo)
            config = todo[0]
            if self.settings.clock.over:
                return right, False
            outcome, reason, ratio = self._check(question, config)
            if outcome == "right":
                right.append(config)
            elif outcome == "unfinished":
                return right, False
            else:
                known[config] = Finding(outcome)
                self.note(question, config, outcome, reason=reason, error=ratio)
        return right, True

    def _check(self, question: Question, config: Config) -> tuple[str, str, float | None]:
        if self.compilers is not None:
            try:
                left = self.settings.clock.left_s
                compiled = self.compilers.submit(question, config).result(left)
            except NotYet:
                return "unfinished", "", None
            if compiled.outcome != "fits":
                return compiled.outcome, compiled.reason, None
        try:
            answer = self._request(question, "check", config=config.to_json())
        except _Lost as error:
            return error.outcome, error.reason, None
        return answer["outcome"], answer["reason"], answer.get("ratio")

    def _compile_ahead(self, question: Question, todo: Sequence[Config]) -> None:
        if self.compilers is None:
            return
        for config in todo:
            self.compilers.submit(question, config)
        if self.ahead is None or self.ahead.done():
            if self.ahead is not None:
                self.ahead.result()  # raises what it raised
            self.ahead = self.compilers.planner.submit(self._look_ahead, self.compilers)

    def _look_ahead(self, compilers: Compilers) -> None:
        """Have candidates of the next questions compiled: finding them takes some ten milliseconds a question."""
        for later in self.work.ahead(AHEAD):
            if compilers.waiting >= WAITING * processes() or self.settings.clock.over:
                return
            for config in self._undecided(later, self.settings.findings.of(later.key)):
                compilers.submit(later, config)

    def _time_all(self, question: Question, known: dict[Config, Finding], right: Sequence[Config]) -> None:
        """Time ``right``, with the default as the yardstick, and record; ``known`` grows."""
        default = question.default
        group = list(right)
        if default in known and _measured([known[default]]) and default not in group:
            group.insert(0, default)
        try:
            times = self._time(question, group)
        except _Lost:
            group = [config for config in group if self._survives(question, known, config)]
            times = self._time(question, group) if group else []
        facts = []
        for config, found in zip(group, times, strict=True):
            outcome = "wrong" if found["reason"] else "measured"
            known[config] = Finding(outcome, None if found["reason"] else found["median_us"])
            if outcome == "wrong":
                more = {"reason": f"after it was timed: {found['reason']}", "error": found["ratio"]}
            else:
                more = {
                    "time_us": found["median_us"],
                    "spread_us": found["spread_us"],
                    "samples": found["samples"],
                    "error": found["ratio"],
                }
                if found["launched"]:
                    more["reason"] = f"timed with the host's launch: {found['launched']}"
            facts.append(self.fact(question, config, outcome, **more))
        self.record(facts)

    def _survives(self, question: Question, known: dict[Config, Finding], config: Config) -> bool:
        """Time one config alone, to find out which of a group ended the child."""
        try:
            self._time(question, [config])
        except _Lost as error:
            known[config] = Finding(error.outcome)
            self.note(question, config, error.outcome, reason=f"while timed, {error.reason}")
            return False
        return True

    def _time(self, question: Question, group: Sequence[Config]) -> list[dict[str, Any]]:
        answer = self._request(
            question,
            "time",
            patience_s=self.settings.patience_s + PER_CANDIDATE_S * len(group),
            configs=[config.to_json() for config in group],
            budget_ms=TIMING_MS * max(len(group), 3),
            slow=RACING,
        )
        if answer["outcome"] != "timed":
            raise _Lost(answer["outcome"], answer["reason"])
        times: list[dict[str, Any]] = answer["times"]
        return times

    def _request(self, question: Question, do: str, patience_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Ask the child about ``question``, with a new child where the last one has gone."""
        try:
            child = self._ready(question)
        except (ChildDied, ChildSlow) as error:
            raise ChildFailed(type(error).__name__, f"its inputs cannot be made: {error}") from error
        try:
            return child.ask(patience_s or self.settings.patience_s, do=do, **values)
        except ChildDied as error:
            raise _Lost("crashed", str(error)) from error
        except ChildSlow as error:
            raise _Lost("timeout", str(error)) from error

    def _ready(self, question: Question) -> Child:
        if self.child is None or not self.child.alive:
            self.prepared = None
            self.child = self._start()
        if self.prepared != question.key:
            self.prepared = None
            self._in_budget(self.child, PREPARE_S, do="prepare", **request(question))
            self.prepared = question.key
        return self.child

    def _start(self) -> Child:
        """A child that holds the device."""
        settings = self.settings
        if self.child is not None:
            self.child.close()
        child = self.child = Child(interpreted=self.index is None)
        try:
            self._in_budget(child, START_S, do="load", ops_files=list(settings.ops_files))
            opened = self._in_budget(child, START_S, do="open", index=self.index, timer=settings.timer)
        except (ChildDied, ChildSlow, ChildFailed) as error:
            where = "the interpreter" if self.index is None else f"cuda:{self.index}"
            raise WorkerFailed(f"no child process can work on {where}: {error}") from error
        self.opened = self.opened or opened["provenance"]  # one ceiling for the whole run
        return child

    def _in_budget(self, child: Child, patience_s: float, **request: Any) -> dict[str, Any]:
        """Ask ``child`` for what comes before any candidate. Raises _Over where the budget ends first."""
        try:
            return child.ask(min(patience_s, self.settings.clock.left_s), **request)
        except ChildSlow as error:
            if self.settings.clock.over:
                raise _Over from error
            raise


def _measured(findings: Iterable[Finding]) -> bool:
    return any(finding.outcome == "measured" for finding in findings)
