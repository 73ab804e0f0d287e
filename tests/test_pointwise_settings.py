"""Settings of a pointwise declaration that there are not, or that do not go with its function; and its switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from portkern.errors import BadType, Mismatch, PluginError
from portkern.pointwise_op import pointwise
from portkern.registry import all_ops
from portkern.runtime import Runtime, using
from tests.test_pointwise import _weighted_gradient, declared


@triton.jit
def _parts_gradient(grad, x, y, weight):
    return grad * weight, grad * (1.0 - weight)


def test_declarations_that_do_not_fit_are_refused() -> None:
    def plain(x: float) -> float:
        return x

    with pytest.raises(PluginError, match="takes a @triton.jit function"):
        declared(function=plain)
    with pytest.raises(PluginError, match=r"takes \(grad, weight\); expected 'grad' first, then any of x, output"):
        pointwise("test::bad", reference=torch.relu, derivative=_weighted_gradient)(
            all_ops()["relu"].plan.args[0].function
        )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"integers": "none"}, "integers is 'none'"),
        ({"dtypes": ("int9",)}, "has 'int9'"),
        ({"dtypes": ()}, "has nothing"),
    ],
)
def test_settings_that_there_are_not_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PluginError, match=text):
        declared(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"passed": lambda weight: ("z",)}, "passed= gives 'z'; its tensors are x, y"),
        ({"passed": lambda weight: "xy z"}, "passed= gives ' ', 'z'"),
        ({"passed": lambda: ("x",)}, r"here \(weight\): got an unexpected keyword argument 'weight'"),
        ({"passed": lambda weight, y: ("x",)}, "missing a required argument: 'y'"),
        ({"passed": ("x",)}, "is not a callable object"),
        ({"passed": lambda weight: ("x",), "derivative": None}, "passed= and no derivative"),
        ({"passed": lambda weight: ("x",), "parts": 2, "derivative": _parts_gradient}, "passed= is not for parts="),
        ({"parts": 2}, r"takes \(grad, weight\); of its tensors x, y, the parts of one, come last"),
    ],
)
def test_gradients_that_cannot_be_are_refused(changes: dict[str, Any], text: str) -> None:
    """An unknown name was passed over; a packed tensor's gradient was an error of torch at the backward."""
    with pytest.raises(PluginError, match=text):
        declared(**changes)


def test_a_name_that_a_number_alone_gives_is_refused_at_the_backward() -> None:
    with using(Runtime()):
        weighted = declared(passed=lambda weight: ("z",) if weight == 1 else ())
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        weighted(x, y, 2.0).sum().backward()
        with pytest.raises(PluginError, match="passed= gives 'z'; its tensors are x, y"):
            weighted(x, y, 1.0).sum().backward()


@pytest.mark.parametrize("value", ["a", None, 2.7, torch.ones(1)])
def test_a_switch_is_an_integer(value: Any) -> None:
    """2.7 was taken for 2."""

    @triton.jit
    def switched(x, MODE: tl.constexpr):
        return x * MODE

    with using(Runtime()):
        function = pointwise("test::switched", reference=lambda x, MODE: x * MODE)(switched)
        x = torch.ones(3)
        assert torch.equal(function(x, 2), 2 * x) and torch.equal(function(x, True), x)
        with pytest.raises(BadType, match="argument 'MODE' must be an int"):
            function(x, value)
        with pytest.raises(Mismatch, match="MODE is an integer of 71 bits"):
            function(x, 2**70)
