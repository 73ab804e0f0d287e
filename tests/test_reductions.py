"""Reductions on the CPU route: torch's shapes, dtypes, errors and gradients."""

from __future__ import annotations

import pytest
import torch

import portkern
from portkern.errors import BadArgument, UnsupportedDtype


@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
@pytest.mark.parametrize("dims", [None, 1, (0, 2), (-1,), ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_gradients(name: str, dims: object, keepdim: bool) -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64).permute(1, 2, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: getattr(portkern, name)(x, dims, keepdim), (x,))


def test_gradients_of_var_mean_and_of_equal_maxima() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    for dims in (None, 1, (0, 2)):
        assert torch.autograd.gradcheck(lambda x, dims=dims: tuple(portkern.var_mean(x, dims, correction=0.5)), (x,))
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    portkern.amax(x, 1).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]]))


def test_dtypes_and_empty() -> None:
    assert portkern.sum(torch.ones(3, dtype=torch.uint8)).dtype == torch.int64
    assert portkern.mean(torch.ones(3, dtype=torch.int32), dtype=torch.float32).dtype == torch.float32
    for shape, dim in (((0, 5), 0), ((5, 0), 1), ((0,), None)):
        x = torch.ones(shape)
        assert torch.equal(portkern.sum(x, dim), torch.sum(x, dim))
        assert portkern.mean(x, dim).shape == torch.mean(x, dim).shape
    assert portkern.amax(torch.ones(0, 5), 1).shape == (0,)
    assert portkern.argmax(torch.ones(3, 4), keepdim=True).shape == torch.argmax(torch.ones(3, 4), keepdim=True).shape
    assert float(portkern.sum(torch.tensor(3.0))) == 3.0


@pytest.mark.parametrize("name", ["sum", "mean", "var_mean", "amax"])
@pytest.mark.parametrize(("shape", "dim"), [((0,), 0), ((0, 5), 0), ((0, 5), 1), ((5, 0), 1), ((5, 0), None)])
def test_gradients_of_nothing(name: str, shape: tuple[int, ...], dim: int | None) -> None:
    x = torch.ones(shape, requires_grad=True)
    if name == "amax" and (dim is None or shape[dim] == 0):
        return  # refused, see test_errors
    found = getattr(portkern, name)(x, dim)
    torch.stack([each.sum() for each in (found if isinstance(found, tuple) else (found,))]).sum().backward()
    assert x.grad is not None and x.grad.shape == shape


def test_a_maximum_that_is_nan_has_that_gradient() -> None:
    rows = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, 1.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]])
    found = []
    for function in (portkern.amax, torch.amax):
        x = rows.clone().requires_grad_()
        function(x, 1).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("correction", [2.5, 4.999, 5, 7])
def test_a_correction_that_leaves_nothing(correction: float) -> None:
    """Over a dim, as torch; over all, torch's gradient is infinite whatever the values."""
    x = torch.randn(3, 5, requires_grad=True)
    got, want = (f(x, 1, correction=correction) for f in (portkern.var_mean, torch.var_mean))
    torch.testing.assert_close(got, want)
    for a, b in zip(got, want, strict=True):
        (ours,), (theirs,) = (torch.autograd.grad(each.sum(), x, retain_graph=True) for each in (a, b))
        torch.testing.assert_close(ours, theirs)


def test_overloads_of_var_mean() -> None:
    x = torch.randn(3, 5)
    calls = (
        ((False,), {}), ((True,), {}), ((), {"unbiased": False}), ((1, False), {}), ((1, False, True), {}),
        ((1,), {"unbiased": True, "keepdim": True}), (((0, 1), False), {}), ((None, False), {}),
        ((1,), {"keepdim": True, "correction": 0}), ((), {"correction": None}),
    )  # fmt: skip
    for args, options in calls:
        got, want = (f(x, *args, **options) for f in (portkern.var_mean, torch.var_mean))
        torch.testing.assert_close(got, want)
    for options in ({"unbiased": False, "correction": 1}, {"unbiased": 1}):
        for function in (portkern.var_mean, torch.var_mean):
            with pytest.raises(TypeError):
                function(x, 1, **options)


def test_no_correction_is_that_of_torch() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(portkern.var_mean(x, correction=None), torch.var_mean(x, correction=None))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: portkern.sum(torch.ones(3, 4), 2), IndexError, "dim 2 is out of range"),
        (lambda: portkern.sum(torch.ones(3, 4), (0, -2)), RuntimeError, "appears multiple times"),
        (lambda: portkern.mean(torch.ones(3, dtype=torch.int64)), UnsupportedDtype, "give a floating dtype="),
        (lambda: portkern.amax(torch.ones(0, 5), 0), IndexError, "a reduced dim is empty"),
        (lambda: portkern.amax(torch.ones(0, 5)), RuntimeError, "a reduced dim is empty"),
        (lambda: portkern.amax(torch.ones(0, 5), (0, 1)), IndexError, "a reduced dim is empty"),
        (lambda: portkern.logsumexp(torch.ones(3, 4), (0, -2)), RuntimeError, "appears multiple times"),
        (lambda: portkern.var_mean(torch.ones(3), correction="a"), TypeError, "'correction' must be a number"),
        (lambda: portkern.var_mean(torch.ones(3), correction=10**400), BadArgument, "no float64 holds"),
        (lambda: portkern.argmax(torch.ones(0)), IndexError, "a reduced dim is empty"),
        (lambda: portkern.argmax(torch.ones(3, dtype=torch.bool)), NotImplementedError, "bool"),
        (lambda: portkern.sum([1.0]), TypeError, "must be a torch.Tensor"),
    ],
)
def test_errors(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        var, mean = portkern.var_mean(x, 0)
        return portkern.sum(x, (0, 1)) + portkern.mean(x) + portkern.amax(x, 1).sum() + (var * mean).sum()

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 6, requires_grad=True)
        got, want = compiled(x), f(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_values_are_converted_first(source: torch.dtype, dtype: torch.dtype) -> None:
    """In float16 1e30 is infinite, and 2,049 is 2,048."""
    for values in ([2049.0, 1.0, 1.0], [9e4, -9e4, 88.0], [1e30, -1e30, 88.0], [2.7, 1.5, -0.9]):
        if values[0] > torch.finfo(torch.float32).max ** 0.5 and not (source.itemsize > 2 and dtype.is_floating_point):
            continue
        x = torch.tensor(values, dtype=torch.float64).to(source)
        if source.is_floating_point:
            x.requires_grad_()
        got, want = portkern.sum(x, dtype=dtype), torch.sum(x.to(dtype), dtype=dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            got, want = portkern.mean(x, dtype=dtype), torch.mean(x.to(dtype))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        if x.requires_grad and dtype.is_floating_point:
            upstream = torch.tensor(3.0, dtype=dtype)
            (ours,), (theirs,) = (torch.autograd.grad(each, x, upstream) for each in (got, want))
            assert torch.equal(ours, theirs) and ours.dtype == source


def test_a_float16_gradient_whose_factors_overflow_together() -> None:
    x = torch.tensor([-400.0, 400.0] * 50, dtype=torch.float16, requires_grad=True)
    portkern.var_mean(x, 0)[0].backward(torch.tensor(200.0, dtype=torch.float16))
    assert x.grad is not None
    torch.testing.assert_close(x.grad.abs(), torch.full_like(x, 400 * 200 * 2 / 99), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("shape", "dim"), [((0, 0), -1), ((0, 0, 4), 0), ((0, 3, 0), 2), ((2, 0), 1)])
def test_no_maximum_of_nothing_in_a_result_of_nothing_either(shape: tuple[int, ...], dim: int) -> None:
    for name in ("amax", "argmax"):
        for function in (getattr(portkern, name), getattr(torch, name)):
            with pytest.raises(IndexError):
                function(torch.empty(shape), dim)
