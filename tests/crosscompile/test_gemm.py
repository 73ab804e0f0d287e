"""Matrix products compiled for each target: the matrix instruction, no spills, and the shared-memory rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.backend import Resources
from portkern.config import Blocks, Config
from portkern.errors import Infeasible
from portkern.executors.compile import compile_plan
from portkern.gemm import PACKS, VARIANTS, packed
from portkern.lookup import Choice, fits
from portkern.op import Case
from portkern.plan import Meta, metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import lay_out

ARCHS = ("sm80", "sm90", "gfx942")
ORDERS = ("nn", "nt", "tn", "tt")
INSTRUCTION = {"sm80": "mma m16n8k16", "sm90": "wgmma.mma_async", "gfx942": "v_mfma_f32_16x16x16_bf16"}
# Few rows, sizes that fit no tile, that end within one, batches, and two that take the largest tiles.
SIZES = ((1, 4096, 4096), (64, 1000, 512), (4104, 4104, 520), (8, 512, 512, 512), (2048, 2048, 2048), (8192, 8192, 512))
DTYPES = ("bfloat16", "float32", "float64")
# One of each for split_k's two ways to read, whole tiles and such as end early, and a sum in many parts.
PARTS = (((512, 512, 32768), "nn"), ((256, 1024, 8192), "nt"), ((500, 520, 8200), "tt"), ((16, 264, 65536), "nt"))
BARRIERS = 32  # bytes beside the blocks


@dataclass(frozen=True)
class Compiled:
    """One product, compiled with one config."""

    what: str
    config: Config
    blocks: Blocks
    rule: int
    needs: Resources
    operands: int  # bytes of all stages
    result: int


def compiled(
    arch: str, metas: Sequence[Any], config: Config | None = None, variant: str | None = None, what: str = "",
    kernels: list[Any] | None = None,
) -> Compiled:  # fmt: skip
    """What the compiler says of ``config``, or else of the default (of ``variant``). Raises Infeasible.

    What it made is added to ``kernels``.
    """
    op, runtime = all_ops()["matmul"], current()
    device = dispatch.reference_device(runtime, arch)
    situation = dispatch.situate(runtime, op, tuple(metas), device)
    backend, work = situation.backend, situation.work
    config = config or backend.default(device, work, variant)
    blocks, refusal = fits(op, work, device, backend, config)
    if blocks is None:
        raise Infeasible(refusal)
    plan = situation.plan(Choice(config, blocks, "test", ""))
    launches = compile_plan(plan, metas, backend, device, backend.launch_options(config), kernels)
    packs = sum(config.params.get(name, 0) > 0 for name in PACKS.values())
    for each in launches[:packs]:
        assert each.kernel == "_matmul_pack_kernel"
        assert each.resources.spills == 0, f"{arch} {config}: {each.resources}"
    launch, *rest = launches[packs:]
    assert launch.resources.shared_bytes <= device.shared_bytes
    for each in rest:  # what adds the parts of a sum
        assert config.variant == "split_k" and each.kernel == "_matmul_sum_kernel"
        assert (each.resources.spills, each.resources.shared_bytes) == (0, 0), f"{arch} {config}: {each.resources}"
    assert len(rest) == (config.variant == "split_k")
    m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
    size = work.element_bytes
    rule = backend.kinds["gemm"].shared.bytes_of(packed(work, config.params), config, blocks)
    what = f"{arch} {situation.problem} {what} [{config}]: {launch.resources}, by rule {rule:,}"
    operands = max(1, config.num_stages - 1) * (m + n) * k * size
    stored = work.compute_bytes if rest else size
    return Compiled(what, config, blocks, rule, launch.resources, operands, m * n * stored)


def product(sizes: tuple[int, ...], dtype: str, order: str = "nn", **options: Any) -> tuple[Any, ...]:
    op = all_ops()["matmul"]
    return metas_of(op.inputs(sizes, getattr(torch, dtype), device="meta", order=order, **options))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults_spill_nothing_and_the_rule_agrees(dtype: str, arch: str) -> None:
    """Each default of each variant; orders rotate, and the rule is never below the compiler's figure. It is exact for
    blocks of dots; a lone row or column keeps none of them there, and converts from 512 bytes to a whole block."""
    found = []
    for number, sizes in enumerate(SIZES):
        for order in (ORDERS[number % 4], ORDERS[(number + 1 + DTYPES.index(dtype)) % 4]):
            for variant in VARIANTS:
                try:
                    found.append(compiled(arch, product(sizes, dtype, order), variant=variant, what=order))
                except Infeasible:
                    assert variant == "persistent"
    for each in found:
        assert each.needs.spills == 0, each.what
        assert each.needs.shared_bytes <= each.rule, each.what
        alone = 1 in (each.config.params["BLOCK_M"], each.config.params["BLOCK_N"])
        if each.operands >= each.result and not alone:  # else a tile of C, which may go to the store in parts, decides
            assert each.rule - each.needs.shared_bytes <= BARRIERS, each.what
    variants = {each.config.variant for each in found}
    assert variants == ({*VARIANTS} if arch == "sm90" and dtype == "bfloat16" else {"tiles", "split_k"})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_sums_are_cut_and_spill_nothing(dtype: str, arch: str) -> None:
    """They are by default, by loads or by descriptors."""
    ways = set()
    for sizes, order in PARTS:
        each = compiled(arch, product(sizes, dtype, order), what=order)
        assert each.config.variant == "split_k" and each.blocks["SPLITS"] > 1, each.what
        assert each.needs.spills == 0 and each.needs.shared_bytes <= each.rule, each.what
        ways.add("PROGRAMS_PER_UNIT" in each.config.params)
    assert ways == ({True, False} if arch == "sm90" and dtype == "bfloat16" else {False})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("order", ORDERS)
def test_matrix_instruction(order: str, arch: str) -> None:
    for dtype in ("bfloat16", "float16"):
        for variant in VARIANTS:
            try:
                each = compiled(arch, product((4096, 4096, 4096), dtype, order), variant=variant)
            except Infeasible:
                assert variant == "persistent" and arch != "sm90"
                continue
            instruction = INSTRUCTION[arch].replace("bf16", "f16") if dtype == "float16" else INSTRUCTION[arch]
            assert each.needs.matrix_instruction.startswith(instruction), each.what


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "padded", "expanded"])
def test_loose_layouts_spill_nothing(layout: str, arch: str) -> None:
    op = all_ops()["matmul"]
    for dtype in DTYPES:
        for sizes in ((300, 200, 136), (2, 300, 200, 136), (3, 200, 136)):
            args = metas_of(lay_out(op.inputs(sizes, getattr(torch, dtype)), layout))
            each = compiled(arch, args, what=layout)
            assert each.needs.spills == 0, each.what
            assert each.needs.shared_bytes <= each.rule, each.what


@pytest.mark.parametrize("arch", ARCHS)
def test_tf32_uses_its_own_instruction(arch: str) -> None:
    words = {"sm80": "m16n8k8", "sm90": "k8", "gfx942": "xf32"}
    (a, b, _) = product((1024, 1024, 1024), "float32")
    each = compiled(arch, (a, b, True))
    assert words[arch] in each.needs.matrix_instruction and each.needs.spills == 0, each.what
    each = compiled(arch, (a, b, False))
    assert words[arch] not in each.needs.matrix_instruction, each.what


@pytest.mark.parametrize("arch", ARCHS)
def test_summed_batches_and_two_batch_dims_compile(arch: str) -> None:
    """What only the tiles variant takes: dims apart from k that are summed, and two batch dims."""
    op, runtime = all_ops()["matmul_backward"], current()
    device = dispatch.reference_device(runtime, arch)
    for case in (
        Case((3, 256, 256, 256), {"summed": True}),
        Case((2, 3, 256, 256, 256), {"summed": True}),
        Case((2, 3, 256, 256, 256), {"columns": True}),
    ):
        left, right, *rest = op.inputs(case.sizes, torch.bfloat16, device="meta", **case.options)
        rest[0] = tuple(rest[0])
        batch = left.shape[:-2]
        wide = [
            torch.empty(*(2 * size for size in batch), *x.shape[-2:], device="meta", dtype=x.dtype)
            for x in (left, right)
        ]
        left, right = (x[tuple(slice(None, None, 2) for _ in batch)] for x in wide)
        metas = (*metas_of((left, right)), *rest)
        situation = dispatch.situate(runtime, op, metas, device)
        choice = dispatch.resolve(runtime, situation)
        for launch in compile_plan(
            situation.plan(choice), metas, situation.backend, device, situation.backend.launch_options(choice.config)
        ):
            assert launch.resources.spills == 0, f"{case} [{choice.config}] {launch.resources}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", [*DTYPES, "tf32"])
def test_operands_summed_over_batches_spill_nothing(kind: str, arch: str) -> None:
    """Two dims apart from k, and addresses of single elements, take the most registers; large aligned ones too."""
    op, runtime = all_ops()["matmul_backward"], current()
    device, dtype = dispatch.reference_device(runtime, arch), getattr(torch, kind.replace("tf32", "float32"))
    for number, (m, n, k) in enumerate(((33, 101, 257), (101, 63, 4095), (500, 300, 129), (2000, 2008, 264))):
        for order in (ORDERS[number], "nt"):
            wide = (torch.empty(10, 4, *each, device="meta", dtype=dtype) for each in ((m, k), (k, n)))
            a, b = (x.mT.contiguous().mT if turned == "t" else x for x, turned in zip(wide, order, strict=True))
            metas = (*metas_of((a[::2, ::2], b[::2, ::2])), (m, n), False, kind == "tf32")
            situation = dispatch.situate(runtime, op, metas, device)
            assert "R" in situation.problem.sizes
            choice = dispatch.resolve(runtime, situation)
            options = situation.backend.launch_options(choice.config)
            for launch in compile_plan(situation.plan(choice), metas, situation.backend, device, options):
                assert launch.resources.spills == 0, f"{m}x{n}x{k} {order} [{choice.config}] {launch.resources}"


def test_every_dtype_has_a_tile_that_fits_the_smallest_parts() -> None:
    """A part with little shared memory borrows choices and keeps its own limits."""
    for arch in ("sm86", "sm89", "sm120", "gfx90a", "gfx950"):
        for dtype in ("float16", "float32", "float64"):
            op, runtime = all_ops()["matmul"], current()
            device = dispatch.reference_device(runtime, arch)
            situation = dispatch.situate(runtime, op, product((4096, 4096, 4096), dtype), device)
            assert dispatch.resolve(runtime, situation).config.variant in VARIANTS


def test_too_large_a_tile_is_refused_with_its_bytes() -> None:
    """Tiles of one vendor's default on another's: twice the shared memory that there is."""
    a, b = (Meta((4096, 4096), (4096, 1), torch.float32) for _ in range(2))
    config = Config("tiles", {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}, 8, 3)
    with pytest.raises(Infeasible, match="131,072 bytes of shared memory, over the 65,536"):
        compiled("gfx942", (a, b, False), config)
