"""The judge: right kernels pass, and plainly wrong results do not, whatever large elements stand beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from portkern.registry import get
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import generator

OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def half_zero(y: torch.Tensor) -> None:
    y[..., y.shape[-1] // 2 :] = 0


def small_zero(y: torch.Tensor) -> None:
    y[y.abs() < 0.002] = 0


def a_row_zero(y: torch.Tensor) -> None:
    y[-1] = 0


def unwritten(y: torch.Tensor) -> None:
    y[0, 0] = torch.nan


def one_off(y: torch.Tensor) -> None:
    y[0, 3] *= 1.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["normal", "wide", "nonfinite"])
@pytest.mark.parametrize("name", OPS)
def test_torchs_own_result_passes(name: str, style: str, dtype: torch.dtype) -> None:
    op = get(name)
    args = op.inputs((16, 1000), dtype, generator=generator(1), style=style)
    verdict = judge(op, args, (op.reference(*args),))
    assert verdict.right, verdict.reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["normal", "wide"])
@pytest.mark.parametrize("break_it", [half_zero, a_row_zero, unwritten, one_off, small_zero])
@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_wrong_results_do_not_pass(
    name: str, break_it: Callable[[torch.Tensor], None], style: str, dtype: torch.dtype
) -> None:
    op = get(name)
    args = op.inputs((2, 32768), dtype, generator=generator(2), style=style)
    if break_it is one_off and style == "wide":
        args[0][0, 3] = args[0].max()  # an element that counts
        args = (*args[:1], *([torch.softmax(args[0].float(), -1).to(dtype)] if len(args) == 4 else []), *args[-2:])
    y = op.reference(*args).clone()
    break_it(y)
    assert not judge(op, args, (y,)).right


def test_an_element_that_is_all_exponential_passes() -> None:
    """Where dy is 0, the gradient of log-softmax is exp(y) times a sum: the rounding of y's product counts."""
    op, y, dy = get("log_softmax_backward"), torch.full((1, 64), -57.3), torch.zeros(1, 64)
    y[0, 0], dy[0, 1] = 0.0, 300.0
    dx = dy - torch.exp2(y * 1.4426950408889634) * dy.sum()
    verdict = judge(op, (dy, y, 1, torch.float32), (dx,))
    assert verdict.right, verdict.reason


def test_a_flat_row_beside_a_peaked_one_counts() -> None:
    op, x = get("softmax"), torch.zeros(2, 4096)
    x[0, 0] = 50.0
    y = torch.softmax(x, -1)
    y[1] = 0
    assert not judge(op, (x, 1, torch.float32), (y,)).right


def test_dtype_strides_and_number_of_outputs_count() -> None:
    op, x = get("softmax"), torch.randn(4, 6, dtype=torch.bfloat16)
    y = torch.softmax(x, -1)
    assert judge(op, (x, 1, torch.bfloat16), (y,)).right
    assert "float32" in judge(op, (x, 1, torch.bfloat16), (y.float(),)).reason
    assert "strides" in judge(op, (x, 1, torch.bfloat16), (y.t().contiguous().t(),)).reason
    assert "0 outputs" in judge(op, (x, 1, torch.bfloat16), ()).reason


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values(layout: str) -> None:
    x = torch.randn(3, 4, 5)
    (laid,) = lay_out((x,), layout)
    assert laid.shape == x.shape
    want = x[:1].expand(x.shape) if layout == "expanded" else x
    assert torch.equal(laid, want)
