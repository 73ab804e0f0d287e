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


class StoreBusy(DatabaseError):
    """Other processes held the file for longer than the busy time-out."""


class Store:
    """The facts of the device that ``path`` is named after. The file is made by the first ``add``.

    Methods raise DatabaseError when the disk fails them and NewerSchema when a newer portkern
    wrote the file. They mend the file on their way: bad rows move to ``quarantine``, older tables
    migrate, a corrupt file is renamed, never deleted, and a fresh one begun. Only ``facts`` with
    ``wait=False``, which an op's call uses, leaves all that to the others.
    """

    busy_s = 30.0  # how long to wait for other processes
    glance_s = 0.2  # how long a call waits for them
    max_tries = 5  # for what another try may mend: a file set aside or replaced meanwhile

    def __init__(self, path: Path, notify: Notices | None = None) -> None:
        self.path = absolute(path)
        self.slug = check_slug(self.path.stem)
        self._notify = Notices() if notify is None else notify
        self._cache: dict[str | None, tuple[Stamp | None, list[Fact]]] = {}
        self._parsed: dict[str, Fact] = {}  # by JSON text: a reload parses what is new
        self._bad: dict[int, str] = {}  # rows seen that did not validate, and not moved yet

    def facts(self, op: str | None = None, *, wait: bool = True) -> list[Fact]:
        """The valid facts, of one op or of all.

        Without ``wait`` it gives up after ``glance_s`` and writes nothing (but SQLite itself takes
        back what a killed process left half written, without which there is nothing to read).
        """
        try:
            current = stamp(self.path)
            trusted = settled(current)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DatabaseError(unusable(self.path, error)) from error
        cached = self._cache.get(op)
        if cached is None or cached[0] != current:
            good, bad = self._run(partial(self._read, op), write=False, wait=wait) or ([], {})
            self._bad = {**self._bad, **bad}
            cached = self._cache[op] = (current if trusted else None, good)
        if self._bad:
            self._set_rows_apart(wait)
        return list(cached[1])

    def last(self, op: str | None = None) -> list[Fact]:
        """What ``facts`` gave last: for when the file cannot be read now."""
        found = self._cache.get(op)
        if found is not None:
            return list(found[1])
        _, every = self._cache.get(None, (None, []))
        return [fact for fact in every if fact.op == op]

    def add(self, facts: Iterable[Fact]) -> int:
        """Store facts, all or none. Returns how many of them were new."""
        rows = [schema.row(check(fact)) for fact in facts]
        foreign = sorted({device for _, _, _, device, _ in rows if device != self.slug})
        if foreign:
            raise InvalidRecord(f"facts about {foreign} do not belong in {self.path}")
        added = self._run(partial(self._insert, rows), write=True) or 0
        self._bad = {}
        return added

    def quarantined(self) -> list[tuple[str, str]]:
        """The JSON and the reason of each row that was set apart, those found now among them."""
        self.facts()
        return self._run(self._read_quarantine, write=False) or []

    def _read(self, op: str | None, db: sqlite3.Connection) -> tuple[list[Fact], dict[int, str]]:
        good: list[Fact] = []
        bad: dict[int, str] = {}
        found = schema.version(db, self.path)
        if found is None:
            return good, bad
        for rowid, key, column, text in db.execute(*schema.select(found, op)):
            try:
                fact = self._validated(key, column, text)
                if op in (None, fact.op):
                    good.append(fact)
            except InvalidRecord as error:
                bad[rowid] = str(error)
        return good, ({} if found < schema.SCHEMA else bad)  # the migration sets apart what was bad before

    def _read_quarantine(self, db: sqlite3.Connection) -> list[tuple[str, str]]:
        if schema.version(db, self.path) is None:
            return []
        return db.execute("SELECT json, reason FROM quarantine ORDER BY rowid").fetchall()

    def _validated(self, key: object, op: object, text: object) -> Fact:
        if not isinstance(text, str):
            raise InvalidRecord(f"the JSON column holds {type(text).__name__}")
        fact = self._parsed.get(text) or decode(text)
        if (fact.key, fact.device) != (key, self.slug) or op not in (None, fact.op):
            raise InvalidRecord(
                f"key {key!r} and op {op!r} in {self.slug} do not match the content, which is "
                f"{fact.key!r} about {fact.op!r} on {fact.device!r}"
            )
        self._parsed[text] = fact
        return fact

    def _set_rows_apart(self, write: bool) -> None:
        bad = self._bad
        if write:
            with contextlib.suppress(DatabaseError):  # a read-only file: they are just skipped
                self._run(self._move, write=True)
            self._bad = {}
        for reason in [*bad.values()][:1]:
            self._notify(
                "quarantine",
                f"{len(bad)} bad rows of {self.path} are left out, the first because: {reason}. "
                "Nothing needs to be done; the table 'quarantine' keeps them, from the next write on.",
            )

    def _move(self, db: sqlite3.Connection) -> None:
        """Move the bad rows that were seen to ``quarantine``."""
        for rowid, reason in [*self._bad.items()]:
            where = "FROM facts WHERE rowid = ?"
            for found in db.execute(f"SELECT key, op, json {where}", (rowid,)).fetchall():
                try:
                    self._validated(*found)  # another process put a good row here meanwhile
                except InvalidRecord:
                    copy = f"INSERT INTO quarantine SELECT key, json, ?, ? {where}"
                    db.execute(copy, (reason, schema.now(), rowid))
                    db.execute(f"DELETE {where}", (rowid,))

    def _insert(self, rows: list[tuple[str, str, str, str, str]], db: sqlite3.Connection) -> int:
        for key, _, _, _, text in rows:  # a bad row under a good one's key would keep it out
            found = db.execute("SELECT rowid, key, op, json FROM facts WHERE key = ?", (key,)).fetchone()
            if found is not None and found[-1] != text:
                try:
                    self._validated(*found[1:])
                except InvalidRecord as error:
                    self._bad = {**self._bad, found[0]: str(error)}
        if self._bad:
            self._move(db)
        before = db.total_changes
        db.executemany(schema.INSERT, rows)
        return db.total_changes - before

    def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool, wait: bool = True) -> T | None:
        """``work`` on a connection, tried again while that helps; None if there is no file."""
        patience = self.busy_s if wait else min(self.busy_s, self.glance_s)
        deadline = time.monotonic() + patience
        tries = 0
        while True:
            try:
                with self._connection(write, mend=wait, patience=patience) as connection:
                    return work(connection)
            except (sqlite3.DatabaseError, OSError) as error:
                if not write and self._vanished():
                    return None
                tries += 1
                if _is_busy(error) and time.monotonic() >= deadline:
                    raise StoreBusy(
                        f"{self.path} was locked by other processes for {patience:g} s: end the one that holds it"
                    ) from error
                self._recover(error, tries, mend=wait)

    @contextmanager
    def _connection(self, write: bool, *, mend: bool, patience: float) -> Iterator[sqlite3.Connection]:
        """A connection, in a transaction if ``write``; to current tables, if it may ``mend`` them."""
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect(write)) as db:
            db.text_factory = _text
            db.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
            db.execute("PRAGMA trusted_schema = OFF")
            found = schema.version(db, self.path)
            if write or (mend and found is not None and found < schema.SCHEMA):
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

    def _recover(self, error: Exception, tries: int, mend: bool) -> None:
        """Return if another try may succeed, otherwise raise DatabaseError."""
        text = str(error) if isinstance(error, sqlite3.Error) else ""  # an OSError's names files
        if not _is_busy(error):
            if tries >= self.max_tries:
                raise DatabaseError(unusable(self.path, error)) from error
            if is_corrupt(error):
                if not mend:
                    raise DatabaseError(
                        f"{self.path} is corrupt ({text}): nothing is read from it until `portkern db list` "
                        "or a tuning run sets it aside"
                    ) from error
                moved = set_aside(self.path, error)
                if moved is not None:
                    self._notify("corrupt", f"{self.path} was corrupt ({text}): kept as {moved}, begun anew")
            elif "readonly" not in text and "I/O" not in text:  # said also of a file that was moved
                raise DatabaseError(unusable(self.path, error)) from error
        time.sleep(random.uniform(0.002, 0.02))


def _is_busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and ("locked" in str(error) or "busy" in str(error))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
