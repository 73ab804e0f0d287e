"""Pointwise ops and reductions on a real GPU: every op, sizes past 31 bits, graphs, the generator."""

from __future__ import annotations

import pytest
import torch

import portkern
from portkern.kernels import quantize
from portkern.op import Case
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import REDUCTIONS, generator, ops_of_kind, run_config, variants

pytestmark = pytest.mark.gpu

OPS = (*ops_of_kind("pointwise"), *REDUCTIONS)
OWN_SIZES = ("bincount", "rope", "quantize_fp8")
LARGE = (Case((300, 5000)), Case((1000003,)), Case((64, 3, 1024)))


@pytest.mark.parametrize("name", OPS)
def test_cases(name: str) -> None:
    """Style and layout rotate; every dtype, and every variant that the device admits."""
    op, device, ran = all_ops()[name], current().device(0), 0
    for turn, dtype in enumerate(op.dtypes):
        for number, case in enumerate((*op.cases, *(() if name in OWN_SIZES else LARGE))):
            style = ("normal", "wide", "nonfinite")[(number + turn) % 3]
            layout = list(LAYOUTS)[(number + turn) % len(LAYOUTS)]
            args = op.inputs(
                case.sizes, getattr(torch, dtype), device="cuda", generator=generator(number, "cuda"), style=style,
                **case.options,
            )  # fmt: skip
            args = lay_out(args, layout)
            for config, _ in variants(current(), op, args, device):
                verdict = judge(op, args, run_config(current(), op, args, device, config))
                assert verdict.right, f"{case} {dtype} {layout} {style} [{config}]: {verdict.reason}"
                ran += 1
    assert ran >= len(op.cases)


def test_more_than_31_bits_of_elements() -> None:
    x = torch.randn((1 << 31) + 4096, dtype=torch.float16, device="cuda")
    y = portkern.silu(x)
    for part in (slice(0, 4096), slice(-4096, None), slice((1 << 31) - 2048, (1 << 31) + 2048)):
        torch.testing.assert_close(y[part], torch.nn.functional.silu(x[part]), rtol=2e-3, atol=1e-6)
    del y
    mask = portkern.dropout(x, 0.5) != 0
    first, later = mask[:4096], mask[1 << 31 :]  # whose indices differ above 31 bits alone
    assert first.shape == later.shape and 0.4 < float((first == later).double().mean()) < 0.6


def test_masks_are_those_of_the_cpu() -> None:
    op, seed = all_ops()["dropout"], torch.tensor([2**61 + 12345])
    for shape in ((1000,), (64, 512), (33, 77)):
        args = (torch.ones(shape), None, None, seed, 0.3, True, torch.float32)
        moved = tuple(each.cuda() if isinstance(each, torch.Tensor) else each for each in args)
        ((config, _),) = variants(current(), op, moved, current().device(0))
        (y,) = run_config(current(), op, moved, current().device(0), config)
        torch.testing.assert_close(y.cpu(), op.reference(*args))


def test_a_graph_draws_a_new_mask_at_each_replay() -> None:
    x = torch.ones(100_000, device="cuda")
    portkern.dropout(x, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = portkern.dropout(x, 0.5)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y) and abs(float((y == 0).double().mean()) - 0.5) < 0.01


def test_0_d_cpu_tensors_and_numbers_beside_gpu_tensors() -> None:
    x = torch.randn(100, device="cuda")
    for other in (torch.tensor(2.5), torch.tensor(2.5, dtype=torch.float64), 2.5, 2):
        got, want = portkern.add(x, other), torch.add(x, other)
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_every_8_bit_code_by_instruction() -> None:
    x = torch.randn(64, 1000, device="cuda") * torch.logspace(-6, 6, 1000, device="cuda")
    op = all_ops()["quantize_fp8"]
    kind, native = current().backend(current().device(0).target).fp8()
    switches = (int(kind.endswith("fnuz")), int(native))
    args = (x, torch.ones(64, 1, device="cuda"), 0, 0, *switches, torch.float32)
    # What is tuned is what is called.
    assert op.inputs((8, 8), torch.bfloat16, device="cuda", other="column")[4:6] == switches
    ((config, _),) = variants(current(), op, args, current().device(0))
    (codes,) = run_config(current(), op, args, current().device(0), config)
    assert torch.equal(codes, op.reference(*args))


def test_rows_in_one_launch_have_the_bits_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every length that a variant serves by default, with rows of zeros, of a NaN and of an infinity."""
    for sizes in ((300, 256), (200, 1000), (130, 8192), (130, 32768), (130, 70000), (1, 100_000)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(sizes, device="cuda").mul_(100).to(dtype)
            if sizes[0] > 3:
                x[0], x[1, 5], x[2, 7] = 0, torch.nan, torch.inf
            found = portkern.quantize_fp8(x)
            with monkeypatch.context() as few:
                few.setattr(quantize, "LONG_ROW", 0)
                few.setattr(quantize, "FEW_ROWS", 2**40)
                expected = portkern.quantize_fp8(x)
            assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)), (sizes, dtype)
            assert torch.equal(found[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0)), (sizes, dtype)
