"""GPU arithmetic gives no floating-point warnings: numpy, which stands in for it here, shall not either."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    with numpy.errstate(all="ignore"):
        yield
