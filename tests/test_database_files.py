"""What the database exports, imports and ships."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from portkern.errors import DatabaseError
from portkern.fact import Fact
from portkern.record import canonical
from portkern.tuning_db import Database
from portkern.tuning_db.jsonl import MAX_LINE
from tests.test_database import OTHER, SLUG, by_key, make, write_lines


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "home", tmp_path / "shipped")


# Export and import ------------------------------------------------------------------------------


def test_export_import_export_is_identical(database: Database, tmp_path: Path) -> None:
    facts = [make(n, op, device) for n in range(40) for op in "ab" for device in (SLUG, OTHER)]
    random.Random(1).shuffle(facts)
    write_lines(tmp_path / f"shipped/{SLUG}.jsonl", make(0, "a"), make(99))
    database.record(facts)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert database.export(first) == 161
    other = Database(tmp_path / "home2", tmp_path / "none")
    report = other.import_file(first)
    assert (report.added, report.known, report.rejected) == (161, 0, [])
    assert other.export(second) == 161
    assert first.read_bytes() == second.read_bytes()
    report = other.import_file(first)
    assert (report.added, report.known, report.rejected) == (0, 161, [])
    lines = first.read_text().splitlines()
    questions = [Fact.from_json(json.loads(line)).question for line in lines]
    assert questions == sorted(questions)
    assert database.export(second, [OTHER]) == 80
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["first.jsonl", "second.jsonl"]


def test_merging_commutes(tmp_path: Path) -> None:
    for name, span in (("a", range(20)), ("b", range(10, 30))):
        write_lines(tmp_path / name, *map(make, span))
    results = []
    for order in ("ab", "ba", "abab"):
        database = Database(tmp_path / f"home_{order}", tmp_path / "none")
        for name in order:
            database.import_file(tmp_path / name)
        database.export(tmp_path / order)
        results.append((tmp_path / order).read_bytes())
    assert results[0] == results[1] == results[2]


def test_ship_writes_winners_and_defaults(database: Database, tmp_path: Path) -> None:
    database.record([make(n) for n in range(5)] + [make(7, role="default"), make(8)])
    path = database.ship(SLUG)
    assert path == tmp_path / f"shipped/{SLUG}.jsonl"
    kept = Database(tmp_path / "none", tmp_path / "shipped").facts(SLUG)
    assert kept == by_key(make(0), make(7, role="default"), make(8))
    before = path.read_bytes()
    assert database.ship(SLUG).read_bytes() == before
    assert database.export(tmp_path / "winners", winners=True) == 3
    assert (tmp_path / "winners").read_bytes() == before
    with pytest.raises(DatabaseError, match="nothing is recorded about 'amd_mi300x'"):
        database.ship(OTHER)


def test_export_that_fails_leaves_the_old_file(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.record([make(1)])
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(DatabaseError, match="cannot export to .*out.jsonl.*No space left"):
        database.export(out)
    assert out.read_text() == "old" and not list(tmp_path.glob("*.part"))
    for bad in (tmp_path, out / "below", tmp_path / "missing" / "x", Path(os.devnull)):
        with pytest.raises(DatabaseError, match="cannot export to"):
            database.export(bad)
    assert Path(os.devnull).is_char_device()


def test_import_of_garbage(database: Database, tmp_path: Path) -> None:
    good = canonical(make(1)).encode()
    lines = [
        b"\xef\xbb\xbf" + good, b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe\x00", good[:200],
        good.replace(b'"schema":1', b'"schema":2'), good.replace(b'"samples":0', b'"samples":1e999'),
        good.replace(b'"BLOCK_M":2', b'"BLOCK_M":3'), good.replace(b'"M":1', b'"M":' + b"9" * 5000),
        good.replace(b'"time_us":2.0', b'"time_us":NaN'), b"[" * 100_000, b"x" * (3 * MAX_LINE),
        good + b"\r", canonical(make(2)).encode() + b"  ", canonical(make(3)).encode(),
    ]  # fmt: skip
    path = tmp_path / "garbage.jsonl"
    path.write_bytes(b"\n".join(lines))
    report = database.import_file(path)
    assert (report.added, report.known) == (3, 1)
    assert [number for number, _ in report.rejected] == list(range(3, 17))
    assert all(reason for _, reason in report.rejected)
    assert "limit" in dict(report.rejected)[16]
    assert database.facts(SLUG) == by_key(make(1), make(2), make(3))
    path.write_bytes(random.Random(0).randbytes(100_000))
    assert database.import_file(path).added == 0


def test_import_of_what_is_no_export(database: Database, tmp_path: Path) -> None:
    database.record([make(1)])
    with pytest.raises(DatabaseError, match="cannot import .*absent.*name a file"):
        database.import_file(tmp_path / "absent")
    with pytest.raises(DatabaseError, match=f"cannot import {tmp_path}"):
        database.import_file(tmp_path)
    with pytest.raises(DatabaseError, match="is a database file: export it"):
        database.import_file(database.home / f"{SLUG}.sqlite3")
