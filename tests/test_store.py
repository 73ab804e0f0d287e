"""One database file under everything that disks and processes do to it."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from portkern.config import Config
from portkern.errors import InvalidRecord
from portkern.fact import Fact
from portkern.problem import Problem
from portkern.record import canonical
from portkern.tuning_db import Store, schema
from portkern.tuning_db.store import StoreBusy

ROOT = Path(__file__).parent.parent
SLUG = "nvidia_h200"

# Children build the same facts: this text is the one definition.
MAKE = """
from portkern.config import Config
from portkern.fact import Fact
from portkern.problem import Problem
from portkern.tuning_db import Store
def make(n, op="softmax", device="nvidia_h200"):
    problem = Problem(op, {"M": 1 + n // 8, "N": 4096}, {"x": "bf16"})
    config = Config("resident_row", {"BLOCK_M": 1 << n % 8})
    return Fact(device, "sm90", op, "k1", "3.9", problem, config, "measured", time_us=float(n + 1))
"""
_space: dict = {}
exec(MAKE, _space)
make = _space["make"]


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", MAKE + script, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def together(script: str, count: int, *arguments: object) -> None:
    """Runs ``count`` children that wait for one another before the script's second half."""
    gate = 'import sys\nprint("ready", flush=True)\nsys.stdin.readline()\n'
    children = [child(gate + script, number, *arguments) for number in range(count)]
    for each in children:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in children:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in children:
        _, errors = each.communicate(timeout=120)
        assert each.returncode == 0, errors


def raw(path: Path, *statements: tuple[str, tuple]) -> list:
    with closing(sqlite3.connect(path)) as db, db:
        return [db.execute(*statement).fetchall() for statement in statements]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"{SLUG}.sqlite3"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path)


def test_every_field_survives(store: Store) -> None:
    fact = Fact(
        device=SLUG, arch="sm90", op="ns::op", kernel_hash="k", toolchain="3.9",
        problem=Problem("ns::op", {"N": 2**40}, {"x": "bf16"}, {"causal": True, "p": 0.5}, {"x": "row16"}),
        config=Config("looped_row", {"BLOCK_N": 64}, 8, 3, {"waves_per_eu": 2, "warp_specialize": False}),
        outcome="measured", role="default", time_us=12.25, spread_us=0.1, samples=31, score=3.5,
        reason="größer", error=0.7, provenance={"driver": "570.1", "watts": 700, "lock": 1.5, "ecc": True},
    )  # fmt: skip
    assert store.add([fact]) == 1
    (back,) = Store(store.path).facts()
    assert back == fact and back.key == fact.key and canonical(back) == canonical(fact)


def test_add_is_idempotent_and_all_or_nothing(store: Store) -> None:
    assert store.add(make(n) for n in range(5)) == 5
    assert store.add(make(n) for n in range(7)) == 2
    assert len(store.facts()) == 7
    with pytest.raises(InvalidRecord, match="amd_mi300x"):
        store.add([make(100), make(101, device="amd_mi300x")])
    assert len(store.facts()) == 7


def test_facts_of_one_op(store: Store) -> None:
    store.add([make(1), make(2, op="matmul")])
    assert [fact.op for fact in store.facts("matmul")] == ["matmul"]
    assert store.facts("absent") == []


def test_rollback_journal_and_meta(store: Store) -> None:
    store.add([make(1)])
    mode, version, meta = raw(
        store.path, ("PRAGMA journal_mode", ()), ("PRAGMA user_version", ()), ("SELECT * FROM meta", ())
    )
    assert mode == [("delete",)] and version == [(schema.SCHEMA,)]
    assert {"schema": str(schema.SCHEMA), "device": SLUG}.items() <= dict(meta).items()


def test_reading_makes_no_file(store: Store) -> None:
    assert store.facts() == [] and store.quarantined() == []
    assert not store.path.exists()
    store.path.touch()  # as another process leaves it between open and its first commit
    assert store.facts() == [] and store.quarantined() == []


def test_sixteen_processes_write_one_new_file(path: Path) -> None:
    together(
        "number, path = int(sys.argv[1]), sys.argv[2]\n"
        "import pathlib\n"
        "for n in range(20):\n"
        "    Store(pathlib.Path(path)).add([make(number * 20 + n), make(10_000 + n)])\n",
        16,
        path,
    )
    assert len(Store(path).facts()) == 16 * 20 + 20
    assert raw(path, ("PRAGMA integrity_check", ())) == [[("ok",)]]


def test_sixteen_processes_find_one_corrupt_file(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)
    together(
        "import pathlib, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "Store(pathlib.Path(sys.argv[2])).add([make(int(sys.argv[1]))])\n",
        16,
        path,
    )
    assert len(Store(path).facts()) == 16
    (kept,) = path.parent.glob("*.corrupt-*")
    assert kept.read_bytes() == b"garbage" * 1000


def test_kill_leaves_old_or_new_state(path: Path) -> None:
    script = (
        "import pathlib, sys\nstore, start = Store(pathlib.Path(sys.argv[1])), int(sys.argv[2])\n"
        "for batch in range(start, start + 1000):\n"
        "    store.add(make(batch * 50 + n) for n in range(50))\n"
        "    print(batch, flush=True)\n"
    )
    rng = random.Random(0)
    promised: set[int] = set()
    for turn in range(8):
        writer = child(script, path, turn * 1000)
        assert writer.stdout is not None
        promised.add(int(writer.stdout.readline()))
        time.sleep(rng.uniform(0.0, 0.1))
        writer.send_signal(signal.SIGKILL)
        out, _ = writer.communicate()
        promised |= {int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")}
        found: dict[int, int] = {}
        for fact in Store(path).facts():
            batch = int(fact.time_us or 0) - 1
            found[batch // 50] = found.get(batch // 50, 0) + 1
        assert set(found.values()) == {50} and promised <= set(found)
    assert raw(path, ("PRAGMA integrity_check", ())) == [[("ok",)]]


def killed_while_writing(store: Store) -> None:
    """A process that changes all 200 facts of ``store``, so that pages are written, and dies before it commits."""
    store.add(make(n) for n in range(200))
    writer = child(
        "import sqlite3, sys, time\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1')\ndb.execute('BEGIN IMMEDIATE')\n"
        "db.execute('DELETE FROM facts WHERE rowid % 2')\n"
        "db.execute('UPDATE facts SET json = json || json')\n"
        "print('dirty', flush=True)\ntime.sleep(60)\n",
        store.path,
    )
    assert writer.stdout is not None and writer.stdout.readline() == "dirty\n"
    writer.kill()
    writer.communicate()


def test_kill_with_pages_already_written(store: Store) -> None:
    killed_while_writing(store)
    assert Path(f"{store.path}-journal").stat().st_size > 0
    assert len(Store(store.path).facts()) == 200
    assert not store.quarantined()


def test_waits_for_a_lock_then_says_who(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([make(1)])
    with closing(sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(Store, "busy_s", 0.1)
        for act in (lambda: store.add([make(2)]), store.facts):
            with pytest.raises(StoreBusy, match="locked by other processes.*end the one"):
                act()
        monkeypatch.setattr(Store, "busy_s", 30.0)
        release = threading.Timer(0.2, other.execute, ("COMMIT",))
        release.start()
        assert store.add([make(2)]) == 1
        release.join()


def test_threads_share_a_store(store: Store) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(10):
                store.add([make(number * 10 + n)])
                store.facts()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(store.facts()) == 80


def test_fork(path: Path) -> None:
    parent = child(
        "import os, pathlib, sys\n"
        "store = Store(pathlib.Path(sys.argv[1]))\nstore.add([make(1)])\n"
        "pid = os.fork()\n"
        "store.add([make(2 + bool(pid))])\n"
        "store.facts()\n"
        "if pid:\n    assert os.waitpid(pid, 0)[1] == 0\n    assert len(store.facts()) == 3\n",
        path,
    )
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 0, errors


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    count: list[int] = []
    read = Store._read
    monkeypatch.setattr(Store, "_read", lambda self, *rest: count.append(1) or read(self, *rest))
    yield count


def test_settled_file_is_read_once(store: Store, reads: list[int]) -> None:
    store.add([make(1)])
    hour_ago = time.time() - 3600
    os.utime(store.path, (hour_ago, hour_ago))
    assert store.facts() == store.facts() == [make(1)] and len(reads) == 1
    store.facts().clear()  # a caller's list is the caller's
    assert Store(store.path).add([make(2)]) == 1
    assert len(store.facts()) == 2


def test_young_file_is_read_again(store: Store, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([make(1)])
    stat = store.path.stat()
    assert len(store.facts()) == 1
    Store(store.path).add([make(2)])
    os.utime(store.path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))  # a coarse clock: the same stamp
    assert len(store.facts()) == 2


def test_slug_names_the_file(tmp_path: Path) -> None:
    for name in ("NVIDIA", "a b", "", "x.y", "é", "a" * 101):
        with pytest.raises(InvalidRecord):
            Store(tmp_path / f"{name}.sqlite3")
