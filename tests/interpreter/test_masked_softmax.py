"""Masked softmax through its public function, by kernels: broadcast masks, causal rows of any strides."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import judge
from tests.spine import generator, run_config


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_causal_rows_of_any_strides(order: tuple[int, ...]) -> None:
    """Positions are those of the last two dims, however these lie."""
    sizes = (2, 2, 5, 6)
    memory = torch.randn([sizes[axis] for axis in order], generator=generator(1))
    x = memory.permute([order.index(axis) for axis in range(4)]).requires_grad_()
    keep = torch.rand(2, 1, 1, 6, generator=generator(2)) > 0.3
    got = portkern.masked_softmax(x, keep, scale=0.5, causal=True)
    triangle = torch.ones(5, 6, dtype=torch.bool).tril() & keep
    z = (0.5 * x).masked_fill(~triangle, -torch.inf)
    want = torch.where(triangle.any(-1, keepdim=True), torch.softmax(z, -1), 0.0)
    torch.testing.assert_close(got, want)
    g = torch.randn(sizes, generator=generator(3))
    (ours,) = torch.autograd.grad(got, x, g)
    y = want.detach()
    torch.testing.assert_close(ours, 0.5 * y * (g - (y * g).sum(-1, keepdim=True)), rtol=1e-4, atol=1e-6)
    full = portkern.logsumexp(x, (1, 3), True)
    torch.testing.assert_close(full, torch.logsumexp(x, (1, 3), True))


def test_causal_rows_of_more_dims_than_one_launch_reaches() -> None:
    """Rows that lie outermost and merge with no other dim: each launch knows which of them it has."""
    memory = torch.randn(2, 3, 3, 3, 6, generator=generator(4))
    x = memory.permute(1, 2, 3, 0, 4)
    keep = (torch.rand(3, 3, 3, 2, 6, generator=generator(5)) > 0.3).transpose(0, 2)
    got = portkern.masked_softmax(x, keep, causal=True)
    left = torch.ones(2, 6, dtype=torch.bool).tril() & keep
    want = torch.softmax(x.masked_fill(~left, -torch.inf), -1)
    torch.testing.assert_close(got, torch.where(left.any(-1, keepdim=True), want, 0.0))


@pytest.mark.parametrize("mask", ["none", "float"])
@pytest.mark.parametrize("variant", ["looped_row", "split_row"])
def test_masks_of_rows_in_blocks(variant: str, mask: str) -> None:
    """What is masked, and rows of which nothing is left, where a row takes several blocks and parts of it have none."""
    op, device = all_ops()["masked_softmax"], dispatch.reference_device(current(), "sm90")
    for number, style in enumerate(("normal", "nonfinite")):
        args = op.inputs((6, 72), torch.float32, generator=generator(number), style=style, mask=mask, causal=True)
        x, given, *rest = args
        if given is not None:
            given[2], given[3, :60] = -torch.inf, -torch.inf
        x[4] = -torch.inf
        params = {"BLOCK_M": 2, "BLOCK_N": 16, **({"SPLITS": 4} if variant == "split_row" else {})}
        outputs = run_config(current(), op, (x, given, *rest), device, Config(variant, params, 4))
        verdict = judge(op, (x, given, *rest), outputs)
        assert verdict.right, f"{style}: {verdict.reason}"
        assert bool((outputs[0][4] == 0).all())


ONE_PART = {"PROGRAMS_PER_UNIT": 1, "PARTS": 2}


@pytest.mark.parametrize(
    ("columns", "dtype"), [(512, torch.bfloat16), (400, torch.float16), (512, torch.float32)], ids=str
)
@pytest.mark.parametrize(
    ("variant", "params"),
    [
        ("resident_row", {"PROGRAMS_PER_UNIT": 0}), ("resident_row", {"PROGRAMS_PER_UNIT": 0, "PARTS": 4}),
        ("cached_row", {"PROGRAMS_PER_UNIT": 0, "PARTS": 4}), ("coresident_row", ONE_PART),
    ],
)  # fmt: skip
def test_rows_and_masks_in_words(columns: int, variant: str, params: dict[str, int], dtype: torch.dtype) -> None:
    """What infinities stand for: with each sign of scale, and with none; masks of rows and of all, of any bytes."""
    op, device = all_ops()["masked_softmax"], dispatch.reference_device(current(), "sm90")
    given = {**params, "BLOCK_N": 512} if variant == "coresident_row" else params
    styles = ((0.5, "normal"), (-0.7, "nonfinite"), (0.0, "wide"), (1e-50, "normal"), (math.inf, "wide"))
    for number, (scale, style) in enumerate(styles):
        if abs(scale) < 1e-38 and variant == "coresident_row":
            continue  # softmax's kernel, which the interpreter does not run with its mask of rows
        x, mask, *_ = op.inputs((5, columns), dtype, generator=generator(number), style=style)
        mask = (mask.to(torch.uint8) * 254).view(torch.bool) if number else mask
        mask[2], mask[3, : columns - 8], mask[4, 0] = False, False, False
        x[4, 0] = torch.nan
        for keep in (mask, mask[:1].expand(5, columns))[: 1 + (number == 1)]:
            args = (x, keep, scale, False, dtype)
            assert op.problem(*metas_of(args)).flags["words"]
            verdict = judge(op, args, run_config(current(), op, args, device, Config(variant, given, 4)))
            assert verdict.right, f"{scale} {style} {keep.stride()}: {verdict.reason}"


@pytest.mark.parametrize(
    ("mask", "columns", "causal", "words"),
    [("bool", 512, False, True), ("bool", 510, False, False), ("float", 512, False, False), ("bool", 512, True, False),
     ("none", 512, False, False)],
)  # fmt: skip
def test_what_is_read_in_words(mask: str, columns: int, causal: bool, words: bool) -> None:
    op = all_ops()["masked_softmax"]
    args = metas_of(op.inputs((8, columns), torch.bfloat16, device="meta", mask=mask, causal=causal))
    assert op.problem(*metas_of(args)).flags["words"] == words
    if mask == "bool":
        x, keep, *rest = args
        repeated = dataclasses.replace(keep, strides=(columns, 0))
        assert not op.problem(x, repeated, *rest).flags["words"]
