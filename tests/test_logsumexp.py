"""Logsumexp on CPU tensors: results as torch's, gradients in fp64, arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portkern
from portkern import errors
from portkern.registry import all_ops
from tests.spine import generator

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((2, 3, 4), (0, 2)), ((2, 3, 4), (-1, 0, 1)), ((), -1),
     ((0, 3), 0), ((3, 0), 1), ((0, 3), 1)],
)  # fmt: skip
def test_as_torch(shape: tuple[int, ...], dim: Any, keepdim: bool) -> None:
    x = torch.randn(shape, generator=generator(1), dtype=torch.float64, requires_grad=True)
    got, want = portkern.logsumexp(x, dim, keepdim), torch.logsumexp(x, dim, keepdim)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)
    if x.numel():
        g = torch.randn(want.shape, generator=generator(2), dtype=torch.float64)
        for ours, theirs in zip(torch.autograd.grad(got, x, g), torch.autograd.grad(want, x, g), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "row",
    [[-INF, -INF], [-INF, 1.0], [INF, 1.0], [INF, INF], [INF, -INF], [NAN, 1.0], [NAN, INF], [1e4, 1e4], [-1e4, 0]],
)
def test_non_finite_as_torch(row: list[float]) -> None:
    x = torch.tensor([row, [0.0, 1.0]])
    torch.testing.assert_close(portkern.logsumexp(x, 1), torch.logsumexp(x, 1), equal_nan=True)


def test_gradcheck() -> None:
    x = torch.randn(3, 4, generator=generator(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: portkern.logsumexp(x, (0, 1), True), (x,))


def test_integers() -> None:
    x = torch.randint(0, 5, (3, 4), generator=generator(4))
    torch.testing.assert_close(portkern.logsumexp(x, 1), torch.logsumexp(x, 1))


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((torch.randn(2, 3), 2), IndexError, ("dim 2", "-2 to 1")),
        ((torch.randn(2, 3), (0, -2)), RuntimeError, ("multiple times",)),
        ((torch.randn(2, 3), 1.0), TypeError, ("float",)),
        ((torch.zeros(2, 3, dtype=torch.complex64), 0), NotImplementedError, ("complex64",)),
    ],
)
def test_refused(args: tuple[Any, ...], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        portkern.logsumexp(*args)
    assert isinstance(raised.value, errors.PortkernError)
    assert all(word in str(raised.value) for word in words), raised.value


def test_opcheck() -> None:
    op = all_ops()["logsumexp"]
    x, dim, dtype = op.inputs((2, 6, 5), torch.float32, generator=generator(5), dim=1)
    for view in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
        torch.library.opcheck(torch.ops.portkern.logsumexp.default, (view, dim, dtype), test_utils="test_faketensor")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_results_and_a_gradient_that_is_not_rounded_twice(dtype: torch.dtype) -> None:
    x = torch.randn(4, 300, generator=generator(8)).to(dtype).requires_grad_()
    y = portkern.logsumexp(x, -1)
    assert y.dtype == dtype and portkern.logsumexp(x, -1, True).shape == (4, 1)
    y.sum().backward()
    exact = torch.softmax(x.detach().double(), -1)
    assert x.grad is not None and x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
