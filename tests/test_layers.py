"""Imports run one way: no module needs, even in a function, what needs it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping

import pytest

from tests.sources import CODE, ROOT, files, name_of


def module_of(name: str) -> str:
    """A file's name as it is imported: the folders beside ``portkern`` are its sub-packages."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "portkern" else ["portkern", *parts])


def imported(source: str) -> Iterator[str]:
    """What runs at import and in functions names; what stands there for the type checker alone is no need."""
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            left += ast.iter_child_nodes(node)


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules of which each needs the one before it, the last being the first; none where imports run one way."""
    needs: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = {name if name in sources else name.rpartition(".")[0] for name in imported(source)}
        needs[module] = (found & sources.keys()) - {module}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle() -> None:
    paths = [path for path in files(*CODE, "kernels") if path != ROOT / "portkern/__init__.py"]  # which loads on demand
    sources = {module_of(name_of(path)): path.read_text() for path in paths}
    assert len(sources) > 150
    assert circle(sources) == []


@pytest.mark.parametrize(
    "back", ["import portkern.a", "from portkern import a", "def f():\n    from portkern.a import b"]
)
def test_a_circle_is_found(back: str) -> None:
    assert set(circle({"portkern.a": "from portkern.b import c", "portkern.b": back})) == {"portkern.a", "portkern.b"}


def test_types_are_no_circle() -> None:
    back = "if TYPE_CHECKING:\n    from portkern.a import b"
    assert circle({"portkern.a": "from portkern.b import c", "portkern.b": back}) == []
