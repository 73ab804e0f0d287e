"""Masked softmax on CPU tensors: masks, causal rows, what is left of nothing, gradients, arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portkern
from portkern import errors
from portkern.registry import all_ops
from tests.spine import generator


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(1), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 1), (4, 5), (3, 4, 5), (3, 1, 5), (1, 1, 1)])
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    x = logits(2, 3, 4, 5)
    keep = torch.rand(shape, generator=generator(2)) > 0.3
    keep[..., 0] = True
    got, want = portkern.masked_softmax(x, keep, scale=0.7), torch.softmax((x * 0.7).masked_fill(~keep, -torch.inf), -1)
    torch.testing.assert_close(got, want)
    g = torch.randn(got.shape, generator=generator(3), dtype=torch.float64)
    for ours, theirs in zip(torch.autograd.grad(got, x, g), torch.autograd.grad(want, x, g), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_added_mask_and_causal() -> None:
    x = logits(2, 4, 4)
    mask = torch.randn(4, 4, generator=generator(4), dtype=torch.float64)
    torch.testing.assert_close(portkern.masked_softmax(x, mask), torch.softmax(x + mask, -1))
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    want = torch.softmax(x.masked_fill(~triangle, -torch.inf), -1)
    torch.testing.assert_close(portkern.masked_softmax(x, causal=True), want)
    wide = logits(2, 6)
    first = portkern.masked_softmax(wide, causal=True)[0]
    assert first.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # counted from the top left


def test_nothing_left_is_zero() -> None:
    """B01: exactly 0, its gradient too; what is masked may be NaN. Plain softmax gives NaN."""
    x = torch.randn(2, 3)
    x[1, 2] = torch.nan
    x.requires_grad_()
    mask = torch.tensor([[True, True, False], [False, False, False]])
    for each in (mask, torch.where(mask, 0.0, -torch.inf)):
        if each.dtype != torch.bool:
            x = x.detach().nan_to_num(0.0).requires_grad_()
        y = portkern.masked_softmax(x, each)
        assert bool((y[1] == 0).all()) and float(y[0, 2].detach()) == 0
        torch.testing.assert_close(y[0].sum(), torch.tensor(1.0))
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert bool((grad[1] == 0).all()) and bool(grad.isfinite().all())
    assert bool(portkern.softmax(torch.full((1, 3), -torch.inf)).isnan().all())


def test_gradcheck() -> None:
    x = logits(3, 4)
    assert torch.autograd.gradcheck(lambda x: portkern.masked_softmax(x, scale=2.0, causal=True), (x,))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mask": torch.ones(3, dtype=torch.bool)}, RuntimeError, ("[3]", "[2, 5]")),
        ({"mask": torch.ones(1, 2, 5, dtype=torch.bool)}, RuntimeError, ("[1, 2, 5]",)),
        ({"mask": torch.ones(2, 5, dtype=torch.int32)}, NotImplementedError, ("mask", "int32")),
        ({"mask": torch.ones(2, 5, requires_grad=True)}, RuntimeError, ("detach",)),
        ({"scale": "2"}, TypeError, ("scale",)),
        ({"input": torch.randn(5), "causal": True}, RuntimeError, ("1 dims",)),
        ({"input": torch.ones(2, 5, dtype=torch.int64)}, NotImplementedError, ("int64",)),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        portkern.masked_softmax(**{"input": torch.randn(2, 5), **arguments})
    assert isinstance(raised.value, errors.PortkernError)
    assert all(word in str(raised.value) for word in words), raised.value


def test_opcheck() -> None:
    op = all_ops()["masked_softmax"]
    x, mask, *rest = op.inputs((2, 6, 5), torch.float32, generator=generator(5))
    torch.library.opcheck(torch.ops.portkern.masked_softmax.default, (x, mask[:1].expand(2, 6, 5), *rest),
                          test_utils="test_faketensor")  # fmt: skip
