"""What the design promises of the whole source tree and of a user's call; each rule is shown to be able to fail."""

from __future__ import annotations

import ast
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.fact import Fact
from portkern.kernel_hash import kernel_hash
from portkern.plan import metas_of
from portkern.registry import all_ops, get, public_names
from portkern.runtime import Runtime, current, using
from portkern.toolchain import triton_series
from portkern.tuning_db import Database

ROOT = Path(__file__).parent.parent
CODE = ("portkern", "backends", "peers", "tuning_db")
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


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


# ---- a user's call ------------------------------------------------------------------------------------------------


def child(code: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_is_importable_first() -> None:
    """Each in a forked child of a process that has no portkern yet, so that no cycle of imports hides."""
    modules = [name_of(path)[:-3].replace("/", ".").removesuffix(".__init__") for path in files(*CODE, "kernels")]
    modules = [module if module.startswith("portkern") else f"portkern.{module}" for module in modules]
    assert len(modules) > 60 and {"portkern", "portkern.tuner.trials", "portkern.kernels.softmax"} <= set(modules)
    failed = child(
        f"""
import importlib, json, os, traceback
import torch, triton, pluggy, click, tabulate, tqdm
failed = []
for module in {modules!r}:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(module)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        failed.append(module)
print(json.dumps(failed))
"""
    )
    assert failed == []


WATCHED = """
import json, os, sys
home, touched = os.environ["PORTKERN_HOME"], []
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime")
def audit(event, args):
    at = args[0] if args and isinstance(args[0], (str, bytes, os.PathLike)) else ""
    at = os.fsdecode(at)
    if event == "open":
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        if at.startswith(home) and args[2] & writes:
            touched.append([event, at])
    elif event in CHANGES and at.startswith(home):
        touched.append([event, at])
    elif event == "sqlite3.connect" and not at.endswith(("mode=ro", "mode=rw")):  # neither makes a file
        touched.append([event, at])
sys.addaudithook(audit)
import torch, portkern
x = torch.randn(3, 40, requires_grad=True)
y = portkern.softmax(x)
y.sum().backward()
portkern.log_softmax(x.detach())
portkern.explain("softmax", torch.randn(3, 40))
{extra}
MEASURE = ("portkern.timing", "portkern.tuner.session", "portkern.benchmark", "portkern.peer")
measuring = [name for name in sys.modules if name in MEASURE]
print(json.dumps({{"touched": touched, "measuring": measuring}}))
"""


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("interpret", ["0", "1"])
@pytest.mark.parametrize("known", [False, True], ids=["empty", "with records"])
def test_a_call_writes_and_measures_nothing(interpret: str, known: bool, tmp_path: Path) -> None:
    home = tmp_path / "home"
    if known:
        at = situation(current())
        assert Database(home, tmp_path / "none").record([fact(at, config, 10.0) for config in CONFIGS])
        assert list(tree(home)) == [f"{at.device.slug}.sqlite3"]
    before = tree(home)
    found = child(WATCHED.format(extra=""), PORTKERN_HOME=str(home), TRITON_INTERPRET=interpret, PORTKERN_ARCH="sm90")
    assert found["touched"] == [] and found["measuring"] == []
    assert tree(home) == before and home.exists() == known


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ("os.makedirs(home); open(os.path.join(home, 'x'), 'w')", ["os.mkdir", "open"]),
        (
            "os.makedirs(home); import sqlite3; sqlite3.connect(os.path.join(home, 'x'))",
            ["os.mkdir", "sqlite3.connect"],
        ),
    ],
)
def test_writes_are_seen(extra: str, what: list[str], tmp_path: Path) -> None:
    found = child(WATCHED.format(extra=extra + "; import portkern.timing"), PORTKERN_HOME=str(tmp_path / "home"))
    assert [event for event, _ in found["touched"]] == what
    assert found["measuring"] == ["portkern.timing"]


# ---- a frozen set of records --------------------------------------------------------------------------------------

CONFIGS = tuple(
    Config("looped_row", {"BLOCK_M": 1, "BLOCK_N": block}, num_warps=warps, num_stages=1)  # type: ignore[arg-type]
    for block, warps in ((1024, 4), (2048, 8), (4096, 8))
)


def situation(runtime: Runtime) -> dispatch.Situation:
    op = get("softmax")
    args = op.inputs((3, 40), torch.float32, device="meta")
    return dispatch.situate(runtime, op, metas_of(args), dispatch.reference_device(runtime, "sm90"))


def fact(at: dispatch.Situation, config: Config, time_us: float) -> Fact:
    return Fact(
        device=at.device.slug, arch=at.device.target.arch, op=at.op.name, kernel_hash=kernel_hash(at.op),
        toolchain=triton_series(), problem=at.problem, config=config, outcome="measured", time_us=time_us,
        spread_us=0.1, samples=50,
    )  # fmt: skip


def test_frozen_records_give_one_config(tmp_path: Path) -> None:
    """Whatever the order in which equally fast configs were recorded, and however often one asks."""
    found = set()
    for number, order in enumerate(itertools.permutations(CONFIGS)):
        for _ in range(2):
            runtime = Runtime(plugins=current().plugins, database=Database(tmp_path / str(number), tmp_path / "none"))
            with using(runtime):
                at = situation(runtime)
                if not runtime.database.facts(at.device.slug):
                    for config in order:
                        runtime.database.record([fact(at, config, 10.0)])
                answers = [dispatch.resolve(runtime, at) for _ in range(2)]
                assert {answer.layer for answer in answers} == {"exact"}
                found |= {answer.config for answer in answers}
    assert len(found) == 1


def test_a_faster_record_is_what_changes_the_config(tmp_path: Path) -> None:
    runtime = Runtime(plugins=current().plugins, database=Database(tmp_path / "home", tmp_path / "none"))
    with using(runtime):
        at = situation(runtime)
        for config, time_us in zip(CONFIGS, (30.0, 20.0, 10.0), strict=True):
            runtime.database.record([fact(at, config, time_us)])
            assert dispatch.resolve(runtime, at).config == config
