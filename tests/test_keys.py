"""Triton's key of a kernel does not depend on which kernels the process launched before it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from portkern.executors.keys import settled

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
"""
KERNELS = """
import triton
import triton.language as tl
import {helpers} as helpers
from {helpers} import both

def made(inner):
    @triton.jit
    def by_closure(x_ptr):
        tl.store(x_ptr, inner(tl.load(x_ptr)))
    return by_closure

closed = made(helpers.scaled)

@triton.jit
def by_name(x_ptr):
    tl.store(x_ptr, both(tl.load(x_ptr), 1.0))

@triton.jit
def by_module(x_ptr):
    tl.store(x_ptr, helpers.both(tl.load(x_ptr), 1.0))

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


@pytest.mark.parametrize("before", [(), ("scaled",), ("both",), ("scaled", "both")], ids=str)
@pytest.mark.parametrize("name", ["by_name", "by_module", "closed"])
def test_a_key_does_not_depend_on_what_was_launched_before(fresh, name: str, before: tuple[str, ...]):
    _, kernels = fresh()
    expected = settled(getattr(kernels, name)).cache_key
    helpers, kernels = fresh()
    for each in before:
        settled(getattr(helpers, each))
    assert settled(getattr(kernels, name)).cache_key == expected
    assert settled(getattr(kernels, name)) is getattr(kernels, name)


def test_a_function_that_is_given_has_one_key_too(fresh):
    helpers, kernels = fresh()
    settled(kernels.given, [4, helpers.both, None])
    expected = helpers.both.cache_key
    helpers, kernels = fresh()
    settled(helpers.scaled)
    settled(kernels.given, [4, helpers.both, None])
    assert helpers.both.cache_key == expected


ALL = """
import importlib, json, pkgutil, random, sys
from portkern import kernels
from portkern.executors.keys import settled
from triton.runtime.jit import JITFunction
found = {}
for each in pkgutil.iter_modules(kernels.__path__):
    module = importlib.import_module(f"{kernels.__name__}.{each.name}")
    found |= {f"{each.name}.{name}": value for name, value in vars(module).items() if isinstance(value, JITFunction)}
names = sorted(found)
random.Random(int(sys.argv[1])).shuffle(names)
for name in names:
    settled(found[name])
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
