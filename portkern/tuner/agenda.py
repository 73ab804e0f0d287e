"""What is still to find out: questions in order of importance, each planned when a lane comes to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from portkern.op import Case, Op
from portkern.runtime import Runtime
from portkern.tuner.findings import Key, family
from portkern.tuner.questions import Place, Question, ask


@dataclass(frozen=True)
class Asked:
    """What becomes a Question when it is planned."""

    place: Place
    op: Op
    case: Case
    dtype: str


def asked(
    places: Sequence[Place],
    ops: Sequence[Op],
    dtypes: Mapping[str, Sequence[str]],
    cases: Mapping[str, Sequence[Case]],
) -> list[Asked]:
    """Everything to ask, the most important first, so that an early end leaves no op or place bare.

    ``dtypes`` and ``cases`` are by op name, most important first.
    """
    return [
        Asked(place, op, case, dtype)
        for of_dtype in zip_longest(*(dtypes[op.name] for op in ops))
        for of_case in zip_longest(*(cases[op.name] for op in ops))
        for op, dtype, case in zip(ops, of_dtype, of_case, strict=True)
        if dtype is not None and case is not None
        for place in places
    ]


def check(runtime: Runtime, everything: Sequence[Asked], over: Callable[[], bool]) -> None:
    """Plan each case once, and forget it: for shapes that a person gave, before anything starts. Raises BadArgument."""
    for what in {(each.op.name, each.case): each for each in reversed(everything)}.values():
        if over():
            return
        ask(runtime, what.place, what.op, what.case, what.dtype)


class Agenda:
    """Plans what is asked, one after another, as its lists run out: to plan all the 2,310 questions of an offline run
    took 5 s on a 2-core machine, and more than the whole budget where others worked there too."""

    def __init__(
        self,
        runtime: Runtime,
        everything: Sequence[Asked],
        learn: Callable[[Question], None],
        over: Callable[[], bool],
    ) -> None:
        """``learn`` is called with each question before a lane sees it; nothing is planned when it is ``over``."""
        self._runtime = runtime
        self._asked = deque(everything)
        self._learn, self._over = learn, over
        self._lists: dict[Place | None, WorkList] = {}
        self._planned: dict[Key, Question] = {}
        self._lock = threading.Lock()

    def of(self, place: Place | None) -> WorkList:
        """The questions of one ``place`` where something is measured; with None, those of all absent targets."""
        return self._lists.setdefault(place, WorkList(self._plan))

    @property
    def planned(self) -> list[Question]:
        """All questions so far, in order."""
        with self._lock:
            return list(self._planned.values())

    @property
    def count(self) -> int:
        """How many questions there are: those that are not planned yet might turn out to be equal to others."""
        with self._lock:
            return len(self._planned) + len(self._asked)

    def _plan(self) -> bool:
        """Put one more question on its list. False if there is none, or no time."""
        with self._lock:
            while self._asked and not self._over():
                next_ = self._asked[0]  # which stays where an error is raised, so that no lane goes on without it
                question = ask(self._runtime, next_.place, next_.op, next_.case, next_.dtype)
                self._asked.popleft()
                if question.key not in self._planned:
                    self._learn(question)
                    self._planned[question.key] = question
                    self.of(question.place if question.place.measured else None).append(question)
                    return True
            return False


class WorkList:
    """Questions that several lanes take from. ``more`` plans one for some list, and is false at the end."""

    def __init__(self, more: Callable[[], bool]) -> None:
        self._more = more
        self._left: deque[Question] = deque()
        self._lock = threading.Lock()

    def append(self, question: Question) -> None:
        with self._lock:
            self._left.append(question)

    def take(self) -> Question | None:
        more = True
        while True:
            with self._lock:
                if self._left or not more:
                    return self._left.popleft() if self._left else None
            more = self._more()  # another lane may take what it plans

    def ahead(self, count: int) -> Iterator[Question]:
        """The next few, which stay, each planned when it is asked for."""
        for place in range(count):
            self._reach(place + 1)
            with self._lock:
                if place >= len(self._left):
                    return
                question = self._left[place]
            yield question

    def put_back(self, question: Question, behind: int) -> None:
        """Let ``question`` come again, after ``behind`` others, but before those that profit by what it finds."""
        self._reach(behind)
        with self._lock:
            alike = (family(each.key) == family(question.key) for each in self._left)
            place = next((place for place, profits in enumerate(alike) if profits), behind)
            self._left.insert(min(place, behind), question)

    def _reach(self, count: int) -> None:
        """Have ``count`` questions here, or all there are. Others may take them at the same time."""
        while len(self._left) < count and self._more():
            pass
