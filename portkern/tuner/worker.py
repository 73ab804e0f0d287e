"""The child process: launches, checks, times and compiles what the parent asks for, line by line.

Requests come on stdin and answers go to the pipe that was stdout, one JSON object a line. Whatever
kernels and compilers print goes to stderr instead. When the parent is gone, so is this process.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

BROKEN = 3  # exit status after an error that leaves the device unusable


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints go to stderr
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    handle = _handler()
    while True:
        request = json.loads(requests.get())
        _say(answers, _answer(handle, request))


def _read(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the parent closed the pipe or died: whatever still runs is for nobody


def _say(answers: IO[str], answer: dict[str, Any]) -> None:
    broken = answer.pop("broken", False)
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    if broken:
        os._exit(BROKEN)


def _answer(handle: Callable[[str, dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return handle(request.pop("do"), request)
    except Exception as error:  # the parent decides what it means
        return {"kind": type(error).__name__, "error": f"{type(error).__name__}: {error}"}


def _handler() -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    from portkern.tuner import compiling
    from portkern.tuner.trials import Trials

    trials = Trials()
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "load": _load,
        "open": trials.open,
        "prepare": trials.prepare,
        "check": trials.check,
        "time": trials.time,
        "compile": compiling.compile_config,
    }
    return lambda name, values: known[name](**values)


def _load(ops_files: list[str]) -> dict[str, Any]:
    from portkern.registry import load_file

    for file in ops_files:
        load_file(file)
    return {}
