"""Matrix products on a real GPU: every variant and layout, sizes past 31 bits, precision, gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.gemm import PACKS
from portkern.lookup import fits
from portkern.op import Case, Op
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import generator, run_config, variants

pytestmark = pytest.mark.gpu

OPS = ("matmul", "matmul_backward")
DTYPES = ("float32", "float16", "bfloat16", "float64")
ORDERS = ("nn", "nt", "tn", "tt")
# Sizes that fit no tile, that have descriptors and end within a tile, and single elements of batches.
LARGER = tuple(
    Case(sizes)
    for sizes in (
        (300, 520, 264),
        (129, 257, 1000),
        (1000, 1001, 999),
        (4, 200, 136, 72),
        (33, 5, 3, 7),
        (40, 72, 4104),
    )
)


def made(op: Op, case: Case, dtype: str, seed: int, style: str = "normal") -> tuple[object, ...]:
    return op.inputs(
        case.sizes, getattr(torch, dtype), device="cuda", generator=generator(seed, "cuda"), style=style, **case.options
    )


def every_config(op: Op, args: tuple[object, ...]) -> Iterator[Config]:
    """The best candidate of each variant and tile shape that fits this call."""
    device = current().device(0)
    situation = dispatch.situate(current(), op, metas_of(args), device)
    seen = set()
    for config in dispatch.candidates(situation):
        blocks, _ = fits(op, situation.work, device, situation.backend, config)
        ways = (config.params.get("SLICES"), config.params.get("PROGRAMS_PER_UNIT"))
        key = (config.variant, *(config.params[f"BLOCK_{name}"] for name in "MNK"), *ways)
        if blocks is not None and key not in seen:
            seen.add(key)
            yield config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_defaults_in_every_layout(name: str, dtype: str) -> None:
    op, device, ran = all_ops()[name], current().device(0), set()
    for number, case in enumerate((*op.cases, *LARGER)):
        for turn in range(2):
            style = ("normal", "wide", "nonfinite")[(number + turn) % 3]
            layout = list(LAYOUTS)[(number + 3 * turn) % len(LAYOUTS)]
            args = lay_out(made(op, case, dtype, number, style), layout)
            for config, variant in variants(current(), op, args, device):
                verdict = judge(op, args, run_config(current(), op, args, device, config))
                assert verdict.right, f"{case} {layout} {style} [{config}]: {verdict.reason}"
                ran.add(variant)
    assert "tiles" in ran


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_tile_in_every_order(order: str, dtype: str) -> None:
    """Whole tiles, ends within a tile, and batches, by each tile of the plugin's candidates."""
    op, device, ran = all_ops()["matmul"], current().device(0), set()
    for case in (
        Case((512, 512, 512), {"order": order}),
        Case((328, 280, 200), {"order": order}),
        Case((3, 136, 264, 72), {"order": order}),
    ):
        args = made(op, case, dtype, 1)
        for config in every_config(op, args):
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{case} [{config}]: {verdict.reason}"
            ran.add(config.variant)
    assert "tiles" in ran


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_output_without_a_descriptor(dtype: str) -> None:
    op, device, ran = all_ops()["matmul"], current().device(0), set()
    for sizes in ((300, 1001, 520), (3, 200, 333, 136), (1, 1001, 520), (3, 1, 333, 136), (1, 1, 64), (1, 1, 1)):
        args = made(op, Case(sizes, {"order": "nt"}), dtype, 2)
        for config in every_config(op, args):
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{sizes} [{config}]: {verdict.reason}"
            ran.add(config.variant)
    assert "tiles" in ran


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_that_end_within_16_bytes_of_a_wider_tensor(dtype: str) -> None:
    """What lies between the end of a row and the next 16 bytes is NaN, and must not be read as part of the sum."""
    op, device = all_ops()["matmul"], current().device(0)
    left, right, _ = made(op, Case((200, 136, 261), {"order": "nt"}), dtype, 4)
    args = []
    for tensor in (left, right.mT):
        wide = torch.full((tensor.shape[0], 264), torch.nan, dtype=tensor.dtype, device="cuda")
        args.append(wide[:, :261].copy_(tensor))
    for tf32 in (False, True) if dtype == "float32" else (False,):
        given = (args[0], args[1].mT, tf32)
        for config in every_config(op, given):
            verdict = judge(op, given, run_config(current(), op, given, device, config))
            assert verdict.right, f"tf32={tf32} [{config}]: {verdict.reason}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_loose_operands_by_every_packing(order: str, dtype: str) -> None:
    """The best candidate of each variant for each way to copy operands that are no multiples of 16 bytes."""
    op, device = all_ops()["matmul"], current().device(0)
    for case in (Case((301, 203, 333), {"order": order}), Case((3, 129, 131, 133), {"order": order})):
        args = made(op, case, dtype, 5)
        situation, ran = dispatch.situate(current(), op, metas_of(args), device), set()
        for config in dispatch.candidates(situation):
            way = (config.variant, *(config.params.get(pack, 0) for pack in PACKS.values()))
            if way in ran or fits(op, situation.work, device, situation.backend, config)[0] is None:
                continue
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{case} [{config}]: {verdict.reason}"
            ran.add(way)
        assert any(way[1:] == (0, 0) for way in ran) and any(all(way[1:]) for way in ran)


def test_float32_is_ieee_unless_asked() -> None:
    a = torch.randn(500, 3000, device="cuda", generator=generator(3, "cuda"))
    b = torch.randn(3000, 700, device="cuda", generator=generator(4, "cuda"))
    exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def error() -> float:
        return float(((portkern.matmul(a, b).double() - exact).abs() / terms).max())

    assert error() < 2e-6
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert 2e-6 < error() < 2e-3
        assert "tf32" in str(portkern.explain("matmul", a, b))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert error() < 2e-6


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        portkern.matmul(torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda", dtype=torch.bfloat16))


def test_gradients_against_fp64() -> None:
    for a_shape, b_shape in (
        ((300, 200), (200, 130)), ((4, 70, 64), (64, 50)), ((4, 70, 64), (4, 64, 50)), ((70, 64), (5, 64, 30)),
        ((2, 1, 33, 40), (3, 40, 24)), ((64,), (64, 30)), ((2, 9, 64), (64,)),
    ):  # fmt: skip
        a = torch.randn(a_shape, device="cuda", requires_grad=True)
        b = torch.randn(b_shape, device="cuda", requires_grad=True)
        c = portkern.matmul(a, b)
        for g in (torch.randn_like(c), torch.ones((), device="cuda").expand(c.shape)):
            got = torch.autograd.grad(c, (a, b), g, retain_graph=True)
            exact = [x.detach().double().requires_grad_() for x in (a, b)]
            want = torch.autograd.grad(torch.matmul(*exact), exact, g.double())
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)


def test_more_batches_than_a_grid_axis_takes() -> None:
    a = torch.randn(70_000, 4, 16, device="cuda", dtype=torch.float16)
    b = torch.randn(70_000, 16, 8, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(portkern.matmul(a, b), torch.matmul(a, b), rtol=2e-3, atol=2e-2)


def test_operands_past_31_bits_of_elements() -> None:
    """Rows past element 2**31 equal the same rows alone: of an operand, of the result, of a batch."""
    b = torch.randn(1024, 8, dtype=torch.float16, device="cuda")
    a = torch.randn((1 << 21) + 64, 1024, dtype=torch.float16, device="cuda")
    assert a.numel() > 1 << 31
    c = portkern.matmul(a, b)
    for rows in (slice(0, 64), slice(-64, None)):
        torch.testing.assert_close(c[rows], torch.matmul(a[rows], b), rtol=2e-3, atol=5e-2)
    del c
    # k along the large stride, so that a step along k passes 31 bits in the end.
    weights = torch.randn(8, (1 << 21) + 64, dtype=torch.float16, device="cuda") / 2**11
    c = portkern.matmul(weights, a)
    parts = sum(weights[:, i : i + 4096].float() @ a[i : i + 4096].float() for i in range(0, a.shape[0], 4096))
    torch.testing.assert_close(c.float(), parts, rtol=1e-2, atol=1e-2)
    batch = a[: 1 << 21].view(32, 1 << 16, 1024)
    c = portkern.matmul(batch, b.expand(32, 1024, 8))
    torch.testing.assert_close(c[-1], torch.matmul(batch[-1], b), rtol=2e-3, atol=5e-2)


def test_result_past_31_bits_of_elements() -> None:
    a = torch.randn(65_664, 32, dtype=torch.float16, device="cuda")
    b = torch.randn(32, 32_832, dtype=torch.float16, device="cuda")
    assert a.shape[0] * b.shape[1] > 1 << 31
    for right in (b, b[:, 1:], b.t().contiguous().t()):
        c = portkern.matmul(a, right)
        for rows in (slice(0, 32), slice(-32, None)):
            torch.testing.assert_close(c[rows], torch.matmul(a[rows], right), rtol=2e-3, atol=2e-2)
        del c


def test_wide_strides_inside_a_tile() -> None:
    step = (1 << 22) - 1
    memory = torch.randn(599 * step + 40, dtype=torch.float16, device="cuda")
    rows, columns = memory.as_strided((600, 40), (step, 1)), memory.as_strided((40, 600), (1, step))
    small = torch.randn(40, 24, dtype=torch.float16, device="cuda")
    tall = torch.randn(600, 24, dtype=torch.float16, device="cuda") / 8
    torch.testing.assert_close(portkern.matmul(rows, small), rows.contiguous() @ small, rtol=2e-3, atol=5e-2)
    torch.testing.assert_close(portkern.matmul(columns, tall), columns.contiguous() @ tall, rtol=2e-3, atol=5e-2)


def test_graph_capture_and_stream() -> None:
    a = torch.randn(512, 384, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(384, 640, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        portkern.matmul(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = portkern.matmul(a, b)
    a.copy_(torch.randn_like(a))
    c.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(c, a @ b, rtol=1.6e-2, atol=1e-1)


@pytest.mark.parametrize("by_descriptors", [False, True])
def test_long_sums_captured_and_the_same_each_time(by_descriptors: bool) -> None:
    """Both launches in a graph, with parts in memory that holds those of the call before."""
    params = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "SPLITS": 7}
    ways = {"PROGRAMS_PER_UNIT": 1} if by_descriptors else {}
    a = torch.randn(200, 4000, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4000, 136, device="cuda", dtype=torch.bfloat16)
    with portkern.pin("matmul", Config("split_k", {**params, **ways}, 4, 3)):
        first = portkern.matmul(a, b)
        assert all(torch.equal(first, portkern.matmul(a, b)) for _ in range(20))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            c = portkern.matmul(a, b)
    for _ in range(3):
        c.fill_(torch.nan)
        graph.replay()
        assert torch.equal(c, first)
    a.copy_(torch.randn_like(a))
    graph.replay()
    torch.testing.assert_close(c, a @ b, rtol=1.6e-2, atol=5e-1)


def test_same_bits_every_time() -> None:
    for dtype in (torch.float16, torch.float32):
        a, b = (torch.randn(777, 777, device="cuda", dtype=dtype) for _ in range(2))
        first = portkern.matmul(a, b)
        assert all(torch.equal(first, portkern.matmul(a, b)) for _ in range(5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graph(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda a, b: portkern.matmul(a * 2, b), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for m in (40, 72):
        a = torch.randn(m, 64, device="cuda", requires_grad=True)
        b = torch.randn(64, 48, device="cuda", requires_grad=True)
        got, want = compiled(a, b), torch.matmul(a * 2, b)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        for ours, theirs in zip(
            torch.autograd.grad(got.sum(), (a, b)), torch.autograd.grad(want.sum(), (a, b)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
