"""The child process of ``verify``: one op and dtype, every variant, case, style and layout.

Speaks JSON lines: a request on stdin; on stdout ``{"at": ...}`` before each case and ``{"row": ...}``
after each variant. What else is printed goes to stderr. A child that hangs ends itself.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import IO, Any

from portkern.dispatch import EMULATE_VARIABLE
from portkern.verification_row import Request, Row

# argv carries this process's import path, so that the child finds the same portkern.
BOOT = "import sys; sys.path[:] = sys.argv[1:]; from portkern.verification_child import main; main()"
HANG_S = 300  # without a finished case: the child is given up
Progress = Callable[[int, str], None]


class Children:
    """The child processes of one run: ``stop`` ends them, and no more are started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[str]] = []
        self._stopped = False

    def start(self, request: Request, errors: IO[str]) -> subprocess.Popen[str]:
        """A child that waits for ``request``. Raises CancelledError after ``stop``."""
        with self._lock:
            if self._stopped:
                raise CancelledError
            child = subprocess.Popen(
                [sys.executable, "-c", BOOT, *map(os.path.abspath, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "TRITON_INTERPRET": "1" if request.route == "interpreted" else "0",
                    EMULATE_VARIABLE: request.emulated,
                },
                start_new_session=True,  # Ctrl-C is for the parent, which ends its children
            )
            self._started.append(child)
            return child

    def stop(self) -> None:
        """End all children, whatever they are at."""
        with self._lock:
            self._stopped = True
            for child in self._started:
                child.kill()


def in_child(request: Request, children: Children, progress: Progress | None = None) -> list[Row]:
    """The rows of ``request``. A variant that ends the child fails; a new child does the others."""
    rows: list[Row] = []
    while True:
        done = (*request.done, *(row.variant for row in rows))
        asked = dataclasses.replace(request, done=done)
        finished, at, problem = _run_child(asked, children, progress)
        rows += finished
        if not problem:
            return rows
        variant = str(at.get("variant", ""))
        failure = f"{at.get('case', 'before the first case')}: {problem}"
        rows.append(Row(request.op, request.dtype, variant or "start", 1, failures=1, first_failure=failure))
        if not variant:
            return rows


def _run_child(
    request: Request, children: Children, progress: Progress | None
) -> tuple[list[Row], dict[str, Any], str]:
    """Rows that a child finished, where it was last, and what ended it early, if anything did."""
    rows: list[Row] = []
    at: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        child = children.start(request, errors)
        try:
            assert child.stdin is not None and child.stdout is not None
            with child.stdin as asked, child.stdout as answers:
                asked.write(json.dumps(request.to_json()))
                asked.close()
                for line in answers:
                    message = json.loads(line)
                    if "row" in message:
                        rows.append(Row.from_json(message["row"]))
                    else:
                        at = message["at"]
                        if progress:
                            progress(1, f"{request.op} {request.dtype} {at['variant']}")
            code = child.wait()
        except BrokenPipeError:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        errors.seek(0)
        return rows, at, _ended(code, errors.read()) if code else ""


def _ended(code: int, errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    if any(line.startswith("Timeout (") for line in lines):
        return f"nothing happened for {HANG_S} s, so the process was ended"
    how = f"the process was ended by signal {-code}" if code < 0 else f"the process exited with {code}"
    return f"{how}: {lines[-1].strip()}" if lines else how


def reference_rows(request: Request, progress: Progress | None = None) -> list[Row]:
    """The rows of the reference route, in this process: nothing there can crash a device."""
    from portkern.verification_cases import rows

    def tell(variant: str, case: str) -> None:
        if progress:
            progress(1, f"{request.op} {request.dtype} {variant}")

    return list(rows(request, tell))


class _Events:
    """The child's stdout, kept for messages; whatever prints goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()


def main() -> None:
    """Serve one request."""
    events = _Events()
    request = Request.from_json(json.loads(sys.stdin.read()))

    from portkern.registry import load_file
    from portkern.verification_cases import rows

    for path in request.ops_files:
        load_file(path)

    def tell(variant: str, case: str) -> None:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        events.send(at={"variant": variant, "case": case})

    for row in rows(request, tell):
        events.send(row=row.to_json())
    faulthandler.cancel_dump_traceback_later()
    sys.stderr.flush()
    # All is said. Taking torch apart while its threads still run aborted 2 of 108 children on a busy host.
    os._exit(0)
