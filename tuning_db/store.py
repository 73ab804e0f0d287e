"""``Store``: one SQLite file, the facts of one device.

Every operation opens a connection of its own and closes it (0.2 ms): nothing is shared between
threads or inherited by a fork, and a file that another process moved away is noticed. The journal
is SQLite's rollback journal, since write-ahead logs do not work on network disks.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from portkern.errors import DatabaseError, InvalidRecord
from portkern.fact import Fact
from portkern.tuning_db import schema
from portkern.tuning_db.aside import is_corrupt, set_aside
from portkern.tuning_db.jsonl import check, decode
from portkern.tuning_db.notices import Notices, unusable
from portkern.tuning_db.paths import Stamp, absolute, check_slug, settled, stamp

T = TypeVar("T")
Bad = tuple[int, str]  # rowid, reason


class StoreBusy(DatabaseError):
    """Other processes held the file for longer than the busy time-out."""


class Store:
    """The facts of the device that ``path`` is named after. The file is made by the first ``add``.

    Methods raise DatabaseError when the disk fails them and NewerSchema when a newer portkern
    wrote the file. A corrupt file is renamed, never deleted, and a fresh one begun.
    """

    busy_s = 30.0  # how long to wait for other processes
    max_tries = 5  # for what another try may mend: a file set aside or replaced meanwhile

    def __init__(self, path: Path, notify: Notices | None = None) -> None:
        self.path = absolute(path)
        self.slug = check_slug(self.path.stem)
        self._notify = Notices() if notify is None else notify
        self._cache: dict[str | None, tuple[Stamp | None, list[Fact]]] = {}
        self._parsed: dict[str, Fact] = {}  # by JSON text: a reload parses what is new

    def facts(self, op: str | None = None) -> list[Fact]:
        """The valid facts, of one op or of all. Bad rows are moved to ``quarantine``."""
        try:
            current = stamp(self.path)
            trusted = settled(current)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DatabaseError(unusable(self.path, error)) from error
        cached = self._cache.get(op)
        if cached is not None and cached[0] == current:
            return list(cached[1])
        good, bad = self._run(partial(self._read, op), write=False) or ([], [])
        if bad:
            self._quarantine(bad)
        self._cache[op] = (current if trusted else None, good)
        return list(good)

    def last(self, op: str | None = None) -> list[Fact]:
        """What ``facts`` gave last: for when the file cannot be read now."""
        cached = self._cache.get(op)
        return [] if cached is None else list(cached[1])

    def add(self, facts: Iterable[Fact]) -> int:
        """Store facts, all or none. Returns how many of them were new."""
        rows = [schema.row(check(fact)) for fact in facts]
        foreign = sorted({device for _, _, _, device, _ in rows if device != self.slug})
        if foreign:
            raise InvalidRecord(f"facts about {foreign} do not belong in {self.path}")
        return self._run(partial(_insert, rows), write=True) or 0

    def quarantined(self) -> list[tuple[str, str]]:
        """The JSON and the reason of each row that was set apart."""
        return self._run(self._read_quarantine, write=False) or []

    def _read(self, op: str | None, db: sqlite3.Connection) -> tuple[list[Fact], list[Bad]]:
        good: list[Fact] = []
        bad: list[Bad] = []
        if schema.version(db, self.path) is None:
            return good, bad
        where, values = ("", ()) if op is None else (" WHERE op = ?", (op,))
        query = f"SELECT rowid, key, op, json FROM facts{where} ORDER BY key"
        for rowid, key, column, text in db.execute(query, values):
            try:
                good.append(self._validated(key, column, text))
            except InvalidRecord as error:
                bad.append((rowid, str(error)))
        return good, bad

    def _read_quarantine(self, db: sqlite3.Connection) -> list[tuple[str, str]]:
        if schema.version(db, self.path) is None:
            return []
        return db.execute("SELECT json, reason FROM quarantine ORDER BY rowid").fetchall()

    def _validated(self, key: object, op: object, text: object) -> Fact:
        if not isinstance(text, str):
            raise InvalidRecord(f"the JSON column holds {type(text).__name__}")
        fact = self._parsed.get(text) or decode(text)
        if (fact.key, fact.op, fact.device) != (key, op, self.slug):
            raise InvalidRecord(
                f"key {key!r} and op {op!r} in {self.slug} do not match the content, which is "
                f"{fact.key!r} about {fact.op!r} on {fact.device!r}"
            )
        self._parsed[text] = fact
        return fact

    def _quarantine(self, bad: list[Bad]) -> None:
        with contextlib.suppress(DatabaseError):  # a read-only file: they are just skipped
            self._run(partial(self._move, bad), write=True)
        self._notify(
            "quarantine",
            f"{len(bad)} bad rows of {self.path} are left out, the first because: {bad[0][1]}. "
            "Nothing needs to be done; the table 'quarantine' keeps them.",
        )

    def _move(self, bad: list[Bad], db: sqlite3.Connection) -> None:
        for rowid, reason in bad:
            where = "FROM facts WHERE rowid = ?"
            for found in db.execute(f"SELECT key, op, json {where}", (rowid,)).fetchall():
                try:
                    self._validated(*found)  # another process put a good row here meanwhile
                except InvalidRecord:
                    copy = f"INSERT INTO quarantine SELECT key, json, ?, ? {where}"
                    db.execute(copy, (reason, schema.now(), rowid))
                    db.execute(f"DELETE {where}", (rowid,))

    def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T | None:
        """``work`` on a connection, tried again while that helps; None if there is no file."""
        deadline = time.monotonic() + self.busy_s
        tries = 0
        while True:
            try:
                with self._connection(write) as connection:
                    return work(connection)
            except (sqlite3.DatabaseError, OSError) as error:
                if not write and self._vanished():
                    return None
                tries += 1
                self._recover(error, tries, deadline)

    @contextmanager
    def _connection(self, write: bool) -> Iterator[sqlite3.Connection]:
        """A connection to current tables, in a transaction if ``write``."""
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect(write)) as db:
            db.text_factory = _text
            db.execute("PRAGMA trusted_schema = OFF")
            found = schema.version(db, self.path)
            if write or (found is not None and found < schema.SCHEMA):
                db.execute("BEGIN IMMEDIATE")  # closing rolls back what was not committed
                schema.prepare(db, self.path)
            yield db
            if db.in_transaction:
                db.execute("COMMIT")

    def _connect(self, write: bool) -> sqlite3.Connection:
        uri = f"{self.path.as_uri()}?mode={'rwc' if write else 'rw'}"
        return sqlite3.connect(uri, uri=True, timeout=self.busy_s, isolation_level=None)

    def _vanished(self) -> bool:
        try:
            os.stat(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def _recover(self, error: Exception, tries: int, deadline: float) -> None:
        """Return if another try may succeed, otherwise raise DatabaseError."""
        text = str(error) if isinstance(error, sqlite3.Error) else ""  # an OSError's names files
        if "locked" in text or "busy" in text:
            if time.monotonic() >= deadline:
                raise StoreBusy(
                    f"{self.path} was locked by other processes for {self.busy_s:.0f} s: end the one that holds it"
                ) from error
        elif tries >= self.max_tries:
            raise DatabaseError(unusable(self.path, error)) from error
        elif is_corrupt(error):
            moved = set_aside(self.path, error)
            if moved is not None:
                self._notify("corrupt", f"{self.path} was corrupt ({text}): kept as {moved}, begun anew")
        elif "readonly" not in text and "I/O" not in text:  # said also of a file that was moved
            raise DatabaseError(unusable(self.path, error)) from error
        time.sleep(random.uniform(0.002, 0.02))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _insert(rows: list[tuple[str, str, str, str, str]], db: sqlite3.Connection) -> int:
    before = db.total_changes
    db.executemany(schema.INSERT, rows)
    return db.total_changes - before
