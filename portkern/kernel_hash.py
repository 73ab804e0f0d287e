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
    tree = _without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(plain))))
    seen[name] = dump(tree)
    values = [piece for value in _named_values(plain, tree) for piece in _pieces(value)]
    for value in values:
        constant = getattr(value, "value", value)  # tl.constexpr wraps one
        if callable(value) and hasattr(_unwrap(value), "__code__") and _home(value) == home:
            _visit(value, home, seen)
        elif isinstance(constant, (int, float, str)):
            seen[f"{name}:{constant!r}"] = ""  # constants that the code names


def dump(node: Any) -> str:
    """The syntax tree as text that is the same in every Python: ``ast.dump`` shows fields that only some versions
    have, and shows or hides empty ones."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in _VERSIONED)
        shown = (f"{name}={dump(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(shown)})"
    if isinstance(node, list):
        return f"[{', '.join(map(dump, node))}]"
    return repr(node)


_VERSIONED = ("ctx", "kind", "type_comment", "type_ignores", "type_params")


def _named_values(function: Callable[..., Any], tree: ast.AST) -> list[Any]:
    """What the names in ``tree`` stand for outside the function. The tree is asked, not the byte code, which holds
    the names inside a comprehension in some Pythons only."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return [outside[name] for name in sorted(names) if name in outside]


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
