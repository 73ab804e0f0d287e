"""The norms through their public functions, by kernels: gradients, layouts, long rows, what users have reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import judge
from tests.spine import generator, run_config

NORMS = ("layer_norm", "rms_norm")
Views = dict[str, Callable[[Tensor], Tensor]]
# Five ways for a (2, 2, 6) tensor to lie, made of its values.
VIEWS: Views = {
    "contiguous": lambda x: x.clone(),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x])[:2],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def parameters(n: int, name: str) -> list[Tensor]:
    count = 2 if name.endswith("layer_norm") else 1
    return [(torch.rand(n, generator=generator(n + i)) + 0.5).requires_grad_() for i in range(count)]


def grads(y: Any, inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, list(inputs), gradient)


@pytest.mark.parametrize("name", NORMS)
def test_layouts_of_input_and_gradient(name: str) -> None:
    """B19, B25: all 25 pairs are as torch has them, and neither is written."""
    base, g = torch.randn(2, 2, 6, generator=generator(1)), torch.randn(2, 2, 6, generator=generator(2))
    weights = parameters(6, name)
    for (how, view), (lies, lay) in itertools.product(VIEWS.items(), VIEWS.items()):
        x, gradient = view(base).detach().requires_grad_(), lay(g)
        before = gradient.clone()
        y, want = getattr(portkern, name)(x, (6,), *weights), getattr(F, name)(x, (6,), *weights)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5, msg=f"{how}")
        pairs = zip(grads(y, [x, *weights], gradient), grads(want, [x, *weights], gradient), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=f"{how}, gradient {lies}")
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("name", NORMS)
def test_gradient_of_a_sum(name: str) -> None:
    """B17: a gradient of stride 0."""
    x = torch.randn(2, 6, 40, generator=generator(3), requires_grad=True)
    weights = parameters(40, name)
    y, want = getattr(portkern, name)(x, (40,), *weights), getattr(F, name)(x, (40,), *weights)
    for ours, theirs in zip(
        torch.autograd.grad(y.sum(), [x, *weights]), torch.autograd.grad(want.sum(), [x, *weights]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_several_dims_without_weights_and_one_alone(name: str) -> None:
    x = torch.randn(2, 1, 3, 5, generator=generator(4), requires_grad=True)
    for view in (x, x.transpose(0, 3).contiguous().transpose(0, 3), x.permute(1, 0, 2, 3)):
        for dims in (1, 2, 4):
            shape = view.shape[-dims:]
            w = torch.randn(shape, generator=generator(5), requires_grad=True)
            y, want = getattr(portkern, name)(view, shape, w), getattr(F, name)(view, shape, w)
            assert y.shape == want.shape and y.dtype == want.dtype
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
            g = torch.randn(want.shape, generator=generator(6))
            for ours, theirs in zip(grads(y, [x, w], g), grads(want, [x, w], g), strict=True):
                assert ours.shape == theirs.shape
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(getattr(portkern, name)(view, shape), getattr(F, name)(view, shape))
    if name == "layer_norm":
        b = torch.randn(5, generator=generator(7), requires_grad=True)
        y, want = portkern.layer_norm(x, (5,), None, b), F.layer_norm(x, (5,), None, b)
        for ours, theirs in zip(grads(y, [x, b], y.detach()), grads(want, [x, b], y.detach()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_residual(name: str, used: tuple[int, ...]) -> None:
    """Both outputs, their gradients alone and together; the residual of another dtype."""
    for residual_dtype in (torch.float32, torch.float64):
        x = torch.randn(5, 33, generator=generator(8), requires_grad=True)
        r = torch.randn(5, 33, generator=generator(9)).to(residual_dtype).requires_grad_()
        weights = parameters(33, name)
        got = getattr(portkern, f"add_{name}")(x, r, (33,), *weights)
        total = x + r
        want = (getattr(F, name)(total, (33,), *(w.to(total.dtype) for w in weights)), total)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        leaves = [x, r, *weights] if 0 in used else [x, r]
        gradient = [torch.randn(5, 33, generator=generator(10 + i)).to(total.dtype) for i in used]
        for ours, theirs in zip(
            torch.autograd.grad([got[i] for i in used], leaves, gradient),
            torch.autograd.grad([want[i] for i in used], leaves, gradient),
            strict=True,
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_only_wanted_gradients_are_computed() -> None:
    """Frozen weights cost no sums over rows."""
    op = all_ops()["layer_norm_backward"]
    x, w = torch.randn(3, 20, requires_grad=True), torch.ones(20)
    y = portkern.layer_norm(x, (20,), w, w)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad(F.layer_norm(x, (20,), w, w).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    args = metas_of(op.inputs((3, 20), torch.float32))
    assert op.work(op.problem(*args)).partials == 2 * 4 * 20
    assert op.work(op.problem(*args[:5], None, None)).partials == 0


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("variant", ["packed_rows", "looped_row", "coresident_row"])
def test_large_means_and_flat_rows(name: str, variant: str) -> None:
    """B13: the variance is that of centred values."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    params = {"packed_rows": {"BLOCK_M": 2}, "looped_row": {"BLOCK_M": 1, "BLOCK_N": 64},
              "coresident_row": {"BLOCK_N": 512, "PROGRAMS_PER_UNIT": 1}}[variant]  # fmt: skip
    config = Config(variant, params, num_warps=4)  # type: ignore[arg-type]
    x = torch.randn(3, 300, generator=generator(11)) + 1e4
    x[1] = 1234.0
    args = (x, None, None, 2**-17, torch.float32) if name == "layer_norm" else (x, None, 2**-17, torch.float32)
    outputs = run_config(current(), op, args, device, config)
    verdict = judge(op, args, outputs)
    assert verdict.right, verdict.reason
    if name == "layer_norm":
        assert bool((outputs[0][1] == 0).all())
        exact = F.layer_norm(x.double(), (300,), eps=2**-17)
        assert float((outputs[0] - exact).abs().max()) < 2e-3  # half a spacing of 1e4 is 5e-4 of this spread
        rstd = (x.double().var(-1, correction=0) + 2**-17).rsqrt()
        torch.testing.assert_close(outputs[1][1].double(), rstd, rtol=2e-6, atol=0)


def test_small_examples() -> None:
    """B13."""
    x = torch.tensor([[80000.0, 80001.0, 80002.0, 80003.0]])
    want = torch.tensor([[-1.3416, -0.4472, 0.4472, 1.3416]])
    torch.testing.assert_close(portkern.layer_norm(x, (4,)), want, rtol=0, atol=1e-4)
    assert bool((portkern.layer_norm(torch.full((2, 256), 1234.0), (256,)) == 0).all())
    assert bool((portkern.layer_norm(torch.randn(5, 1), (1,)) == 0).all())
    leaves = [torch.randn(5, 1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    y, total = portkern.add_layer_norm(*leaves, (1,))
    assert bool((y == 0).all()) and torch.equal(total, leaves[0] + leaves[1])
    given = torch.randn(2, 5, 1, dtype=torch.float64)
    for found in torch.autograd.grad((y, total), leaves, (given[0], given[1])):
        torch.testing.assert_close(found, given[1], rtol=0, atol=1e-12)  # rstd is 316
    x = torch.tensor([[2.0], [-3.0]], requires_grad=True)
    y = portkern.rms_norm(x, (1,))
    torch.testing.assert_close(y, x.detach().sign())
    assert float(torch.autograd.grad(y.sum(), x)[0].abs().max()) < 1e-6


@pytest.mark.parametrize("n", [65537, 131072, 1048577])
@pytest.mark.parametrize("name", NORMS)
def test_long_rows(name: str, n: int) -> None:
    """B07."""
    op, dtype = all_ops()[name], torch.float16 if n == 131072 else torch.float32
    x = (torch.randn(1, n, generator=generator(n)) * 4 + 3).to(dtype)
    args = (x, None, None, 2**-17, dtype) if name == "layer_norm" else (x, None, 2**-17, dtype)
    params = {"BLOCK_M": 1, "BLOCK_N": 16384}
    config = Config("looped_row", params, num_warps=32)  # type: ignore[arg-type]
    verdict = judge(op, args, run_config(current(), op, args, dispatch.reference_device(current(), "sm90"), config))
    assert verdict.right, verdict.reason


def test_weight_gradient_does_not_grow_with_rows() -> None:
    """B15: the relative error of sums over 16 times as many rows is no larger than twice that of few."""
    device, op = dispatch.reference_device(current(), "sm90"), all_ops()["rms_norm_backward"]
    errors = []
    for rows in (256, 4096):
        args = op.inputs((rows, 16), torch.float16, generator=generator(rows))
        params = {"BLOCK_M": 16, "PROGRAMS_PER_UNIT": 1, "SUM_BLOCK_M": 32, "SUM_BLOCK_N": 16, "SUM_WARPS": 1}
        config = Config("packed_rows", params, num_warps=4)  # type: ignore[arg-type]
        _, dw, _ = run_config(current(), op, (*args[:5], torch.float32, None), device, config)
        exact = op.reference(*(a.double() if isinstance(a, Tensor) else a for a in args[:5]), torch.float64, None)[1]
        errors.append(float((dw.double() - exact).norm() / exact.norm()))
    assert errors[1] < 2 * errors[0] + 1e-7 and errors[1] < 1e-6


@pytest.mark.parametrize("name", NORMS)
def test_non_finite_as_torch(name: str) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 40, generator=generator(12))
        x[1, 7] = value
        got, want = getattr(portkern, name)(x, (40,)), getattr(F, name)(x, (40,))
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_empty(name: str) -> None:
    """B27: shapes are kept, nothing is launched, and sums over no rows are 0."""
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        x = torch.randn(shape, requires_grad=True)
        w = torch.randn(shape[-1:], requires_grad=True)
        y = getattr(portkern, name)(x, shape[-1:], w)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("name", NORMS)
def test_same_bits_every_time(name: str) -> None:
    x, g = torch.randn(9, 33, generator=generator(13)), torch.randn(9, 33, generator=generator(14))
    w = torch.ones(33, requires_grad=True)
    first, *others = (grads(getattr(portkern, name)(x, (33,), w), [w], g)[0] for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 9), (2, 4, 3, 3)])
def test_group_norm_of_any_strides(shape: tuple[int, ...]) -> None:
    """Contiguous, channels last, sliced and expanded; values and gradients by kernels."""
    base = torch.randn(shape, generator=generator(15))
    w, b = (torch.rand(4, generator=generator(16 + i), requires_grad=True) for i in range(2))
    g = torch.randn(shape, generator=generator(18))
    last = base.movedim(1, -1).contiguous().movedim(-1, 1)
    for view in (base, last, torch.stack([base, base], -1)[..., 0], base[:1].expand(shape)):
        x = view.detach().requires_grad_()
        y, want = portkern.group_norm(x, 2, w, b), F.group_norm(x, 2, w, b)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        for gradient in (g, g[:1].expand(shape)):
            for ours, theirs in zip(grads(y, [x, w, b], gradient), grads(want, [x, w, b], gradient), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            y, want = portkern.group_norm(x, 2, w, b), F.group_norm(x, 2, w, b)
