"""Every op, variant and default config for gfx942, forward and backward, executed and judged as on a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import triton
from click.testing import CliRunner

import portkern
from portkern import dispatch
from portkern.cli.main import portkern as cli
from portkern.config import Config
from portkern.errors import UnknownName
from portkern.registry import all_ops, load_file
from portkern.runtime import current
from portkern.testing import judge
from portkern.verification import verify
from portkern.verification_cases import rows
from portkern.verification_row import Request
from tests.emulation.test_emulate import random

FAULTY = str(Path(__file__).parents[1] / "ops" / "faulty.py")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
OPS = sorted(name for name in all_ops() if "::" not in name)
OLDEST = triton.__version__.startswith("3.6.")
FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_op_is_right(dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child of ``verify`` does, in this process: a child that starts for each op takes 2.4 s to import torch.

    One input of every second case: float16 and bfloat16 share the cases, and so do two versions of Triton in float32.
    Two of each in a full sweep.
    """
    op = all_ops()[name]
    if dtype not in op.dtypes:
        pytest.skip(f"{name} takes no {dtype}")
    monkeypatch.setenv("PORTKERN_EMULATE", "gfx942")
    first, step = (0, 1) if FULL else ((OLDEST if dtype == "float32" else dtype == "bfloat16"), 2)
    request = Request(name, dtype, "cpu", "emulated", thin=not FULL, emulated="gfx942", first=int(first), step=step)
    found = list(rows(request, lambda *_: None))
    assert not any(row.failures for row in found), [f"{row.label}: {row.first_failure}" for row in found]
    assert any(row.cases for row in found) and ("gradient" in {row.variant for row in found} or not op.backwards)
    part = dispatch.reference_device(current(), "gfx942").name
    for row in found:
        assert row.cases or part in row.why or "no gain" in row.why, f"{row.label} never ran: {row.why}"


def test_faults_are_found_and_named() -> None:
    load_file(FAULTY)
    names = [f"faulty::{name}" for name in ("right", "off", "stray", "alters")]
    report = verify(names, device="gfx942", dtypes=["float32"], thin=True, ops_files=[FAULTY], jobs=2)
    assert report.route == "emulated" and "executed by an emulator" in report.statement
    found = {row.op: row.first_failure for row in report.rows if row.variant == "blocks"}
    assert found["faulty::right"] == "" and "error 1 at (6,)" in found["faulty::off"]
    assert "MemoryFault" in found["faulty::stray"] and "output 0" in found["faulty::stray"]
    assert "altered its inputs" in found["faulty::alters"]


def test_the_command_says_what_it_did() -> None:
    done = CliRunner().invoke(cli, ["verify", "silu", "--device", "gfx942", "--dtype", "fp16"])
    assert done.exit_code == 0, done.output
    assert re.search(r"All \d+ cases are right \(amd_mi300x", done.output)
    assert "never the speed, and nothing was compared with the hardware" in " ".join(done.output.split())
    with pytest.raises(UnknownName, match=r"cannot verify on 'sm80': .* \(gfx942\); "):
        verify(["softmax"], device="sm80")


def test_ops_of_a_process_run_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """``PORTKERN_EMULATE``: the public function, its gradient and the record of what dispatch chose."""
    monkeypatch.setenv("PORTKERN_EMULATE", "gfx942")
    x = random(3, 200).requires_grad_()
    y = portkern.softmax(x, -1)
    assert judge(all_ops()["softmax"], (x.detach(), 1, torch.float32), [y.detach()]).right
    assert not torch.equal(y, torch.softmax(x, -1)), "torch computed this"
    y[:, 0].sum().backward()
    wanted = torch.autograd.functional.jacobian(lambda each: torch.softmax(each, -1)[:, 0].sum(), x.detach().double())
    assert x.grad is not None and float((x.grad.double() - wanted).abs().max()) < 1e-7


@pytest.mark.parametrize(("parts", "columns"), [(2, 1300), (4, 1300), (4, 2048)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm"])
def test_programs_that_wait_work_their_columns_off_in_parts(
    name: str, parts: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no default of this target does: the last program of a row has parts that are cut, or empty, or full."""
    monkeypatch.setenv("PORTKERN_EMULATE", "gfx942")
    op = all_ops()[name]
    args = op.inputs((5, columns), torch.bfloat16, generator=torch.Generator().manual_seed(parts), style="wide")
    config = Config(
        "coresident_row", {"BLOCK_N": 512, "PROGRAMS_PER_UNIT": 1, "PARTS": parts}, 1, 1, {"poll_cache": ".cv"}
    )
    with portkern.pin(name, config):
        outputs = dispatch.run(op, args)
    verdict = judge(op, args, outputs)
    assert verdict.right, verdict.reason


@pytest.mark.parametrize("order", ["nn", "tt"])
@pytest.mark.parametrize("variant", ["tiles", "split_k"])
def test_packed_operands(variant: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in the operands' own order and in the other, of whole tiles and of such as end early."""
    monkeypatch.setenv("PORTKERN_EMULATE", "gfx942")
    op = all_ops()["matmul"]
    params = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2, "PACK_A": 1, "PACK_B": 2}
    config = Config(variant, {**params, **({"SPLITS": 2} if variant == "split_k" else {})}, 4, 2)
    for sizes in ((64, 64, 64), (2, 35, 70, 66)):
        args = op.inputs(sizes, torch.float32, generator=torch.Generator().manual_seed(1), order=order)
        with portkern.pin("matmul", config):
            output = dispatch.run(op, args)
        verdict = judge(op, args, [output])
        assert verdict.right, f"{sizes}: {verdict.reason}"


def test_counts_of_an_op() -> None:
    arguments = ["compile", "matmul", "--device", "gfx942", "--shape", "256x256x256", "--dtype", "bf16", "--emulate"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert re.search(r"_matmul_tiles_kernel +\d+ +[\d,]+ +[\d,]+ +4,096 ", done.output)  # 256^3 in 16 x 16 x 16
    assert "never a time" in done.output and "candidates refused" in done.output
    done = CliRunner().invoke(cli, ["compile", "softmax", "--device", "sm90", "--shape", "8x64", "--emulate"])
    assert done.exit_code == 2 and "no plugin emulates sm90" in done.stderr
