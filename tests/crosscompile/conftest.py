"""The versions of Triton that CI tests with take turns: of a test with many parameters each runs its part.

Drawn by name, so that either meets every target with every kind of work; all of them with PORTKERN_FULL_SWEEP=1, and
where tests are asked for by name. How many instructions a version makes is for each to show.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter

import pytest
import triton

FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"
OLDEST = triton.__version__.startswith("3.6.")
MANY = 9  # instances of one function; what has fewer runs with either
BOTH = "test_instructions.py"
FOR_OLDEST = 160  # of 256: the row of the newest has more else to do


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FULL or config.option.keyword or any("::" in argument for argument in config.args):
        return
    counts = Counter(_function(item) for item in items)
    shared = [item for item in items if counts[_function(item)] >= MANY and item.path.name != BOTH]
    left = {item for item in shared if (_draw(item) < FOR_OLDEST) != OLDEST}
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _draw(item: pytest.Item) -> int:
    return hashlib.sha256(item.nodeid.encode()).digest()[0]
