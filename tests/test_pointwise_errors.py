"""Calls of pointwise ops that are refused, and arguments at the ends of what is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

import portkern
from portkern.errors import BadArgument, BadType, Mismatch, UnsupportedDtype
from portkern.plan import metas_of
from portkern.registry import all_ops
from tests.spine import generator


def test_a_second_derivative_says_that_there_is_none() -> None:
    x = torch.randn(4, requires_grad=True)
    (slope,) = torch.autograd.grad(portkern.silu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no derivative of 'silu_backward'"):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: portkern.relu([1.0]), BadType, "must be a torch.Tensor, not list"),
        (lambda: portkern.relu(torch.ones(3), inplace=True), BadArgument, "inplace is True"),
        (lambda: portkern.relu(torch.ones(3, dtype=torch.bool)), UnsupportedDtype, "bool"),
        (lambda: portkern.gelu(torch.ones(3, dtype=torch.int64)), NotImplementedError, "not implemented for int64"),
        (lambda: portkern.gelu(torch.ones(3), approximate="erf"), RuntimeError, "must be either 'none' or 'tanh'"),
        (lambda: portkern.silu(torch.ones(3, dtype=torch.complex64)), UnsupportedDtype, "complex64"),
        (lambda: portkern.silu([1.0]), TypeError, "argument 'input' must be a torch.Tensor, not list"),
        (lambda: portkern.swiglu([1.0]), TypeError, "argument 'input' must be a torch.Tensor or a number, not list"),
        (lambda: portkern.add(torch.ones(3), [1.0]), TypeError, "argument 'other' must be"),
        (lambda: portkern.silu(torch.ones(3), torch.ones(3)), TypeError, "argument 'inplace' must be a bool, not T"),
        (lambda: portkern.gelu(torch.ones(3), torch.ones(3)), TypeError, "argument 'approximate' must be a str"),
        (lambda: portkern.leaky_relu(torch.ones(3), "a"), TypeError, "argument 'negative_slope' must be a number"),
        # A number beside integers makes a floating result of them, which torch's function does not give.
        (lambda: portkern.leaky_relu(torch.ones(3, dtype=torch.int32)), NotImplementedError, "not implemented for i"),
        (lambda: portkern.add(torch.ones(3), 1, alpha=10**30), Mismatch, r"between -2\^63 and 2\^64 - 1: give a float"),
        (lambda: portkern.add(torch.ones(3), -(2**64)), Mismatch, "an integer of 65 bits"),
        (lambda: portkern.add(torch.ones(3).long(), 1, alpha=2**63), RuntimeError, r"2\^63 - 1"),
        (lambda: portkern.leaky_relu(torch.ones(3), 1e300), RuntimeError, "more than float32 holds"),
        (lambda: portkern.add(torch.ones(3, dtype=torch.complex64), 1, alpha=1.5), UnsupportedDtype, "complex64"),
        (lambda: portkern.add(torch.ones(3), torch.ones(4)), RuntimeError, "do not broadcast"),
        (lambda: portkern.add(torch.ones(3, dtype=torch.int64), 1, alpha=1.5), RuntimeError, "must be an integer"),
        (lambda: portkern.add(torch.ones(3), 1, alpha=True), RuntimeError, "both bool"),
        (lambda: portkern.add(torch.ones(3).bool(), 1, alpha=False), RuntimeError, "both bool"),
        (lambda: portkern.add(torch.ones(3).bool(), True, alpha=2.0), RuntimeError, "must be an integer"),
        (lambda: portkern.add("a", torch.ones(3)), TypeError, "must be a torch.Tensor or a number, not str"),
        (lambda: portkern.swiglu(torch.ones(3, 5)), ValueError, "multiple of 2"),
        (lambda: portkern.swiglu(torch.ones(())), ValueError, "multiple of 2"),
        (lambda: portkern.prelu(-torch.ones(1, 2, 2, 2), torch.ones(3)), ValueError, "3 weights for 2 channels"),
        (lambda: portkern.prelu(-torch.ones(1, 2), torch.ones(1, 2)), RuntimeError, "2 dims"),
    ],
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.complex64])
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh", "add", "axpy", "swiglu"])
def test_types_that_kernels_do_not_know_are_refused(name: str, dtype: torch.dtype) -> None:
    """relu of uint16 gave 1 for what is not 0."""
    x = torch.zeros(4).to(dtype)
    with pytest.raises(UnsupportedDtype, match=str(dtype).removeprefix("torch.")):
        getattr(portkern, name)(x, *{"add": (x,), "axpy": (x, 2), "swiglu": (x,)}.get(name, ()))


def test_numbers_at_the_ends_of_their_types() -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(portkern.leaky_relu(-x, 1e300), -1e300 * x)
    assert torch.equal(portkern.add(x.float(), 1e300), torch.full((3,), float("inf")))  # as in torch
    assert torch.equal(portkern.add(x, 2**64 - 1), x + (2**64 - 1))
    assert torch.equal(portkern.add(x.long(), -(2**63)), x.long() - 2**63)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu"])
def test_gradients_of_two_types(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, gate = (torch.randn(3, 4, generator=generator(place)).to(dtype) for place, dtype in enumerate(dtypes))
    found = [x.clone().requires_grad_(), gate.clone().requires_grad_()]
    getattr(portkern, name)(*found).sum().backward()
    want = [x.double().requires_grad_(), gate.double().requires_grad_()]
    getattr(portkern, name)(*want).sum().backward()
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got.grad, exact.grad.to(got.dtype))


def test_prelu_weights_run_along_dim_1() -> None:
    x, weight = -torch.ones(1, 3, 2, 2), torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    y = portkern.prelu(x, weight)
    assert torch.equal(y, torch.nn.functional.prelu(x, weight))
    y.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((3,), -4.0))
    assert portkern.prelu(x, torch.tensor(0.5)).shape == x.shape


def test_empty_and_0_d() -> None:
    for shape in ((), (0,), (0, 3), (3, 0)):
        x = torch.ones(shape)
        assert portkern.silu(x).shape == x.shape and portkern.add(x, x).shape == x.shape
    assert portkern.add(torch.ones(0, 1), torch.ones(3)).shape == (0, 3)


def test_annotations_of_triton_are_understood() -> None:
    gelu = all_ops()["gelu"].plan.args[0]
    assert (gelu.operands, gelu.scalars, gelu.switches) == (("x",), (), ("TANH",))
    assert tl.constexpr  # what the annotation is
    assert metas_of((torch.ones(3),))[0].shape == (3,)
