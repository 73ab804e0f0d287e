"""How many values a Triton function of scalars gives, as far as its source says."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import triton.language as tl

NOTHING, SINGLE = 0, -1  # else the length of a tuple; None: the source does not say
# Of triton.language: those that give one value, whatever they are given.
ELEMENTWISE = frozenset(
    "abs cast cdiv ceil clamp cos div_rn erf exp exp2 fdiv floor fma full log log2 maximum minimum rsqrt sin sqrt "
    "sqrt_rn umulhi where zeros".split()
)


def values_given(function: Any, depth: int = 8) -> int | None:
    """SINGLE, NOTHING, the length of the tuple that ``function`` gives, or None where that is not known: its ways out
    differ, or a name stands for something that is not followed. ``depth``: calls that are."""
    tree = _tree(function)
    if tree is None:
        return None
    own = list(_own_nodes(tree))
    kinds = _Kinds(function, tree, own, depth)
    return _common([kinds.of(node.value) if node.value else NOTHING for node in own if isinstance(node, ast.Return)])


def _tree(function: Any) -> ast.FunctionDef | None:
    source = getattr(function, "src", None)  # Triton has read it already, but not for its interpreter
    try:
        tree = ast.parse(source if isinstance(source, str) else textwrap.dedent(inspect.getsource(function.fn)))
    except (OSError, SyntaxError):
        return None
    found = tree.body[0]
    return found if isinstance(found, ast.FunctionDef) else None


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, and in none inside it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield node
            yield from _own_nodes(node)


def _common(found: list[int | None]) -> int | None:
    if not found:
        return NOTHING
    return found[0] if all(each == found[0] for each in found) else None


class _Kinds:
    """What the expressions of one function stand for."""

    def __init__(self, function: Any, tree: ast.FunctionDef, own: list[ast.AST], depth: int) -> None:
        self._function, self._depth = function.fn, depth
        self._parameters = {each.arg for each in tree.args.args}
        self._assigned: dict[str, list[ast.expr | None]] = {}  # None: in a way that is not followed
        self._asked: set[str] = set()
        simple: dict[int, ast.expr] = {}
        for node in own:
            if isinstance(node, ast.Assign):
                simple.update({id(target): node.value for target in node.targets})
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
                simple[id(node.target)] = node.value
        for node in own:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._assigned.setdefault(node.id, []).append(simple.get(id(node)))

    @cached_property
    def _outside(self) -> Mapping[str, Any]:
        return {**self._function.__globals__, **inspect.getclosurevars(self._function).nonlocals}

    def of(self, node: ast.expr | None) -> int | None:
        """SINGLE, the length of a tuple, or None."""
        if isinstance(node, ast.Tuple):
            return None if any(isinstance(each, ast.Starred) for each in node.elts) else len(node.elts)
        if isinstance(node, (ast.Constant, ast.Compare, ast.BoolOp)):
            return SINGLE
        if isinstance(node, ast.UnaryOp):
            return self.of(node.operand)
        if isinstance(node, ast.BinOp):
            return SINGLE if self.of(node.left) == self.of(node.right) == SINGLE else None
        if isinstance(node, ast.IfExp):
            return _common([self.of(node.body), self.of(node.orelse)])
        if isinstance(node, ast.Name):
            return self._of_name(node.id)
        return self._of_call(node) if isinstance(node, ast.Call) else None

    def _of_name(self, name: str) -> int | None:
        if name in self._asked:  # a value that is made of itself, in a loop
            return SINGLE
        found: list[int | None] = [SINGLE] if name in self._parameters else []
        if name in self._assigned:
            self._asked.add(name)
            found += [self.of(each) for each in self._assigned[name]]
            self._asked.discard(name)
        elif not found:
            value = self._outside.get(name)
            return SINGLE if isinstance(value, (int, float, tl.constexpr)) else None
        return _common(found)

    def _of_call(self, node: ast.Call) -> int | None:
        called = self._value(node.func)
        name = getattr(called, "__name__", "")
        if name in ELEMENTWISE and getattr(tl, name, None) is called:
            return SINGLE
        if hasattr(called, "fn") and self._depth:
            return values_given(called, self._depth - 1)
        # A method, as in x.to(tl.float32), gives what its value is.
        return self.of(node.func.value) if isinstance(node.func, ast.Attribute) and node.func.attr == "to" else None

    def _value(self, node: ast.expr) -> Any:
        """What a name, or an attribute of a module, stands for outside of the function."""
        if isinstance(node, ast.Name):
            inside = node.id in self._parameters or node.id in self._assigned
            return None if inside else self._outside.get(node.id)
        return getattr(self._value(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None
