"""Group norm on CPU tensors: results as torch's, gradients in fp64, arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import portkern
from portkern import dispatch, errors
from portkern.config import Config
from portkern.lookup import Choice
from portkern.plan import Launch, Plan, metas_of
from portkern.record import FrozenMap
from portkern.registry import all_ops
from portkern.runtime import current
from tests.spine import generator


@pytest.mark.parametrize("shape", [(2, 6), (3, 6, 5), (2, 6, 3, 4), (1, 6, 2, 1, 3)])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_as_torch(shape: tuple[int, ...], groups: int) -> None:
    x = torch.randn(shape, generator=generator(1), dtype=torch.float64, requires_grad=True)
    w, b = (torch.rand(6, generator=generator(2 + i), dtype=torch.float64, requires_grad=True) for i in range(2))
    for args in ((x, groups), (x, groups, w), (x, groups, w, b), (x, groups, None, b)):
        got, want = portkern.group_norm(*args), F.group_norm(*args)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    g = torch.randn(shape, generator=generator(4), dtype=torch.float64)
    pairs = zip(torch.autograd.grad(portkern.group_norm(x, groups, w, b), (x, w, b), g),
                torch.autograd.grad(F.group_norm(x, groups, w, b), (x, w, b), g), strict=True)  # fmt: skip
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradcheck() -> None:
    tensors = [torch.randn(2, 4, 3, generator=generator(5), dtype=torch.float64, requires_grad=True)]
    tensors += [torch.rand(4, generator=generator(6 + i), dtype=torch.float64, requires_grad=True) for i in range(2)]
    assert torch.autograd.gradcheck(lambda x, w, b: portkern.group_norm(x, 2, w, b), tensors)


def test_channels_last_is_read_and_written_in_place() -> None:
    x = torch.randn(2, 6, 4, 5, generator=generator(8)).to(memory_format=torch.channels_last)
    y = portkern.group_norm(x, 3)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, F.group_norm(x, 3))


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((torch.randn(6), 2), RuntimeError, ("at least 2",)),
        ((torch.randn(2, 6), 4), RuntimeError, ("6 channels", "4 groups")),
        ((torch.randn(2, 6), 0), ValueError, ("num_groups is 0",)),
        ((torch.randn(2, 6), -1), RuntimeError, ("num_groups is -1",)),
        ((torch.randn(1, 6), 6), ValueError, ("[1, 6]", "1 value for each of 6 groups")),
        ((torch.randn(1, 6, 1, 1), 6), ValueError, ("1 value for each of 6 groups",)),
        ((torch.randn(2, 6), 2.0), TypeError, ("num_groups", "float")),
        ((torch.randn(2, 6), 2, torch.ones(5)), RuntimeError, ("weight", "[5]", "[6]")),
        ((torch.ones(2, 6, dtype=torch.int32), 2), NotImplementedError, ("int32",)),
    ],
)
def test_refused(args: tuple[Any, ...], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        portkern.group_norm(*args)
    assert isinstance(raised.value, errors.PortkernError)
    assert all(word in str(raised.value) for word in words), raised.value


def test_groups_of_one_value_in_more_batches_as_torch() -> None:
    for shape in ((2, 6), (2, 6, 1), (0, 6, 1), (1, 6, 0), (1, 0, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(portkern.group_norm(x, 6), F.group_norm(x, 6))


def test_opcheck() -> None:
    op = all_ops()["group_norm"]
    x, *rest = op.inputs((2, 6, 5), torch.float32, generator=generator(9))
    for view in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.library.opcheck(torch.ops.portkern.group_norm.default, (view, *rest), test_utils="test_faketensor")


def test_a_frozen_weight_has_no_sums() -> None:
    op = all_ops()["group_norm_backward"]
    args = metas_of(op.inputs((2, 6, 5), torch.float32))
    assert op.work(op.problem(*args)).partials > 0 == op.work(op.problem(*args[:5], None, None)).partials


def shared_plan(
    name: str, sizes: tuple[int, ...], params: dict[str, int], dtype: str = "bfloat16", step: int = 1
) -> tuple[Plan, Launch]:
    """The plan of programs that share 32 groups and wait for each other, on an H200, of every ``step``-th place."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    args = op.inputs((*sizes[:2], sizes[2] * step), getattr(torch, dtype), device="meta", groups=32)
    args = tuple(each[..., ::step] if isinstance(each, torch.Tensor) and each.dim() == 3 else each for each in args)
    situation = dispatch.situate(current(), op, metas_of(args), device)
    given = {"PROGRAMS_PER_UNIT": 4, "SUM_BLOCK_M": 16, "SUM_BLOCK_N": 8, "SUM_WARPS": 8, **params}
    config = Config("coresident_row", FrozenMap(given), 8)
    plan = situation.plan(Choice(config, op.fit(config, situation.work, device), "test", "test"))
    return plan, plan.launches[0]


@pytest.mark.parametrize("name", ["group_norm", "group_norm_backward"])
def test_programs_that_share_a_group(name: str) -> None:
    """A word for each part of each group, zeroed, and for each that a power of 2 has beyond them; as many programs as
    run at once, in whole groups."""
    for sizes, params, parts, words in (
        ((2, 512, 65536), {"BLOCK_N": 8192}, 128, 128),
        ((2, 320, 16384), {"BLOCK_N": 8192}, 20, 32),
        ((2, 320, 16384), {"BLOCK_N": 2048, "SPLITS": 20}, 20, 32),
        ((2, 320, 16384), {"BLOCK_N": 2048, "SPLITS": 39}, 30, 32),
    ):
        plan, first = shared_plan(name, sizes, params)
        (buffer,) = (each for each in plan.scratch if each.dtype == torch.int64)
        assert buffer.init == 0 and buffer.shape == (64 * words,)
        assert first.coresident and first.grid[0] % parts == 0
        assert first.grid[0] == min(64, 132 * 4 // parts) * parts
        assert first.constexprs["SPLITS"] == words and first.constexprs["WALK"] == ("SPLITS" in params)
        if name.endswith("backward"):  # of dy * h and of dy, for each part that a channel is cut into
            assert plan.scratch[0].shape == (2 * sizes[0] * parts // (sizes[1] // 32) * sizes[1],)


def test_words_of_two_only_where_they_are_whole() -> None:
    tile = {"BLOCK_N": 4096}
    for sizes, dtype, step, paired in (
        ((2, 64, 4096), "bfloat16", 1, True), ((2, 64, 4096), "float16", 1, True), ((2, 64, 4096), "float32", 1, False),
        ((2, 64, 4095), "bfloat16", 1, False), ((2, 64, 4096), "bfloat16", 2, False),
    ):  # fmt: skip
        for name in ("group_norm", "group_norm_backward"):
            assert shared_plan(name, sizes, tile, dtype, step)[1].constexprs["PAIRS"] == paired, (sizes, dtype, step)
    full = {sizes: shared_plan("group_norm", sizes, tile)[1].constexprs["FULL"]
            for sizes in ((2, 64, 4096), (2, 64, 4100), (2, 96, 2048))}  # fmt: skip
    assert list(full.values()) == [True, False, False]


def test_offsets_that_pass_31_bits_are_wide() -> None:
    for step, wide in ((1, False), (1 << 20, True)):
        assert shared_plan("group_norm", (2, 64, 4096), {"BLOCK_N": 4096}, step=step)[1].constexprs["WIDE"] == wide


@pytest.mark.parametrize(
    ("sizes", "params", "words"),
    [
        ((2, 512, 65536), {"BLOCK_N": 4096}, ("256 parts", "at most 128")),
        ((2, 512, 65536), {"BLOCK_N": 8192, "PROGRAMS_PER_UNIT": 0}, ("128 parts", "gives 0")),
        ((2, 32, 1), {"BLOCK_N": 4096}, ("one element",)),
    ],
)
def test_groups_that_cannot_be_shared(sizes: tuple[int, ...], params: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(errors.Infeasible) as raised:
        shared_plan("group_norm", sizes, params)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("name", ["group_norm", "group_norm_backward"])
def test_float64_is_not_exchanged(name: str) -> None:
    """The word that programs exchange holds two float32."""
    op = all_ops()[name]
    for dtype, shared in ((torch.float64, False), (torch.float32, True)):
        work = op.work(op.problem(*metas_of(op.inputs((2, 64, 4096), dtype, device="meta"))))
        assert ("coresident_row" in work.variants) == shared
