"""A lock file: every config that a process resolved, with a hash of them all. ``portkern.freezing`` writes it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portkern.config import Config
from portkern.errors import BadLock
from portkern.problem import Problem
from portkern.record import FrozenMap
from portkern.sizes import is_traced

SCHEMA = "portkern.lock/1"
MODE, FILE = "PORTKERN_MODE", "PORTKERN_LOCK"
DEFAULT_FILE = "portkern.lock"


@dataclass(frozen=True)
class Entry:
    """One config, for one problem on one device; ``kernel`` is the hash of the op that it was resolved for."""

    device: str
    problem: Problem
    config: Config
    kernel: str

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "problem": self.problem.to_json(),
            "config": self.config.to_json(),
            "kernel": self.kernel,
        }


class Lock:
    """The entries of one lock file, by device and problem, and a hash of them all."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        found = {(each.device, each.problem.key): each for each in entries}
        self.entries: Mapping[str, Entry] = FrozenMap({f"{key[0]} {key[1]}": found[key] for key in sorted(found)})
        self._families: dict[tuple[str, str], dict[FrozenMap[int], Entry]] = {}
        for each in self.entries.values():
            self._families.setdefault((each.device, each.problem.family), {})[each.problem.sizes] = each
        text = json.dumps([each.to_json() for each in self.entries.values()], sort_keys=True)
        self.hash = hashlib.sha256(text.encode()).hexdigest()

    def get(self, device: str, problem: Problem) -> Entry | None:
        """What the file says of ``problem`` on the device with that slug."""
        entries = self._families.get((device, problem.family), {})
        if any(map(is_traced, problem.sizes.values())):  # such sizes have no hash, and note what they are compared with
            return next((each for sizes, each in entries.items() if sizes == problem.sizes), None)
        return entries.get(problem.sizes)

    def write(self, path: Path) -> None:
        """Replace the file at ``path`` whole. Raises BadLock where that cannot be written."""
        data = {"schema": SCHEMA, "hash": self.hash, "entries": [each.to_json() for each in self.entries.values()]}
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise BadLock(f"cannot write the lock file {path}: {error.strerror}; name a writable place") from error

    @staticmethod
    def read(path: Path) -> Lock:
        """The lock in the file at ``path``. Raises BadLock for one that is missing, altered or of another schema."""
        try:
            data = json.loads(path.read_text())
            schema = data.get("schema")
            if schema != SCHEMA:
                raise BadLock(
                    f"{path} has the schema {schema!r}, not {SCHEMA!r}: write it again with portkern.freeze()"
                )
            lock = Lock(
                Entry(
                    each["device"],
                    Problem.from_json(each["problem"]),
                    Config.from_json(each["config"]),
                    each["kernel"],
                )
                for each in data["entries"]
            )
            stated = data["hash"]
        except OSError as error:
            raise BadLock(
                f"cannot read the lock file {path}: {error.strerror}; write one with portkern.freeze(), or name "
                f"another in {FILE}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadLock(f"{path} is no lock file: {error}; write one with portkern.freeze()") from error
        if lock.hash != stated:
            raise BadLock(
                f"{path} was altered: its entries have the hash {lock.hash[:12]}, it states {str(stated)[:12]}"
            )
        return lock


def asked_for() -> Lock | None:
    """The lock that the environment names, or None. Raises BadLock."""
    mode = os.environ.get(MODE, "")
    if mode in ("", "normal"):
        return None
    if mode != "frozen":
        raise BadLock(f"{MODE} is {mode!r}; it is 'frozen' or 'normal'")
    return Lock.read(Path(os.environ.get(FILE) or DEFAULT_FILE))
