"""Every op and variant at its default, compiled for each target: it fits and nothing spills."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.backend import Resources
from portkern.backends._shared import CommonBackend
from portkern.config import Config
from portkern.executors.compile import compile_plan
from portkern.lookup import Choice, fits
from portkern.op import Case
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, lay_out
from tests.spine import REDUCTIONS, ops_of_kind, told, variants

ARCHS = ("sm80", "sm90", "gfx942")
SOFTMAX = ("log_softmax", "log_softmax_backward", "softmax", "softmax_backward")
OTHERS = [name for name in ops_of_kind("row_reduction") if name not in (*SOFTMAX, *REDUCTIONS)]
OPS = list(SOFTMAX)
VARIANTS = ("packed_rows", "resident_row", "cached_row", "looped_row", "split_row", "coresident_row")
# Row lengths at which a variant's default changes, or alignment is lost; and a column reduction.
CASES = (
    Case((4096, 200)), Case((4096, 1024)), Case((4096, 4095)), Case((4096, 8192)), Case((4096, 32768)),
    Case((4096, 131072)), Case((1, 1048576)), Case((4, 1048577)), Case((64, 512, 128), {"dim": 1}),
)  # fmt: skip
OTHER_CASES = tuple(case for case in CASES if not case.options)
DTYPES = ("bfloat16", "float32", "float64")
# A third of the matrix, another one for each op, variant and target; all of it on demand.
FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"


# op, columns, dtype, layouts: what spilled in registers while it waited, on sm90 with Triton 3.9.
KNOWN = (
    ("softmax_backward", "4095", "bfloat16", "transposed", "contiguous"),
    ("softmax_backward", "1000", "bfloat16", "contiguous", "transposed"),
    ("log_softmax_backward", "8192", "float32", "contiguous", "transposed"),
)
Layouts = tuple[str, ...]  # of the operands read, one after the other
# Of a gradient and an output: each way alone, and the two that meet in a model, one of them a view of something else.
COMBINATIONS: tuple[Layouts, ...] = (
    ("transposed", "contiguous"), ("contiguous", "transposed"), ("transposed", "transposed"), ("sliced", "contiguous"),
    ("contiguous", "sliced"), ("sliced", "transposed"), ("offset", "contiguous"), ("offset", "transposed"),
    ("expanded", "contiguous"),
)  # fmt: skip
LAID_OUT = (Case((512, 1000)), Case((512, 4095)), Case((512, 8192)), Case((96, 65536)))
# How many combinations a test takes of its list, spread over it: 1 of so many.
STEP = 1 if FULL else 25
# Input dtype, and that of the result: none of them alone decides the width of a tile.
CONVERSIONS = (
    ("float16", "float16"), ("float32", "bfloat16"), ("float16", "float32"), ("int64", "float32"), ("int64", "float16"),
    ("bfloat16", "float64"),
)  # fmt: skip


def compile_defaults(name: str, args: tuple[Any, ...], arch: str, wanted: str, what: str, trades: bool = False) -> int:
    """Compile the default of the variant ``wanted``, if ``arch`` has it for ``args``; give how many that were."""
    op, runtime, compiled = all_ops()[name], current(), 0
    device = dispatch.reference_device(runtime, arch)
    situation = dispatch.situate(runtime, op, args, device)
    for config, variant in variants(runtime, op, args, device):
        if variant != wanted:
            continue
        blocks, _ = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None
        plan = situation.plan(Choice(config, blocks, "test", ""))
        options = situation.backend.launch_options(config)
        for launch in compile_plan(plan, args, situation.backend, device, options):
            needs = launch.resources
            message = f"{what} [{config}] {launch.kernel}: {needs}"
            left = trades and traded(situation, config, needs) or told(situation, config, needs)
            assert needs.spills == 0 or left, message
            assert needs.shared_bytes <= device.shared_bytes, message
            assert needs.programs_per_unit >= 1, f"no unit can hold one program: {message}"
            assert needs.registers <= device.max_registers, message
            if plan.launches[-1].coresident:
                # Fewer programs than asked for are the lookup's next answer, down to one row at a time.
                assert needs.programs_per_unit * device.units >= blocks["SPLITS"], message
        compiled += 1
    return compiled


def traded(situation: dispatch.Situation, config: Config, needs: Resources) -> bool:
    """Whether the assembler itself gave 8 bytes of stack, far from any limit, for one more program on a unit.

    Seen where one operand alone is unaligned or lies apart, as 90 registers became 80. A program that others wait
    for gets no such leave; see ``told``.
    """
    if needs.spills > 8 or config.variant in situation.work.waiting:
        return False
    rules, device = situation.backend, situation.device
    assert isinstance(rules, CommonBackend)
    granule = 8  # in which a unit gives registers out
    fits_more = rules.programs_per_unit(device, needs.registers + granule, needs.shared_bytes, config.num_warps)
    return fits_more < needs.programs_per_unit and needs.registers < rules.register_cap(device, config) // 2


def laid_out(name: str, case: Case, dtype: str, layouts: Layouts) -> tuple[Any, ...]:
    """Metas of a call whose tensors lie as ``layouts`` say, one after the other."""
    args = list(all_ops()[name].inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options))
    positions = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    for position, layout in zip(positions, layouts, strict=False):
        args[position] = LAYOUTS[layout](args[position])
    return metas_of(args)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPS)
def test_default_compiles_without_spills(name: str, variant: str, arch: str) -> None:
    compiled = 0
    turn = OPS.index(name) + VARIANTS.index(variant) + ARCHS.index(arch)
    for number, (case, dtype) in enumerate(itertools.product(CASES, DTYPES)):
        if not FULL and (number + number // len(DTYPES) + turn) % len(DTYPES):
            continue
        args = metas_of(all_ops()[name].inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options))
        compiled += compile_defaults(name, args, arch, variant, f"{case} {dtype}")
    if not compiled:
        assert variant == "cached_row"  # for 16-bit forwards where the nearest cache holds a row
        pytest.skip(f"{variant} does not apply to {name} on {arch}")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_defaults_compile_without_spills(name: str, arch: str) -> None:
    """Of each variant one case and dtype, another one for each op, variant and target; two targets of three."""
    turn, compiled = OTHERS.index(name) + ARCHS.index(arch), 0
    cases = list(itertools.product(OTHER_CASES, DTYPES))
    for number, variant in enumerate(VARIANTS):
        chosen = cases if FULL else [cases[(7 * turn + 5 * number) % len(cases)]]
        for case, dtype in chosen if FULL or (turn + number) % 3 else ():
            args = metas_of(all_ops()[name].inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options))
            compiled += compile_defaults(name, args, arch, variant, f"{case} {dtype}")
    if not compiled:  # an op with few variants, and none of them in turn
        case, dtype = cases[turn % len(cases)]
        args = metas_of(all_ops()[name].inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options))
        compiled = compile_defaults(name, args, arch, "looped_row", f"{case} {dtype}")
    assert compiled


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPS)
def test_layouts_compile_without_spills(name: str, variant: str, arch: str) -> None:
    """Operands that lie differently, of dtypes that convert or do not."""
    turn = 7 * OPS.index(name) + 5 * VARIANTS.index(variant) + ARCHS.index(arch)
    dtypes, compiled = ("bfloat16", "float32", "float16", "float64"), 0
    for number, (layouts, case, dtype) in enumerate(itertools.product(COMBINATIONS, LAID_OUT, dtypes)):
        if (number + turn) % STEP == 0:
            args = laid_out(name, case, dtype, layouts)
            compiled += compile_defaults(name, args, arch, variant, f"{case} {dtype} {layouts}", trades=True)
    assert compiled or variant == "cached_row"  # which serves rows of lengths between these


@pytest.mark.parametrize("known", KNOWN, ids=" ".join)
def test_layouts_that_spilled_once(known: tuple[str, ...]) -> None:
    name, columns, dtype, *layouts = known
    args = laid_out(name, Case((512, int(columns))), dtype, tuple(layouts))
    assert compile_defaults(name, args, "sm90", "coresident_row", " ".join(known)) == 1


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_norm_rows_that_are_read_again(arch: str, weights: str) -> None:
    """The longest row that the nearest cache keeps, with weights and biases: no spill, as the default of its length."""
    x, w = torch.empty(4096, 32768, dtype=torch.bfloat16, device="meta"), torch.empty(32768, device="meta")
    op = all_ops()["layer_norm"]
    assert op.signature is not None
    vector = w.to(getattr(torch, weights))
    args = metas_of(op.signature(x, (32768,), vector, vector))
    assert compile_defaults("layer_norm", args, arch, "cached_row", weights) == 1
    device = dispatch.reference_device(current(), arch)
    situation = dispatch.situate(current(), op, args, device)
    assert situation.backend.default(device, situation.work).variant == "cached_row"


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_logits_that_are_read_again(arch: str) -> None:
    args = metas_of(all_ops()["cross_entropy"].inputs((4096, 32000), torch.bfloat16, device="meta"))
    assert compile_defaults("cross_entropy", args, arch, "cached_row", "32000 classes") == 1
    device = dispatch.reference_device(current(), arch)
    situation = dispatch.situate(current(), all_ops()["cross_entropy"], args, device)
    assert situation.backend.default(device, situation.work).variant == "cached_row"


@pytest.mark.parametrize(
    "name", ["softmax_backward", "log_softmax_backward", "masked_softmax_backward", "add_rms_norm"]
)
def test_two_narrow_operands_keep_a_row_whole(name: str) -> None:
    """By 32 warps, without spills: shared, such rows took 7 to 10 % longer on an H200, and 8 bytes spilled."""
    op, runtime = all_ops()[name], current()
    device = dispatch.reference_device(runtime, "sm90")
    args = metas_of(op.inputs((4096, 32768), torch.float16, device="meta"))
    situation = dispatch.situate(runtime, op, args, device)
    config = situation.backend.default(device, situation.work)
    assert (config.variant, config.num_warps) == ("resident_row", 32)
    blocks, reason = fits(op, situation.work, device, situation.backend, config)
    assert blocks is not None, reason
    plan, options = situation.plan(Choice(config, blocks, "test", "")), situation.backend.launch_options(config)
    for launch in compile_plan(plan, args, situation.backend, device, options):
        assert launch.resources.spills == 0, f"{name} [{config}] {launch.resources}"


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_8_bit_floats_compile_without_spills(arch: str) -> None:
    """In the target's own format and by its instruction, which no other test here takes."""
    op, runtime, compiled = all_ops()["quantize_fp8_rows"], current(), 0
    kind, native = runtime.backend(dispatch.reference_device(runtime, arch).target).fp8()
    switches = {"FNUZ": int(kind.endswith("fnuz")), "NATIVE": int(native)}
    sizes, layouts = ((32768, 256), (4096, 4095), (4096, 32768), (256, 131072)), ("contiguous", "transposed", "sliced")
    for number, (size, variant) in enumerate(itertools.product(sizes, ("packed_rows", "resident_row", "looped_row"))):
        case, dtype = Case(size, switches), DTYPES[number % 2]
        args = laid_out("quantize_fp8_rows", case, dtype, (layouts[(number + number // 3) % 3],))
        compiled += compile_defaults(op.name, args, arch, variant, f"{case} {dtype}")
    assert compiled >= 6


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", OPS)
def test_conversions_compile_without_spills(name: str, arch: str) -> None:
    """Every variant in turn, for rows of one element too."""
    turn, backward = OPS.index(name) + ARCHS.index(arch), name.endswith("backward")
    cases = (Case((512, 1)), Case((512, 1000)), Case((96, 40000)), Case((512, 8192)))
    # A backward's operands have the dtype of the result, and its result that of the input; integers have no gradient.
    conversions = [(to, given) for given, to in CONVERSIONS if given != "int64"] if backward else CONVERSIONS
    every, compiled = list(itertools.product(conversions, cases, VARIANTS)), 0
    for (given, to), case, variant in every if FULL else every[turn::25]:
        args = (*laid_out(name, case, given, ())[:-1], getattr(torch, to))
        compiled += compile_defaults(name, args, arch, variant, f"{case} {given} -> {to}", trades=True)
    assert compiled >= 2


@pytest.mark.parametrize("arch", ARCHS)
def test_strided_inputs_compile_without_spills(arch: str) -> None:
    """The plain default, whatever variant it is, on operands that are not contiguous."""
    op, runtime = all_ops()["softmax"], current()
    device = dispatch.reference_device(runtime, arch)
    for layout, n in itertools.product(("transposed", "sliced", "offset", "padded"), (100, 5000)):
        args = metas_of(lay_out(op.inputs((64, n), torch.bfloat16), layout))
        situation = dispatch.situate(runtime, op, args, device)
        choice = dispatch.resolve(runtime, situation)
        options = situation.backend.launch_options(choice.config)
        for launch in compile_plan(situation.plan(choice), args, situation.backend, device, options):
            assert launch.resources.spills == 0, f"{layout} {n} [{choice.config}]"
