"""Runs tests/emulation: machine code for an absent GPU, executed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_emulation(run_folder: Callable[[Path, dict[str, str], float], None]) -> None:
    run_folder(Path(__file__).parent / "emulation", {}, 1200)
