"""The database where the disk is bad, full, locked or of a newer portkern: dispatch goes on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from portkern.errors import DatabaseError, NewerSchema
from portkern.tuning_db import Database, DatabaseWarning, Store
from tests.test_database import OTHER, ROOT, SLUG, by_key, make, write_lines

FULL = sqlite3.OperationalError("database or disk is full")


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "home", tmp_path / "shipped")


# Disks that fail --------------------------------------------------------------------------------


def check_answers_without_a_disk(database: Database) -> None:
    """Shipped facts and what this process recorded, with one warning for all of it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert not database.record([make(1)])
        assert not database.record([make(2), make(1, device=OTHER)])
        for _ in range(2):
            assert database.facts(SLUG) == by_key(make(0), make(1), make(2))
            assert database.facts(OTHER) == [make(1, device=OTHER)]
            assert database.slugs() == [OTHER, SLUG]
        assert database.epoch(SLUG) and database.epoch(OTHER)
    (warning,) = seen
    assert warning.category is DatabaseWarning and "Set PORTKERN_HOME" in str(warning.message)


@pytest.mark.parametrize("where", ["a file", "under a file", "/proc", "/dev/null"])
def test_home_that_cannot_be(tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    places = {"a file": file, "under a file": file / "home", "/proc": Path("/proc/portkern")}
    write_lines(tmp_path / f"shipped/{SLUG}.jsonl", make(0))
    database = Database(places.get(where, Path(where)), tmp_path / "shipped")
    check_answers_without_a_disk(database)
    with pytest.raises(DatabaseError, match="PORTKERN_HOME"):
        database.import_file(tmp_path / f"shipped/{SLUG}.jsonl")
    assert file.read_text() == "x"


def test_disk_that_is_full(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / f"shipped/{SLUG}.jsonl", make(0))
    with monkeypatch.context() as full:
        full.setattr(Store, "_connect", lambda self, write: (_ for _ in ()).throw(FULL))
        check_answers_without_a_disk(database)
    assert database.record([make(3)])  # there is space again: what was kept in memory goes too
    assert Database(database.home, tmp_path / "none").facts(SLUG) == by_key(*map(make, (1, 2, 3)))


def test_locked_file_is_left_alone_for_a_while(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.record([make(1)])
    assert database.facts(SLUG) == [make(1)]
    monkeypatch.setattr(Store, "busy_s", 0.05)
    other = sqlite3.connect(database.home / f"{SLUG}.sqlite3", isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(DatabaseWarning, match="locked by other processes"):
            assert not database.record([make(2)])
        other.execute("COMMIT")
    finally:
        other.close()
    monkeypatch.setattr(Store, "_run", lambda *rest, **more: pytest.fail("touched the file"))
    assert database.facts(SLUG) == by_key(make(1), make(2)) and not database.record([make(3)])
    monkeypatch.undo()
    database._rest_until.clear()
    assert database.record([make(4)])
    assert Database(database.home, database.home).facts(SLUG) == by_key(*map(make, range(1, 5)))


def test_call_does_not_wait_and_its_rest_delays_no_record(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.record([make(1)])
    other = sqlite3.connect(database.home / f"{SLUG}.sqlite3", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    begun = time.monotonic()
    with pytest.warns(DatabaseWarning, match="locked by other processes"):
        assert database.facts(SLUG, "softmax", wait=False) == []
    assert time.monotonic() - begun < 1.5
    epoch = database.epoch()
    other.close()
    assert database.facts(SLUG, wait=False) == [] and database.epoch() == epoch  # it rests
    assert database.facts(SLUG) == [make(1)]  # for calls only
    assert database.record([make(2)])
    epoch = database.epoch()
    monkeypatch.setattr("time.monotonic", lambda: begun + 1000.0)
    assert database.epoch() > epoch and database.epoch(SLUG) == database.epoch()
    assert database.facts(SLUG, wait=False) == by_key(make(1), make(2))


def test_newer_file_never_stops_an_op(database: Database, tmp_path: Path) -> None:
    database.record([make(1)])
    db = sqlite3.connect(database.home / f"{SLUG}.sqlite3")
    db.execute("PRAGMA user_version = 9")
    db.close()
    newer = Database(database.home, tmp_path / "none")
    with pytest.warns(DatabaseWarning, match="has schema 9.*upgrade portkern.*PORTKERN_HOME") as seen:
        assert newer.facts(SLUG) == [] and not newer.record([make(2)])
        assert newer.facts(SLUG) == [make(2)]
    assert len(seen) == 1
    with pytest.raises(NewerSchema):
        newer.export(tmp_path / "out")
    write_lines(tmp_path / "new.jsonl", make(3))
    with pytest.raises(NewerSchema):
        newer.import_file(tmp_path / "new.jsonl")


CHILD = """
import os, pathlib, resource, sys, warnings
import tests_make as t
folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
warm = t.Database(folder / "warm", folder / "none")  # imports all that another user may not read
warm.record([t.make(1)]), warm.facts(t.SLUG)
if kind == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
elif os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
database = t.Database(folder / "home", folder / "shipped")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    before = database.facts(t.SLUG)
    assert not database.record(t.make(n) for n in range(100, 600))
    assert len(database.facts(t.SLUG)) == len(before) + 500
    database.slugs(), database.quarantined(t.SLUG) if kind != "closed" else ()
assert len(before) == (0 if kind == "closed" else 3), before
assert len(seen) == 1 and "PORTKERN_HOME" in str(seen[0].message), [str(s.message) for s in seen]
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("kind", ["full", "read-only", "closed"])
def test_real_disk_limits(open_folder: Path, kind: str) -> None:
    """A file size limit; a read-only home; a home that may not even be listed (as another user)."""
    database = Database(open_folder / "home", open_folder / "shipped")
    database.record(map(make, range(3)))
    (open_folder / "tests_make.py").write_text(Path(__file__).read_text())
    database.home.chmod({"full": 0o755, "read-only": 0o555, "closed": 0o000}[kind])
    path = os.pathsep.join((str(open_folder), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", CHILD, str(open_folder), kind],
        cwd=open_folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    database.home.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert database.facts(SLUG) == by_key(*map(make, range(3)))
