"""What stands in for a GPU here: numpy, whose warnings no GPU gives, and Triton's interpreter and its slow look-ups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    with numpy.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_patches() -> Iterator[None]:
    """The interpreter looks through the whole language for builtins at each call of a device function: more than 40 %
    of the time of pointwise kernels. Which names those are is looked up once, while nothing is patched."""

    @functools.cache
    def names_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        assert names_of(package)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield
