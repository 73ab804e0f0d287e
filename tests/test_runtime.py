"""``Runtime`` after a fork: the child's own, of what the parent's was made of, and made when asked for."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern.runtime import Runtime, current, sink, using
from portkern.tuning_db import Database

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work()`` gives in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(write, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(found)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    runtime = Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))
    runtime.ops["mine::nothing"] = object()  # type: ignore[assignment]
    return runtime


def test_a_child_keeps_database_plugins_and_ops(runtime: Runtime) -> None:
    def work() -> list[Any]:
        own = current()
        return [
            str(own.database.home),
            str(own.database.shipped),
            own.plugins is runtime.plugins,
            list(own.ops),
            own is runtime or own.database is runtime.database or own.lock is runtime.lock,
            own is current(),
        ]

    with using(runtime):
        home, shipped = str(runtime.database.home), str(runtime.database.shipped)
        assert in_child(work) == [home, shipped, True, ["mine::nothing"], False, True]
        assert in_child(lambda: in_child(work)) == [home, shipped, True, ["mine::nothing"], False, True]


def test_a_child_that_asks_for_nothing_makes_no_database(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("portkern.runtime.Database", lambda *args: made.append(args) or runtime.database)
    with using(runtime):
        assert in_child(lambda: len(made)) == 0
        assert in_child(lambda: [current() is not None, len(made)]) == [True, 1]


def test_a_parent_that_held_a_lock_does_not_block_its_child(runtime: Runtime) -> None:
    def work() -> bool:
        with current().lock:
            return True

    with using(runtime), runtime.lock:
        assert in_child(work)


def test_a_child_that_leaves_the_block_has_its_own_of_the_outer_one(runtime: Runtime, tmp_path: Path) -> None:
    outer = Runtime(plugins=runtime.plugins, database=Database(tmp_path / "outer"))

    def work(inner: Any) -> list[Any]:
        inner.__exit__(None, None, None)
        return [str(current().database.home), current() is outer]

    with using(outer):
        inner = using(runtime)
        inner.__enter__()
        try:
            assert in_child(lambda: work(inner)) == [str(tmp_path / "outer"), False]
        finally:
            inner.__exit__(None, None, None)
        assert current() is outer


def test_memory_that_nobody_reads_outlives_the_runtime() -> None:
    """A graph that was captured in the block writes to its address afterwards."""
    device, found = torch.device("cpu"), []
    for _ in range(2):
        with using(current().anew()):
            found.append(sink(device).data_ptr())
            gc.collect()
    assert found[0] == found[1] == sink(device).data_ptr()
