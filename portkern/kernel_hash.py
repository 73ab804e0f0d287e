"""The kernel hash: equal for equal code, whatever its comments and white space."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from portkern.op import Op


@cache
def kernel_hash(op: Op) -> str:
    """Hash of the syntax trees of the op's ``plan`` and ``fit``, the kernels they name, and every
    function those call, as far as they live in the same package (or the same lone file)."""
    seen: dict[str, str] = {}
    for root in (op.plan, op.fit):
        _visit(root, _home(root), seen)
    text = "\n".join(f"{name}\n{seen[name]}" for name in sorted(seen))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _visit(function: Any, home: str, seen: dict[str, str]) -> None:
    plain = _unwrap(function)
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in seen:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    seen[name] = ast.dump(_without_docstrings(tree), annotate_fields=False)
    values = [piece for value in _named_values(plain) for piece in _pieces(value)]
    for value in values:
        constant = getattr(value, "value", value)  # tl.constexpr wraps one
        if callable(value) and hasattr(_unwrap(value), "__code__") and _home(value) == home:
            _visit(value, home, seen)
        elif isinstance(constant, (int, float, str)):
            seen[f"{name}:{constant!r}"] = ""  # constants that the code names


def _named_values(function: Callable[..., Any]) -> list[Any]:
    closure = inspect.getclosurevars(function)
    named = {**closure.globals, **closure.nonlocals}
    return [named[name] for name in sorted(named)]


def _pieces(value: Any) -> Iterator[Any]:
    """``value``, or what it is made of where it is a record or a container of functions."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _pieces(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _pieces(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _pieces(item)
    else:
        yield value


def _unwrap(function: Any) -> Any:
    """The Python function behind a JITFunction, a partial or a decorator."""
    while True:
        inner = getattr(function, "fn", None) or getattr(function, "func", None)
        inner = inner or getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        function = inner


def _home(function: Any) -> str:
    """Where code that belongs together lives: the package of the function's module, or, for a
    module on its own, the module."""
    module = str(getattr(_unwrap(function), "__module__", ""))
    return module.rpartition(".")[0] or module


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        constant = body[0].value
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            node.body = body[1:]  # type: ignore[attr-defined]
    return tree
