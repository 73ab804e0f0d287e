"""``torch.func.vmap``: one call for a mapped dim wherever it is, the values of a loop, and gradients through it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import vmap

import portkern
from portkern import dispatch
from portkern.batching import SlicewiseWarning

SHAPES = {1: (5,), 2: (3, 5), 3: (2, 3, 5), 4: (4, 2, 3, 5)}
OTHERS = {1: (5,), 2: (5, 7), 3: (2, 5, 7), 4: (4, 2, 5, 7)}
SIZE = 6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the ops that ran."""
    ran: list[str] = []
    run = dispatch.run

    def counted(op: Any, args: Any) -> Any:
        ran.append(op.name)
        return run(op, args)

    monkeypatch.setattr(dispatch, "run", counted)
    yield ran


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def many_gradients(result: torch.Tensor, leaves: Any, upstream: torch.Tensor) -> Any:
    """One for each of the ``upstream`` gradients."""
    return vmap(lambda each: torch.autograd.grad(result, leaves, each, retain_graph=True))(upstream)


def mapped(shape: tuple[int, ...], dim: int | None) -> torch.Tensor:
    return random(*shape) if dim is None else random(*shape[:dim], SIZE, *shape[dim:])


def places(rank: int) -> list[int | None]:
    return [None, 0, *({rank // 2, rank} - {0})]


PRODUCTS = [
    (left, right, dims)
    for left, right in itertools.product(SHAPES, OTHERS)
    for dims in itertools.product(places(left), places(right))
    if dims != (None, None)
]


@pytest.mark.parametrize(("left", "right", "dims"), PRODUCTS)
def test_a_product_takes_one_call_and_so_does_each_gradient(left: int, right: int, dims: Any, calls: list[str]) -> None:
    operands = [mapped(SHAPES[left], dims[0]).requires_grad_(), mapped(OTHERS[right], dims[1]).requires_grad_()]
    found = vmap(portkern.matmul, dims, -1)(*operands)
    assert calls == ["matmul"]
    wanted = vmap(torch.matmul, dims, -1)(*operands)
    torch.testing.assert_close(found, wanted)
    upstream = random(*wanted.shape)
    gradients = torch.autograd.grad(found, operands, upstream)
    assert calls == ["matmul", "matmul_backward", "matmul_backward"]
    for gradient, expected in zip(gradients, torch.autograd.grad(wanted, operands, upstream), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(SHAPES, OTHERS)])
def test_many_gradients_of_one_product_take_one_call_each(left: int, right: int, calls: list[str]) -> None:
    operands = [mapped(SHAPES[left], None).requires_grad_(), mapped(OTHERS[right], None).requires_grad_()]
    found, wanted = portkern.matmul(*operands), torch.matmul(*operands)
    upstream = random(SIZE, *wanted.shape)
    calls.clear()
    gradients = many_gradients(found, operands, upstream)
    assert calls == ["matmul_backward"] * 2
    for gradient, other in zip(gradients, many_gradients(wanted, operands, upstream), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product([(0, None), (None, 1), (2, 0)], [(0, 0), (1, None)])])
def test_nested_maps_of_a_product_take_one_call(outer: Any, inner: Any, calls: list[str]) -> None:
    shapes = [[3, 5], [5, 7]]
    for dims, size in ((inner, 4), (outer, SIZE)):
        for shape, dim in zip(shapes, dims, strict=True):
            if dim is not None:
                shape.insert(dim, size)
    operands = [random(*shape) for shape in shapes]
    found = vmap(vmap(portkern.matmul, inner), outer)(*operands)
    torch.testing.assert_close(found, vmap(vmap(torch.matmul, inner), outer)(*operands))
    assert calls == ["matmul"]


def test_nothing_is_mapped_over_too() -> None:
    assert vmap(portkern.matmul)(torch.ones(0, 3, 4), torch.ones(0, 4, 5)).shape == (0, 3, 5)


X, Y, MASK, WEIGHT = random(SIZE, 3, 5), random(SIZE, 3, 5), random(SIZE, 3, 5) > 0, random(5)
# What is mapped, where, by both; and what is called then.
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], Any, str]] = {
    "softmax": (lambda x: portkern.softmax(x, 0), lambda x: torch.softmax(x, 0), (X,), 1, "softmax"),
    "log_softmax": (portkern.log_softmax, lambda x: x.log_softmax(-1), (X,), 2, "log_softmax"),
    "numbers": (portkern.softmax, lambda x: torch.softmax(x, -1), (X[:, 0, 0],), 0, "softmax"),
    "logsumexp": (lambda x: portkern.logsumexp(x, 0, True), lambda x: x.logsumexp(0, True), (X,), 0, "logsumexp"),
    "logsumexp of numbers": (
        lambda x: portkern.logsumexp(x, 0), lambda x: x.logsumexp(0), (X[:, 0, 0],), 0, "logsumexp",
    ),
    "masked": (
        lambda x, mask: portkern.masked_softmax(x, mask, causal=True),
        lambda x, mask: torch.softmax(x.masked_fill(~(mask & torch.ones(3, 5, dtype=torch.bool).tril()), -1e30), -1)
        * (mask & torch.ones(3, 5, dtype=torch.bool).tril()).any(-1, keepdim=True),
        (X, MASK), 0, "masked_softmax",
    ),
    "one mask": (
        lambda x, mask: portkern.masked_softmax(x, mask, scale=2.0),
        lambda x, mask: torch.softmax((2 * x).masked_fill(~mask, -1e30), -1),
        (X, torch.tensor([True, False, True, True, True])), (1, None), "masked_softmax",
    ),
    "masked numbers": (
        lambda x: portkern.masked_softmax(x), lambda x: torch.softmax(x, -1), (X[:, 0, 0],), 0, "masked_softmax",
    ),
    "sum": (lambda x: portkern.sum(x, 0, True), lambda x: x.sum(0, True), (X,), 2, "sum"),
    "mean of all": (portkern.mean, torch.mean, (X,), 1, "mean"),
    "mean of numbers": (portkern.mean, torch.mean, (X[:, 0, 0],), 0, "mean"),
    "var_mean": (lambda x: portkern.var_mean(x, -1), lambda x: torch.var_mean(x, -1), (X,), 1, "var_mean"),
    "amax": (lambda x: portkern.amax(x, 1), lambda x: x.amax(1), (X,), 0, "amax"),
    "argmax": (lambda x: portkern.argmax(x, 1), lambda x: x.argmax(1), (X,), 0, "argmax"),
    "layer_norm": (
        lambda x, w: portkern.layer_norm(x, (5,), w, w),
        lambda x, w: torch.nn.functional.layer_norm(x, (5,), w, w),
        (X, WEIGHT), (0, None), "layer_norm",
    ),
    "rms_norm over two dims": (
        lambda x: portkern.rms_norm(x, (3, 5)), lambda x: torch.nn.functional.rms_norm(x, (3, 5)), (X,), 0, "rms_norm",
    ),
    "one residual": (
        lambda x, r: portkern.add_layer_norm(x, r, (5,)),
        lambda x, r: (torch.nn.functional.layer_norm(x + r, (5,)), x + r),
        (X, Y[0]), (0, None), "add_layer_norm",
    ),
    "gelu": (portkern.gelu, torch.nn.functional.gelu, (X,), 1, "gelu"),
    "add of other ranks": (portkern.add, torch.add, (X, WEIGHT[None].expand(SIZE, 5)), (2, 0), "add"),
    "add of one": (portkern.add, torch.add, (X[0, 0], Y), (None, 1), "add"),
    "add of numbers": (portkern.add, torch.add, (X[:, 0, 0], Y[0]), (0, None), "add"),
    "prelu": (portkern.prelu, torch.nn.functional.prelu, (X, WEIGHT[:1]), (0, None), "prelu"),
    "packed": (
        portkern.swiglu, lambda x: torch.nn.functional.silu(x[..., :2]) * x[..., 2:], (X[..., :4],), 1, "swiglu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_an_op_takes_one_call(name: str, calls: list[str]) -> None:
    ours, theirs, given, dim, called = OPS[name]
    leaves = [each.clone().requires_grad_() if each.is_floating_point() else each for each in given]
    dims = dim if isinstance(dim, tuple) else (dim,) * len(given)
    args = [each if place is None else each.movedim(0, place) for each, place in zip(leaves, dims, strict=True)]
    found, wanted = vmap(ours, dims)(*args), vmap(theirs, dims)(*args)
    assert calls == [called]
    _assert_alike(found, wanted)
    if name == "argmax":
        return
    leaves = [each for each in leaves if each.is_floating_point()]
    gradients = [
        torch.autograd.grad([each.square().sum() for each in _tuple(result)], leaves, allow_unused=True)
        for result in (found, wanted)
    ]
    _assert_alike(*gradients)


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _assert_alike(found: Any, wanted: Any) -> None:
    assert len(_tuple(found)) == len(_tuple(wanted))
    for each, other in zip(_tuple(found), _tuple(wanted), strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "masked", "gelu", "add of numbers"])
def test_many_gradients_of_one_call_take_one_call(name: str, calls: list[str]) -> None:
    ours, theirs, given, _, called = OPS[name]
    leaves = [each.clone().requires_grad_() if each.is_floating_point() else each for each in given]
    args = [each[0] if each.dim() else each for each in leaves]
    found, wanted = ours(*args), theirs(*args)
    upstream = random(4, *wanted.shape)
    calls.clear()
    leaf = leaves[0]
    (gradient,) = many_gradients(found, leaf, upstream)
    assert len(calls) <= 1 and all(each == f"{called}_backward" for each in calls)
    torch.testing.assert_close(gradient, many_gradients(wanted, leaf, upstream)[0])


def test_what_has_no_rule_is_called_for_each_slice_and_says_so(calls: list[str]) -> None:
    weights = random(SIZE, 5)
    with pytest.warns(SlicewiseWarning, match=f"layer_norm once for each of {SIZE} slices"):
        found = vmap(lambda x, w: portkern.layer_norm(x, (5,), w))(X, weights)
    assert calls == ["layer_norm"] * SIZE
    torch.testing.assert_close(found, vmap(lambda x, w: torch.nn.functional.layer_norm(x, (5,), w))(X, weights))
    with warnings.catch_warnings(), pytest.raises(ValueError, match="size 0"):
        warnings.simplefilter("ignore")
        vmap(lambda x, w: portkern.layer_norm(x, (5,), w))(X[:0], weights[:0])
