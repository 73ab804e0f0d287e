"""Several compiling child processes: they refuse what spills, and warm Triton's cache on disk."""

from __future__ import annotations

import base64
import os
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from portkern.backend import Resources
from portkern.config import Config
from portkern.errors import WorkerFailed
from portkern.tuner.child import Child, ChildDied, ChildFailed, ChildSlow
from portkern.tuner.questions import Question

MOST = 16  # processes; each holds torch and a compiler in memory
LOAD_S = 300.0


@dataclass(frozen=True)
class Compiled:
    """``outcome`` is ``fits``, ``refused``, ``crashed`` or ``timeout``, with the reason."""

    outcome: str
    reason: str = ""
    resources: tuple[Resources, ...] = ()


def processes() -> int:
    """How many compile at once: this process's cores but for itself and what measures, at least two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return min(MOST, max(2, cores - 2))


class Compilers:
    """A pool of compiling children, started as they are needed."""

    def __init__(self, ops_files: Sequence[str], patience_s: float) -> None:
        self._ops_files = list(ops_files)
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(processes(), thread_name_prefix="portkern-compile")
        self.planner = ThreadPoolExecutor(1, thread_name_prefix="portkern-plan")  # finds what to compile next
        self._own = threading.local()
        self._children: list[Child] = []
        self._asked: dict[tuple[object, Config], Future[Compiled]] = {}
        self._open: set[Future[Compiled]] = set()  # of those, what is not done
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, question: Question, config: Config) -> Future[Compiled]:
        """Compile ``config`` for ``question`` some time soon; asked twice, it is compiled once."""
        with self._lock:
            found = self._asked.get((question.key, config))
            if found is None:
                found = self._pool.submit(self._compile, question, config)
                self._asked[(question.key, config)] = found
                self._open.add(found)
                found.add_done_callback(self._open.discard)
            return found

    @property
    def waiting(self) -> int:
        """How many configs are not compiled yet, of those submitted."""
        return len(self._open)  # asked for each question that is looked at: to go through 18,000 of them took 11 ms

    def close(self) -> None:
        """End all children, whatever they are at."""
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
        self.planner.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
            child.close()
        self._pool.shutdown(wait=True)

    def _compile(self, question: Question, config: Config) -> Compiled:
        try:
            answer = self._child().ask(
                self._patience_s,
                do="compile",
                op=question.op.name,
                args=base64.b64encode(pickle.dumps(question.args)).decode(),
                device=question.situation.device.to_json(),
                config=config.to_json(),
                present=bool(question.place.indices),
            )
        except ChildDied as error:
            return Compiled("crashed", f"while compiling, {error}")
        except ChildSlow as error:
            return Compiled("timeout", f"compiling gave {error}")
        if answer["reason"]:
            return Compiled("refused", answer["reason"])
        return Compiled("fits", resources=tuple(map(Resources.from_json, answer["resources"])))

    def _child(self) -> Child:
        """This thread's child; a new one where the last has died."""
        child: Child | None = getattr(self._own, "child", None)
        if child is not None and child.alive:
            return child
        with self._lock:  # so that close() finds every child that was started
            if self._closed:
                raise CancelledError
            child = Child()
            self._children.append(child)
        try:
            child.ask(LOAD_S, do="load", ops_files=self._ops_files)
        except (ChildDied, ChildSlow, ChildFailed) as error:
            raise WorkerFailed(f"no child process can compile: {error}") from error
        self._own.child = child
        return child
