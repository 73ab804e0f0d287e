"""One database file that is damaged, of another version, or replaced: what is kept, set apart and begun anew."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from portkern.errors import DatabaseError, NewerSchema
from portkern.record import canonical
from portkern.tuning_db import DatabaseWarning, Store, aside, schema
from portkern.tuning_db.store import StoreBusy
from tests.test_store import SLUG, killed_while_writing, make, raw


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"{SLUG}.sqlite3"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path)


BAD_ROWS = {
    "half written": "UPDATE facts SET json = substr(json, 1, 90) WHERE rowid = 1",
    "tampered": "UPDATE facts SET json = replace(json, '\"samples\":0', '\"samples\":9') WHERE rowid = 1",
    "wrong key": "UPDATE facts SET key = 'x' WHERE rowid = 1",
    "wrong op": "UPDATE facts SET op = 'matmul' WHERE rowid = 1",
    "bytes": "UPDATE facts SET json = x'ff00fe' WHERE rowid = 1",
    "not UTF-8": "UPDATE facts SET json = cast(x'ff00fe' AS TEXT) WHERE rowid = 1",
    "number": "UPDATE facts SET json = 7 WHERE rowid = 1",
    "not finite": "UPDATE facts SET json = replace(json, '1.0', 'NaN') WHERE rowid = 1",
    "deep": "UPDATE facts SET json = replace(hex(zeroblob(100000)), '0', '[') WHERE rowid = 1",
    "long": "UPDATE facts SET json = hex(zeroblob(1000000)) WHERE rowid = 1",
}


@pytest.mark.parametrize("damage", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_row_is_set_apart(store: Store, damage: str) -> None:
    store.add(make(n) for n in range(3))
    raw(store.path, (damage, ()))
    with pytest.warns(DatabaseWarning, match="1 bad rows of .* are left out") as seen:
        assert store.facts() == sorted((make(1), make(2)), key=lambda fact: fact.key)
        assert len(store.facts()) == 2
    assert len(seen) == 1
    assert len(store.quarantined()) == 1 and store.quarantined()[0][1]
    assert store.add([make(0)]) == 1  # the good row can come again


def test_bad_row_of_a_read_only_file_is_skipped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(make(n) for n in range(3))
    raw(store.path, (BAD_ROWS["half written"], ()))
    before = store.path.read_bytes()
    monkeypatch.setattr(
        Store, "_connect",
        lambda self, write: sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, isolation_level=None),
    )  # fmt: skip
    with pytest.warns(DatabaseWarning, match="bad rows"):
        assert len(store.facts()) == 2
    assert len(store.facts()) == 2 and store.path.read_bytes() == before
    with pytest.raises(DatabaseError, match="readonly.*PORTKERN_HOME"):
        store.add([make(9)])


def test_good_row_replaces_a_bad_one_that_nobody_read(store: Store) -> None:
    store.add(make(n) for n in range(3))
    raw(store.path, (BAD_ROWS["half written"], ()))
    assert Store(store.path).add([make(0), make(1)]) == 1
    assert len(store.facts()) == 3 and len(store.quarantined()) == 1


# What an op's call may do -----------------------------------------------------------------------


def test_glance_leaves_bad_rows_to_a_writer(store: Store) -> None:
    store.add(make(n) for n in range(3))
    raw(store.path, (BAD_ROWS["half written"], ()))
    before = store.path.read_bytes()
    with pytest.warns(DatabaseWarning, match="1 bad rows of .* are left out"):
        assert len(store.facts("softmax", wait=False)) == 2
    assert len(store.facts(wait=False)) == 2 and store.path.read_bytes() == before
    assert store.add([make(5)]) == 1
    assert raw(store.path, ("SELECT count(*) FROM quarantine", ())) == [[(1,)]]
    assert len(store.facts()) == 3


def test_glance_reads_an_older_file_as_it_is(store: Store) -> None:
    facts = [make(0), make(1, op="matmul"), make(2, op="matmul")]
    rows = [(fact.key, canonical(fact)) for fact in facts]
    raw(
        store.path,
        ("CREATE TABLE facts (key TEXT PRIMARY KEY, json TEXT)", ()),
        *(("INSERT INTO facts VALUES (?, ?)", row) for row in [*rows, ("half", rows[0][1][:50])]),
    )
    before = store.path.read_bytes()
    assert store.facts("softmax", wait=False) == [make(0)]
    assert len(store.facts(wait=False)) == 3 and store.path.read_bytes() == before
    assert store.add([make(3)]) == 1
    assert len(store.facts()) == 4 and len(store.quarantined()) == 1


@pytest.mark.parametrize("how", ["garbage", "cut", "no tables"])
def test_glance_leaves_a_corrupt_file_alone(store: Store, how: str) -> None:
    store.add(make(n) for n in range(300))
    {"garbage": _garbage, "cut": _cut, "no tables": _no_tables}[how](store.path)
    before = store.path.read_bytes()
    with pytest.raises(DatabaseError, match="is corrupt .*portkern db list"):
        store.facts(wait=False)
    assert store.path.read_bytes() == before and len(list(store.path.parent.iterdir())) == 1


def test_glance_takes_back_what_a_killed_process_half_wrote(store: Store) -> None:
    """As SQLite does for every reader: without it the file could not be read until the next write."""
    killed_while_writing(store)
    assert len(store.facts(wait=False)) == 200


def test_glance_is_short(store: Store) -> None:
    store.add([make(1)])
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        with pytest.raises(StoreBusy, match=r"for 0\.2 s"):
            store.facts(wait=False)
        assert time.monotonic() - start < 1.5


def _garbage(path: Path) -> None:
    path.write_bytes(b"This is no database at all. " * 100)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)


def _no_tables(path: Path) -> None:
    raw(path, ("DROP TABLE quarantine", ()), ("ALTER TABLE facts DROP COLUMN json", ()))


@pytest.mark.parametrize("damage", [_garbage, _cut, _overwritten, _no_tables])
@pytest.mark.parametrize("first", ["read", "write"])
def test_corrupt_file_is_kept_and_begun_anew(store: Store, damage, first: str) -> None:
    store.add(make(n) for n in range(300))
    damage(store.path)
    broken = store.path.read_bytes()
    with pytest.warns(DatabaseWarning, match=r"corrupt .*kept as .*\.corrupt-\d{8}T") as seen:
        if first == "read":
            assert store.facts() == []
        assert store.add([make(7)]) == 1
    assert len(seen) == 1
    (kept,) = store.path.parent.glob("*.corrupt-*")
    assert kept.read_bytes() == broken
    assert store.facts() == [make(7)]


def test_journal_goes_aside_with_its_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _garbage(store.path)
    Path(f"{store.path}-journal").write_bytes(b"old")  # of a writer that is still alive
    monkeypatch.setattr(aside, "_sound", lambda path: False)  # SQLite itself would remove it here
    assert aside.set_aside(store.path, sqlite3.DatabaseError("malformed")) is not None
    assert [kept.read_bytes() for kept in store.path.parent.glob("*.corrupt-*-journal")] == [b"old"]


@pytest.mark.parametrize("how", ["user_version", "meta"])
def test_newer_schema_is_refused_and_untouched(store: Store, how: str) -> None:
    store.add([make(1)])
    if how == "meta":  # as after a dump and reload
        raw(store.path, ("UPDATE meta SET value = '7' WHERE name = 'schema'", ()), ("PRAGMA user_version = 0", ()))
    else:
        raw(store.path, ("PRAGMA user_version = 7", ()))
    before = store.path.read_bytes()
    for act in (store.facts, store.quarantined, lambda: store.add([make(2)])):
        with pytest.raises(NewerSchema, match=f"{store.path} has schema 7, .* up to 1: upgrade.*PORTKERN_HOME"):
            act()
    assert store.path.read_bytes() == before


@pytest.mark.parametrize("first", ["read", "write"])
def test_older_schema_migrates(store: Store, first: str) -> None:
    rows = [(make(n).key, canonical(make(n))) for n in range(3)] + [("half", canonical(make(9))[:50])]
    raw(
        store.path,
        ("CREATE TABLE facts (key TEXT PRIMARY KEY, json TEXT)", ()),
        *(("INSERT INTO facts VALUES (?, ?)", row) for row in rows),
    )
    if first == "write":
        store.add([make(3)])
    assert len(store.facts()) == 3 + (first == "write")
    assert [text for text, _ in store.quarantined()] == [rows[-1][1]]
    assert raw(store.path, ("PRAGMA user_version", ())) == [[(schema.SCHEMA,)]]


def test_migration_is_one_transaction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    raw(store.path, ("CREATE TABLE facts (key TEXT PRIMARY KEY, json TEXT)", ()))
    before = store.path.read_bytes()

    def fails(db: sqlite3.Connection) -> None:
        schema._from_0(db)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(schema, "MIGRATIONS", {0: fails})
    with pytest.raises(DatabaseError, match="disk is full"):
        store.facts()
    assert store.path.read_bytes() == before


def test_migrations_reach_the_current_version() -> None:
    assert sorted(schema.MIGRATIONS) == list(range(schema.SCHEMA))


def test_file_vanishes_between_look_and_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([make(1)])
    connect = Store._connect

    def late(self: Store, write: bool) -> sqlite3.Connection:
        self.path.unlink(missing_ok=True)
        return connect(self, write)

    monkeypatch.setattr(Store, "_connect", late)
    assert store.facts() == []
    monkeypatch.undo()
    assert store.add([make(2)]) == 1 and store.facts() == [make(2)]


def test_file_replaced_in_mid_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([make(1)])
    connect = Store._connect
    moves = iter([True])

    def moved(self: Store, write: bool) -> sqlite3.Connection:
        connection = connect(self, write)
        if next(moves, False):
            self.path.rename(self.path.with_suffix(".moved"))
        return connection

    monkeypatch.setattr(Store, "_connect", moved)
    assert store.add([make(2)]) == 1
    assert store.facts() == [make(2)]  # in the file of this name, not in the one moved away
