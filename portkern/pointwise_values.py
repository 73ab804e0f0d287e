"""How many values a Triton function of scalars gives, as far as its return statements show at once."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

NOTHING, SINGLE = 0, -1  # else the length of a tuple; None: its source does not show it


def values_given(function: Any) -> int | None:
    """SINGLE, NOTHING, the length of the tuple that ``function`` gives, or None."""
    source = getattr(function, "src", None)  # Triton has read it already, but not for its interpreter
    try:
        tree = ast.parse(source if isinstance(source, str) else textwrap.dedent(inspect.getsource(function.fn)))
    except (OSError, SyntaxError):
        return None
    own = list(_own_nodes(tree.body[0]))
    stored = {node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    single = set(inspect.signature(function.fn).parameters) - stored
    found = {_shown(node.value, single) if node.value else NOTHING for node in own if isinstance(node, ast.Return)}
    return found.pop() if len(found) == 1 else None if found else NOTHING


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, and in none inside it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield node
            yield from _own_nodes(node)


def _shown(node: ast.expr, single: set[str]) -> int | None:
    """SINGLE, the length of a tuple, or None; ``single`` are the names of scalars."""
    if isinstance(node, ast.Tuple):
        return None if any(isinstance(each, ast.Starred) for each in node.elts) else len(node.elts)
    if isinstance(node, ast.Name):
        return SINGLE if node.id in single else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # tuples add up too
        return SINGLE if SINGLE in (_shown(node.left, single), _shown(node.right, single)) else None
    # No tuple is multiplied by a value, negated or compared in Triton.
    return SINGLE if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant)) else None
