"""What the tuner's tests share: an empty database, and runs in the interpreter with a stub timer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portkern.runtime import Runtime, using
from portkern.tuner import TuneReport, tune
from portkern.tuning_db import Database

TESTS = Path(__file__).parent
OPS = str(TESTS / "ops" / "shift.py")
TIMER = f"{TESTS / 'stub_timer.py'}:TIMER"
SHAPES = ["100"]
PATIENCE = 10.0  # a hanging candidate costs a test that long


@pytest.fixture(name="home")
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty database, and the stub timer's log, for one test."""
    monkeypatch.setenv("PORTKERN_HOME", str(tmp_path))
    monkeypatch.setenv("PORTKERN_ARCH", "sm90")
    monkeypatch.setenv("PORTKERN_TEST_LOG", str(tmp_path / "log"))
    with using(Runtime(database=Database(tmp_path))):
        yield tmp_path


def interpreted(*ops: str, **changes: Any) -> TuneReport:
    values: dict[str, Any] = {
        "device": "interpreter", "timer": TIMER, "ops_files": [OPS], "shapes": SHAPES, "budget": "5m",
        "patience": PATIENCE,
    }  # fmt: skip
    return tune(*ops, **{**values, **changes})
