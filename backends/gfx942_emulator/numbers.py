"""Arithmetic that numpy lacks: fused multiply-add with one rounding, minimum and maximum as the ISA orders them,
narrow floats, scaling by powers of two. Arrays in, arrays out; nothing here knows registers.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

Array = Any  # a numpy array: what numpy's own types say of mixed arithmetic is mostly Any
F16, F32, F64 = np.float16, np.float32, np.float64
U8, U16, U32, U64, I32, I64 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64
SMALLEST_NORMAL = F32(2.0**-126)
_SPLIT = F64(2**27 + 1)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b rounded, and what the rounding lost, exactly (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b rounded, and what the rounding lost, exactly (Dekker), barring overflow and underflow."""
    product = a * b
    high_a = _SPLIT * a
    high_a = high_a - (high_a - a)
    high_b = _SPLIT * b
    high_b = high_b - (high_b - b)
    low_a, low_b = a - high_a, b - high_b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


def round_to_odd(total: Array, lost: Array) -> Array:
    """``total`` moved to its odd neighbour where ``lost`` says that it is inexact.

    A later rounding to fewer bits then gives what one rounding of the exact value would have given.
    """
    bits = total.view(I64)
    inexact = (lost != 0) & np.isfinite(total) & ((bits & 1) == 0)
    if not inexact.any():
        return total
    step = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(F64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32 with one rounding, subnormals kept."""
    product = np.multiply(a, b, dtype=F64)  # exact: 48 bits
    total = product + c
    result = total.astype(F32)
    # The second rounding can only differ where float64 ended just on a tie, or below the normals.
    bits = np.ascontiguousarray(total).view(U64)
    doubtful = ((bits & U64(0x1FFFFFFF)) == U64(0x10000000)) | (np.abs(total) < SMALLEST_NORMAL)
    if doubtful.any():
        total, lost = two_sum(product, np.asarray(c, F64))
        result = np.where(doubtful, round_to_odd(total, lost).astype(F32), result)
    return result


def fma16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float16 with one rounding."""
    total, lost = two_sum(np.multiply(a, b, dtype=F64), np.asarray(c, F64))
    return round_to_odd(total, lost).astype(F16)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64 with one rounding (Boldo and Melquiond), by fractions where the tricks would underflow."""
    a, b, c = np.broadcast_arrays(a, b, c)
    plain = a * b + c
    product, low = two_product(a, b)
    upper, carried = two_sum(c, low)
    high, rest = two_sum(product, upper)
    tail, lost = two_sum(rest, carried)
    result = high + round_to_odd(tail, lost)
    size = np.abs(product)
    tame = np.isfinite(result) & (size < 1e290) & ((size > 1e-260) | (a == 0) | (b == 0))
    tame &= (np.abs(a) < 1e290) & (np.abs(b) < 1e290) & (np.abs(c) < 1e290)
    result = np.where(tame & (result != 0), result, plain)
    wild = ~tame & np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    for index in np.argwhere(wild):
        at = tuple(index)
        result[at] = _exact64(float(a[at]), float(b[at]), float(c[at]))
    return result


def _exact64(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fmax(a: Array, b: Array) -> Array:
    """The larger; the other one where one is NaN; +0 above -0 (IEEE maxNum)."""
    return _ordered(np.fmax(a, b), a, b, np.bitwise_and)


def fmin(a: Array, b: Array) -> Array:
    """The smaller; the other one where one is NaN; -0 below +0 (IEEE minNum)."""
    return _ordered(np.fmin(a, b), a, b, np.bitwise_or)


def _ordered(result: Array, a: Array, b: Array, merge: Any) -> Array:
    zero = (a == 0) & (b == 0)
    if zero.any():
        kind = f"u{result.itemsize}"
        result = np.where(zero, merge(np.asarray(a).view(kind), np.asarray(b).view(kind)).view(result.dtype), result)
    return result


def fmed3(a: Array, b: Array, c: Array) -> Array:
    """The middle one; the least where one is NaN."""
    least = fmin(fmin(a, b), c)
    largest = fmax(fmax(a, b), c)
    middle = np.where(largest == a, fmax(b, c), np.where(largest == b, fmax(a, c), fmax(a, b)))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, middle).astype(least.dtype)


def flushed(x: Array) -> Array:
    """float32 with subnormals made zero of their sign, as the transcendental unit does."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(F32(0), x), x)


def transcendental(function: Any, x: Array) -> Array:
    """``function`` computed in float64 and rounded once; subnormal operands and results are flushed."""
    return flushed(function(flushed(x).astype(F64)).astype(F32))


def ldexp(x: Array, exponent: Array) -> Array:
    """x * 2^exponent with one rounding, in the dtype of x."""
    if x.dtype == F16:
        return np.ldexp(x.astype(F64), np.clip(exponent, -200, 200)).astype(F16)
    return np.ldexp(x, np.clip(exponent, -5000, 5000)).astype(x.dtype)


def exponent_field(x: Array) -> Array:
    """The biased exponent as it stands in the number's bits."""
    if x.dtype == F64:
        return ((np.asarray(x).view(U64) >> U64(52)) & U64(0x7FF)).astype(I32)
    return ((np.asarray(x).view(U32) >> U32(23)) & U32(0xFF)).astype(I32)


def to_integer(x: Array, dtype: Any) -> Array:
    """Towards zero, clamped to the range of ``dtype``; NaN gives 0."""
    limits = np.iinfo(dtype)
    whole = np.trunc(np.nan_to_num(np.asarray(x, F64), nan=0.0, posinf=1e300, neginf=-1e300))
    return np.clip(whole, limits.min, limits.max).astype(I64).astype(dtype)


def round_toward_zero16(x: Array) -> Array:
    """float32 to float16, towards zero (largest finite instead of infinity for finite numbers)."""
    near = x.astype(F16)
    wide = near.astype(F32)
    over = (np.abs(wide) > np.abs(x)) & np.isfinite(x)
    return np.where(over, (near.view(U16) - U16(1)), near.view(U16)).view(F16)


def xf32(x: Array) -> Array:
    """float32 as the matrix unit reads it in its tf32-like mode: 10 bits of mantissa, to nearest even."""
    bits = np.asarray(x).view(U32)
    rounded = (bits + U32(0xFFF) + ((bits >> U32(13)) & U32(1))) & U32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits & U32(0xFFFFE000) | (np.isnan(x) * U32(0x400000))).view(F32)


def from_bf16(bits: Array) -> Array:
    """float32 of bfloat16 bits."""
    return (bits.astype(U32) << U32(16)).view(F32)


# The 8-bit formats of this architecture have no infinity and no -0: 0x80 is the one NaN.
FP8, BF8 = (4, 3, 8), (5, 2, 16)  # exponent bits, mantissa bits, bias


def from_fp8(bits: Array, form: tuple[int, int, int]) -> Array:
    """float32 of 8-bit floats in ``form`` (FP8 or BF8, fnuz)."""
    return _table8(form)[bits]


def _table8(form: tuple[int, int, int]) -> Array:
    exponent_bits, mantissa_bits, bias = form
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    scale = np.ldexp(1.0, np.maximum(exponent, 1) - bias - mantissa_bits)
    value = (mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)) * scale
    value = np.where(code & 0x80, -value, value)
    value[0x80] = np.nan
    return value.astype(F32)


def to_fp8(x: Array, form: tuple[int, int, int], clamps: Array, noise: Array | None = None) -> Array:
    """8-bit floats (fnuz), to nearest even, or stochastically by the 32 bits of ``noise``.

    Too large gives the largest number where ``clamps`` (a mode of the wave), else NaN; NaN and infinity give NaN.
    """
    exponent_bits, mantissa_bits, bias = form
    size = np.abs(np.asarray(x, F64))
    finite = np.isfinite(x)
    size = np.where(finite, size, 0)
    power = np.maximum(np.frexp(size)[1] - 1, 1 - bias)
    unit = np.ldexp(1.0, power - mantissa_bits)
    steps = size / unit
    whole = np.rint(steps) if noise is None else np.floor(steps + np.asarray(noise, F64) / 2.0**32)
    largest = float(_table8(form)[0x7F])
    finite = finite & ((whole * unit <= largest) | clamps)
    value = np.minimum(whole * unit, largest)
    power = np.maximum(np.frexp(value)[1] - 1, 1 - bias)
    mantissa = np.rint(value / np.ldexp(1.0, power - mantissa_bits)).astype(I32)
    normal = mantissa >= 1 << mantissa_bits
    field = np.where(normal, power + bias, 0)
    code = (field << mantissa_bits) + np.where(normal, mantissa - (1 << mantissa_bits), mantissa)
    code = np.where((np.signbit(x)) & (code != 0), code | 0x80, code)
    return np.where(finite, code, 0x80).astype(U8)


def count_ones(x: Array) -> Array:
    """How many bits of each unsigned number are set."""
    octets = np.ascontiguousarray(x).view(U8).reshape(*x.shape, x.itemsize)
    return np.unpackbits(octets, axis=-1).sum(-1).astype(U32)


def reverse_bits(x: Array) -> Array:
    """Bits of 32-bit numbers in the reverse order."""
    octets = np.ascontiguousarray(x).view(U8).reshape(*x.shape, 4)
    bits = np.unpackbits(octets, axis=-1, bitorder="little")[..., ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(U32)[..., 0]


def leading_zeros(x: Array) -> Array:
    """Number of zero bits before the first one, from the top; all ones for 0. 32 or 64 bits."""
    width = 8 * x.itemsize
    if width == 32:
        found = np.frexp(x.astype(F64))[1]
    else:
        high = (x >> U64(32)).astype(F64)
        low = (x & U64(0xFFFFFFFF)).astype(F64)
        found = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    return np.where(x == 0, U32(0xFFFFFFFF), (width - found).astype(U32))


def trailing_zeros(x: Array) -> Array:
    """Number of zero bits below the lowest one; all ones for 0. 32 or 64 bits."""
    one = x.dtype.type(1)
    lowest = x & (~x + one)
    return np.where(x == 0, U32(0xFFFFFFFF), U32(8 * x.itemsize - 1) - leading_zeros(lowest))
