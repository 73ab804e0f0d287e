"""Matrix products in Triton's interpreter: all variants, layouts, sizes that fit no tile, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton.language as tl

import portkern
import portkern.kernels.matmul as matmul_file
from portkern import dispatch
from portkern.config import Config
from portkern.errors import Infeasible, UnsupportedDtype
from portkern.executors.launch import execute
from portkern.gemm_plan import gemm_plan
from portkern.lookup import fits
from portkern.memory import Guarded
from portkern.op import Op
from portkern.plan import Buffer, metas_of
from portkern.product import Matrix, product_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.target import Device
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import generator, ops_of_kind, run_config

# bfloat16 products are wrong in the interpreter.
DTYPES = ("float32", "float16", "float64")
OPS = ops_of_kind("gemm")
SMALL = {
    "tiles": Config("tiles", {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 2}, 4, 2),
    "persistent": Config(
        "persistent", {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 2, "PROGRAMS_PER_UNIT": 1}, 4, 2
    ),
    "split_k": Config("split_k", {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 2, "SPLITS": 3}, 4, 2),
    "split_k by descriptors": Config(
        "split_k",
        {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 2, "SPLITS": 2, "PROGRAMS_PER_UNIT": 1, "SLICES": 2},
        4,
        2,
    ),
}
LEAST = {"tiles": 8, "persistent": 2, "split_k": 6, "split_k by descriptors": 1}  # cases that each can run


def device() -> Device:
    return dispatch.reference_device(current(), "sm90")


def check(op: Op, args: tuple[object, ...], config: Config, what: str) -> bool:
    """Whether ``config`` can run; then its result must be right."""
    situation = dispatch.situate(current(), op, metas_of(args), device())
    if fits(op, situation.work, device(), situation.backend, config)[0] is None:
        return False
    verdict = judge(op, args, run_config(current(), op, args, device(), config))
    assert verdict.right, f"{what} [{config}]: {verdict.reason}"
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("name", OPS)
def test_cases_in_every_layout(name: str, variant: str, dtype: str) -> None:
    """Each case in one style and layout, another one in each dtype; in two where descriptors take few layouts."""
    op, ran = all_ops()[name], 0
    turn, shifts = DTYPES.index(dtype), 1 if variant in ("tiles", "split_k") else 2
    for number, case in enumerate(op.cases):
        for shift in range(shifts):
            style = ("normal", "wide", "nonfinite")[(number + turn + shift) % 3]
            layout = list(LAYOUTS)[(number + turn + 3 * shift) % len(LAYOUTS)]
            args = op.inputs(
                case.sizes, getattr(torch, dtype), generator=generator(number), style=style, **case.options
            )
            ran += check(op, lay_out(args, layout), SMALL[variant], f"{case} {layout} {style}")
    assert ran >= LEAST[variant]


@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_orders_and_batches_by_descriptor(order: str, dtype: torch.dtype) -> None:
    op = all_ops()["matmul"]
    for sizes, options in (
        ((40, 48, 56), {}),
        ((24, 40, 16), {}),
        ((3, 24, 40, 16), {}),
        ((3, 24, 40, 16), {"shared": "a"}),
        ((3, 24, 40, 16), {"shared": "b"}),
    ):
        args = op.inputs(sizes, dtype, generator=generator(1), order=order, **options)
        for slices in (1, 2):
            for programs in (1, 2):
                config = SMALL["persistent"].replace(params={"SLICES": slices, "PROGRAMS_PER_UNIT": programs})
                assert check(op, args, config, f"{sizes} {order} {options}")
        cut = SMALL["split_k by descriptors"].replace(params={"SPLITS": 3})
        assert check(op, args, cut, f"{sizes} {order} {options}") == (sizes[-1] > 16)


ALONE = {"row": {"BLOCK_M": 1, "BLOCK_N": 16}, "column": {"BLOCK_M": 16, "BLOCK_N": 1}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("alone", ALONE)
def test_a_lone_row_or_column(alone: str, order: str, dtype: torch.dtype) -> None:
    op = all_ops()["matmul"]
    for number, (m, n, k) in enumerate([(1, 20, 37), (1, 1, 65), (1, 16, 32), (1, 33, 1), (3, 5, 40)]):
        sizes = (m, n, k) if alone == "row" else (n, m, k)
        for batch, more in (((), {}), ((3,), {"SPLITS": 2}), ((2, 2), {"PACK_A": 1, "PACK_B": 2})):
            args = op.inputs(
                (*batch, *sizes),
                dtype,
                generator=generator(number),
                order=order,
                style=("wide", "nonfinite")[number % 2],
            )
            params = {**ALONE[alone], "BLOCK_K": 32, "GROUP_M": 8, **more}
            config = Config("split_k" if "SPLITS" in more else "tiles", params, 4, 1)
            assert check(op, args, config, f"{sizes} {order}") == ("SPLITS" not in more or k > 32)


def test_descriptor_with_output_that_has_none() -> None:
    """N = 13 keeps the output from a descriptor, not B, which lies in columns."""
    op = all_ops()["matmul"]
    for sizes in ((20, 13, 40), (2, 20, 13, 40)):
        args = op.inputs(sizes, torch.float16, generator=generator(2), order="nt")
        assert check(op, args, SMALL["persistent"], str(sizes))


def test_what_has_no_descriptor_says_so() -> None:
    op, runtime = all_ops()["matmul"], current()
    for layout, word in (("sliced", "contiguous"), ("offset", "16 bytes"), ("padded", "16 bytes")):
        args = lay_out(op.inputs((32, 32, 32), torch.float16, generator=generator(3)), layout)
        situation = dispatch.situate(runtime, op, metas_of(args), device())
        with pytest.raises(Infeasible, match=word):
            op.fit(SMALL["persistent"], situation.work, device())
        with pytest.raises(Infeasible, match="descriptors"):
            situation.backend.default(device(), situation.work, "persistent")
        explained = portkern.explain("matmul", *args[:2])
        assert any("descriptors" in refusal.reason for refusal in explained.refused)


SHAPES = (
    ((7,), (7,)), ((7,), (7, 5)), ((5, 7), (7,)), ((3, 5, 7), (7,)), ((7,), (3, 7, 5)),
    ((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((5, 7), (2, 7, 3)), ((2, 5, 7), (2, 7, 3)),
    ((2, 1, 5, 7), (3, 7, 4)), ((4, 1, 2, 5, 3), (3, 1, 3, 6)), ((2, 3, 2, 4, 3), (2, 1, 2, 3, 5)),
    ((2, 3, 2, 4, 3), (1, 3, 1, 3, 5)), ((1, 5, 0), (0, 4)), ((0, 3), (3, 4)), ((3, 0, 5, 7), (7, 4)), ((1, 1), (1, 1)),
)  # fmt: skip


@pytest.mark.parametrize("a_shape, b_shape", SHAPES)
def test_gradients_of_every_shape(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    """Values, gradients, and gradients of gradients through the public function, by kernels."""
    for turn in range(3):
        a = torch.randn(a_shape, generator=generator(4))
        b = torch.randn(b_shape, generator=generator(5))
        if turn == 1:
            a, b = (x.mT.contiguous().mT if x.dim() > 1 else x for x in (a, b))
        if turn == 2:
            a, b = (torch.stack([x, x], -1)[..., 0] for x in (a, b))
        a, b = a.requires_grad_(), b.requires_grad_()
        got, want = portkern.matmul(a, b), torch.matmul(a, b)
        assert got.shape == want.shape and got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        gradient = torch.randn(want.shape, generator=generator(6), requires_grad=True)
        firsts = [torch.autograd.grad(each, (a, b), gradient, create_graph=True) for each in (got, want)]
        for ours, theirs in zip(*firsts, strict=True):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        seconds = [torch.autograd.grad(sum(x.square().sum() for x in first), (a, b, gradient)) for first in firsts]
        for ours, theirs in zip(*seconds, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_expanded_and_strided_gradients() -> None:
    a = torch.randn(3, 20, 12, generator=generator(7), requires_grad=True)
    b = torch.randn(12, 18, generator=generator(8), requires_grad=True)
    gradients = {
        "ones": torch.ones(()).expand(3, 20, 18),
        "rows": torch.randn(18, generator=generator(9)).expand(3, 20, 18),
        "columns": torch.randn(3, 20, 1, generator=generator(9)).expand(3, 20, 18),
        "batches": torch.randn(20, 18, generator=generator(9)).expand(3, 20, 18),
        "transposed": torch.randn(18, 20, 3, generator=generator(9)).permute(2, 1, 0),
        "sliced": torch.randn(3, 40, 36, generator=generator(9))[:, ::2, ::2],
    }
    for what, gradient in gradients.items():
        before = gradient.clone()
        got = torch.autograd.grad(portkern.matmul(a, b), (a, b), gradient)
        want = torch.autograd.grad(torch.matmul(a, b), (a, b), gradient.contiguous())
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=what)
        assert torch.equal(gradient, before), what


def test_gradient_lies_as_its_operand() -> None:
    """A weight that is read transposed gets its gradient in its own layout, so that none is copied."""
    weight = torch.randn(6, 9, generator=generator(10), requires_grad=True)
    x = torch.randn(4, 9, generator=generator(11))
    portkern.matmul(x, weight.t()).sum().backward()
    assert weight.grad is not None and weight.grad.stride() == weight.stride()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, 9))


@pytest.mark.parametrize("variant", SMALL)
def test_sizes_that_end_within_a_tile(variant: str) -> None:
    op, ran = all_ops()["matmul"], 0
    for m, n, k in itertools.product((1, 15, 17), (1, 31, 40), (1, 16, 34, 36)):
        for layout in ("contiguous", "transposed"):
            args = lay_out(op.inputs((m, n, k), torch.float32, generator=generator(m * n * k)), layout)
            ran += check(op, args, SMALL[variant], f"{m}x{n}x{k} {layout}")
    assert ran >= 4


def parts_added(*parts: float) -> float:
    """The sum of a product whose parts have these sums, one for each block of k."""
    op = all_ops()["matmul"]
    b = torch.zeros(16 * len(parts), 1)
    b[::16, 0] = torch.tensor(parts)
    config = SMALL["split_k"].replace(params={"SPLITS": len(parts)})
    (found,) = run_config(current(), op, (torch.ones(1, 16 * len(parts)), b, False), device(), config)
    return float(found)


def test_parts_are_added_in_their_order() -> None:
    """Of 1, 1e8 and -1e8 float32 makes 0 in this order, and 1 in others."""
    assert parts_added(1.0, 1e8, -1e8) == 0.0
    assert parts_added(1e8, -1e8, 1.0) == 1.0
    assert parts_added(1e8, 1.0, -1e8) == 0.0
    assert parts_added(1.0, 2.0, 4.0, 8.0, 16.0) == 31.0


@pytest.mark.parametrize("blocks", range(2, 9))
def test_every_number_of_parts(blocks: int) -> None:
    """Parts of unlike lengths, the last block cut, and more parts than blocks: no element twice, none left out."""
    op = all_ops()["matmul"]
    for k in (16 * blocks, 16 * blocks - 5):
        a = torch.ones(2, k)
        b = 2.0 ** (torch.arange(k) % 16)[:, None] * torch.tensor([1.0, -3.0])
        for splits in range(2, blocks + 3):
            config = SMALL["split_k"].replace(params={"SPLITS": splits})
            (found,) = run_config(current(), op, (a, b, False), device(), config)
            assert torch.equal(found, a @ b), (k, splits)


@pytest.mark.parametrize("out", [((2, 7, 9), (200, 20, 2)), ((2, 7, 9), (100, 1, 10)), ((2, 7, 9), (63, 9, 1))])
def test_parts_are_added_into_any_strides(out: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """What no op of this package has: results that do not lie one after another. The gaps stay as they were."""
    shape, strides = out
    a, b = torch.randn(2, 7, 70, generator=generator(12)), torch.randn(2, 70, 9, generator=generator(13))
    metas = (*metas_of((a, b)), False)
    product = product_of(Matrix.of(metas[0]), Matrix.of(metas[1]), Matrix(shape, strides, 4))
    op = all_ops()["matmul"]
    blocks = op.fit(SMALL["split_k"], dispatch.situate(current(), op, metas, device()).work, device())
    plan = gemm_plan(
        matmul_file._KERNELS, SMALL["split_k"], blocks, product, Buffer(shape, strides, torch.float32),
        COMPUTE=tl.float32, PRECISION="ieee",
    )  # fmt: skip
    memory = Guarded()
    (found,) = execute(plan, (a, b, False), torch.device("cpu"), {}, allocate=memory)
    assert found.stride() == strides and not memory.broken()
    torch.testing.assert_close(found, a @ b)


def test_bfloat16_is_refused_where_it_would_be_wrong() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedDtype, match="multiplies bfloat16 matrices wrongly; unset TRITON_INTERPRET"):
        portkern.matmul(x, x.t())
    assert torch.equal(portkern.softmax(x.t(), 1), torch.full((3, 2), 0.5, dtype=torch.bfloat16))
