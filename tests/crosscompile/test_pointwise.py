"""Every pointwise op compiled for each target: no spills, and 16 bytes a lane where operands allow it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.executors.binding import bind
from portkern.executors.compile import _pointer, compile_launch, compile_plan, standing_in
from portkern.op import Case
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import Runtime, current
from portkern.testing import lay_out
from portkern.tuning_db import Database
from tests.spine import ops_of_kind

ARCHS = ("sm80", "sm90", "gfx942")
OPS = ops_of_kind("pointwise")
OWN_SIZES = ("bincount", "rope", "quantize_fp8")
LAYOUTS = ("contiguous", "offset", "transposed", "padded", "sliced")
SIZES = ((512, 4096), (4098,), (3, 200, 96), (64, 1000))


def arguments(name: str, sizes: tuple[int, ...], dtype: str, layout: str, **options: Any) -> tuple[Any, ...]:
    args = all_ops()[name].inputs(sizes, getattr(torch, dtype), device="meta", **options)
    return metas_of(lay_out(args, layout))


def cases_of(name: str) -> list[Case]:
    """Sizes that take a whole tile, with each of the options of the op's cases; for an op whose sizes mean something of
    its own, its own."""
    op = all_ops()[name]
    if name in OWN_SIZES:
        return [*op.tune_cases, *op.cases[:: max(1, len(op.cases) // 3)]]
    found: list[dict[str, Any]] = []
    for case in op.cases:
        options = {key: value for key, value in case.options.items() if key not in ("other", "mixed")}
        found += [options] if options not in found else []
    return [Case(SIZES[(OPS.index(name) + number) % len(SIZES)], options) for number, options in enumerate(found * 2)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", OPS)
def test_defaults_spill_nothing(name: str, arch: str) -> None:
    """Sizes, dtypes and layouts rotate, so that each op meets all of them over the targets."""
    op, runtime = all_ops()[name], current()
    device, turn = dispatch.reference_device(runtime, arch), OPS.index(name) + ARCHS.index(arch)
    for number, case in enumerate(cases_of(name)):
        at = number + turn
        dtype, layout = op.dtypes[(at + number) % len(op.dtypes)], LAYOUTS[(at + at // 3) % len(LAYOUTS)]
        args = arguments(name, case.sizes, dtype, "contiguous" if number == 0 else layout, **case.options)
        situation = dispatch.situate(runtime, op, args, device)
        choice = dispatch.resolve(runtime, situation)
        plan, launch_options = situation.plan(choice), situation.backend.launch_options(choice.config)
        for launch in compile_plan(plan, args, situation.backend, device, launch_options):
            needs = launch.resources
            assert needs.spills == 0, f"{situation.problem} [{choice.config}] {needs}"
            assert needs.programs_per_unit >= 1


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dropout_beside_other_inputs_spills_nothing(dtype: str, arch: str, tmp_path: Path) -> None:
    """All inputs read at once spilled 16 bytes at 72 registers, in float16 alone. By default: a record, which is of one
    Triton, may name what another one spills."""
    op = all_ops()["bias_dropout_add"]
    runtime = Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))
    device = dispatch.reference_device(runtime, arch)
    for options in ({"bias": True, "residual": True}, {"residual": True}, {}):
        args = arguments("bias_dropout_add", (8192, 14336), dtype, "contiguous", **options)
        situation = dispatch.situate(runtime, op, args, device)
        choice = dispatch.resolve(runtime, situation)
        launch_options = situation.backend.launch_options(choice.config)
        (launch,) = compile_plan(situation.plan(choice), args, situation.backend, device, launch_options)
        assert launch.resources.spills == 0, f"{situation.problem} [{choice.config}] {launch.resources}"


def text_of(name: str, args: tuple[Any, ...], arch: str) -> str:
    """The machine code, as text, of the default of ``name``."""
    op, runtime = all_ops()[name], current()
    device = dispatch.reference_device(runtime, arch)
    situation = dispatch.situate(runtime, op, args, device)
    choice = dispatch.resolve(runtime, situation)
    plan = situation.plan(choice)
    (launch,) = plan.launches
    options = situation.backend.launch_options(choice.config)
    with standing_in(situation.backend):
        given = bind(launch, args, plan.outputs, plan.scratch, _pointer)
        compiled = compile_launch(launch.kernel, given, launch.grid, situation.backend, options, launch)
    return str(compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"])


WIDE = re.compile(r"ld\.global\.v4\.b32|st\.global\.v4\.b32|(?:global|buffer)_(?:load|store)_dwordx4")
NARROW = re.compile(
    r"(?:ld|st)\.global\.(?!v4\.b32)[\w.]+|(?:global|buffer)_(?:load|store)_(?:dword(?!x4)|u?short|byte|ubyte)\w*"
)
SEED = {"ld.global.b64", "global_load_dwordx2"}  # one number for a whole program
# Whole tensors; rows of a length that is no multiple of the tile; the halves of a packed row.
VECTORS = (
    ("gelu", (8192, 14336), {}), ("swiglu", (8192, 14336), {}), ("swiglu_backward", (8192, 14336), {}),
    ("rope", (1, 64, 32, 8, 128), {}), ("dropout", (8192, 14336), {}),
    ("bias_dropout_add", (512, 1024), {"bias": True, "residual": True}),
    ("swiglu", (512, 2 * 1032), {"packed": True}), ("swiglu_backward", (512, 2 * 14336), {"packed": True}),
)  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_aligned_operands_move_16_bytes_a_lane(dtype: str, arch: str) -> None:
    for name, sizes, options in VECTORS:
        text = text_of(name, arguments(name, sizes, dtype, "contiguous", **options), arch)
        narrow = (
            NARROW.findall(text) if name != "rope" else []
        )  # whose tables, and few key heads, are less than a vector
        assert WIDE.search(text) and not set(narrow) - SEED, f"{name} {sizes} {narrow}"


@pytest.mark.parametrize(("arch", "instruction"), [("sm90", "e4m3x2"), ("gfx942", "v_cvt_pk_fp8_f32")])
def test_an_8_bit_float_is_made_by_the_targets_own_instruction(arch: str, instruction: str) -> None:
    runtime = current()
    kind, native = runtime.backend(dispatch.reference_device(runtime, arch).target).fp8()
    switches = {"FNUZ": int(kind.endswith("fnuz")), "NATIVE": int(native)}
    for other in ("column", "scalar"):
        given = arguments("quantize_fp8", (512, 4096), "bfloat16", "contiguous", other=other, **switches)
        text = text_of("quantize_fp8", given, arch)
        assert instruction in text and WIDE.search(text)
    # Rows that are kept, and that are read again: 16 bytes are read at once, and the codes of these, 8 bytes, written.
    for sizes in ((32768, 256), (8192, 8192), (4096, 32768)):
        given = arguments("quantize_fp8_rows", sizes, "bfloat16", "contiguous", **switches)
        text = text_of("quantize_fp8_rows", given, arch)
        assert instruction in text and re.search("ld|load", " ".join(WIDE.findall(text)))
        assert re.search(r"st\.global\S*\.v[24]\.b32|store_dwordx[24]", text)


@pytest.mark.parametrize("arch", ARCHS)
def test_only_the_last_tile_of_an_odd_length_is_narrow(arch: str) -> None:
    text = text_of("silu", arguments("silu", (1000003,), "bfloat16", "contiguous"), arch)
    assert WIDE.search(text) and NARROW.search(text)
