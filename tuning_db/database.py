"""``Database``: the facts of every device, from the user's files and from those shipped."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from portkern.errors import DatabaseError, InvalidRecord, NewerSchema
from portkern.fact import Fact
from portkern.tuning_db import jsonl, paths
from portkern.tuning_db.notices import Notices, unusable
from portkern.tuning_db.store import Store, StoreBusy
from portkern.tuning_db.winners import winners_only

BATCH = 1000  # facts that an import commits at once


@dataclass(frozen=True)
class ImportReport:
    """What an import did: facts added, facts already there, and the lines refused, with reasons."""

    added: int
    known: int
    rejected: list[tuple[int, str]]


class Database:
    """All facts that this process can see.

    ``facts``, ``slugs`` and ``record`` never fail because of a disk: they answer from what is
    shipped, what was read before and what this process recorded, and warn once. ``export``,
    ``import_file`` and ``ship``, which a person asks for, raise DatabaseError instead.
    """

    retry_s = 60.0  # how long a file that was locked beyond the time-out is left alone

    def __init__(self, home: Path | None = None, shipped: Path | None = None) -> None:
        self.home = paths.home() if home is None else paths.absolute(home)
        self.notify = Notices()
        self.shipped = Path(__file__).with_name("shipped") if shipped is None else paths.absolute(shipped)
        self._shipped = jsonl.Shipped(self.shipped, self.notify)
        self._stores: dict[str, Store] = {}
        self._memory: dict[str, dict[str, Fact]] = {}  # recorded here, and in no file
        self._epochs: dict[str, int] = {}
        self._epoch = 0
        self._lock = threading.Lock()
        self._rest_until: dict[tuple[str, bool], float] = {}  # by slug and whether for writing

    def facts(self, slug: str, op: str | None = None, *, wait: bool = True) -> list[Fact]:
        """The facts about one device, of one op or of all: each once, in the order of their keys.

        An op's call passes ``wait=False``: it waits 0.2 s for a locked file, where others wait 30 s,
        and leaves bad rows, older tables and corrupt files to be mended by those who may write.
        Raises InvalidRecord for a slug that ``device_slug`` could not have made.
        """
        return self._merged(slug, op, strict=False, wait=wait)

    def slugs(self) -> list[str]:
        """Every device (or absent architecture) that there are records about."""
        return self._slugs(strict=False)

    def record(self, facts: Iterable[Fact]) -> bool:
        """Add facts. False if any of them could not be written and is only kept in this process.

        What could not be written is tried again with the next facts about the same device.
        Raises InvalidRecord, before anything is stored, for a fact that cannot be.
        """
        groups = _by_device(jsonl.check(fact) for fact in facts)
        return all([self._record(slug, group) for slug, group in groups.items()])

    def epoch(self, slug: str | None = None) -> int:
        """A number that rises whenever this process records or imports facts about ``slug``, or about any device.

        It rises too when a file that was locked has rested, so that what is cached is read again.
        """
        if self._rest_until:
            self._wake()
        return self._epoch if slug is None else self._epochs.get(slug, 0)

    def export(self, path: Path, slugs: Iterable[str] | None = None, *, winners: bool = False) -> int:
        """Write facts to ``path``, one sorted line each, replacing it whole. Returns how many.

        With ``winners`` only what ``winners_only`` keeps. Raises DatabaseError if a file cannot be
        read or ``path`` cannot be written, and NewerSchema.
        """
        wanted = self._slugs(strict=True) if slugs is None else sorted(set(slugs))
        facts = [fact for slug in wanted for fact in self._merged(slug, None, strict=True)]
        return jsonl.write(Path(path), winners_only(facts) if winners else facts)

    def ship(self, slug: str) -> Path:
        """Write the shipped file of ``slug``: winners and defaults of all that is known of it."""
        path = self._shipped.path(slug)
        facts = winners_only(self._merged(slug, None, strict=True))
        if not facts:
            raise DatabaseError(f"nothing is recorded about {slug!r}; known are {self.slugs()}")
        jsonl.write(path, facts, make_folder=True)
        self._raise_epoch(slug)
        return path

    def import_file(self, path: Path) -> ImportReport:
        """Add the facts of an exported file. A bad line is reported and stops nothing.

        Raises DatabaseError if the file cannot be read or a database file cannot be written: what
        was added until then stays, and another import adds the rest.
        """
        added = known = 0
        rejected: list[tuple[int, str]] = []
        batch: list[Fact] = []
        for number, line in _numbered_lines(Path(path)):
            try:
                batch.append(jsonl.decode(line))
            except InvalidRecord as error:
                rejected.append((number, str(error)))
            if len(batch) == BATCH:
                added, known = added + self._import(batch), known + len(batch)
                batch = []
        added, known = added + self._import(batch), known + len(batch)
        return ImportReport(added, known - added, rejected)

    def quarantined(self, slug: str) -> list[tuple[str, str]]:
        """The rows of one device's file that did not validate: their JSON and the reason."""
        return self._store(slug).quarantined()

    def _store(self, slug: str) -> Store:
        found = self._stores.get(slug)
        if found is None:
            path = self.home / f"{paths.check_slug(slug)}{paths.SUFFIX}"
            found = self._stores.setdefault(slug, Store(path, self.notify))
        return found

    def _slugs(self, *, strict: bool) -> list[str]:
        stored: list[str] = []
        try:
            stored = paths.slugs_in(self.home, paths.SUFFIX)
        except OSError as error:
            if strict:
                raise DatabaseError(unusable(self.home, error)) from error
            self.notify("home", unusable(self.home, error))
        return sorted({*self._shipped.slugs(), *stored, *self._memory})

    def _merged(self, slug: str, op: str | None, *, strict: bool, wait: bool = True) -> list[Fact]:
        shipped = self._shipped.facts(slug, op)
        stored = self._stored(slug, op, strict=strict, wait=wait)
        memory = [fact for fact in [*self._memory.get(slug, {}).values()] if op in (None, fact.op)]
        merged = {fact.key: fact for fact in itertools.chain(shipped, stored, memory)}
        return [merged[key] for key in sorted(merged)]

    def _stored(self, slug: str, op: str | None, *, strict: bool, wait: bool) -> list[Fact]:
        store = self._store(slug)
        if not strict and (self._resting(slug, write=True) or (self._resting(slug, write=False) and not wait)):
            return store.last(op)
        try:
            return store.facts(op, wait=wait)
        except DatabaseError as error:
            if strict:
                raise
            self._failed(slug, error, write=wait)
            return store.last(op)

    def _record(self, slug: str, facts: list[Fact]) -> bool:
        memory = self._memory.setdefault(slug, {})
        memory.update((fact.key, fact) for fact in facts)
        stored = False
        failure: DatabaseError | None = None
        if not self._resting(slug, write=True):
            pending = list(memory.values())
            try:
                self._store(slug).add(pending)
                stored = True
                for fact in pending:
                    memory.pop(fact.key, None)
            except DatabaseError as error:
                failure = error
        self._raise_epoch(slug)
        if failure is not None:
            self._failed(slug, failure, write=True)
        return stored

    def _import(self, facts: list[Fact]) -> int:
        added = 0
        for slug, group in _by_device(facts).items():
            added += self._store(slug).add(group)
            self._raise_epoch(slug)
        return added

    def _raise_epoch(self, slug: str) -> None:
        with self._lock:
            self._epoch += 1
            self._epochs[slug] = self._epoch

    def _wake(self) -> None:
        """End the rests that are over: what was answered meanwhile may be out of date."""
        now = time.monotonic()
        for rest, until in [*self._rest_until.items()]:
            if until <= now and self._rest_until.pop(rest, None) is not None:
                self._raise_epoch(rest[0])

    def _resting(self, slug: str, *, write: bool) -> bool:
        """Whether a file that was locked is left alone: by writers and those who waited long, or by calls."""
        return time.monotonic() < self._rest_until.get((slug, write), 0.0)

    def _failed(self, slug: str, error: DatabaseError, *, write: bool) -> None:
        if isinstance(error, StoreBusy):
            self._rest_until[slug, write] = time.monotonic() + self.retry_s
        self.notify("newer" if isinstance(error, NewerSchema) else "home", str(error))


def _by_device(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(fact.device, []).append(fact)
    return groups


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank; one that is too long comes cut, in one piece."""
    try:
        with open(path, "rb") as file:
            for number in itertools.count(1):
                line = file.readline(jsonl.MAX_LINE + 2)
                if not line:
                    return
                if number == 1 and line.startswith(b"SQLite format 3\0"):
                    raise DatabaseError(f"{path} is a database file: export it with the portkern that wrote it")
                rest = line
                while len(rest) > jsonl.MAX_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(jsonl.MAX_LINE + 2)
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield number, text.strip() if len(text) <= jsonl.MAX_LINE else text
    except OSError as error:
        raise DatabaseError(
            f"cannot import {path}: {error.strerror or error}; name a file that portkern exported"
        ) from error
