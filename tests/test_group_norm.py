"""Group norm on CPU tensors: results as torch's, gradients in fp64, arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import portkern
from portkern import errors
from portkern.plan import metas_of
from portkern.registry import all_ops
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
