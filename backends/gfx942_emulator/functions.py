"""What vector instructions compute where a lambda would not do: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.numbers import (
    F16,
    F32,
    F64,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Array,
    from_fp8,
    to_integer,
    transcendental,
)

Function = Callable[..., Any]
I16 = np.int16
M24 = U32(0xFFFFFF)


def saturating(kind: Any, subtract: bool, reverse: bool = False) -> Function:
    """Sum or difference of whole numbers, kept within the range of ``kind``."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max

    def function(a: Array, b: Array) -> Array:
        first, second = (b, a) if reverse else (a, b)
        first, second = first.view(kind).astype(I64), second.view(kind).astype(I64)
        return np.clip(first - second if subtract else first + second, low, high).astype(kind)

    return function


def i24(x: Array) -> Array:
    """The lowest 24 bits as a signed number."""
    return (x << I32(8)) >> I32(8)


def bfe_u32(a: Array, b: Array, c: Array) -> Array:
    """A field of bits, by offset and size."""
    return (a >> (b & U32(31))) & ((U32(1) << (c & U32(31))) - U32(1))


def bfe_i32(a: Array, b: Array, c: Array) -> Array:
    """A field of bits, by offset and size, with its sign."""
    offset, size = b & U32(31), c & U32(31)
    up = U32(64) - np.minimum(size, U32(32) - offset)
    wide = ((a.astype(I64) >> offset.astype(I64)) << (up & U32(63)).astype(I64)) >> (up & U32(63)).astype(I64)
    return np.where(size == 0, 0, wide).astype(I32)


def perm(a: Array, b: Array, selector: Array) -> Array:
    """Each byte of the selector picks a byte of {a, b} (0 to 3: b), a sign, or a constant."""
    both = (a.astype(U64) << U64(32)) | b
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), U32)
    for position in range(4):
        pick = (selector >> U32(8 * position)) & U32(0xFF)
        byte = ((both >> (U64(8) * (pick & U32(7)))) & U64(0xFF)).astype(U32)
        if (pick > 7).any():
            sign = (both >> (U64(16) * ((pick - U32(8)) & U32(3)) + U64(15))) & U64(1)
            filled = np.where(pick < 12, sign.astype(U32) * U32(0xFF), np.where(pick == 12, 0, 0xFF)).astype(U32)
            byte = np.where(pick > 7, filled, byte)
        result |= byte << U32(8 * position)
    return result


def align(shift: Function) -> Function:
    """The lower half of two registers shifted right; ``shift`` says by how many bits."""
    return lambda a, b, c: ((((a.astype(U64) << U64(32)) | b) >> shift(c).astype(U64)) & U64(0xFFFFFFFF)).astype(U32)


def sad(a: Array, b: Array, c: Array) -> Array:
    """The absolute difference, added."""
    return np.maximum(a, b) - np.minimum(a, b) + c


def sad_u8(a: Array, b: Array, c: Array) -> Array:
    """The absolute differences of four bytes, added."""
    total = c
    for shift in (0, 8, 16, 24):
        x, y = ((v >> U32(shift)) & U32(0xFF) for v in (a, b))
        total = total + np.maximum(x, y) - np.minimum(x, y)
    return total


def med3(a: Array, b: Array, c: Array) -> Array:
    """The middle one."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def mul_hi_u32(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    return ((a.astype(U64) * b) >> U64(32)).astype(U32)


def mul_hi_i32(a: Array, b: Array) -> Array:
    """The upper half of a signed product."""
    return ((a.astype(I64) * b) >> I64(32)).astype(I32)


def frexp_exponent(x: Array) -> Array:
    """The exponent of a number whose mantissa lies from 0.5 to 1; 0 for what is not finite."""
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


def frexp_mantissa(x: Array) -> Array:
    """The mantissa, from 0.5 to 1."""
    found: Array = np.where(np.isfinite(x), np.frexp(x)[0], x)
    return found.astype(x.dtype)


def fract(x: Array) -> Array:
    """What the floor leaves, below 1."""
    below = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.where(np.isinf(x), x.dtype.type(np.nan), np.fmin(x - np.floor(x), below)).astype(x.dtype)


def turns(function: Function) -> Function:
    """Sine and cosine of turns; outside of 256 turns the sine is 0 and the cosine 1."""

    def evaluate(x: Array) -> Array:
        small = np.abs(x) <= 256
        # Reduced first, so that whole and half turns are exact.
        found = function(2 * np.pi * (x - np.rint(x)))
        return np.where(np.isfinite(x), np.where(small, found, function(0.0)), np.nan)

    return lambda x: transcendental(evaluate, x)


def narrow(function: Function) -> Function:
    """A function of float16, computed in float64 and rounded once."""
    return lambda x: function(x.astype(F64)).astype(F16)


def rsqrt(x: Array) -> Array:
    """The reciprocal of the square root."""
    return 1 / np.sqrt(x)


def float_of_byte(number: int) -> Function:
    """One byte as a float."""
    return lambda a: ((a >> U32(8 * number)) & U32(0xFF)).astype(F32)


def float8(form: tuple[int, int, int]) -> Function:
    """The lowest byte, an 8-bit float, as a float32."""
    return lambda a: from_fp8((a & U32(0xFF)).astype(U8), form)


def norm(kind: Any, largest: int) -> Function:
    """Two numbers from -1 (or 0) to 1 as parts of ``largest``, in the two halves."""

    def function(a: Array, b: Array) -> Array:
        low, high = (to_integer(np.rint(np.clip(x, -1 if kind is I16 else 0, 1) * largest), kind) for x in (a, b))
        return low.view(U16).astype(U32) | (high.view(U16).astype(U32) << U32(16))

    return function


def pack2(convert: Function) -> Function:
    """Two results of ``convert`` in the two halves."""

    def function(a: Array, b: Array) -> Array:
        low, high = np.broadcast_arrays(convert(a), convert(b))
        return low.astype(U32) | (high.astype(U32) << U32(16))

    return function


def byte_dots(kind: Any) -> Function:
    """The products of four bytes, added."""

    def function(a: Array, b: Array, c: Array) -> Array:
        total = c
        for shift in (0, 8, 16, 24):
            x, y = ((v >> U32(shift)).astype(U8).view(kind).astype(c.dtype) for v in (a, b))
            total = total + x * y
        return total

    return function


def dot2(a: Array, b: Array, c: Array) -> Array:
    """The products of two float16 each, added, rounded once."""
    total = np.asarray(c, F64)
    for shift in (0, 16):
        x, y = ((v >> U32(shift)).astype(U16).view(F16).astype(F64) for v in (a, b))
        total = total + x * y
    return total.astype(F32)


def class_of(x: Array, wanted: Array) -> Array:
    """Which of ten classes x is in, against the bits of ``wanted``."""
    tiny = np.finfo(x.dtype).smallest_normal
    kind = f"u{x.itemsize}"
    quiet = np.asarray(x).view(kind) >> np.dtype(kind).type(np.finfo(x.dtype).nmant - 1) & np.dtype(kind).type(1) == 1
    negative, zero, infinite, nan = np.signbit(x), x == 0, np.isinf(x), np.isnan(x)
    small = (np.abs(x) < tiny) & ~zero
    normal = np.isfinite(x) & ~zero & ~small
    classes = [
        nan & ~quiet, nan & quiet, infinite & negative, normal & negative, small & negative, zero & negative,
        zero & ~negative, small & ~negative, normal & ~negative, infinite & ~negative,
    ]  # fmt: skip
    found = np.zeros(np.broadcast_shapes(x.shape, wanted.shape), bool)
    for bit, member in enumerate(classes):
        found |= member & ((wanted >> U32(bit)) & U32(1) == 1)
    return found
