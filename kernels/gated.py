"""Gated activations: y = f(x) * gate, with f = silu (swiglu), gelu (geglu), relu (reglu).

    dx = dy * gate * f'(x)        dgate = dy * f(x)

x and gate are two tensors that broadcast, or the halves of one tensor's last dim, which is then read in place, and
whose gradient is written in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from portkern.kernels import _scalars
from portkern.kernels.activations import (
    TUNE_CASES,
    by_tanh,
    gelu_of_torch,
    gelu_reference,
    gelu_slope_of_torch,
    gelu_slope_reference,
    gelu_slope_terms,
    gelu_terms,
)  # fmt: skip
from portkern.op import Case
from portkern.pointwise_arguments import check_operand
from portkern.pointwise_op import pointwise
from portkern.pointwise_reference import CASES_PACKED


@triton.jit
def _swiglu(x, gate):
    return _scalars.silu(x) * gate


@triton.jit
def _swiglu_gradient(grad, x, gate):
    return grad * gate * _scalars.silu_slope(x), grad * _scalars.silu(x)


@triton.jit
def _geglu(x, gate, TANH: tl.constexpr = 0):
    return _scalars.gelu(x, TANH) * gate


@triton.jit
def _geglu_gradient(grad, x, gate, TANH):
    return grad * gate * _scalars.gelu_slope(x, TANH), grad * _scalars.gelu(x, TANH)


@triton.jit
def _reglu(x, gate):
    return tl.where(x < 0, 0.0, x) * gate


@triton.jit
def _reglu_gradient(grad, x, gate):
    return tl.where(x <= 0, 0.0, grad * gate), grad * tl.where(x < 0, 0.0, x)


def swiglu(input: Tensor, gate: Tensor | None = None) -> tuple[Any, ...]:
    """``silu(input) * gate``.

    Args:
        input: floating, any shape and strides.
        gate: a tensor that broadcasts with ``input``. Without it, ``input`` is packed: its first half along the last
            dim is activated, and its second half is the gate.

    Returns a tensor of the common shape; of a packed ``input``, of half its last dim.
    Raises BadArgument (a ValueError) for a packed tensor of an odd last dim, Mismatch (a RuntimeError), BadType (a
    TypeError), UnsupportedDtype (a NotImplementedError).
    """
    return check_operand("swiglu", "input", input), gate


def geglu(input: Tensor, gate: Tensor | None = None, approximate: str = "none") -> tuple[Any, ...]:
    """``gelu(input, approximate) * gate``. Args, result and errors are those of ``swiglu`` and ``gelu``."""
    return check_operand("geglu", "input", input), gate, by_tanh("geglu", approximate)


def reglu(input: Tensor, gate: Tensor | None = None) -> tuple[Any, ...]:
    """``relu(input) * gate``. Args, result and errors are those of ``swiglu``."""
    return check_operand("reglu", "input", input), gate


def _geglu_reference(x: Tensor, gate: Tensor, tanh: int) -> Tensor:
    return gelu_reference(x, tanh) * gate


def _swiglu_slope_reference(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * gate, x.expand_as(grad)), grad * F.silu(x)


def _reglu_slope_reference(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    y = F.relu(x)
    return torch.ops.aten.threshold_backward(grad * gate, y.expand_as(grad), 0), grad * y


def _swiglu_terms(x: Tensor, gate: Tensor) -> Tensor:
    return (F.silu(x) * gate).abs() * (1 + x.abs())


def _swiglu_slope_terms(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    s, steep = torch.sigmoid(x), 1 + x.abs()
    return (grad * gate).abs() * s * (1 + x.abs() * (1 - s)) * steep, (grad * x).abs() * s * steep


def _geglu_terms(x: Tensor, gate: Tensor, tanh: int) -> Tensor:
    return gelu_terms(x, tanh) * gate


def _geglu_slope_reference(grad: Tensor, x: Tensor, gate: Tensor, tanh: int) -> tuple[Tensor, Tensor]:
    upstream = grad * gate
    x = x.to(upstream.dtype)  # torch's function takes no two types
    return gelu_slope_reference(upstream, x.expand_as(grad), tanh), grad * gelu_reference(x, tanh)


def _geglu_slope_of_torch(grad: Tensor, x: Tensor, gate: Tensor, tanh: int) -> tuple[Tensor, Tensor]:
    upstream = grad * gate
    return gelu_slope_of_torch(upstream, x.to(upstream.dtype).expand_as(grad), tanh), grad * gelu_of_torch(x, tanh)


def _geglu_slope_terms(grad: Tensor, x: Tensor, gate: Tensor, tanh: int) -> tuple[Tensor, Tensor]:
    return gelu_slope_terms(grad * gate, x, tanh), gelu_terms(x, tanh) * grad


_PACKED_TUNE_CASES = (*TUNE_CASES, Case((8192, 2 * 14336), {"packed": True}))

OPS = (
    *pointwise(
        "swiglu", signature=swiglu, reference=lambda x, gate: F.silu(x) * gate, derivative=_swiglu_gradient, parts=2,
        derivative_reference=_swiglu_slope_reference, integers="refuse", terms=_swiglu_terms,
        derivative_terms=_swiglu_slope_terms, tune_cases=_PACKED_TUNE_CASES,
    )(_swiglu).ops,
    *pointwise(
        "geglu", signature=geglu, reference=_geglu_reference, derivative=_geglu_gradient, parts=2, integers="refuse",
        cases=(*CASES_PACKED, Case((3, 130), {"TANH": 1}), Case((3, 64), {"TANH": 1, "packed": True})),
        terms=_geglu_terms, derivative_reference=_geglu_slope_reference, derivative_terms=_geglu_slope_terms,
        eager=lambda x, gate, tanh: gelu_of_torch(x, tanh) * gate, derivative_eager=_geglu_slope_of_torch,
        tune_cases=tuple(Case(case.sizes, {**case.options, "TANH": 1}) for case in _PACKED_TUNE_CASES),
    )(_geglu).ops,
    *pointwise(
        "reglu", signature=reglu, reference=lambda x, gate: F.relu(x) * gate, derivative=_reglu_gradient, parts=2,
        derivative_reference=_reglu_slope_reference, integers="refuse", tune_cases=_PACKED_TUNE_CASES,
    )(_reglu).ops,
)  # fmt: skip
