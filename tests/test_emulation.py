"""Runs tests/emulation: machine code for an absent GPU, executed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "emulation"
Run = Callable[[Path, dict[str, str], float], None]


@pytest.mark.slow
def test_emulation(run_folder: Run) -> None:
    run_folder(FOLDER, {"PYTEST_ADDOPTS": "-k 'not every_op'"}, 1200)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_op(run_folder: Run, dtype: str) -> None:
    run_folder(FOLDER, {"PYTEST_ADDOPTS": f"-k 'every_op and {dtype}'"}, 1800)
