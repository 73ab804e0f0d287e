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
    if x.dtype == tl.float64:
        t = tl.exp(2.0 * tl.where(size < 32.0, size, 32.0))
        # (t - 1) / log(t) has the rounding error of t twice, and loses it; where t rounds to 1 it is 1.
        less = tl.where(t == 1.0, 2.0 * size, (t - 1.0) * (2.0 * size) / tl.log(tl.where(t == 1.0, 2.0, t)))
        near = less / (less + 2.0)
        far = 1.0 - 2.0 / (t + 1.0)
        y = tl.where(size < 0.65, near, far)
        return tl.where(size < 1e-18, x, tl.where(x == x, tl.where(x < 0, -y, y), x))  # -0.0 and subnormals
    else:
        # Where exp2 overflows the quotient is 0, and NaN stays: no clamp is needed.
        far = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * size) + 1.0)
        z = x * x
        p = 0.020469421745944447 + z * -0.005515165580990933
        p = 0.13330830356451373 + z * (-0.0536880238192704 + z * p)
        near = x * (1.0 + z * (-0.3333325984863269 + z * p))  # -0.0 and subnormals as they are
        return tl.where(size < 0.65, near, tl.where(x < 0, -far, far))


@triton.jit
def gelu(x, TANH: tl.constexpr):
    if TANH and x.dtype == tl.float64:
        return x * sigmoid(2.0 * _inner(x))  # (1 + tanh(u)) / 2 without its cancellation
    elif TANH:
        c = _clamped(x)
        # The same, its factors folded.
        return x / (1.0 + tl.exp2(c * (-2.302208198144325 - 0.1029432395800235 * c * c)))
    else:
        return x * _below(x)


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        s = sigmoid(2.0 * _inner(x))
        c = _clamped(x)
        return s + x * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * c * c))
    else:
        return _below(x) + x * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x))


@triton.jit
def _below(x):
    """P(a normal number < x), without the cancellation of (1 + erf(x / sqrt(2))) / 2 down its tail.

    In fp32 2 to the power of a polynomial in |x|, the best fit of log2 P(a normal number > |x|) up to 9: 1.2e-8 of P
    near 0 and 0.2 % where P is under 1e-5. Farther out it falls without end. x times it is within 2 units of the last
    place for x > 0 and 8 for x > -2; torch's is within 5 and 38. An erf takes twice the instructions, which bound it.
    """
    if x.dtype == tl.float64:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        a = tl.abs(x)
        p = 5.234144282439956e-07 + a * -1.4372779411075953e-08
        p = 6.122084596427158e-05 + a * (-7.840768375899643e-06 + a * p)
        p = -7.147038559196517e-05 + a * (-0.000236936699366197 + a * p)
        p = -0.05248106271028519 + a * (0.007017850410193205 + a * p)
        p = -1.1511054039001465 + a * (-0.4592096507549286 + a * p)
        tail = tl.exp2(-1.0 + a * p)
        return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def _inner(x):
    """sqrt(2 / pi) (x + 0.044715 x^3)"""
    c = _clamped(x)
    return 0.7978845608028654 * c * (1.0 + 0.044715 * c * c)


@triton.jit
def _clamped(x):
    """Between -30 and 30, far outside which nothing of a gelu changes, so that no power overflows. NaN may be lost."""
    return tl.minimum(tl.maximum(x, -30.0), 30.0)
