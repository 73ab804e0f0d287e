"""What the design promises of a user's call; each rule is shown to be able to fail."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.fact import Fact
from portkern.kernel_hash import kernel_hash
from portkern.plan import metas_of
from portkern.registry import get
from portkern.runtime import Runtime, current, using
from portkern.toolchain import triton_series
from portkern.tuning_db import Database
from tests.sources import CODE, ROOT, files, name_of

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
