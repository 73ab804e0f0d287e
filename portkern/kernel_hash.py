"""The kernel hash: equal for equal code, whatever its comments and white space."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from portkern.op import Op

CORE = "portkern"  # whose functions turn plans of shared kinds into launches


@cache
def kernel_hash(op: Op) -> str:
    """Hash of the syntax trees of the op's ``plan`` and ``fit``, the kernels they name, and every function those call,
    as far as they live in the op's package (or lone file) or in portkern, with the constants that they name."""
    seen: dict[str, str] = {}
    for name in ("plan", "fit"):
        # What a shared plan is given, a scalar function say, has a home of its own.
        pieces = list(_pieces(getattr(op, name), name))
        homes = frozenset(_home(value) for _, value in pieces if hasattr(_unwrap(value), "__code__"))
        for path, value in pieces:
            _note(path, value, homes, seen)
    text = "\n".join(f"{name}\n{seen[name]}" for name in sorted(seen))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _note(path: str, value: Any, homes: frozenset[str], seen: dict[str, str]) -> None:
    """Enter what stands at ``path``: a constant by its value, a function by its name, then its code once."""
    constant = getattr(value, "value", value)  # tl.constexpr wraps one
    if isinstance(constant, (int, float, str, bool, type(None))):
        seen[path] = repr(constant)
    elif hasattr(_unwrap(value), "__code__") and _home(value) in (*homes, CORE):
        seen[path] = _visit(value, homes, seen)


def _visit(function: Any, homes: frozenset[str], seen: dict[str, str]) -> str:
    """Enter the code of ``function`` and what it names; gives its qualified name."""
    plain = _unwrap(function)
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in seen:
        return name
    seen[name], names = _code(plain)
    for outer, value in _named_values(plain, names):
        for path, piece in _pieces(value, f"{name}:{outer}"):
            _note(path, piece, homes, seen)
    return name


@cache  # ops share most of what they name: 4.4 s for all of them without, 0.6 with, on a 2-core machine
def _code(function: Any) -> tuple[str, frozenset[str]]:
    """The code of a plain ``function`` as text, and the names in it."""
    try:
        tree = _without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (SyntaxError, OSError):  # a lambda in the middle of a line, or no source: the byte code stands for it
        code = function.__code__
        return f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}", frozenset(code.co_names)
    nodes, own = list(ast.walk(tree)), _locals(tree)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {
        f"{node.value.id}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return dump(tree), frozenset(name for name in names if name.partition(".")[0] not in own)


def _locals(tree: ast.AST) -> set[str]:
    """Names of the function that ``tree`` is: they stand for nothing outside of it. Not those of scopes within, which
    may stand for something outside elsewhere, and which only some Pythons count among the function's."""
    found, shared, left = set[str](), set[str](), [tree]
    while left:
        node = left.pop()
        within = [each for each in ast.iter_child_nodes(node) if not isinstance(each, _SCOPES)]
        left += ast.iter_child_nodes(node) if isinstance(node, ast.Module) else within
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Global):
            shared |= set(node.names)
        elif isinstance(node, ast.FunctionDef):  # what stands around it is evaluated outside
            defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
            outside = [name for each in (*defaults, *node.decorator_list) for name in ast.walk(each)]
            shared |= {name.id for name in outside if isinstance(name, ast.Name)}
    return found - shared


_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip


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


def _named_values(function: Callable[..., Any], names: frozenset[str]) -> list[tuple[str, Any]]:
    """What ``names`` stand for outside the function. They come from the tree, not the byte code, which holds the names
    inside a comprehension in some Pythons only."""
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    found = [(name, outside[name]) for name in sorted(names) if name in outside]
    for name in sorted(names):  # a function by way of its module: _scalars.gelu
        module, _, inner = name.partition(".")
        if inner and inspect.ismodule(outside.get(module)) and hasattr(outside[module], inner):
            value = getattr(outside[module], inner)
            found += [(name, value)] if hasattr(_unwrap(value), "__code__") else []
    return found


def _pieces(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """``value`` with its path, or what it is made of where it is a record, a container or a partial function."""
    if isinstance(value, functools.partial):
        yield from _pieces(value.func, f"{path}()")
        yield from _pieces((value.args, value.keywords), f"{path}(...)")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _pieces(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _pieces(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _pieces(item, f"{path}[{index}]")
    else:
        yield path, value


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
