"""Triton's key of a kernel, made so that it is the same in every process."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any


def keyed(kernel: Any, given: Iterable[Any] = ()) -> Any:
    """``kernel``, after the keys of all that it calls, and of the functions among ``given``, have been made.

    Triton 3.6 enters the constants of a callee into the key of its caller where the callee's own key is there already,
    and leaves them out where it is not. So which kernel a process launched first decided whether it found the others on
    disk: of 30 kernels that had been compiled to tune four ops, 15 were compiled a second time. Callees first, there is
    one key. Triton 3.9 has one anyway.
    """
    for function in (*given, kernel):
        if _jitted(function) and function.hash is None:
            _make(function, set())
    return kernel


def _jitted(function: Any) -> bool:
    """Whether it is a function that Triton compiles, and has a key: what the interpreter runs has none.

    Asked of each constant of a launch, nearly all of them numbers: 22 take 1.4 us where these are told first, 6 if not.
    """
    return (
        callable(function)
        and hasattr(type(function), "cache_key")
        and hasattr(function, "fn")
        and hasattr(function, "hash")
    )


def _make(function: Any, above: set[int]) -> None:
    """Make the key of ``function``, those of its callees first; ``above`` are its callers.

    One that has a hash is asked too: it may be the placeholder of another thread, which is waited for at Triton's lock.
    """
    callers = above | {id(function)}
    if function.hash is None:
        for callee in _callees(function):
            if id(callee) not in callers:
                _make(callee, callers)
    _ = function.cache_key


def _callees(function: Any) -> Iterator[Any]:
    """What ``function`` may call, by name, by way of a module, or by default: all of it that is there."""
    plain = function.fn
    outside, names = plain.__globals__, list(_names(plain.__code__))
    found = [outside[name] for name in names if name in outside]
    found += inspect.getclosurevars(plain).nonlocals.values()
    modules = {id(each): each for each in found if isinstance(each, ModuleType)}
    waiting = list(modules.values())
    while waiting:  # modules in modules, as in ``package.module.function``
        module = waiting.pop()
        inside = [getattr(module, name) for name in names if hasattr(module, name)]
        found += inside
        new = {id(each): each for each in inside if isinstance(each, ModuleType) and id(each) not in modules}
        modules |= new
        waiting += new.values()
    found += (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values())
    return (each for each in found if _jitted(each))


def _names(code: CodeType) -> Iterator[str]:
    """The names in ``code``, those in a comprehension included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
