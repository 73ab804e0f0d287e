"""Triton's key of a kernel, made so that it is the same in every process."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any


def settled(kernel: Any, given: Iterable[Any] = ()) -> Any:
    """``kernel``, after the keys of all that it calls, and of the functions among ``given``, have been made.

    Triton 3.6 enters the constants of a callee into the key of its caller where the callee's own key is there already,
    and leaves them out where it is not. So which kernel a process launched first decided whether it found the others on
    disk: 15 of 30 kernels that had been compiled for one GPU were compiled a second time. Callees first, there is one
    key. Triton 3.9 has one anyway.
    """
    for function in (*given, kernel):
        if _jitted(function) and function.hash is None:
            _make(function, set())
    return kernel


def _jitted(function: Any) -> bool:
    """Whether it is a function that Triton compiles, and has a key: what the interpreter runs has none."""
    return hasattr(type(function), "cache_key") and hasattr(function, "fn") and hasattr(function, "hash")


def _make(function: Any, above: set[int]) -> None:
    """Make the key of ``function``, those of its callees first; ``above`` are its callers."""
    callers = above | {id(function)}
    for callee in _callees(function):
        if callee.hash is None and id(callee) not in callers:
            _make(callee, callers)
    _ = function.cache_key


def _callees(function: Any) -> Iterator[Any]:
    """What ``function`` may call, by name, by way of a module, or by default: all of it that is there."""
    plain = function.fn
    outside, names = plain.__globals__, list(_names(plain.__code__))
    found = [outside[name] for name in names if name in outside]
    found += inspect.getclosurevars(plain).nonlocals.values()
    modules = [each for each in found if isinstance(each, ModuleType)]
    found += [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
    found += (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values())
    return (each for each in found if _jitted(each))


def _names(code: CodeType) -> Iterator[str]:
    """The names in ``code``, those in a comprehension included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
