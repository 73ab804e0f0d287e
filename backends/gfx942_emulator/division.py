"""Division refinement by the ISA: pre-scaling, fused multiply-add with post-scaling, and the fix-up of special values.

A compiler divides by refining a reciprocal between these three. They are written out case by case, since a simplified
version hides: refinement then still gives the right quotient for ordinary numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from portkern.backends.gfx942_emulator.numbers import F32, F64, Array, exponent_field, fma32, fma64, ldexp


class Format(NamedTuple):
    """Constants of the manual for one width."""

    dtype: Any
    scale: int  # what operands are scaled by, as a power of two
    far: int  # quotients whose exponents differ by this much come near the largest number
    tiny: int  # numerators with at most this biased exponent are scaled
    bias: int
    vanishing: int  # quotients below this difference of exponents underflow
    smallest: float


SINGLE = Format(F32, 64, 96, 23, 127, -150, 2.0**-126)
DOUBLE = Format(F64, 128, 768, 53, 1023, -1075, 2.0**-1022)


def scale(form: Format, s0: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """``v_div_scale``: s0 (one of the two) scaled, and whether the quotient must be scaled back."""
    s0, denominator, numerator = np.broadcast_arrays(s0, denominator, numerator)
    exponent_n, exponent_d = exponent_field(numerator), exponent_field(denominator)
    zero = (numerator == 0) | (denominator == 0)
    far = exponent_n - exponent_d >= form.far
    tiny_d = (exponent_d == 0) & (denominator != 0)
    # In float64 quotients of float32 are exact enough to tell; for float64 their exponents tell.
    small_reciprocal = _subnormal(form, form.dtype(1), denominator)
    small_quotient = _subnormal(form, numerator, denominator)
    is_d, is_n = _same(s0, denominator), _same(s0, numerator)
    up, down = ldexp(s0, np.int32(form.scale)), ldexp(s0, np.int32(-form.scale))
    nothing = np.zeros(s0.shape, bool)
    cases = [
        # condition, scaled value, flag
        (zero, np.full_like(s0, np.nan), nothing),
        (far, np.where(is_d, up, s0), ~nothing),  # only the denominator
        (tiny_d, up, nothing),
        # Scaling the denominator down scales the quotient up; the multiply-add brings it back.
        (small_reciprocal & small_quotient, np.where(is_d, down, s0), ~nothing),
        (small_reciprocal, down, nothing),
        (small_quotient, np.where(is_n, up, s0), ~nothing),  # only the numerator
        (exponent_n <= form.tiny, up, nothing),
    ]
    conditions = [case[0] for case in cases]
    value = np.select(conditions, [case[1] for case in cases], s0)
    return value.astype(form.dtype), np.select(conditions, [case[2] for case in cases], False)


def _subnormal(form: Format, numerator: Any, denominator: Array) -> Array:
    quotient = np.abs(np.divide(numerator, denominator, dtype=form.dtype))
    return (quotient < form.smallest) & (np.asarray(numerator) != 0) & np.isfinite(denominator) & (denominator != 0)


def _same(a: Array, b: Array) -> Array:
    kind = f"u{a.itemsize}"
    return np.ascontiguousarray(a).view(kind) == np.ascontiguousarray(b).view(kind)


def fmas(form: Format, a: Array, b: Array, c: Array, flag: Array) -> Array:
    """``v_div_fmas``: a * b + c, scaled back where ``flag`` (VCC) says so; c tells the direction."""
    result = (fma32 if form.dtype is F32 else fma64)(a, b, c)
    power = np.where(exponent_field(c) > form.bias, form.scale, -form.scale)
    scaled: Array = np.where(flag, ldexp(result, power), result)
    return scaled.astype(form.dtype)


def fixup(form: Format, quotient: Array, denominator: Array, numerator: Array) -> Array:
    """``v_div_fixup``: the quotient, or what a special numerator or denominator makes of it."""
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    dtype = form.dtype
    sign = np.where(np.signbit(numerator) != np.signbit(denominator), dtype(-1), dtype(1))
    exponent_n, exponent_d = exponent_field(numerator), exponent_field(denominator)
    conditions = [
        np.isnan(numerator),
        np.isnan(denominator),
        (numerator == 0) & (denominator == 0),
        np.isinf(numerator) & np.isinf(denominator),
        (denominator == 0) | np.isinf(numerator),
        np.isinf(denominator) | (numerator == 0),
        exponent_n - exponent_d < form.vanishing,
        np.isnan(quotient),  # the refinement ran over: see docs/decisions.md
    ]
    underflow, overflow = np.copysign(dtype(0), sign), np.copysign(dtype(np.inf), sign)
    nan = np.full_like(quotient, np.nan)
    values = [
        numerator, denominator, nan, nan, np.copysign(dtype(np.inf), sign), np.copysign(dtype(0), sign), underflow,
        overflow,
    ]  # fmt: skip
    return np.select(conditions, values, np.copysign(quotient, sign)).astype(dtype)


def fixup16(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """``v_div_fixup_f16``, whose operands are exact in float32."""
    wide = [np.asarray(x).astype(F32) for x in (quotient, denominator, numerator)]
    return fixup(SINGLE, *wide).astype(np.float16)
