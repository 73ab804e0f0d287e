"""Declarations of pointwise ops that are refused where they stand, and those that only a call shows to be wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from portkern.errors import PluginError
from portkern.pointwise_op import pointwise
from portkern.pointwise_values import NOTHING, SINGLE, values_given
from portkern.registry import all_ops
from tests.test_pointwise_object import line, scaled, square


@pytest.mark.parametrize("name", [None, 3, square])
def test_an_op_has_a_name(name: Any) -> None:
    with pytest.raises(PluginError, match="takes the name of an op first, as in 'mine::axpy', not "):
        pointwise(name, reference=torch.relu)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reference": 3}, "reference is 3; it takes a function"),
        ({"reference": None}, "reference is None; it takes a function"),
        ({"eager": "relu"}, "eager is 'relu'; it takes a function"),
        ({"signature": 3}, "signature is 3; it takes a function"),
        ({"reference": lambda x: x}, r"called with \(x, scale\), by position, and takes \(x\): too many positional"),
        ({"terms": lambda x, scale, z: x}, r"terms is called with \(x, scale\).*missing a required argument: 'z'"),
        ({"derivative_reference": lambda grad: grad}, r"derivative_reference is called with \(grad, scale\)"),
        ({"derivative": None, "derivative_terms": lambda grad: grad}, "has derivative_terms= and no derivative="),
        ({"derivative": 3}, "takes a @triton.jit function"),
        ({"defaults": {"scal": 1.0}}, "defaults= names 'scal'; it may name x, scale"),
        ({"examples": {"x": 1.0}}, "examples= names 'x'; it may name scale"),
        ({"defaults": {"scale": "a"}}, "defaults= gives scale as 'a'; it must be a number"),
        ({"defaults": 3}, "defaults= is a mapping of names to numbers, not 3"),
        ({"defaults": {"x": 1.0}}, "'x' has a default and scale after it has none"),
        (
            {"defaults": {}, "signature": lambda x, scale: (x, scale)},
            "it has signature= and defaults=, which belong in that function",
        ),
        ({"parts": 2}, "parts is 2; it is how many of the last tensors may be one, from 1 to 1"),
        ({"live": "many"}, "live is 'many'"),
        ({"result": "uint8"}, "result is 'uint8'; it takes a torch.dtype"),
        ({"cases": ((3,),)}, r"cases is \(\(3,\),\); it takes a sequence of portkern.Case"),
        ({"tune_cases": None}, "tune_cases is None; it takes a sequence of portkern.Case"),
        ({"dtypes": "float32"}, "dtypes is 'float32'; it takes a sequence"),
        ({"dtypes": None}, "dtypes is None; it takes a sequence"),
    ],
)
def test_declarations_are_refused_where_they_stand(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PluginError, match=text):
        line(**changes)


def test_a_switch_takes_integers() -> None:
    for word in ("defaults", "examples"):
        with pytest.raises(PluginError, match=f"{word}= gives MODE as 1.5; it must be an integer"):
            scaled(**{word: {"MODE": 1.5}})


@triton.jit
def _helper(x):
    return x, x * 2.0


@triton.jit
def _one(grad, x):
    found = grad * tl.exp(x)
    return found


@triton.jit
def _two_by_a_name(grad, x):
    both = (grad, grad * x)
    return both


@triton.jit
def _two_by_a_helper(grad, x):
    return _helper(grad)


@triton.jit
def _two_unpacked(grad, x):
    first, second = _helper(grad)
    return first, second * x


@triton.jit
def _three(grad, x):
    return grad, grad, x


@triton.jit
def _nothing(grad, x):
    x + grad


@triton.jit
def _either(grad, x):
    if x is None:
        return grad
    return grad, x


@triton.jit
def _accumulated(grad, x):
    total = 0.0
    for _ in tl.static_range(3):
        total += grad * x
        total = total.to(tl.float32)
    return -total


@triton.jit
def _sum_of_tuples(grad, x):
    first = (grad,)
    return first + (x,)


@triton.jit
def _product(x, y):
    return x * y


@triton.jit
def _product_slope(grad, x):
    return grad * x


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (_one, None), (_two_by_a_name, None), (_two_by_a_helper, None), (_two_unpacked, 2), (_three, 3),
        (_nothing, NOTHING), (_either, None), (_accumulated, SINGLE), (_sum_of_tuples, None), (_product_slope, SINGLE),
    ],
)  # fmt: skip
def test_a_source_says_how_many_values_it_gives(function: Any, count: int | None) -> None:
    assert values_given(function) == count


def test_no_shipped_derivative_is_taken_for_one_with_another_number_of_values() -> None:
    known = 0
    for name, op in all_ops().items():
        expression = getattr(op.plan, "args", (None,))[0]
        if hasattr(expression, "gradients"):
            wanted = expression.gradients if expression.gradients > 1 else SINGLE
            known += values_given(expression.function) == wanted
            assert values_given(expression.function) in (wanted, None), name
    assert known >= 18  # of 29


@pytest.mark.parametrize(
    ("function", "derivative", "text"),
    [
        (_product, _product_slope, "its derivative gives one value; it must give a tuple of 2, one .* tensors x, y"),
        (_product, _three, "its derivative gives a tuple of 3; it must give a tuple of 2"),
        (_product, _nothing, "its derivative gives nothing; it must give a tuple of 2"),
        (_product, _two_by_a_helper, None),
        (_helper, None, "its function gives a tuple of 2; it must give one value"),
    ],
)
def test_a_function_gives_as_many_values_as_it_has_to(function: Any, derivative: Any, text: str | None) -> None:
    """On the CPU the reference's autograd runs: that a gradient lacked was seen on a GPU alone."""
    reference = (lambda x: x) if function is _helper else (lambda x, y: x * y)
    declare = pointwise("test::product", reference=reference, derivative=derivative)
    if text is None:
        declare(function)
        return
    with pytest.raises(PluginError, match=text):
        declare(function)


@triton.jit
def _by_keyword(x, *, s: float):
    return x * s


def _plain(x):
    return x


def test_a_function_that_triton_does_not_take_is_refused() -> None:
    with pytest.raises(PluginError, match="keyword-only parameter 's'; kernels give it its arguments by position"):
        line(function=_by_keyword)
    for plain in (_plain, lambda x, scale: x):
        with pytest.raises(PluginError, match="takes a @triton.jit function of scalars, written with def in a Python"):
            line(function=plain)


def test_a_function_that_triton_cannot_read_is_refused() -> None:
    """Triton's compiler refuses it itself; what stands here is as its interpreter wraps it."""
    made: dict[str, Any] = {"tl": tl}
    exec("def hidden(x, scale: float):\n    return x * scale", made)
    for function, what in ((made["hidden"], "hidden, whose source is in no file"), (lambda x, scale: x, "a lambda")):
        with pytest.raises(PluginError, match=f"got {what}: Triton reads the source"):
            line(function=SimpleNamespace(fn=function))


def test_what_a_call_alone_shows_is_refused_at_the_first_one() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    summed = line("test::summed", reference=lambda x, scale: x.sum() * scale)
    with pytest.raises(
        PluginError, match=r"test::summed: its reference gives .* \[\(\)\], and its results have \[\(3, 4\)"
    ):
        summed(x, 2.0)
    with pytest.raises(PluginError, match="test::number: its reference gives 3.0; it must give one tensor"):
        line("test::number", reference=lambda x, scale: 3.0)(x, 2.0)
    with pytest.raises(PluginError, match="its signature= gives 3; it must give a tuple of x, scale"):
        line("test::signed", signature=lambda x: 3)(x)
    for derivative in (lambda grad, scale: grad.sum(), lambda grad, scale: (grad, grad), lambda grad, scale: [2.0]):
        declared = line("test::sloped", derivative_reference=derivative)
        with pytest.raises(PluginError, match=r"it must give one of \(3, 4\) for each of x, expanded"):
            declared(x, 2.0).sum().backward()
