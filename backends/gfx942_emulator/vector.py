"""Vector instructions: one row each, as in the manual's tables of VOP1, VOP2, VOP3 and VOP3P.

A row is (type of the result, types of the sources, function). Functions see arrays of those types and know no
registers, lanes or masks. What does not fit a row is in ``special.py``; comparisons are made from their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import division
from portkern.backends.gfx942_emulator.numbers import (
    BF8,
    F16,
    F32,
    F64,
    FP8,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Array,
    count_ones,
    fma16,
    fma32,
    fma64,
    fmax,
    fmed3,
    fmin,
    from_fp8,
    ldexp,
    leading_zeros,
    reverse_bits,
    round_toward_zero16,
    to_integer,
    trailing_zeros,
    transcendental,
)

Function = Callable[..., Any]
Row = tuple[str, str, Function]
I16 = np.int16
M24 = U32(0xFFFFFF)


def _i24(x: Array) -> Array:
    return (x << I32(8)) >> I32(8)


def _bfe_u32(a: Array, b: Array, c: Array) -> Array:
    return (a >> (b & U32(31))) & ((U32(1) << (c & U32(31))) - U32(1))


def _bfe_i32(a: Array, b: Array, c: Array) -> Array:
    offset, size = b & U32(31), c & U32(31)
    up = U32(64) - np.minimum(size, U32(32) - offset)
    wide = ((a.astype(I64) >> offset.astype(I64)) << (up & U32(63)).astype(I64)) >> (up & U32(63)).astype(I64)
    return np.where(size == 0, 0, wide).astype(I32)


def _perm(a: Array, b: Array, selector: Array) -> Array:
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


def _align(shift: Function) -> Function:
    return lambda a, b, c: ((((a.astype(U64) << U64(32)) | b) >> shift(c).astype(U64)) & U64(0xFFFFFFFF)).astype(U32)


def _sad(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(a, b) - np.minimum(a, b) + c


def _sad_u8(a: Array, b: Array, c: Array) -> Array:
    total = c
    for shift in (0, 8, 16, 24):
        x, y = ((v >> U32(shift)) & U32(0xFF) for v in (a, b))
        total = total + np.maximum(x, y) - np.minimum(x, y)
    return total


def _med3(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _mul_hi_u32(a: Array, b: Array) -> Array:
    return ((a.astype(U64) * b) >> U64(32)).astype(U32)


def _mul_hi_i32(a: Array, b: Array) -> Array:
    return ((a.astype(I64) * b) >> I64(32)).astype(I32)


def _frexp_exponent(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


def _frexp_mantissa(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[0], x).astype(x.dtype)


def _fract(x: Array) -> Array:
    below = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.where(np.isinf(x), x.dtype.type(np.nan), np.fmin(x - np.floor(x), below)).astype(x.dtype)


def _turns(function: Function) -> Function:
    """Sine and cosine of turns; outside of 256 turns the sine is 0 and the cosine 1."""

    def evaluate(x: Array) -> Array:
        small = np.abs(x) <= 256
        # Reduced first, so that whole and half turns are exact.
        found = function(2 * np.pi * (x - np.rint(x)))
        return np.where(np.isfinite(x), np.where(small, found, function(0.0)), np.nan)

    return lambda x: transcendental(evaluate, x)


def _narrow(function: Function) -> Function:
    """A function of float16, computed in float64 and rounded once."""
    return lambda x: function(x.astype(F64)).astype(F16)


def _rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


def _float_of_byte(number: int) -> Function:
    return lambda a: ((a >> U32(8 * number)) & U32(0xFF)).astype(F32)


def _float8(form: tuple[int, int, int]) -> Function:
    return lambda a: from_fp8((a & U32(0xFF)).astype(U8), form)


def _norm(kind: Any, largest: int) -> Function:
    def function(a: Array, b: Array) -> Array:
        low, high = (to_integer(np.rint(np.clip(x, -1 if kind is I16 else 0, 1) * largest), kind) for x in (a, b))
        return low.view(U16).astype(U32) | (high.view(U16).astype(U32) << U32(16))

    return function


def _pack2(convert: Function) -> Function:
    def function(a: Array, b: Array) -> Array:
        low, high = np.broadcast_arrays(convert(a), convert(b))
        return low.astype(U32) | (high.astype(U32) << U32(16))

    return function


def _byte_dots(kind: Any) -> Function:
    def function(a: Array, b: Array, c: Array) -> Array:
        total = c
        for shift in (0, 8, 16, 24):
            x, y = ((v >> U32(shift)).astype(U8).view(kind).astype(c.dtype) for v in (a, b))
            total = total + x * y
        return total

    return function


def _dot2(a: Array, b: Array, c: Array) -> Array:
    total = np.asarray(c, F64)
    for shift in (0, 16):
        x, y = ((v >> U32(shift)).astype(U16).view(F16).astype(F64) for v in (a, b))
        total = total + x * y
    return total.astype(F32)


def _class(x: Array, wanted: Array) -> Array:
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


_INTEGERS: dict[str, Row] = {
    "v_mov_b32": ("b32", "b32", lambda a: a),
    "v_mov_b64": ("b64", "b64", lambda a: a),
    "v_accvgpr_read_b32": ("b32", "b32", lambda a: a),
    "v_accvgpr_write_b32": ("b32", "b32", lambda a: a),
    "v_accvgpr_mov_b32": ("b32", "b32", lambda a: a),
    "v_add_u32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_u32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_subrev_u32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_add_i32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_i32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a + b) << (c & U32(31))),
    "v_lshl_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) | c),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_and_b32": ("b32", "b32 b32", lambda a, b: a & b),
    "v_or_b32": ("b32", "b32 b32", lambda a, b: a | b),
    "v_xor_b32": ("b32", "b32 b32", lambda a, b: a ^ b),
    "v_xnor_b32": ("b32", "b32 b32", lambda a, b: ~(a ^ b)),
    "v_not_b32": ("b32", "b32", lambda a: ~a),
    "v_and_or_b32": ("b32", "b32 b32 b32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("b32", "b32 b32 b32", lambda a, b, c: a | b | c),
    "v_bfi_b32": ("b32", "b32 b32 b32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": ("u32", "u32 u32 u32", _bfe_u32),
    "v_bfe_i32": ("i32", "i32 u32 u32", _bfe_i32),
    "v_bfm_b32": ("b32", "u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))),
    "v_bfrev_b32": ("b32", "b32", reverse_bits),
    "v_bcnt_u32_b32": ("u32", "b32 u32", lambda a, b: count_ones(a) + b),
    "v_ffbh_u32": ("u32", "u32", leading_zeros),
    "v_ffbl_b32": ("u32", "b32", trailing_zeros),
    "v_ffbh_i32": ("u32", "i32", lambda a: leading_zeros(np.where(a < 0, ~a, a).view(U32))),
    "v_lshlrev_b32": ("b32", "u32 b32", lambda a, b: b << (a & U32(31))),
    "v_lshrrev_b32": ("b32", "u32 b32", lambda a, b: b >> (a & U32(31))),
    "v_ashrrev_i32": ("i32", "u32 i32", lambda a, b: b >> (a & U32(31)).view(I32)),
    "v_lshlrev_b64": ("b64", "u32 b64", lambda a, b: b << (a & U32(63)).astype(U64)),
    "v_lshrrev_b64": ("b64", "u32 b64", lambda a, b: b >> (a & U32(63)).astype(U64)),
    "v_ashrrev_i64": ("i64", "u32 i64", lambda a, b: b >> (a & U32(63)).astype(I64)),
    "v_alignbit_b32": ("b32", "b32 b32 u32", _align(lambda c: c & U32(31))),
    "v_alignbyte_b32": ("b32", "b32 b32 u32", _align(lambda c: U32(8) * (c & U32(3)))),
    "v_perm_b32": ("b32", "b32 b32 b32", _perm),
    "v_mul_lo_u32": ("u32", "u32 u32", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", "u32 u32", _mul_hi_u32),
    "v_mul_hi_i32": ("i32", "i32 i32", _mul_hi_i32),
    "v_mul_u32_u24": ("u32", "u32 u32", lambda a, b: (a & M24) * (b & M24)),
    "v_mul_i32_i24": ("i32", "i32 i32", lambda a, b: _i24(a) * _i24(b)),
    "v_mul_hi_u32_u24": ("u32", "u32 u32", lambda a, b: _mul_hi_u32(a & M24, b & M24)),
    "v_mul_hi_i32_i24": ("i32", "i32 i32", lambda a, b: _mul_hi_i32(_i24(a), _i24(b))),
    "v_mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: (a & M24) * (b & M24) + c),
    "v_mad_i32_i24": ("i32", "i32 i32 i32", lambda a, b, c: _i24(a) * _i24(b) + c),
    "v_sad_u32": ("u32", "u32 u32 u32", _sad),
    "v_sad_u8": ("u32", "u32 u32 u32", _sad_u8),
    "v_min_u32": ("u32", "u32 u32", np.minimum),
    "v_max_u32": ("u32", "u32 u32", np.maximum),
    "v_min_i32": ("i32", "i32 i32", np.minimum),
    "v_max_i32": ("i32", "i32 i32", np.maximum),
    "v_min3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("u32", "u32 u32 u32", _med3),
    "v_min3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("i32", "i32 i32 i32", _med3),
    "v_dot4_i32_i8": ("i32", "u32 u32 i32", _byte_dots(np.int8)),
    "v_dot4c_i32_i8": ("i32", "u32 u32 i32", _byte_dots(np.int8)),
    "v_dot4_u32_u8": ("u32", "u32 u32 u32", _byte_dots(U8)),
}
_SHORTS: dict[str, Row] = {
    "v_add_u16": ("u16", "u16 u16", lambda a, b: a + b),
    "v_sub_u16": ("u16", "u16 u16", lambda a, b: a - b),
    "v_subrev_u16": ("u16", "u16 u16", lambda a, b: b - a),
    "v_add_i16": ("i16", "i16 i16", lambda a, b: a + b),
    "v_sub_i16": ("i16", "i16 i16", lambda a, b: a - b),
    "v_mul_lo_u16": ("u16", "u16 u16", lambda a, b: a * b),
    "v_mad_u16": ("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_mad_legacy_u16": ("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_mad_i16": ("i16", "i16 i16 i16", lambda a, b, c: a * b + c),
    "v_mad_u32_u16": ("u32", "u16 u16 u32", lambda a, b, c: a.astype(U32) * b + c),
    "v_mad_i32_i16": ("i32", "i16 i16 i32", lambda a, b, c: a.astype(I32) * b + c),
    "v_min_u16": ("u16", "u16 u16", np.minimum),
    "v_max_u16": ("u16", "u16 u16", np.maximum),
    "v_min_i16": ("i16", "i16 i16", np.minimum),
    "v_max_i16": ("i16", "i16 i16", np.maximum),
    "v_min3_i16": ("i16", "i16 i16 i16", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i16": ("i16", "i16 i16 i16", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i16": ("i16", "i16 i16 i16", _med3),
    "v_min3_u16": ("u16", "u16 u16 u16", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u16": ("u16", "u16 u16 u16", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u16": ("u16", "u16 u16 u16", _med3),
    "v_lshlrev_b16": ("u16", "u16 u16", lambda a, b: b << (a & U16(15))),
    "v_lshrrev_b16": ("u16", "u16 u16", lambda a, b: b >> (a & U16(15))),
    "v_ashrrev_i16": ("i16", "u16 i16", lambda a, b: b >> (a & U16(15)).view(I16)),
    "v_pack_b32_f16": ("b32", "b16 b16", lambda a, b: a.astype(U32) | (b.astype(U32) << U32(16))),
    "v_sat_pk_u8_i16": ("b32", "b32", lambda a: np.clip(a.astype(U16).view(I16), 0, 255).astype(U32)
                        | (np.clip((a >> U32(16)).astype(U16).view(I16), 0, 255).astype(U32) << U32(8))),
}  # fmt: skip
_SINGLES: dict[str, Row] = {
    "v_add_f32": ("f32", "f32 f32", lambda a, b: a + b),
    "v_sub_f32": ("f32", "f32 f32", lambda a, b: a - b),
    "v_subrev_f32": ("f32", "f32 f32", lambda a, b: b - a),
    "v_mul_f32": ("f32", "f32 f32", lambda a, b: a * b),
    # 0 times anything is 0.
    "v_mul_legacy_f32": ("f32", "f32 f32", lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b)),
    "v_fma_f32": ("f32", "f32 f32 f32", fma32),
    "v_fmac_f32": ("f32", "f32 f32 f32", fma32),
    "v_fmaak_f32": ("f32", "f32 f32 f32", fma32),
    "v_fmamk_f32": ("f32", "f32 f32 f32", fma32),
    "v_max_f32": ("f32", "f32 f32", fmax),
    "v_min_f32": ("f32", "f32 f32", fmin),
    "v_max3_f32": ("f32", "f32 f32 f32", lambda a, b, c: fmax(fmax(a, b), c)),
    "v_min3_f32": ("f32", "f32 f32 f32", lambda a, b, c: fmin(fmin(a, b), c)),
    "v_med3_f32": ("f32", "f32 f32 f32", fmed3),
    "v_ldexp_f32": ("f32", "f32 i32", ldexp),
    "v_frexp_exp_i32_f32": ("i32", "f32", _frexp_exponent),
    "v_frexp_mant_f32": ("f32", "f32", _frexp_mantissa),
    "v_fract_f32": ("f32", "f32", _fract),
    "v_trunc_f32": ("f32", "f32", np.trunc),
    "v_ceil_f32": ("f32", "f32", np.ceil),
    "v_rndne_f32": ("f32", "f32", np.rint),
    "v_floor_f32": ("f32", "f32", np.floor),
    "v_exp_f32": ("f32", "f32", lambda a: transcendental(np.exp2, a)),
    "v_log_f32": ("f32", "f32", lambda a: transcendental(np.log2, a)),
    "v_exp_legacy_f32": ("f32", "f32", lambda a: transcendental(np.exp2, a)),
    "v_log_legacy_f32": ("f32", "f32", lambda a: transcendental(np.log2, a)),
    "v_rcp_f32": ("f32", "f32", lambda a: transcendental(np.reciprocal, a)),
    "v_rcp_iflag_f32": ("f32", "f32", lambda a: transcendental(np.reciprocal, a)),
    "v_rsq_f32": ("f32", "f32", lambda a: transcendental(_rsqrt, a)),
    "v_sqrt_f32": ("f32", "f32", lambda a: transcendental(np.sqrt, a)),
    "v_sin_f32": ("f32", "f32", _turns(np.sin)),
    "v_cos_f32": ("f32", "f32", _turns(np.cos)),
    "v_div_fixup_f32": ("f32", "f32 f32 f32", lambda *s: division.fixup(division.SINGLE, *s)),
    "v_dot2_f32_f16": ("f32", "u32 u32 f32", _dot2),
    "v_dot2c_f32_f16": ("f32", "u32 u32 f32", _dot2),
}
_HALVES: dict[str, Row] = {
    "v_add_f16": ("f16", "f16 f16", lambda a, b: a + b),
    "v_sub_f16": ("f16", "f16 f16", lambda a, b: a - b),
    "v_subrev_f16": ("f16", "f16 f16", lambda a, b: b - a),
    "v_mul_f16": ("f16", "f16 f16", lambda a, b: a * b),
    "v_fma_f16": ("f16", "f16 f16 f16", fma16),
    "v_fma_legacy_f16": ("f16", "f16 f16 f16", fma16),
    "v_fmac_f16": ("f16", "f16 f16 f16", fma16),
    "v_fmaak_f16": ("f16", "f16 f16 f16", fma16),
    "v_fmamk_f16": ("f16", "f16 f16 f16", fma16),
    # Two roundings, unlike the fused form.
    "v_mad_f16": ("f16", "f16 f16 f16", lambda a, b, c: a * b + c),
    "v_mad_legacy_f16": ("f16", "f16 f16 f16", lambda a, b, c: a * b + c),
    "v_max_f16": ("f16", "f16 f16", fmax),
    "v_min_f16": ("f16", "f16 f16", fmin),
    "v_max3_f16": ("f16", "f16 f16 f16", lambda a, b, c: fmax(fmax(a, b), c)),
    "v_min3_f16": ("f16", "f16 f16 f16", lambda a, b, c: fmin(fmin(a, b), c)),
    "v_med3_f16": ("f16", "f16 f16 f16", fmed3),
    "v_ldexp_f16": ("f16", "f16 i16", ldexp),
    "v_frexp_exp_i16_f16": ("i16", "f16", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I16)),
    "v_frexp_mant_f16": ("f16", "f16", _frexp_mantissa),
    "v_fract_f16": ("f16", "f16", _fract),
    "v_trunc_f16": ("f16", "f16", np.trunc),
    "v_ceil_f16": ("f16", "f16", np.ceil),
    "v_rndne_f16": ("f16", "f16", np.rint),
    "v_floor_f16": ("f16", "f16", np.floor),
    "v_exp_f16": ("f16", "f16", _narrow(np.exp2)),
    "v_log_f16": ("f16", "f16", _narrow(np.log2)),
    "v_rcp_f16": ("f16", "f16", _narrow(np.reciprocal)),
    "v_rsq_f16": ("f16", "f16", _narrow(_rsqrt)),
    "v_sqrt_f16": ("f16", "f16", _narrow(np.sqrt)),
    "v_sin_f16": ("f16", "f16", lambda a: _turns(np.sin)(a.astype(F32)).astype(F16)),
    "v_cos_f16": ("f16", "f16", lambda a: _turns(np.cos)(a.astype(F32)).astype(F16)),
    "v_div_fixup_f16": ("f16", "f16 f16 f16", division.fixup16),
}
_DOUBLES: dict[str, Row] = {
    "v_add_f64": ("f64", "f64 f64", lambda a, b: a + b),
    "v_mul_f64": ("f64", "f64 f64", lambda a, b: a * b),
    "v_fma_f64": ("f64", "f64 f64 f64", fma64),
    "v_fmac_f64": ("f64", "f64 f64 f64", fma64),
    "v_max_f64": ("f64", "f64 f64", fmax),
    "v_min_f64": ("f64", "f64 f64", fmin),
    "v_ldexp_f64": ("f64", "f64 i32", ldexp),
    "v_frexp_exp_i32_f64": ("i32", "f64", _frexp_exponent),
    "v_frexp_mant_f64": ("f64", "f64", _frexp_mantissa),
    "v_fract_f64": ("f64", "f64", _fract),
    "v_trunc_f64": ("f64", "f64", np.trunc),
    "v_ceil_f64": ("f64", "f64", np.ceil),
    "v_rndne_f64": ("f64", "f64", np.rint),
    "v_floor_f64": ("f64", "f64", np.floor),
    "v_rcp_f64": ("f64", "f64", np.reciprocal),
    "v_rsq_f64": ("f64", "f64", _rsqrt),
    "v_sqrt_f64": ("f64", "f64", np.sqrt),
    "v_div_fixup_f64": ("f64", "f64 f64 f64", lambda *s: division.fixup(division.DOUBLE, *s)),
}
_CONVERSIONS: dict[str, Row] = {
    "v_cvt_f16_f32": ("f16", "f32", lambda a: a.astype(F16)),
    "v_cvt_f32_f16": ("f32", "f16", lambda a: a.astype(F32)),
    "v_cvt_f32_f64": ("f32", "f64", lambda a: a.astype(F32)),
    "v_cvt_f64_f32": ("f64", "f32", lambda a: a.astype(F64)),
    "v_cvt_f32_i32": ("f32", "i32", lambda a: a.astype(F32)),
    "v_cvt_f32_u32": ("f32", "u32", lambda a: a.astype(F32)),
    "v_cvt_f64_i32": ("f64", "i32", lambda a: a.astype(F64)),
    "v_cvt_f64_u32": ("f64", "u32", lambda a: a.astype(F64)),
    "v_cvt_i32_f32": ("i32", "f32", lambda a: to_integer(a, I32)),
    "v_cvt_u32_f32": ("u32", "f32", lambda a: to_integer(a, U32)),
    "v_cvt_i32_f64": ("i32", "f64", lambda a: to_integer(a, I32)),
    "v_cvt_u32_f64": ("u32", "f64", lambda a: to_integer(a, U32)),
    "v_cvt_rpi_i32_f32": ("i32", "f32", lambda a: to_integer(np.floor(a.astype(F64) + 0.5), I32)),
    "v_cvt_flr_i32_f32": ("i32", "f32", lambda a: to_integer(np.floor(a), I32)),
    "v_cvt_f16_u16": ("f16", "u16", lambda a: a.astype(F16)),
    "v_cvt_f16_i16": ("f16", "i16", lambda a: a.astype(F16)),
    "v_cvt_u16_f16": ("u16", "f16", lambda a: to_integer(a, U16)),
    "v_cvt_i16_f16": ("i16", "f16", lambda a: to_integer(a, I16)),
    "v_cvt_f32_ubyte0": ("f32", "u32", _float_of_byte(0)),
    "v_cvt_f32_ubyte1": ("f32", "u32", _float_of_byte(1)),
    "v_cvt_f32_ubyte2": ("f32", "u32", _float_of_byte(2)),
    "v_cvt_f32_ubyte3": ("f32", "u32", _float_of_byte(3)),
    "v_cvt_f32_fp8": ("f32", "u32", _float8(FP8)),
    "v_cvt_f32_bf8": ("f32", "u32", _float8(BF8)),
    "v_cvt_pkrtz_f16_f32": ("b32", "f32 f32", _pack2(lambda a: round_toward_zero16(a).view(U16))),
    "v_cvt_pk_u16_u32": ("b32", "u32 u32", _pack2(lambda a: np.minimum(a, U32(0xFFFF)))),
    "v_cvt_pk_i16_i32": ("b32", "i32 i32", _pack2(lambda a: np.clip(a, -32768, 32767).astype(I16).view(U16))),
    "v_cvt_pknorm_i16_f32": ("b32", "f32 f32", _norm(I16, 32767)),
    "v_cvt_pknorm_u16_f32": ("b32", "f32 f32", _norm(U16, 65535)),
}
ROWS: dict[str, Row] = {**_INTEGERS, **_SHORTS, **_SINGLES, **_HALVES, **_DOUBLES, **_CONVERSIONS}
# These read what their result overwrites, as a last source.
ACCUMULATING = frozenset("v_fmac_f32 v_fmac_f16 v_fmac_f64 v_dot2c_f32_f16 v_dot4c_i32_i8".split())
# 16-bit results that leave the upper half of the register alone; the others clear it.
KEEPING_UPPER = frozenset("v_fma_f16 v_mad_f16 v_mad_u16 v_mad_i16 v_div_fixup_f16".split())

# Both halves, or both 32-bit registers, at once: the type of a half, and the function.
PACKED: dict[str, Row] = {
    "v_pk_add_f32": ("f32", "f32 f32", lambda a, b: a + b),
    "v_pk_mul_f32": ("f32", "f32 f32", lambda a, b: a * b),
    "v_pk_fma_f32": ("f32", "f32 f32 f32", fma32),
    "v_pk_mov_b32": ("b32", "b32 b32", lambda a, b: a),
    "v_pk_add_f16": ("f16", "f16 f16", lambda a, b: a + b),
    "v_pk_mul_f16": ("f16", "f16 f16", lambda a, b: a * b),
    "v_pk_fma_f16": ("f16", "f16 f16 f16", fma16),
    "v_pk_max_f16": ("f16", "f16 f16", fmax),
    "v_pk_min_f16": ("f16", "f16 f16", fmin),
    "v_pk_add_u16": ("u16", "u16 u16", lambda a, b: a + b),
    "v_pk_sub_u16": ("u16", "u16 u16", lambda a, b: a - b),
    "v_pk_add_i16": ("i16", "i16 i16", lambda a, b: a + b),
    "v_pk_sub_i16": ("i16", "i16 i16", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("u16", "u16 u16", lambda a, b: a * b),
    "v_pk_mad_u16": ("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("i16", "i16 i16 i16", lambda a, b, c: a * b + c),
    "v_pk_max_u16": ("u16", "u16 u16", np.maximum),
    "v_pk_min_u16": ("u16", "u16 u16", np.minimum),
    "v_pk_max_i16": ("i16", "i16 i16", np.maximum),
    "v_pk_min_i16": ("i16", "i16 i16", np.minimum),
    "v_pk_lshlrev_b16": ("u16", "u16 u16", lambda a, b: b << (a & U16(15))),
    "v_pk_lshrrev_b16": ("u16", "u16 u16", lambda a, b: b >> (a & U16(15))),
    "v_pk_ashrrev_i16": ("i16", "u16 i16", lambda a, b: b >> (a & U16(15)).view(I16)),
}
_UNORDERED = {
    "nge": np.greater_equal, "nlg": lambda a, b: (a < b) | (a > b), "ngt": np.greater, "nle": np.less_equal,
    "nlt": np.less,
}  # fmt: skip
_COMMON: dict[str, Function] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
FLOAT_COMPARISONS: dict[str, Function] = {
    **_COMMON,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "neq": np.not_equal,
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    **{word: (lambda a, b, f=function: ~f(a, b)) for word, function in _UNORDERED.items()},
}
INTEGER_COMPARISONS: dict[str, Function] = {
    **_COMMON,
    "ne": np.not_equal,
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}


def comparison(name: str) -> tuple[str, Function] | None:
    """Types of the sources and the function of ``v_cmp_<word>_<type>``; None for another name."""
    parts = name.split("_")
    if len(parts) != 4 or parts[1] not in ("cmp", "cmpx"):
        return None
    word, kind = parts[2], parts[3]
    if word == "class":
        return f"{kind} u32", _class
    table = FLOAT_COMPARISONS if kind.startswith("f") else INTEGER_COMPARISONS
    return (f"{kind} {kind}", table[word]) if word in table else None
