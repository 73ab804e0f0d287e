"""Runs tests/crosscompile: every variant through Triton's compiler, for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_crosscompile(run_folder: Callable[[Path, dict[str, str], float], None]) -> None:
    run_folder(Path(__file__).parent / "crosscompile", {}, 1200)
