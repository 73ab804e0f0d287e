"""What the design promises of the whole source tree; each rule is shown to be able to fail."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portkern.registry import all_ops, public_names
from tests.sources import CODE, ROOT, files, name_of

LONGEST_FUNCTION, LONGEST_FILE = 60, 300
STRINGS = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
VENDOR = re.compile(
    r"(?<![a-z0-9])(nvidia|amd|cuda|hip|rocm|ptx|ptxas|cubin|nvml|amdgcn|hsaco|instinct|geforce|radeon|hopper|ampere|"
    r"blackwell|cdna\d?|rdna\d?|wgmma|mfma|sm_?\d{2,3}[a-z]?|gfx\d\w*|[abhv]\d00|mi\d{3}[a-z]?|rtx)(?![a-z0-9])"
)
TORCH = re.compile(r"\btorch \. (((version|backends) \. )?(cuda|hip)|_C( \. \w+)+)$")  # torch's own name
# Texts that may show a spelling, never names: a hook's or an error's example, words dropped from marketing names,
# and the distribution in which torch for one vendor brings Triton.
EXAMPLES = {
    "portkern/hookspecs.py": {"gfx942", "sm80", "sm89", "sm90", "sm_90a"},
    "portkern/target.py": {"geforce", "gfx942", "h100", "instinct", "nvidia", "sm80", "sm90"},
    "portkern/toolchain.py": {"rocm"},
    "portkern/tuner/requests.py": {"sm90"},
}


# ---- one source: who may mention what -----------------------------------------------------------------------------


def vendor_words(source: str) -> tuple[set[str], set[str]]:
    """Vendor and architecture words among the names, and in the texts and comments, of ``source``.

    ``cuda`` is also torch's name of every GPU: ``torch.cuda``, functions in ``torch._C`` and the text 'cuda' are no
    vendor's.
    """
    names: set[str] = set()
    texts: set[str] = set()
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        found = set(VENDOR.findall(token.string.lower()))
        before = f"{before} {token.string}"[-200:]  # more than any of TORCH
        if token.type in STRINGS:
            texts |= found - {"cuda"}
        elif token.type == tokenize.NAME and not TORCH.search(before):
            names |= found
    return names, texts


# Ops that are called like a method or function of Python: they are mentioned where a text is just that.
WORDS = {"add", "all", "any", "max", "mean", "min", "sum"}


def op_names(source: str, ops: list[str]) -> set[str]:
    """Names of ``ops`` in the code of ``source``; docstrings may show an example, and ``mine::<op>`` is another."""
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    found = WORDS & set(ops) & {text for text in texts if isinstance(text, str)}
    ops = [op for op in ops if op not in WORDS]
    code = ast.unparse(_Bare().visit(ast.parse(source))).replace("torch.backends.cuda.matmul", "")  # torch's setting
    code = re.sub(r"(scatter_reduce_\([^()]*, )'\w+'\)", r"\1)", code)  # and its word for how
    return found | {op for op in ops if re.search(rf"(?<![a-zA-Z0-9:]){re.escape(op)}(?![a-zA-Z0-9])", code)}


class _Bare(ast.NodeTransformer):
    """Takes texts that are no values away: docstrings. Comments are not in the tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else self.generic_visit(node)


@pytest.mark.parametrize("path", files("kernels"), ids=name_of)
def test_kernels_mention_no_vendor(path: Path) -> None:
    assert not VENDOR.findall(path.read_text().lower())


def test_the_core_mentions_no_vendor() -> None:
    found = {name_of(path): vendor_words(path.read_text()) for path in files("portkern", "peers")}
    assert {file: names for file, (names, _) in found.items() if names} == {}
    assert {file: texts for file, (_, texts) in found.items() if texts} == EXAMPLES


# In an instruction set `add` and `max` are instructions.
NO_INSTRUCTIONS = [path for path in files("portkern", "backends") if "_emulator" not in name_of(path)]


@pytest.mark.parametrize("path", NO_INSTRUCTIONS, ids=name_of)
def test_core_and_backends_mention_no_op(path: Path) -> None:
    ops = [name for name in all_ops() if "::" not in name]
    assert {"softmax", "log_softmax_backward"} <= set(ops)
    assert not op_names(path.read_text(), ops)
    if path.is_relative_to(ROOT / "backends"):
        text = path.read_text()
        assert not [op for op in ops if op not in WORDS and re.search(rf"(?<![a-zA-Z]){op}(?![a-zA-Z])", text)]


@pytest.mark.parametrize(
    ("source", "names", "texts"),
    [
        ("if device.is_hip: pass", {"hip"}, set()),
        ("if arch == 'sm90': pass", set(), {"sm90"}),
        ("x = 1  # faster on an H100", set(), {"h100"}),
        ("'''For gfx942.'''", set(), {"gfx942"}),
        ("cuda = torch.cuda.device('cuda:1')", {"cuda"}, set()),
        ("stream = torch._C._cuda_getCurrentRawStream; torch_cuda = 1", {"cuda"}, set()),
        ("torch.version.hip or torch.version.cuda", set(), set()),
        ("warp = chip + small_amd64", set(), set()),
    ],
)
def test_vendor_words_are_found(source: str, names: set[str], texts: set[str]) -> None:
    assert vendor_words(source) == (names, texts)


def test_op_names_are_found() -> None:
    ops = ["softmax", "log_softmax"]
    assert op_names("def f():\n    '''As softmax.'''\n    softmaxes = 1  # softmax", ops) == set()
    assert op_names("if op.name == 'softmax': pass", ops) == {"softmax"}
    assert op_names("def plan_log_softmax(): pass", ops) == {"softmax", "log_softmax"}
    assert op_names("x.scatter_reduce_(0, *at, 'amax')", ["amax"]) == set()
    assert op_names("x.scatter_reduce_(0, *at, 'amax').amax(1)", ["amax"]) == {"amax"}
    assert op_names("found.add(sum(x))", ["add", "sum", "add_norm"]) == set()
    assert op_names("if name == 'add': add_norm()", ["add", "sum", "add_norm"]) == {"add", "add_norm"}


# ---- shape of the source ------------------------------------------------------------------------------------------


def too_long(source: str) -> list[str]:
    """Functions that are too long, and ``file`` if the whole is."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    found = [node.name for node in functions if node.end_lineno - node.lineno + 1 >= LONGEST_FUNCTION]
    return found + ["file"] * (source.count("\n") > LONGEST_FILE)


def swallowed(source: str) -> list[int]:
    """Lines that catch anything and say nothing of it: a bare ``except``, or one of Exception with no use of it."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if _swallows(node)]


def _swallows(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in node.args)
    if not isinstance(node, ast.ExceptHandler):
        return False
    if node.type is None:
        return True
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    if not any(ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
        return False
    inside = [part for line in node.body for part in ast.walk(line)]
    used = any(isinstance(part, ast.Name) and part.id == node.name for part in inside)
    return not used and not any(isinstance(part, ast.Raise) for part in inside)


MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "put", "remove", "setdefault",
    "update",
}  # fmt: skip


def changed_globals(source: str) -> list[int]:
    """Lines of functions that change what a name of the module holds, or bind that name anew."""
    tree = ast.parse(source)
    bound = [node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)] for node in tree.body]
    names = {target.id for targets in bound for target in targets if isinstance(target, ast.Name)}
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    found = set()
    for function in functions:
        own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        found |= {node.lineno for node in ast.walk(function) if _changes(node, names - own)}
    return sorted(found)


def _changes(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Global):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS and _root(node.func) in names
    part = isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del))
    return part and _root(node) in names


def _root(node: ast.AST) -> str | None:
    """The name at which ``a.b[c].d`` starts."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def undocumented(source: str, errors: set[str]) -> list[str]:
    """Public functions without a docstring, or with one that leaves out an error that they raise themselves."""
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or _is_hook(node):
            continue
        text = ast.get_docstring(node) or ""
        raises = {
            ast.unparse(part.exc.func)
            for part in ast.walk(node)
            if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call)
        }
        if not text or any(error not in text for error in raises & errors):
            found.append(node.name)
    return found


def _is_hook(node: ast.FunctionDef) -> bool:
    """Whether hookspecs.py documents it, or a command of the command line, whose docstring is its help."""
    marks = [ast.unparse(mark).split("(")[0] for mark in node.decorator_list]
    return any(mark.endswith(("hookimpl", "command")) for mark in marks)


@pytest.mark.parametrize("path", files(*CODE), ids=name_of)
def test_shape(path: Path) -> None:
    source = path.read_text()
    errors = {
        node.name for node in ast.parse((ROOT / "portkern/errors.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    assert not too_long(source)
    assert not undocumented(source, errors)
    assert not swallowed(source)


def test_the_state_of_the_process_is_in_one_place() -> None:
    found = {name_of(path): changed_globals(path.read_text()) for path in files(*CODE, "kernels")}
    assert {name for name, lines in found.items() if lines} == {"portkern/runtime.py"}
    held = (ROOT / "portkern/runtime.py").read_text()
    assert changed_globals(held.replace("_process = _Process()", "")) == [], "no other name of the module is changed"


def test_no_test_file_is_too_long() -> None:
    assert [name_of(path) for path in files("tests") if "file" in too_long(path.read_text())] == []


@pytest.mark.parametrize("path", files("kernels"), ids=name_of)
def test_kernels_swallow_nothing(path: Path) -> None:
    assert not swallowed(path.read_text())


@pytest.mark.parametrize(
    ("check", "source", "found"),
    [
        (too_long, "def f():\n" + "    x = 1\n" * 60, ["f"]),
        (too_long, "def f():\n" + "    x = 1\n" * 58, []),
        (too_long, "x = 1\n" * 301, ["file"]),
        (swallowed, "try:\n    f()\nexcept:\n    raise", [3]),
        (swallowed, "try:\n    f()\nexcept Exception:\n    pass", [3]),
        (swallowed, "try:\n    f()\nexcept (ValueError, Exception) as error:\n    x = None", [3]),
        (swallowed, "with contextlib.suppress(Exception):\n    f()", [1]),
        (swallowed, "try:\n    f()\nexcept Exception as error:\n    say(error)", []),
        (swallowed, "try:\n    f()\nexcept BaseException:\n    close()\n    raise", []),
        (swallowed, "try:\n    f()\nexcept ValueError:\n    pass", []),
        (changed_globals, "known = {}\ndef f(x):\n    known[x] = 1", [3]),
        (changed_globals, "known: list = []\ndef f(x):\n    known.append(x)", [3]),
        (changed_globals, "held = Held()\nclass A:\n    def f(self):\n        del held.items[self]", [4]),
        (changed_globals, "count = 0\ndef f():\n    global count\n    count += 1", [3]),
        (changed_globals, "known = {}\nknown[1] = 2\ndef f(x):\n    known = {}\n    known[x] = 1", []),
        (changed_globals, "known = {}\ndef f(known):\n    known.update(a=1)\n    return known[1]", []),
    ],
)
def test_shapes_are_found(check: Callable[[str], list[Any]], source: str, found: list[Any]) -> None:
    assert check(source) == found


def test_missing_docstrings_are_found() -> None:
    assert undocumented("def f(): pass\ndef _g(): pass", set()) == ["f"]
    source = "def f():\n    '''Says it.{}'''\n    raise BadDim('no')"
    assert undocumented(source.format(""), {"BadDim"}) == ["f"]
    assert undocumented(source.format(" Raises BadDim."), {"BadDim"}) == []


def test_public_names_are_documented() -> None:
    import portkern

    for name in (*portkern.__all__, *public_names()):
        if not name.startswith("__"):
            assert getattr(portkern, name).__doc__, name
