"""Frozen processes: one lock file answers, whatever is recorded meanwhile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import portkern
from portkern import dispatch, lock
from portkern.config import Config
from portkern.errors import BadLock
from portkern.hot import Prepared
from portkern.kernel_hash import kernel_hash
from portkern.lock import Entry, Lock
from portkern.plan import metas_of
from portkern.registry import get
from portkern.runtime import Runtime, using
from portkern.tuning_db import Database


def situation(runtime: Runtime, shape: tuple[int, ...]) -> dispatch.Situation:
    op = get("softmax")
    metas = metas_of(op.inputs(shape, torch.float32, device="meta"))
    return dispatch.situate(runtime, op, metas, dispatch.reference_device(runtime, "sm90"))


def entry(found: dispatch.Situation, config: Config, kernel: str = "") -> Entry:
    return Entry(found.device.slug, found.problem, config, kernel or kernel_hash(found.op))


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with using(Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))) as made:
        yield made


@pytest.fixture
def config(runtime: Runtime) -> Config:
    """Another one than the default."""
    default = dispatch.resolve(runtime, situation(runtime, (64, 512))).config
    return default.replace(num_warps=default.num_warps * 2)


def test_the_file_answers_in_the_place_of_records(runtime: Runtime, config: Config, tmp_path: Path) -> None:
    found = situation(runtime, (64, 512))
    path = tmp_path / "service.lock"
    Lock([entry(found, config)]).write(path)
    runtime.frozen = Lock.read(path)
    choice = dispatch.resolve(runtime, found)
    assert (choice.layer, choice.config) == ("frozen", config) and runtime.frozen.hash[:12] in choice.reason
    near = dispatch.resolve(runtime, situation(runtime, (64, 500)))
    assert near.layer == "default" and "the lock file has no entry" in near.reason


def test_an_older_kernel_is_said(runtime: Runtime, config: Config) -> None:
    found = situation(runtime, (64, 512))
    runtime.frozen = Lock([entry(found, config, "0" * 16)])
    assert "the kernel has changed" in dispatch.resolve(runtime, found).reason


def test_a_config_that_cannot_run_makes_room(runtime: Runtime, config: Config) -> None:
    found = situation(runtime, (64, 512))
    runtime.frozen = Lock([entry(found, config.replace(options={"waves_per_eu": 2}))])
    choice = dispatch.resolve(runtime, found)
    assert choice.layer == "default" and choice.passed_over[0][0].layer == "frozen"


def test_the_hash_is_of_the_entries_alone(runtime: Runtime, config: Config) -> None:
    a, b = (entry(situation(runtime, shape), config) for shape in ((64, 512), (64, 2048)))
    assert Lock([a, b]).hash == Lock([b, a, a]).hash != Lock([a]).hash


def test_freeze_writes_what_is_called_again_and_again(runtime: Runtime, tmp_path: Path) -> None:
    """The plan of a shape that is served by its prepared call alone may be forgotten, its config is not."""
    found = situation(runtime, (64, 512))
    planned = dispatch.Planned(found, dispatch.resolve(runtime, found), torch.device("cuda:0"))
    runtime.calls.put("key", Prepared(found.op, lambda given: None, (), (), planned))
    portkern.freeze(tmp_path / "service.lock")
    assert len(runtime.plans) == 0
    frozen = Lock.read(tmp_path / "service.lock").get(found.device.slug, found.problem)
    assert frozen is not None and frozen.config == planned.choice.config


def test_freeze_reads_back(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(BadLock, match="not frozen"):
        portkern.lock_hash()
    written = portkern.freeze(tmp_path / "a.lock")
    assert written == portkern.lock_hash() == Lock.read(tmp_path / "a.lock").hash
    with pytest.raises(BadLock, match="cannot write"):
        portkern.freeze(tmp_path / "none" / "a.lock")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no lock file"),
        ("[]", "is no lock file"),
        ('{"schema": "portkern.lock/9"}', "schema 'portkern.lock/9'"),
        ('{"schema": "portkern.lock/1"}', "is no lock file"),
        ('{"schema": "portkern.lock/1", "hash": "0", "entries": []}', "was altered"),
        ('{"schema": "portkern.lock/1", "hash": 7, "entries": []}', "was altered"),
        ('{"schema": "portkern.lock/1", "hash": "0", "entries": [{"device": "x"}]}', "is no lock file"),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.lock"
    path.write_text(text)
    with pytest.raises(BadLock, match=message):
        Lock.read(path)
    with pytest.raises(BadLock, match="cannot read"):
        Lock.read(tmp_path / "none.lock")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BadLock, match="No space left"):
        Lock([]).write(tmp_path / "a.lock")
    assert not list(tmp_path.iterdir())


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "service.lock"
    Lock([]).write(path)
    monkeypatch.setenv(lock.MODE, "frozen")
    monkeypatch.setenv(lock.FILE, str(path))
    found = lock.asked_for()
    assert found is not None and found.hash == json.loads(path.read_text())["hash"]
    monkeypatch.setenv(lock.MODE, "cold")
    with pytest.raises(BadLock, match="'cold'"):
        lock.asked_for()


CHILD = """
import torch, portkern
x = torch.randn(5, 100)
assert torch.allclose(portkern.softmax(x), torch.softmax(x, -1), atol=1e-6)
first = portkern.freeze("service.lock")
y = portkern.softmax(torch.randn(5, 101))
print(first == portkern.lock_hash(), len(portkern.lock.Lock.read(__import__("pathlib").Path("service.lock")).entries))
print(portkern.explain("softmax", x).layer)
"""


def test_in_processes(tmp_path: Path) -> None:
    """In the interpreter: what one process resolved, another answers from the file."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PORTKERN_HOME": str(tmp_path / "home")}
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{CHILD}"]
    wrote = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert wrote.stdout.split() == ["True", "1", "frozen"], wrote.stderr
    code = f"import sys; sys.path.insert(0, {str(root)!r})\nimport torch, portkern\nprint(portkern.lock_hash())"
    frozen = {**environment, lock.MODE: "frozen", lock.FILE: "service.lock"}
    read = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=frozen, capture_output=True, text=True)
    assert read.stdout.strip() == Lock.read(tmp_path / "service.lock").hash, read.stderr
    frozen[lock.FILE] = "none.lock"
    lost = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=frozen, capture_output=True, text=True)
    assert lost.returncode and "cannot read the lock file none.lock" in lost.stderr


def test_a_forked_process_keeps_what_its_parent_read(
    runtime: Runtime, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "service.lock"
    Lock([entry(situation(runtime, (64, 512)), config)]).write(path)
    monkeypatch.setenv("PORTKERN_MODE", "frozen")
    monkeypatch.setenv("PORTKERN_LOCK", str(path))
    parent = Runtime(database=runtime.database)
    assert parent.frozen is not None
    path.unlink()
    assert parent.anew().frozen is parent.frozen
    assert runtime.anew().frozen is None
