"""Runs tests/emulation: machine code for an absent GPU, executed on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import triton

FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"
# The dtypes of 16 bits are for the oldest Triton; in float32 either version takes every second case.
DTYPES = ["fp32", "fp16", "bf16"] if FULL or triton.__version__.startswith("3.6.") else ["fp32"]
FOLDER = Path(__file__).parent / "emulation"
Run = Callable[[Path, dict[str, str], float], None]


@pytest.mark.slow
def test_emulation(run_folder: Run) -> None:
    run_folder(FOLDER, {"PYTEST_ADDOPTS": "-k 'not every_op'"}, 1200)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op(run_folder: Run, dtype: str) -> None:
    run_folder(FOLDER, {"PYTEST_ADDOPTS": f"-k 'every_op and {dtype}'"}, 1800)
