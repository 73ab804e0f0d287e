"""A lane answers questions one after another, in a thread of its own, by asking child processes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from portkern.config import Config
from portkern.fact import Fact
from portkern.record import FrozenMap
from portkern.tuner.agenda import WorkList
from portkern.tuner.findings import Findings
from portkern.tuner.questions import Question


@dataclass(frozen=True)
class Answer:
    """How a question ended: ``measured``, ``predicted``, ``known``, ``unanswered`` (nothing runs),
    ``unfinished`` (the budget ended first) or ``failed`` (its inputs or its process)."""

    question: Question
    status: str
    reason: str = ""


class Clock:
    """The budget of a run; ``stop`` ends it at once."""

    def __init__(self, budget_s: float) -> None:
        self.start = time.monotonic()
        self._deadline = self.start + budget_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        return 0.0 if self.stopped else max(self._deadline - time.monotonic(), 0.0)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start


@dataclass(frozen=True)
class Settings:
    """What all lanes of a run share. ``record`` and ``finish`` hand results to the main thread."""

    clock: Clock
    limit: int
    patience_s: float
    ops_files: Sequence[str]
    timer: str | None
    findings: Findings
    provenance: Callable[[Question], FrozenMap[Any]]
    record: Callable[[list[Fact]], None]
    finish: Callable[[Answer | BaseException], None]


@dataclass
class Lane(ABC):
    """Takes questions until there is none or the budget ends."""

    settings: Settings
    work: WorkList
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @abstractmethod
    def answer(self, question: Question) -> Answer:
        """Find out, and record what is found as it is found."""

    @abstractmethod
    def close(self) -> None:
        """End this lane's child processes; what waits for them ends with it."""

    def note(self, question: Question, config: Config, outcome: str, **more: Any) -> None:
        """Record one fact."""
        self.record([self.fact(question, config, outcome, **more)])

    def record(self, facts: list[Fact]) -> None:
        """Let all lanes know ``facts``, and the database."""
        self.settings.findings.add(facts)
        self.settings.record(facts)

    def fact(self, question: Question, config: Config, outcome: str, **more: Any) -> Fact:
        provenance = self.settings.provenance(question)
        return question.fact(config, outcome, provenance, **more)

    def _run(self) -> None:
        try:
            while not self.settings.clock.over:
                question = self.work.take()
                if question is None:
                    return
                self.settings.finish(self.answer(question))
        except BaseException as error:  # the main thread raises it
            if not self.settings.clock.stopped:
                self.settings.finish(error)
