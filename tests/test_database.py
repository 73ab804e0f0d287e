"""The database as dispatch, tuner and command line use it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portkern.config import Config
from portkern.errors import InvalidRecord
from portkern.fact import Fact
from portkern.problem import Problem
from portkern.record import canonical
from portkern.tuning_db import Database, DatabaseWarning, home
from portkern.tuning_db.jsonl import Shipped

ROOT = Path(__file__).parent.parent
SLUG, OTHER = "nvidia_h200", "amd_mi300x"


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
