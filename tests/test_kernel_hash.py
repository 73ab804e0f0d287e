"""The kernel hash: blind to comments and white space, not to code, wherever the code stands."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from portkern.kernel_hash import kernel_hash
from portkern.op import Op

SOURCE = (Path(__file__).parent / "ops" / "scale.py").read_text()


def op_from(tmp_path: Path, name: str, source: str) -> Op:
    """The op of ``source``, always under one module name: only the code may differ."""
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("hashed_op", file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["hashed_op"] = module
    spec.loader.exec_module(module)
    found: Op = module.OPS[0]
    kernel_hash(found)
    return found


def test_comments_blank_lines_and_docstrings_change_nothing(tmp_path: Path) -> None:
    plain = kernel_hash(op_from(tmp_path, "plain", SOURCE))
    noisy = SOURCE.replace(
        "    offs_n = tl.program_id(0)", '    """A docstring."""\n\n    # A comment.\n    offs_n   =  tl.program_id(0)'
    )
    assert noisy != SOURCE
    assert kernel_hash(op_from(tmp_path, "noisy", noisy)) == plain


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x.to(tl.float32) * factor", "x.to(tl.float32) + factor"),
        ("(-(-n // block),)", "(n // block + 1,)"),
        ('Blocks(BLOCK_N=config.params["BLOCK_N"])', 'Blocks(BLOCK_N=2 * config.params["BLOCK_N"])'),
    ],
    ids=["kernel", "plan", "fit"],
)
def test_code_changes_it(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    changed = kernel_hash(op_from(tmp_path, "changed", SOURCE.replace(old, new)))
    assert changed != kernel_hash(op_from(tmp_path, "plain", SOURCE))


def test_the_tree_is_the_same_text_in_every_python() -> None:
    """A record made under one Python must not be stale under another: the expected text is spelt out."""
    from portkern.kernel_hash import dump

    tree = ast.parse("@jit\ndef f(x, /, *, B: int = 2):\n    return [x[i:] + B for i in g(*x) if not i], f'{x!r}'\n")
    assert dump(tree) == (
        "Module(body=[FunctionDef(name='f', args=arguments(posonlyargs=[arg(arg='x')], kwonlyargs=[arg(arg='B', "
        "annotation=Name(id='int'))], kw_defaults=[Constant(value=2)]), body=[Return(value=Tuple(elts=["
        "ListComp(elt=BinOp(left=Subscript(value=Name(id='x'), slice=Slice(lower=Name(id='i'))), op=Add(), "
        "right=Name(id='B')), generators=[comprehension(target=Name(id='i'), iter=Call(func=Name(id='g'), "
        "args=[Starred(value=Name(id='x'))]), ifs=[UnaryOp(op=Not(), operand=Name(id='i'))], is_async=0)]), "
        "JoinedStr(values=[FormattedValue(value=Name(id='x'), conversion=114)])]))], decorator_list=[Name(id='jit')])])"
    )


def test_names_inside_a_comprehension_count(tmp_path: Path) -> None:
    """Python 3.11 and 3.12 keep them in different places."""
    listed = SOURCE.replace("(-(-n // block),)", "tuple([_blocks(n, block) for _ in (0,)])")
    helper = "\n\ndef _blocks(n: int, block: int) -> int:\n    return -(-n // block)\n"
    first = kernel_hash(op_from(tmp_path, "first", listed + helper))
    assert kernel_hash(op_from(tmp_path, "second", listed + helper.replace("-(-n", "1 - (-n"))) != first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_A, _B = 1, 2", "_A, _B = 2, 1"),
        ('_TABLE = {"x": 1, "y": -1}', '_TABLE = {"x": -1, "y": 1}'),
        ('_CALLS = {"a": min, "b": _blocks}', '_CALLS = {"a": _blocks, "b": min}'),
        ("partial(_plan, extra=1)", "partial(_plan, extra=2)"),
        (
            "lambda config, work, device: _fit(config, work, device)",
            "lambda config, work, device: _fit(config, work, 0)",
        ),
    ],
)
def test_names_paths_and_arguments_count(tmp_path: Path, old: str, new: str) -> None:
    source = SOURCE.replace("-> Blocks:\n", "-> Blocks:\n    _A + _B + len(_TABLE) + len(_CALLS)\n")
    source = source.replace(
        "input: Meta, factor: float | None) -> Plan:", "input: Meta, factor: Any, extra: int = 0) -> Plan:"
    )
    source = source.replace("plan=_plan", "plan=partial(_plan, extra=1)")
    source = source.replace("fit=_fit", "**{'fit': lambda config, work, device: _fit(config, work, device)}")
    head = (
        'from functools import partial\n\n_A, _B = 1, 2\n_TABLE = {"x": 1, "y": -1}\n\n\n'
        'def _blocks(a, b):\n    return a\n\n\n_CALLS = {"a": min, "b": _blocks}\n'
    )
    source = source.replace("\n\n@triton.jit", f"\n{head}\n\n@triton.jit", 1)
    assert old in source
    assert kernel_hash(op_from(tmp_path, "a", source)) != kernel_hash(op_from(tmp_path, "b", source.replace(old, new)))


def test_kernels_behind_records_and_partials_count() -> None:
    """softmax names its kernels in a record and its plan in a partial: both are looked through."""
    from portkern.kernel_hash import _visit
    from portkern.registry import get

    op, seen = get("softmax"), {}
    _visit(op.plan, frozenset({"portkern.kernels"}), seen)
    names = {name.rpartition(".")[2] for name in seen}
    assert {"_softmax_kernel", "_softmax_tile", "tile_origin", "_softmax_coresident_kernel"} <= names
    assert {"row_plan", "_split", "needs_wide_offsets", "rows_of"} <= names  # the machine's own part of the plan
    assert kernel_hash(get("log_softmax")) != kernel_hash(op)  # the same functions with another argument
    assert kernel_hash(dataclasses.replace(op, fit=op.outputs)) != kernel_hash(op)


def test_functions_reached_through_their_module_count() -> None:
    """``_scalars.gelu``, which the kernels of activations name: a record must not outlive a change of it."""
    from portkern import kernel_hash as hashing
    from portkern.kernels import activations

    seen: dict[str, str] = {}
    hashing._visit(activations._gelu, frozenset({"portkern.kernels"}), seen)
    assert {"portkern.kernels._scalars.gelu", "portkern.kernels._scalars._inner"} <= set(seen)


def names_in(tmp_path: Path, source: str) -> frozenset[str]:
    """The names that count in the function ``f`` of ``source``."""
    from portkern.kernel_hash import _code

    path = tmp_path / "scoped.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("scoped", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: frozenset[str] = _code(module.f)[1]
    return found


@pytest.mark.parametrize(
    "body",
    ["mean = x\n    return mean", "for mean in x: pass", "return [mean := x]", "mean.y = 0\n    mean = 1"],
    ids=["assigned", "loop", "walrus", "attribute"],
)
def test_what_a_function_binds_stands_for_nothing_outside(tmp_path: Path, body: str) -> None:
    assert not any(name.startswith("mean") for name in names_in(tmp_path, f"mean = 1\ndef f(x):\n    {body}\n"))


@pytest.mark.parametrize(
    "source",
    [
        "mean = 1\ndef f(x, mean=mean): return mean",
        "mean = 1\ndef f(x):\n    global mean\n    mean = x",
        "mean = 1\ndef f(x):\n    class Inner:\n        mean = 2\n    return mean",
        "mean = 1\ndef f(x): return [mean for mean in x], mean",
        "mean = lambda g: g\n@mean\ndef f(x):\n    mean = x",
    ],
    ids=["default", "global", "class", "comprehension", "decorator"],
)
def test_what_may_stand_for_something_outside_counts(tmp_path: Path, source: str) -> None:
    assert "mean" in names_in(tmp_path, source + "\n")
