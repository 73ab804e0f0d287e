"""Fixtures for pytest: ``from portkern.pytest_fixtures import emulated`` in a conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from portkern.emulator import Counters


@pytest.fixture
def emulated() -> Callable[..., Counters]:
    """``portkern.emulate``: runs a ``@triton.jit`` kernel as an absent GPU would; skips the test without Triton."""
    pytest.importorskip("triton")
    from portkern.emulation import emulate

    return emulate
