"""The database as dispatch, tuner and command line use it, on good disks and bad ones."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from portkern.config import Config
from portkern.errors import DatabaseError, InvalidRecord, NewerSchema
from portkern.fact import Fact
from portkern.problem import Problem
from portkern.record import canonical
from portkern.tuning_db import Database, DatabaseWarning, Store, home
from portkern.tuning_db.jsonl import MAX_LINE, Shipped

ROOT = Path(__file__).parent.parent
SLUG, OTHER = "nvidia_h200", "amd_mi300x"
FULL = sqlite3.OperationalError("database or disk is full")


def make(n: int, op: str = "softmax", device: str = SLUG, role: str = "candidate") -> Fact:
    problem = Problem(op, {"M": 1 + n // 8, "N": 4096}, {"x": "bf16"})
    config = Config("resident_row", {"BLOCK_M": 1 << n % 8})
    return Fact(
        device, "sm90", op, "k1", "3.9", problem, config, "measured", role=role, time_us=float(n + 1)
    )  # fmt: skip


def by_key(*facts: Fact) -> list[Fact]:
    return sorted(facts, key=lambda fact: fact.key)


def write_lines(path: Path, *facts: Fact) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{canonical(fact)}\n" for fact in facts))


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "home", tmp_path / "shipped")


# Where the home is ------------------------------------------------------------------------------


def test_home_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORTKERN_HOME", "rel/ative")
    assert home() == tmp_path / "rel/ative"
    monkeypatch.setenv("PORTKERN_HOME", "~/mine")
    assert home() == tmp_path / "mine"
    for unset in ("", " "):
        monkeypatch.setenv("PORTKERN_HOME", unset)
        assert home().is_relative_to(tmp_path) and home().name == "portkern"
    assert Database().home == home()


def test_home_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PORTKERN_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/")
    assert home().is_absolute()
    monkeypatch.delenv("HOME")
    assert home().is_absolute()
    monkeypatch.setattr("os.path.expanduser", lambda path: os.fspath(path))  # an unknown user id
    assert home() == Path(os.devnull, "portkern")
    with pytest.warns(DatabaseWarning, match="Set PORTKERN_HOME") as seen:
        database = Database(shipped=tmp_path)
        assert database.facts(SLUG) == [] and not database.record([make(1)])
        assert database.facts(SLUG) == [make(1)]
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []


def test_home_in_a_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("PORTKERN_HOME", "relative")
    assert home().is_absolute()


def test_symlinked_home(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert Database(tmp_path / "link", tmp_path).record([make(1)])
    assert Database(tmp_path / "real", tmp_path).facts(SLUG) == [make(1)]


# Answers ----------------------------------------------------------------------------------------


def test_record_routes_by_device(database: Database) -> None:
    here, there, predicted = make(1), make(2, device=OTHER), make(3, device="gfx942")
    assert database.record([here, there, predicted]) and database.record([])
    assert database.slugs() == [OTHER, "gfx942", SLUG]
    again = Database(database.home, database.home / "none")
    assert [again.facts(slug) for slug in again.slugs()] == [[there], [predicted], [here]]
    assert sorted(os.listdir(database.home)) == [f"{slug}.sqlite3" for slug in again.slugs()]


def test_shipped_and_recorded_merge(database: Database, tmp_path: Path) -> None:
    write_lines(tmp_path / f"shipped/{SLUG}.jsonl", make(1), make(2), make(3, op="matmul"))
    database.record([make(2), make(4)])
    assert database.facts(SLUG) == by_key(make(1), make(2), make(3, op="matmul"), make(4))
    assert database.facts(SLUG, "matmul") == [make(3, op="matmul")]
    assert database.facts(OTHER) == []
    write_lines(tmp_path / f"shipped/{OTHER}.jsonl", make(1, device=OTHER))
    assert database.slugs() == [OTHER, SLUG]


def test_bad_shipped_lines_are_skipped(database: Database, tmp_path: Path) -> None:
    shipped = tmp_path / f"shipped/{SLUG}.jsonl"
    write_lines(shipped, make(1), make(2, device=OTHER))
    with shipped.open("ab") as out:
        out.write(b"\n{half\n\xff\xfe\n" + canonical(make(3)).encode())
    with pytest.warns(DatabaseWarning, match="line 2: it is about the device 'amd_mi300x'") as seen:
        assert database.facts(SLUG) == database.facts(SLUG) == by_key(make(1), make(3))
    assert len(seen) == 1


def test_epoch_rises_with_this_device_only(database: Database, tmp_path: Path) -> None:
    seen = [database.epoch(SLUG)]
    database.record([make(1)])
    seen.append(database.epoch(SLUG))
    database.record([make(1, device=OTHER)])
    assert database.epoch(SLUG) == seen[-1]
    write_lines(tmp_path / "new.jsonl", make(2))
    database.import_file(tmp_path / "new.jsonl")
    seen.append(database.epoch(SLUG))
    assert seen == sorted(set(seen))


def test_epoch_of_all_rises_with_every_device(database: Database, tmp_path: Path) -> None:
    seen = [database.epoch()]
    for act in (
        lambda: database.record([make(1)]),
        lambda: database.record([make(1, device=OTHER)]),
        lambda: database.record([make(1, device="gfx942")]),
        lambda: database.ship(SLUG),
    ):
        act()
        seen.append(database.epoch())
    write_lines(tmp_path / "new.jsonl", make(2, device=OTHER))
    database.import_file(tmp_path / "new.jsonl")
    seen.append(database.epoch())
    assert seen == sorted(set(seen)) and seen[-1] == database.epoch(OTHER)
    database.facts(SLUG)
    assert database.epoch() == seen[-1]


@pytest.mark.parametrize("slug", ["../../etc/passwd", "/etc/x", "a/b", "..", "", "NVIDIA H200", "a" * 101, "x\0", "é"])
def test_no_slug_leaves_the_home(database: Database, tmp_path: Path, slug: str) -> None:
    fact = dataclasses.replace(make(1), device=slug or "_")
    line = tmp_path / "line"
    write_lines(line, fact)
    for act in (
        lambda: database.facts(slug),
        lambda: database.record([make(2), fact]),
        lambda: database.export(tmp_path / "out", [slug]),
        lambda: database.ship(slug),
    ):
        with pytest.raises(InvalidRecord, match="device"):
            act()
    (number, reason), *_ = database.import_file(line).rejected
    assert number == 1 and "device" in reason
    assert database.facts(SLUG) == []  # the good fact beside it was not stored either
    assert not database.home.exists()


def test_fact_that_is_no_json_is_refused(database: Database) -> None:
    for change in ({"provenance": {"clock": float("nan")}}, {"op": "\ud800"}):
        with pytest.raises(InvalidRecord):
            database.record([dataclasses.replace(make(1), **change)])


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


def test_import_and_reading_write_nothing(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "import portkern.tuning_db as t\n"
        "assert not os.path.exists(os.environ['PORTKERN_HOME'])\n"
        "d = t.Database(); d.facts('nvidia_h200'); d.slugs()\n"
        "assert not os.path.exists(os.environ['PORTKERN_HOME'])\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", script],
        cwd=ROOT, env={**os.environ, "PORTKERN_HOME": str(tmp_path / "home")}, check=True,
    )  # fmt: skip


def test_shipped_facts_of_one_op(tmp_path: Path) -> None:
    """Lines of other ops are not decoded, however their JSON is spaced; a bad line that names this one is told."""
    facts, told = [make(1), make(2, op="softmax_backward"), make(3, op="a.b"), make(4)], []
    spaced = [json.dumps(json.loads(canonical(each)), indent=None) for each in facts]
    (tmp_path / f"{SLUG}.jsonl").write_text("\n".join([*spaced, '{"op": "a.b"}', '{"op": "other"}']) + "\n")
    shipped = Shipped(tmp_path, lambda *words: told.append(words))
    for op in ("softmax", "softmax_backward", "a.b", "a"):
        assert shipped.facts(SLUG, op) == [fact for fact in facts if fact.op == op]
    assert len(told) == 1
    assert shipped.facts(SLUG) == facts and len(told) == 3
