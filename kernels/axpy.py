"""Sums of tensors: add is x + alpha * y, axpy is a * x + y. Shapes broadcast, dtypes are promoted as in torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it beside the functions)
from torch import Tensor

from portkern.arguments import check_scalar
from portkern.errors import Mismatch
from portkern.pointwise_arguments import check_operand
from portkern.pointwise_op import pointwise


@triton.jit
def _add(x, y, alpha: float = 1):
    return x + alpha * y


@triton.jit
def _add_gradient(grad, alpha):
    return grad, grad * alpha


@triton.jit
def _axpy(x, y, a: float):
    return a * x + y


@triton.jit
def _axpy_gradient(grad, a):
    return grad * a, grad


def add(input: Tensor | float, other: Tensor | float, *, alpha: float = 1) -> tuple[Any, ...]:
    """``input + alpha * other``, as ``torch.add``.

    Args:
        input, other: tensors whose shapes broadcast, of any strides and any real types, or numbers.
        alpha: a number; an integer where the result is one. For two bool operands it is True unless it is 0.

    Returns a tensor of the common shape and of the type that torch's promotion gives.
    Raises Mismatch (a RuntimeError) for shapes that do not broadcast or an ``alpha`` of another kind, BadType (a
    TypeError), UnsupportedDtype (a NotImplementedError).
    """
    alpha = check_scalar("add", "alpha", alpha)
    kinds = [_kind(check_operand("add", name, each)) for name, each in (("input", input), ("other", other))]
    if isinstance(alpha, float) and not {float, complex} & set(kinds):  # complex ones are refused as such
        raise Mismatch(f"add(): alpha is {alpha}; for integer operands it must be an integer")
    if kinds == [bool, bool]:
        alpha = bool(alpha)  # which does not widen the result
    elif isinstance(alpha, bool):
        raise Mismatch(f"add(): alpha is {alpha}; for operands that are not both bool it must be a number")
    return input, other, alpha


def _kind(value: Any) -> type:
    if isinstance(value, Tensor):
        kinds = {torch.bool: bool, torch.complex64: complex, torch.complex128: complex}
        return kinds.get(value.dtype, float if value.dtype.is_floating_point else int)
    return type(value)


def _axpy_of_torch(x: Any, y: Any, a: float) -> Tensor:
    whole = not all(isinstance(each, Tensor) and each.is_floating_point() for each in (x, y))
    # In one pass, where torch takes a factor that is no integer.
    found: Tensor = a * x + y if whole else torch.add(y, x, alpha=a)
    return found


def axpy(x: Tensor | float, y: Tensor | float, a: float) -> tuple[Any, ...]:
    """``a * x + y`` with a number ``a``. Args, result and errors are otherwise those of ``add``."""
    return x, y, a


OPS = (
    *pointwise(
        "add", signature=add, reference=lambda x, y, alpha: torch.add(x, y, alpha=alpha), derivative=_add_gradient,
        passed=lambda alpha: ("x", "y") if alpha == 1 else ("x",),
        derivative_reference=lambda grad, alpha: (grad, grad * alpha), examples={"alpha": 1.5},
        terms=lambda x, y, alpha: abs(x) + abs(alpha * y),
    )(_add).ops,
    *pointwise(
        "axpy", signature=axpy, reference=lambda x, y, a: a * x + y, eager=_axpy_of_torch,
        derivative=_axpy_gradient, passed=lambda a: ("x", "y") if a == 1 else ("y",),
        derivative_reference=lambda grad, a: (grad * a, grad), examples={"a": 1.5},
        terms=lambda x, y, a: (a * x).abs() + abs(y),
    )(_axpy).ops,
)  # fmt: skip
