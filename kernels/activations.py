"""Activations, each a scalar function and its derivative.

    relu        max(x, 0)                          leaky_relu  x, or slope * x below 0
    sigmoid     1 / (1 + exp(-x))                  prelu       the same with a slope for each channel
    tanh        tanh(x)                            silu        x * sigmoid(x)
    gelu        x * P(a normal number < x), or its tanh approximation
    mish        x * tanh(log(1 + exp(x)))

Any shape and strides; 16-bit values are computed in float32. NaN, infinities and ties at 0 are treated as in torch.
Exponentials have a relative error that grows with their argument, so far down a tail the promise is absolute.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import autocast_to_narrow, check_scalar, check_tensor, refuse_inplace
from portkern.errors import BadType, Mismatch, UnsupportedDtype
from portkern.kernels import _scalars
from portkern.op import Case
from portkern.pointwise_op import pointwise
from portkern.pointwise_reference import CASES


@triton.jit
def _relu(x):
    return tl.where(x < 0, 0, x)  # NaN and -0.0 stay


@triton.jit
def _relu_gradient(grad, output):
    return tl.where(output <= 0, 0.0, grad)


@triton.jit
def _leaky_relu(x, slope: float = 0.01):
    return tl.where(x > 0, x, x * slope)


@triton.jit
def _leaky_relu_gradient(grad, x, slope):
    return tl.where(x > 0, grad, grad * slope)


@triton.jit
def _prelu(x, weight):
    return tl.where(x > 0, x, x * weight)


@triton.jit
def _prelu_gradient(grad, x, weight):
    return tl.where(x > 0, grad, grad * weight), tl.where(x > 0, 0.0, grad * x)


@triton.jit
def _gelu(x, TANH: tl.constexpr = 0):
    return _scalars.gelu(x, TANH)


@triton.jit
def _gelu_gradient(grad, x, TANH):
    return grad * _scalars.gelu_slope(x, TANH)


@triton.jit
def _silu(x):
    return _scalars.silu(x)


@triton.jit
def _silu_gradient(grad, x):
    return grad * _scalars.silu_slope(x)


@triton.jit
def _mish(x):
    n = tl.exp(tl.where(x > 20.0, 20.0, x))
    m = n * (n + 2.0)
    return x * (m / (m + 2.0))


@triton.jit
def _mish_gradient(grad, x):
    n = tl.exp(tl.where(x > 20.0, 20.0, x))
    m = n * (n + 2.0)
    d = 1.0 / (m + 2.0)
    return grad * (m * d + x * tl.where(x > 20.0, 0.0, 4.0 * n * (n + 1.0) * d * d))


@triton.jit
def _sigmoid(x):
    return _scalars.sigmoid(x)


@triton.jit
def _sigmoid_gradient(grad, output):
    return grad * ((1.0 - output) * output)


@triton.jit
def _tanh(x):
    return _scalars.tanh(x)


@triton.jit
def _tanh_gradient(grad, output):
    return grad * (1.0 - output * output)


# ---- the public functions -----------------------------------------------------------------------------------------


def relu(input: Tensor, inplace: bool = False) -> tuple[Any, ...]:
    """``max(input, 0)`` of each element, as ``torch.nn.functional.relu``.

    Args:
        input: any shape and strides; a floating or an integer type.
        inplace: must be False: no op of portkern alters its arguments.

    Returns a tensor of ``input``'s shape, type and memory format. NaN stays NaN.
    Raises BadArgument (a ValueError), BadType (a TypeError), UnsupportedDtype (a NotImplementedError).
    """
    refuse_inplace("relu", inplace)
    if check_tensor("relu", "input", input).dtype == torch.bool:
        raise UnsupportedDtype("relu(): not implemented for bool; convert to an integer or floating type first")
    return (input,)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> tuple[Any, ...]:
    """``input`` where that is above 0, else ``negative_slope * input``, as ``torch.nn.functional.leaky_relu``.

    Args, result and errors are those of ``relu``; integers are refused.
    """
    refuse_inplace("leaky_relu", inplace)
    slope = check_scalar("leaky_relu", "negative_slope", negative_slope)
    return check_tensor("leaky_relu", "input", input), slope


def prelu(input: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """``input`` where that is above 0, else ``weight * input``, as ``torch.nn.functional.prelu``.

    Args:
        input: floating, any shape and strides.
        weight: one element, or one for each of the channels, which are dim 1 of ``input``.

    In an autocast region both take its dtype.
    Raises Mismatch (a ValueError and a RuntimeError) for another number of weights, and as ``leaky_relu``.
    """
    input = autocast_to_narrow(check_tensor("prelu", "input", input))
    weight = autocast_to_narrow(check_tensor("prelu", "weight", weight))
    channels = input.shape[1] if input.dim() > 1 else 1
    if weight.dim() > 1:
        raise Mismatch(f"prelu(): weight has {weight.dim()} dims; it takes one dim, a weight for each channel")
    if weight.numel() == 1:
        return input, weight.reshape((1,) * input.dim())
    if weight.numel() != channels:
        raise Mismatch(
            f"prelu(): {weight.numel()} weights for {channels} channels (dim 1 of shape {tuple(input.shape)}); "
            "give one, or one for each channel"
        )
    return input, weight.reshape(1, channels, *(1,) * (input.dim() - 2))


def gelu(input: Tensor, approximate: str = "none") -> tuple[Any, ...]:
    """Gaussian error linear unit of each element, as ``torch.nn.functional.gelu``.

    Args:
        input: floating, any shape and strides.
        approximate: ``none`` for the exact function, ``tanh`` for its usual approximation.

    Raises Mismatch (a ValueError and a RuntimeError) for another ``approximate``, and as ``leaky_relu``.
    """
    return check_tensor("gelu", "input", input), by_tanh("gelu", approximate)


def by_tanh(op: str, approximate: str) -> int:
    """Whether ``approximate`` asks for the tanh form. Raises Mismatch, BadType."""
    if not isinstance(approximate, str):
        raise BadType(f"{op}(): argument 'approximate' must be a str, not {type(approximate).__name__}")
    if approximate not in ("none", "tanh"):
        raise Mismatch(f"{op}(): approximate is {approximate!r}; it must be either 'none' or 'tanh'")
    return int(approximate == "tanh")


def silu(input: Tensor, inplace: bool = False) -> tuple[Any, ...]:
    """``input * sigmoid(input)`` of each element, as ``torch.nn.functional.silu``.

    Args, result and errors are those of ``leaky_relu``.
    """
    refuse_inplace("silu", inplace)
    return (check_tensor("silu", "input", input),)


def mish(input: Tensor, inplace: bool = False) -> tuple[Any, ...]:
    """``input * tanh(log(1 + exp(input)))`` of each element, as ``torch.nn.functional.mish``.

    Args, result and errors are those of ``leaky_relu``.
    """
    refuse_inplace("mish", inplace)
    return (check_tensor("mish", "input", input),)


def sigmoid(input: Tensor) -> tuple[Any, ...]:
    """``1 / (1 + exp(-input))`` of each element, as ``torch.sigmoid``; integers give torch's default dtype."""
    return (check_tensor("sigmoid", "input", input),)


def tanh(input: Tensor) -> tuple[Any, ...]:
    """Hyperbolic tangent of each element, as ``torch.tanh``; integers give torch's default dtype."""
    return (check_tensor("tanh", "input", input),)


# ---- references and declarations ----------------------------------------------------------------------------------


def _prelu_of_torch(x: Tensor, weight: Tensor) -> Tensor:
    """What F.prelu calls when it has spread the weights along the channels."""
    return torch._prelu_kernel(x.expand(torch.broadcast_shapes(x.shape, weight.shape)), weight)


def gelu_reference(x: Tensor, tanh: int) -> Tensor:
    """torch's gelu; in fp64 the tanh form without the cancellation that torch has down the tail, and at infinity
    without the NaN of torch's vectorised erf on the CPU."""
    if tanh and x.dtype == torch.float64:
        return x * torch.sigmoid(_twice_inner(x))
    return torch.where(x == math.inf, x, gelu_of_torch(x, tanh))


def gelu_of_torch(x: Tensor, tanh: int) -> Tensor:
    """torch's gelu."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def gelu_slope_reference(grad: Tensor, x: Tensor, tanh: int) -> Tensor:
    """The gradient of ``gelu_reference``."""
    if tanh and x.dtype == torch.float64:
        s, root = torch.sigmoid(_twice_inner(x)), 2 * math.sqrt(2 / math.pi)
        return grad * (s + x * s * (1 - s) * root * (1 + 0.134145 * x * x))
    return gelu_slope_of_torch(grad, x, tanh)


def gelu_slope_of_torch(grad: Tensor, x: Tensor, tanh: int) -> Tensor:
    """torch's gradient of gelu."""
    found: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if tanh else "none")
    return found


def _steep(y: Tensor, x: Tensor) -> Tensor:
    """The size of y with the exponent's argument, which is rounded before the exponential."""
    return (y.abs() * (1 + x.abs())).nan_to_num(0.0, 0.0, 0.0)


def _silu_slope_terms(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return _steep(grad * s * (1 + x.abs() * (1 - s)), x)


def _mish_slope_terms(grad: Tensor, x: Tensor) -> Tensor:
    w, s = torch.tanh(F.softplus(x)), torch.sigmoid(x)
    return _steep(grad * (w + x.abs() * (1 - w * w) * s), x)


def gelu_terms(x: Tensor, tanh: int) -> Tensor:
    """What a gelu is made of: the argument of the exponential in its tanh form; else 1 + erf, as in torch."""
    return _steep(gelu_reference(x, tanh), _twice_inner(x)) if tanh else 0.5 * x


def gelu_slope_terms(grad: Tensor, x: Tensor, tanh: int) -> Tensor:
    """The two terms of the slope of a gelu, which cancel at one place."""
    if not tanh:
        return grad.abs() * (0.5 + (x.abs() * 0.4 * torch.exp(-0.5 * x * x)).nan_to_num(0.0, 0.0, 0.0))
    s = torch.sigmoid(_twice_inner(x))
    return _steep(grad * (s + x.abs() * s * (1 - s) * 1.6 * (1 + 0.134145 * x * x)), _twice_inner(x))


def _twice_inner(x: Tensor) -> Tensor:
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


GELU_CASES = (*CASES, Case((3, 130), {"TANH": 1}), Case((2, 5, 33), {"TANH": 1}), Case((4099,), {"TANH": 1}))
TUNE_CASES = (Case((8192, 14336)), Case((4096, 4096)))
_PRELU_CASES = tuple(
    Case(sizes, {"other": other})
    for sizes, other in (((), "scalar"), ((7,), "scalar"), ((0, 5), "row"), ((5, 33), "row"), ((3, 1, 40), "outer"))
)

OPS = (
    *pointwise(
        "relu", signature=relu, reference=F.relu, tune_cases=TUNE_CASES, derivative=_relu_gradient,
        derivative_reference=lambda grad, output: torch.ops.aten.threshold_backward(grad, output, 0),
    )(_relu).ops,
    *pointwise(
        "leaky_relu", signature=leaky_relu, reference=F.leaky_relu, derivative=_leaky_relu_gradient, integers="refuse",
        derivative_reference=lambda grad, x, slope: torch.ops.aten.leaky_relu_backward(grad, x, slope, False),
    )(_leaky_relu).ops,
    *pointwise(
        "prelu", signature=prelu, reference=lambda x, weight: torch.where(x > 0, x, x * weight), integers="refuse",
        eager=_prelu_of_torch, derivative=_prelu_gradient, cases=_PRELU_CASES,
        derivative_eager=lambda grad, x, weight: torch.ops.aten._prelu_kernel_backward(grad, x.expand_as(grad), weight),
        derivative_reference=lambda grad, x, weight: (
            torch.where(x > 0, grad, grad * weight), torch.where(x > 0, 0.0, grad * x)
        ),
    )(_prelu).ops,
    *pointwise(
        "gelu", signature=gelu, reference=gelu_reference, eager=gelu_of_torch, derivative=_gelu_gradient,
        derivative_eager=gelu_slope_of_torch, integers="refuse",
        derivative_reference=gelu_slope_reference, terms=gelu_terms, derivative_terms=gelu_slope_terms,
        cases=GELU_CASES, tune_cases=(*TUNE_CASES, Case((8192, 14336), {"TANH": 1})),
    )(_gelu).ops,
    *pointwise(
        "silu", signature=silu, reference=F.silu, derivative=_silu_gradient, integers="refuse", tune_cases=TUNE_CASES,
        derivative_reference=torch.ops.aten.silu_backward,
        terms=lambda x: _steep(F.silu(x), x), derivative_terms=_silu_slope_terms,
    )(_silu).ops,
    *pointwise(
        "mish", signature=mish, reference=F.mish, derivative=_mish_gradient, integers="refuse",
        derivative_reference=torch.ops.aten.mish_backward,
        terms=lambda x: _steep(F.mish(x), x), derivative_terms=_mish_slope_terms,
    )(_mish).ops,
    *pointwise(
        "sigmoid", signature=sigmoid, reference=torch.sigmoid, derivative=_sigmoid_gradient, integers="float",
        derivative_reference=torch.ops.aten.sigmoid_backward, terms=lambda x: _steep(torch.sigmoid(x), x),
    )(_sigmoid).ops,
    *pointwise(
        "tanh", signature=tanh, reference=torch.tanh, derivative=_tanh_gradient, integers="float",
        derivative_reference=torch.ops.aten.tanh_backward, derivative_terms=lambda grad, output: grad,
    )(_tanh).ops,
)  # fmt: skip
