"""Scalar functions that several ops are made of, right for every finite and non-finite argument, in fp32 and fp64."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_slope(x):
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def tanh(x):
    """Near 0 a polynomial, or what exp and log give of exp(2x) - 1 exactly: 1 - 2 / (exp(2x) + 1) cancels there."""
    size = tl.abs(x)
    t = tl.exp(2.0 * tl.where(size < 32.0, size, 32.0))
    far = 1.0 - 2.0 / (t + 1.0)
    if x.dtype == tl.float64:
        # (t - 1) / log(t) has the rounding error of t twice, and loses it; where t rounds to 1 it is 1.
        less = tl.where(t == 1.0, 2.0 * size, (t - 1.0) * (2.0 * size) / tl.log(tl.where(t == 1.0, 2.0, t)))
        near = less / (less + 2.0)
    else:
        z = size * size
        p = 0.020469421745944447 + z * -0.005515165580990933
        p = 0.13330830356451373 + z * (-0.0536880238192704 + z * p)
        near = size + size * z * (-0.3333325984863269 + z * p)
    y = tl.where(size < 0.65, near, far)
    y = tl.where(x < 0, -y, y)
    return tl.where(size < 1e-18, x, tl.where(x == x, y, x))  # -0.0 and subnormals as they are


@triton.jit
def gelu(x, TANH: tl.constexpr):
    if TANH and x.dtype == tl.float64:
        return x * sigmoid(2.0 * _inner(x))  # (1 + tanh(u)) / 2 without its cancellation
    elif TANH:
        c = _clamped(x)
        # The same, its factors folded.
        return x / (1.0 + tl.exp2(c * (-2.302208198144325 - 0.1029432395800235 * c * c)))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        s = sigmoid(2.0 * _inner(x))
        c = _clamped(x)
        return s + x * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * c * c))
    else:
        pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * pdf


@triton.jit
def _inner(x):
    """sqrt(2 / pi) (x + 0.044715 x^3)"""
    c = _clamped(x)
    return 0.7978845608028654 * c * (1.0 + 0.044715 * c * c)


@triton.jit
def _clamped(x):
    """Between -30 and 30, far outside which nothing of a gelu changes, so that no power overflows. NaN may be lost."""
    return tl.minimum(tl.maximum(x, -30.0), 30.0)
