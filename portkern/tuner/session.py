"""``tune``: plans in this process as lanes come to it, and records what they find as they find it."""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from portkern import registry
from portkern.arguments import seconds
from portkern.discovery import unserved
from portkern.errors import BadArgument
from portkern.fact import Fact
from portkern.record import FrozenMap
from portkern.runtime import Runtime, current
from portkern.toolchain import provenance, require_triton
from portkern.tuner.agenda import Agenda, asked, check
from portkern.tuner.compilers import Compilers, processes
from portkern.tuner.findings import Findings, Key
from portkern.tuner.lane import Answer, Clock, Lane, Settings
from portkern.tuner.measuring import Measuring
from portkern.tuner.predicting import Predicting
from portkern.tuner.questions import Place, Question
from portkern.tuner.report import Line, TuneReport, line_of
from portkern.tuner.requests import Shape, cases_of, dtypes_of, ops_of, places_of

POLL_S = 0.2

Events = queue.SimpleQueue[list[Fact] | Answer | BaseException]


def tune(
    *ops: str,
    device: str = "auto",
    shapes: Sequence[Shape] | None = None,
    dtypes: Sequence[str] | None = None,
    budget: float | str = "90s",
    ops_files: Sequence[str] = (),
    progress: bool = True,
    timer: str | None = None,
    limit: int = 8,
    patience: float = 60.0,
) -> TuneReport:
    """Find the best config for each problem, record it, and report.

    Args:
        ops: names of ops, each with its backward; by default those of ``ops_files``, or else all.
        device: ``auto`` (every GPU here; where there is none, every architecture offline), ``all``
            (both), ``cuda:N``, or the name of an architecture, which is tuned offline: candidates
            are compiled and ranked, not timed. Several may be joined by commas.
        shapes: as in ``"4096x8192"`` or ``(4096, 8192)``; those that each op proposes by default.
        dtypes: as in ``"bf16"``; by default those of each op but float64.
        budget: seconds, or ``"90s"``, ``"5m"``, ``"1h"``; what is left over is for the next run.
        ops_files: Python files that define further ``OPS``.
        progress: draw a bar on stderr, if that is a terminal.
        timer: ``module:attribute`` or ``file.py:attribute`` of a ``portkern.timing.Timer`` to use
            in place of the GPU's.
        limit: candidates to measure for each problem, at most; fewer where the default is the best of the first.
        patience: seconds to wait for one candidate before it counts as hung.

    What is known already is not measured again. Raises BadArgument, UnknownName, UnsupportedDtype,
    MissingTriton, or WorkerFailed if no child process can work at all.
    """
    budget_s = seconds(budget)
    ops_files = [ops_files] if isinstance(ops_files, str) else ops_files
    clock = Clock(budget_s)
    if limit < 1 or patience <= 0:
        raise BadArgument(f"limit is {limit} and patience {patience}; they start at 1 and above 0")
    require_triton()
    runtime = current()
    files = [str(Path(file).resolve()) for file in ops_files]
    loaded = [op.name for file in files for op in registry.load_file(file)]
    found = ops_of(ops or loaded)
    places = places_of(runtime, device, timer)
    everything = asked(places, found, dtypes_of(found, dtypes), cases_of(found, shapes))
    if shapes is not None:
        check(runtime, everything, lambda: clock.over)
    knowledge = _Knowledge(runtime)
    agenda = Agenda(runtime, everything, knowledge.learn, lambda: clock.over)
    events: Events = queue.SimpleQueue()
    origin = partial(_provenance, {})
    settings = Settings(clock, limit, patience, files, timer, knowledge.findings, origin, events.put, events.put)
    with _lanes(settings, agenda, places) as lanes:
        answers = _collect(knowledge, lanes, events, agenda, progress)
    lines = _in_order(knowledge, agenda.planned, answers)
    left, missing = agenda.count - len(lines), unserved(runtime.plugins)
    return TuneReport(lines, round(clock.elapsed_s, 3), budget_s, left, _command(), missing)


@contextmanager
def _lanes(settings: Settings, agenda: Agenda, places: Sequence[Place]) -> Iterator[list[Lane]]:
    """The lanes of a run, started; ended with all their processes when the block ends."""
    compilers = Compilers(settings.ops_files, settings.patience_s)
    lanes: list[Lane] = []
    if not all(place.measured for place in places):
        lanes += [Predicting(settings, agenda.of(None), compilers) for _ in range(processes())]
    for place in (place for place in places if place.measured):
        mine = agenda.of(place)
        for index in place.indices:
            lanes.append(Measuring(settings, mine, index, compilers))
        if not place.indices:
            lanes.append(Measuring(settings, mine))
    try:
        for lane in lanes:
            lane.start()
        yield lanes
    except BaseException:
        settings.clock.stop()
        raise
    finally:
        compilers.close()
        for lane in lanes:
            lane.close()


def _collect(
    knowledge: _Knowledge,
    lanes: Sequence[Lane],
    events: Events,
    agenda: Agenda,
    progress: bool,
) -> list[Answer]:
    """Record facts and gather answers until every lane has ended. Raises what a lane raised."""
    answers: list[Answer] = []
    seen: set[Key] = set()
    shown = progress and sys.stderr.isatty()
    with tqdm(total=agenda.count, unit="problem", file=sys.stderr, disable=not shown) as bar:
        while True:
            working = any(lane.thread.is_alive() for lane in lanes)
            try:
                event = events.get(timeout=POLL_S) if working else events.get_nowait()
            except queue.Empty:
                if not working:
                    return answers
                continue
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Answer):
                answers.append(event)
                if event.status != "unfinished":
                    bar.update(event.question.key not in seen)  # some come twice
                    seen.add(event.question.key)
                    bar.set_postfix_str(_best_so_far(knowledge.line(event)))
            else:
                knowledge.add(event)


def _best_so_far(line: Line) -> str:
    if line.winner is None:
        return f"{line.problem}: {line.status}"
    if line.winner_us is None:
        return f"{line.problem}: {line.winner}"
    share = f", {line.copy_fraction:.0%} of copy" if line.copy_fraction else ""
    return f"{line.problem}: {line.winner_us:.1f} us{share}"


class _Knowledge:
    """The facts about the ops of a run, by question: those of the database, and its own."""

    def __init__(self, runtime: Runtime) -> None:
        self.findings = Findings()
        self._database = runtime.database
        self._facts: defaultdict[tuple[str, ...], list[Fact]] = defaultdict(list)
        self._read: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def learn(self, question: Question) -> None:
        """Read what the database knows of the op there, when the first question about it is planned."""
        where = (question.place.slug, question.op.name)
        if where not in self._read:
            facts = self._database.facts(*where)
            self.findings.add(facts)
            self._keep(facts)
            self._read.add(where)

    def add(self, facts: Sequence[Fact]) -> None:
        """Record ``facts``, so that a run that is killed now has them."""
        self._database.record(facts)
        self._keep(facts)

    def line(self, answer: Answer) -> Line:
        with self._lock:
            facts = list(self._facts[answer.question.key])
        return line_of(answer, facts)

    def _keep(self, facts: Sequence[Fact]) -> None:
        with self._lock:
            for fact in facts:
                self._facts[fact.question].append(fact)


def _in_order(knowledge: _Knowledge, work: Sequence[Question], answers: Sequence[Answer]) -> tuple[Line, ...]:
    done = {answer.question.key: answer for answer in answers if answer.status != "unfinished"}
    return tuple(knowledge.line(done[question.key]) for question in work if question.key in done)


def _provenance(made: dict[Place, Mapping[str, Any]], question: Question) -> FrozenMap[Any]:
    """Where and with what a fact was found; ``made`` keeps what does not change in a run."""
    place = question.place
    if place not in made:
        device = place.device
        own: dict[str, Any] = {"name": device.name}
        if place.measured:
            own |= {"driver": device.driver, "identity": device.identity, **device.extra}
        made[place] = {**provenance(), **own, "command": _command()}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return FrozenMap({**made[place], "utc": now})


def _command() -> str:
    """The command line, without the folders of this machine."""
    program, *rest = sys.argv or [""]
    name = Path(program).parent.name if program.endswith("__main__.py") else Path(program).name
    return " ".join([name or "python", *(re.sub(r"(?<![\w.])[\w.~-]*/\S*/", "", word) for word in rest)])
