"""The parent's side of one worker process: asked in JSON lines, killed when it does not answer."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from portkern.planned import EMULATE_VARIABLE

# argv carries this process's import path, so that the child finds the same portkern.
BOOT = "import sys; sys.path[:] = sys.argv[1:]; sys.argv[1:] = []; from portkern.tuner.worker import main; main()"
TAIL_BYTES = 4096
GRACE_S = 5.0  # for a child that was asked to end


class ChildDied(Exception):
    """The child ended, or closed its pipe, before it answered; the message says how."""


class ChildSlow(Exception):
    """The child did not answer in time and was killed."""


class ChildFailed(Exception):
    """The child answered that it could not do what it was asked to; it lives on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def environment(inherited: Mapping[str, str], *, interpreted: bool) -> dict[str, str]:
    """A child's variables: what the user set for calls of his own, an interpreter or a stand-in for another
    architecture, is not what a machine is tuned for."""
    kept = {name: value for name, value in inherited.items() if name not in ("TRITON_INTERPRET", EMULATE_VARIABLE)}
    return kept | ({"TRITON_INTERPRET": "1"} if interpreted else {})


class Child:
    """One worker process, in which kernels are ``interpreted`` or what the machine's GPU runs."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, *map(os.path.abspath, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(os.environ, interpreted=interpreted),
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, patience_s: float, **request: Any) -> dict[str, Any]:
        """The answer to ``request``. Raises ChildDied, ChildSlow or ChildFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise ChildDied(self._how_it_ended()) from None
        try:
            line = self._answers.get(timeout=patience_s)
        except queue.Empty:
            self.kill()
            raise ChildSlow(f"no answer within {patience_s:.0f} s, so it was killed") from None
        if line is None:
            raise ChildDied(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["kind"], answer["error"])
        return answer

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let the process end, or end it."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self._answers.put(line)
        self._answers.put(None)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "its process closed the pipe and was killed"
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        last = self._last_line()
        return f"its process ended {how}" + (f": {last}" if last else "")

    def _last_line(self) -> str:
        """The last line that the child printed: what an abort says before it ends."""
        time.sleep(0.01)
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), TAIL_BYTES, max(size - TAIL_BYTES, 0))
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else ""
