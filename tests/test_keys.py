"""Triton's key of a kernel does not depend on which kernels the process launched before it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from portkern.executors.keys import keyed

HELPERS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3.0)

@triton.jit
def scaled(x):
    return x * FACTOR

@triton.jit
def both(x, y, Then: tl.constexpr = scaled):
    return scaled(x) + Then(y)

@triton.jit
def outside(x):  # whose name is no global of the kernels
    return scaled(x) + 1.0
"""
KERNELS = """
import triton
import triton.language as tl
import {helpers} as helpers
from types import ModuleType
from {helpers} import both

shelf = ModuleType("shelf")
shelf.inner = helpers

def made(inner):
    @triton.jit
    def by_closure(x_ptr):
        tl.store(x_ptr, inner(tl.load(x_ptr)))
    return by_closure

closed = made(helpers.scaled)

@triton.jit
def by_module_in_module(x_ptr):
    tl.store(x_ptr, shelf.inner.outside(tl.load(x_ptr)))

@triton.jit
def by_name(x_ptr):
    tl.store(x_ptr, both(tl.load(x_ptr), 1.0))

@triton.jit
def by_module(x_ptr):
    tl.store(x_ptr, helpers.outside(tl.load(x_ptr)))

@triton.jit
def given(x_ptr, Function: tl.constexpr):
    tl.store(x_ptr, Function(tl.load(x_ptr), 2.0))
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the two modules anew, from the same files, so that no key of theirs has been made."""
    (tmp_path / "key_helpers.py").write_text(HELPERS)
    (tmp_path / "key_kernels.py").write_text(KERNELS.format(helpers="key_helpers"))

    def make() -> tuple[ModuleType, ModuleType]:
        found = []
        for name in ("key_helpers", "key_kernels"):
            spec = util.spec_from_file_location(name, tmp_path / f"{name}.py")
            assert spec is not None and spec.loader is not None
            module = util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            found.append(module)
        return found[0], found[1]

    return make


@pytest.mark.parametrize("before", [(), ("scaled",), ("both", "outside"), ("scaled", "both")], ids=str)
@pytest.mark.parametrize("name", ["by_name", "by_module", "by_module_in_module", "closed"])
def test_a_key_does_not_depend_on_what_was_launched_before(fresh, name: str, before: tuple[str, ...]):
    _, kernels = fresh()
    expected = keyed(getattr(kernels, name)).cache_key
    helpers, kernels = fresh()
    for each in before:
        keyed(getattr(helpers, each))
    assert keyed(getattr(kernels, name)).cache_key == expected
    assert keyed(getattr(kernels, name)) is getattr(kernels, name)


def test_a_function_that_is_given_has_one_key_too(fresh):
    helpers, kernels = fresh()
    keyed(kernels.given, [4, helpers.both, None])
    expected = helpers.both.cache_key
    helpers, kernels = fresh()
    keyed(helpers.scaled)
    keyed(kernels.given, [4, helpers.both, None])
    assert helpers.both.cache_key == expected


class InTheMaking:
    """Stands for a function whose key another thread is making: a placeholder, and who asks for the key waits."""

    def __init__(self, fn: Callable[..., Any], asked: list[str]) -> None:
        self.fn, self.hash, self._asked = fn, "recursion:", asked

    def __call__(self) -> None: ...

    @property
    def cache_key(self) -> str:
        self._asked.append(self.fn.__name__)
        return "made"


def test_a_key_that_another_thread_is_making_is_waited_for():
    asked: list[str] = []
    callee = InTheMaking(lambda x: x, asked)
    caller = InTheMaking(lambda x: callee, asked)
    callee.fn.__name__, caller.fn.__name__, caller.hash = "callee", "caller", None
    keyed(caller)
    assert asked == ["callee", "caller"]


ALL = """
import importlib, json, pkgutil, random, sys
from portkern import kernels
from portkern.executors.keys import keyed
from triton.runtime.jit import JITFunction
found = {}
for each in pkgutil.iter_modules(kernels.__path__):
    module = importlib.import_module(f"{kernels.__name__}.{each.name}")
    found |= {f"{each.name}.{name}": value for name, value in vars(module).items() if isinstance(value, JITFunction)}
names = sorted(found)
random.Random(int(sys.argv[1])).shuffle(names)
for name in names:
    keyed(found[name])
print(json.dumps({name: found[name].cache_key for name in sorted(names)}))
"""


def test_every_kernel_has_the_same_key_in_every_process():
    """Without callees first, 28 of 246 had another in the second process, with Triton 3.6."""
    first, second = (
        json.loads(subprocess.run([sys.executable, "-c", ALL, str(seed)], check=True, capture_output=True).stdout)
        for seed in (1, 2)
    )
    assert len(first) > 200
    assert first == second
