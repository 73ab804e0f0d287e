"""Runs tests/interpreter: kernels on CPU tensors, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_interpreter(run_folder: Callable[[Path, dict[str, str], float], None]) -> None:
    run_folder(Path(__file__).parent / "interpreter", {"TRITON_INTERPRET": "1"}, 1200)
