"""Packed operands of matrix products in the interpreter: copies in both orders, and what lies between their rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import portkern.kernels.matmul as matmul_file
from portkern import dispatch
from portkern.gemm import PACKS
from portkern.op import Case, Op
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, lay_out
from tests.interpreter.test_gemm import DTYPES, LEAST, OPS, SMALL, check, device
from tests.spine import generator

ORDERS = ("nn", "nt", "tn", "tt")
BOTH = {"PACK_A": 1, "PACK_B": 1}
PACKINGS = [
    {pack: value for pack, value in zip(PACKS.values(), values, strict=True) if value}
    for values in itertools.product((0, 1, 2), repeat=2)
    if any(values)
]
# Sizes of which none is a multiple of 16 bytes in any dtype: one product, batches, repeated ones, and a summed dim.
ODD = (
    ("matmul", Case((17, 35, 37))),
    ("matmul", Case((2, 17, 35, 37))),
    ("matmul", Case((2, 17, 35, 37), {"shared": "a"})),
    ("matmul", Case((2, 3, 17, 35, 37), {"shared": "b"})),
    ("matmul_backward", Case((3, 17, 35, 37), {"summed": True})),
    ("matmul_backward", Case((17, 35, 37), {"columns": True})),
)


@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("name", OPS)
def test_packed_operands_in_every_layout(name: str, variant: str) -> None:
    op, ran = all_ops()[name], 0
    for number, case in enumerate(op.cases):
        packing, layout = PACKINGS[number % len(PACKINGS)], list(LAYOUTS)[(number // 2) % len(LAYOUTS)]
        dtype = torch.float16 if number % 3 == 2 else torch.float32
        args = op.inputs(case.sizes, dtype, generator=generator(number), **case.options)
        ran += check(op, lay_out(args, layout), SMALL[variant].replace(params=packing), f"{case} {layout}")
    assert ran >= LEAST[variant] // 2


def edged(op: Op, case: Case, number: int) -> tuple[object, ...]:
    """Odd operands in one of the orders, with an infinite last row of A and last element of its first row, and a last
    column of NaN in B: one row and one column of the result more, and none of the others, are finite."""
    dtype = getattr(torch, DTYPES[number % len(DTYPES)])
    args = op.inputs(case.sizes, dtype, generator=generator(number), order=ORDERS[number % 4], **case.options)
    args = lay_out(args, ("contiguous", "offset", "padded", "sliced")[number // 3 % 4])
    a, b = args[:2]
    a[..., -1, :] = math.inf
    a[..., 0, -1] = math.inf
    b[..., :, -1] = math.nan
    finite = op.reference(*(x.double() if isinstance(x, torch.Tensor) else x for x in args)).isfinite()
    assert finite[..., 1:-1, :-1].all() and not finite[..., -1, :].any() and not finite[..., :, -1].any()
    return args


@pytest.mark.parametrize("variant", SMALL)
def test_nothing_between_the_rows_of_a_copy_reaches_the_result(variant: str) -> None:
    """Scratch memory starts as NaN, and NaN lies around the operands: whatever is read but an element is zero."""
    ran, turns = 0, 2 if variant == "tiles" else 3
    for (number, packing), (index, (name, case)) in itertools.product(enumerate(PACKINGS), enumerate(ODD)):
        if (number + index) % turns == 0:
            op = all_ops()[name]
            args = edged(op, case, number + index)
            problem = dispatch.situate(current(), op, metas_of(args), device()).problem
            assert ("R" in problem.sizes) == ("summed" in case.options)
            ran += check(op, args, SMALL[variant].replace(params=packing), f"{case} {number + index}")
    assert ran >= {"tiles": 24, "split_k": 16}.get(variant, 4)


@pytest.mark.parametrize("order", ORDERS)
def test_packed_operands_have_descriptors(order: str) -> None:
    """Whatever order, and sizes that are no multiples of 16 bytes."""
    op = all_ops()["matmul"]
    both = [packing for packing in PACKINGS if len(packing) == 2]
    for number, (sizes, options) in enumerate(
        (((70, 67, 129), {}), ((3, 30, 65, 35), {}), ((3, 30, 65, 35), {"shared": "a"}))
    ):
        args = op.inputs(sizes, torch.float32, generator=generator(14), order=order, **options)
        for variant in ("persistent", "split_k by descriptors"):
            assert not check(op, args, SMALL[variant], f"{sizes} {order}")
            packing = both[(number + ORDERS.index(order)) % 4]
            assert check(op, args, SMALL[variant].replace(params=packing), f"{sizes} {order} {options}")


def test_a_packed_copy_is_made_once_for_all_that_read_it() -> None:
    """Of four launches, one for each index of two of four batch dims, two each read the same matrices of b."""
    op = all_ops()["matmul"]
    a = torch.randn(2, 3, 1, 4, 20, 12, generator=generator(15))[:, :, :, ::2]
    b = torch.randn(3, 2, 2, 12, 18, generator=generator(16))[:, :, :1]
    args = (a.expand(2, 3, 2, 2, 20, 12), b.expand(3, 2, 2, 12, 18), False)
    situation = dispatch.situate(current(), op, metas_of(args), device())
    config = SMALL["tiles"].replace(params=BOTH)
    blocks = op.fit(config, situation.work, device())
    plan = op.plan(config, blocks, device(), *situation.args)
    copied = [launch.args[0].position for launch in plan.launches if launch.kernel is matmul_file._matmul_pack_kernel]
    assert (copied.count(0), copied.count(1), len(plan.launches)) == (4, 2, 10)
    assert check(op, args, config, "four batch dims")
    repeated = (torch.randn(20, 12, generator=generator(17)).expand(5, 20, 12), torch.randn(5, 12, 18), False)
    for packing, columns in ((BOTH, 12 * 18), ({"PACK_A": 2, "PACK_B": 2}, 12 * 20)):  # rows of 18 end at 20
        config = SMALL["tiles"].replace(params=packing)
        situation = dispatch.situate(current(), op, metas_of(repeated), device())
        blocks = op.fit(config, situation.work, device())
        plan = op.plan(config, blocks, device(), *situation.args)
        assert [buffer.shape for buffer in plan.scratch] == [(12 * 20,), (5 * columns,)]
        assert check(op, repeated, config, "repeated")
