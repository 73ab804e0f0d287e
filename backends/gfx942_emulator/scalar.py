"""Scalar instructions: one row each, as in the manual's tables of SOP1, SOP2, SOPC, SOPK and SMEM.

A row gives the type of the result, those of the sources, and the function. Where SCC is written, a second function of
the result and the sources says what it becomes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.numbers import (
    I32,
    I64,
    U32,
    U64,
    Array,
    count_ones,
    leading_zeros,
    reverse_bits,
    trailing_zeros,
)
from portkern.backends.gfx942_emulator.state import EXEC, VCC

Function = Callable[..., Any]


def _nonzero(result: Array, *_: Array) -> Array:
    return result != 0


def overflow_add(result: Array, a: Array, b: Array) -> Array:
    """Whether a signed sum went out of range."""
    return ((a ^ result) & (b ^ result)) < 0


def overflow_sub(result: Array, a: Array, b: Array) -> Array:
    """Whether a signed difference went out of range."""
    return ((a ^ b) & (a ^ result)) < 0


def _high(kind: Any, wide: Any) -> Function:
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(kind)


def _shl_add(count: int) -> Function:
    return lambda a, b: (a << U32(count)) + b


def _carry_shl_add(count: int) -> Function:
    return lambda r, a, b: (a.astype(U64) << U64(count)) + b > U64(0xFFFFFFFF)


def _field(b: Array, kind: Any, width: int) -> tuple[Array, Array]:
    return (b & (width - 1)).astype(kind), ((b >> 16) & 0x7F).astype(kind)


def _bfe_u32(a: Array, b: Array) -> Array:
    offset, size = _field(b, U64, 32)
    return ((a.astype(U64) >> offset) & ((U64(1) << size) - U64(1))).astype(U32)


def _bfe_i32(a: Array, b: Array) -> Array:
    offset, size = _field(b, I64, 32)
    size = np.minimum(size, 32 - offset)
    up = 64 - size
    found = ((a.astype(I64) >> offset) << np.minimum(up, 63)) >> np.minimum(up, 63)
    return np.where(size == 0, 0, found).astype(I32)


def _bfe_u64(a: Array, b: Array) -> Array:
    offset, size = _field(b.astype(U64), U64, 64)
    ones = np.where(size >= 64, U64(0xFFFFFFFFFFFFFFFF), (U64(1) << np.minimum(size, U64(63))) - U64(1))
    return (a >> offset) & ones


def _bfe_i64(a: Array, b: Array) -> Array:
    offset, size = _field(b.astype(I64), I64, 64)
    size = np.minimum(size, 64 - offset)
    up = np.minimum(64 - size, 63)
    return np.where(size == 0, 0, ((a >> offset) << up) >> up)


def _pack(low: int, high: int) -> Function:
    def function(a: Array, b: Array) -> Array:
        return ((a >> U32(16 * low)) & U32(0xFFFF)) | (((b >> U32(16 * high)) & U32(0xFFFF)) << U32(16))

    return function


def _bfm64(a: Array, b: Array) -> Array:
    return ((U64(1) << (a.astype(U64) & U64(63))) - U64(1)) << (b.astype(U64) & U64(63))


def _reverse64(a: Array) -> Array:
    low, high = (a & U64(0xFFFFFFFF)).astype(U32), (a >> U64(32)).astype(U32)
    return (reverse_bits(low).astype(U64) << U64(32)) | reverse_bits(high)


def _shift(kind: Any, width: int, left: bool) -> Function:
    ones = width - 1
    if left:
        return lambda a, b: a << (b & U32(ones)).astype(kind)
    return lambda a, b: a >> (b & U32(ones)).astype(kind)


def _sign_bits(a: Array) -> Array:
    """Position of the first bit that differs from the sign, from the top; all ones where none does."""
    return leading_zeros(np.where(a < 0, ~a, a).view(U32))


# name: (result, sources, function, SCC)
SOP2: dict[str, tuple[str, str, Function, Function | None]] = {
    "s_add_u32": ("u32", "u32 u32", lambda a, b: a + b, lambda r, a, b: r < a),
    "s_sub_u32": ("u32", "u32 u32", lambda a, b: a - b, lambda r, a, b: b > a),
    "s_add_i32": ("i32", "i32 i32", lambda a, b: a + b, overflow_add),
    "s_sub_i32": ("i32", "i32 i32", lambda a, b: a - b, overflow_sub),
    "s_min_i32": ("i32", "i32 i32", np.minimum, lambda r, a, b: a < b),
    "s_min_u32": ("u32", "u32 u32", np.minimum, lambda r, a, b: a < b),
    "s_max_i32": ("i32", "i32 i32", np.maximum, lambda r, a, b: a > b),
    "s_max_u32": ("u32", "u32 u32", np.maximum, lambda r, a, b: a > b),
    "s_and_b32": ("b32", "b32 b32", lambda a, b: a & b, _nonzero),
    "s_and_b64": ("b64", "b64 b64", lambda a, b: a & b, _nonzero),
    "s_or_b32": ("b32", "b32 b32", lambda a, b: a | b, _nonzero),
    "s_or_b64": ("b64", "b64 b64", lambda a, b: a | b, _nonzero),
    "s_xor_b32": ("b32", "b32 b32", lambda a, b: a ^ b, _nonzero),
    "s_xor_b64": ("b64", "b64 b64", lambda a, b: a ^ b, _nonzero),
    "s_andn2_b32": ("b32", "b32 b32", lambda a, b: a & ~b, _nonzero),
    "s_andn2_b64": ("b64", "b64 b64", lambda a, b: a & ~b, _nonzero),
    "s_orn2_b32": ("b32", "b32 b32", lambda a, b: a | ~b, _nonzero),
    "s_orn2_b64": ("b64", "b64 b64", lambda a, b: a | ~b, _nonzero),
    "s_nand_b32": ("b32", "b32 b32", lambda a, b: ~(a & b), _nonzero),
    "s_nand_b64": ("b64", "b64 b64", lambda a, b: ~(a & b), _nonzero),
    "s_nor_b32": ("b32", "b32 b32", lambda a, b: ~(a | b), _nonzero),
    "s_nor_b64": ("b64", "b64 b64", lambda a, b: ~(a | b), _nonzero),
    "s_xnor_b32": ("b32", "b32 b32", lambda a, b: ~(a ^ b), _nonzero),
    "s_xnor_b64": ("b64", "b64 b64", lambda a, b: ~(a ^ b), _nonzero),
    "s_lshl_b32": ("b32", "b32 u32", _shift(U32, 32, True), _nonzero),
    "s_lshl_b64": ("b64", "b64 u32", _shift(U64, 64, True), _nonzero),
    "s_lshr_b32": ("b32", "b32 u32", _shift(U32, 32, False), _nonzero),
    "s_lshr_b64": ("b64", "b64 u32", _shift(U64, 64, False), _nonzero),
    "s_ashr_i32": ("i32", "i32 u32", _shift(I32, 32, False), _nonzero),
    "s_ashr_i64": ("i64", "i64 u32", _shift(I64, 64, False), _nonzero),
    "s_bfm_b32": ("b32", "u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)), None),
    "s_bfm_b64": ("b64", "u32 u32", _bfm64, None),
    "s_mul_i32": ("i32", "i32 i32", lambda a, b: a * b, None),
    "s_mul_hi_u32": ("u32", "u32 u32", _high(U32, U64), None),
    "s_mul_hi_i32": ("i32", "i32 i32", _high(I32, I64), None),
    "s_bfe_u32": ("u32", "u32 u32", _bfe_u32, _nonzero),
    "s_bfe_i32": ("i32", "i32 u32", _bfe_i32, _nonzero),
    "s_bfe_u64": ("u64", "u64 u32", _bfe_u64, _nonzero),
    "s_bfe_i64": ("i64", "i64 u32", _bfe_i64, _nonzero),
    "s_absdiff_i32": ("i32", "i32 i32", lambda a, b: np.abs(a - b), _nonzero),
    "s_lshl1_add_u32": ("u32", "u32 u32", _shl_add(1), _carry_shl_add(1)),
    "s_lshl2_add_u32": ("u32", "u32 u32", _shl_add(2), _carry_shl_add(2)),
    "s_lshl3_add_u32": ("u32", "u32 u32", _shl_add(3), _carry_shl_add(3)),
    "s_lshl4_add_u32": ("u32", "u32 u32", _shl_add(4), _carry_shl_add(4)),
    "s_pack_ll_b32_b16": ("b32", "b32 b32", _pack(0, 0), None),
    "s_pack_lh_b32_b16": ("b32", "b32 b32", _pack(0, 1), None),
    "s_pack_hh_b32_b16": ("b32", "b32 b32", _pack(1, 1), None),
}
SOP1: dict[str, tuple[str, str, Function, Function | None]] = {
    "s_mov_b32": ("b32", "b32", lambda a: a, None),
    "s_mov_b64": ("b64", "b64", lambda a: a, None),
    "s_not_b32": ("b32", "b32", lambda a: ~a, _nonzero),
    "s_not_b64": ("b64", "b64", lambda a: ~a, _nonzero),
    "s_brev_b32": ("b32", "b32", reverse_bits, None),
    "s_brev_b64": ("b64", "b64", _reverse64, None),
    "s_bcnt0_i32_b32": ("u32", "b32", lambda a: U32(32) - count_ones(a), _nonzero),
    "s_bcnt0_i32_b64": ("u32", "b64", lambda a: U32(64) - count_ones(a), _nonzero),
    "s_bcnt1_i32_b32": ("u32", "b32", count_ones, _nonzero),
    "s_bcnt1_i32_b64": ("u32", "b64", count_ones, _nonzero),
    "s_ff0_i32_b32": ("u32", "b32", lambda a: trailing_zeros(~a), None),
    "s_ff0_i32_b64": ("u32", "b64", lambda a: trailing_zeros(~a), None),
    "s_ff1_i32_b32": ("u32", "b32", trailing_zeros, None),
    "s_ff1_i32_b64": ("u32", "b64", trailing_zeros, None),
    "s_flbit_i32_b32": ("u32", "b32", leading_zeros, None),
    "s_flbit_i32_b64": ("u32", "b64", leading_zeros, None),
    "s_flbit_i32": ("u32", "i32", _sign_bits, None),
    "s_sext_i32_i8": ("i32", "b32", lambda a: a.astype(np.uint8).view(np.int8).astype(I32), None),
    "s_sext_i32_i16": ("i32", "b32", lambda a: a.astype(np.uint16).view(np.int16).astype(I32), None),
    "s_abs_i32": ("i32", "i32", np.abs, _nonzero),
}
# name: (sources, what SCC becomes)
SOPC: dict[str, tuple[str, Function]] = {
    f"s_cmp{k}_{word}_{kind}": (f"{kind} {kind}", function)
    for word, function in {
        "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
        "le": np.less_equal,
    }.items()
    for kind in ("i32", "u32", "u64")
    for k in ("", "k")
}  # fmt: skip
SOPC["s_bitcmp0_b32"] = ("b32 u32", lambda a, b: ((a >> (b & U32(31))) & U32(1)) == 0)
SOPC["s_bitcmp1_b32"] = ("b32 u32", lambda a, b: ((a >> (b & U32(31))) & U32(1)) == 1)
SOPC["s_bitcmp0_b64"] = ("b64 u32", lambda a, b: ((a >> (b & U32(63)).astype(U64)) & U64(1)) == 0)
SOPC["s_bitcmp1_b64"] = ("b64 u32", lambda a, b: ((a >> (b & U32(63)).astype(U64)) & U64(1)) == 1)
# How EXEC and the source give the new EXEC.
SAVEEXEC: dict[str, Function] = {
    "s_and_saveexec_b64": lambda s, e: s & e,
    "s_or_saveexec_b64": lambda s, e: s | e,
    "s_xor_saveexec_b64": lambda s, e: s ^ e,
    "s_andn2_saveexec_b64": lambda s, e: s & ~e,
    "s_orn2_saveexec_b64": lambda s, e: s | ~e,
    "s_nand_saveexec_b64": lambda s, e: ~(s & e),
    "s_nor_saveexec_b64": lambda s, e: ~(s | e),
    "s_xnor_saveexec_b64": lambda s, e: ~(s ^ e),
    "s_andn1_saveexec_b64": lambda s, e: ~s & e,
    "s_orn1_saveexec_b64": lambda s, e: ~s | e,
}
WREXEC: dict[str, Function] = {
    "s_andn1_wrexec_b64": lambda s, e: ~s & e,
    "s_andn2_wrexec_b64": lambda s, e: s & ~e,
}
# Where a branch looks, and what it wants to find there: None for SCC.
BRANCHES: dict[str, tuple[int | None, bool]] = {
    "s_cbranch_scc0": (None, False),
    "s_cbranch_scc1": (None, True),
    "s_cbranch_vccz": (VCC, False),
    "s_cbranch_vccnz": (VCC, True),
    "s_cbranch_execz": (EXEC, False),
    "s_cbranch_execnz": (EXEC, True),
}
# They order memory, time or power; here everything happens at once and in order.
NO_EFFECT = frozenset(
    "s_nop s_waitcnt s_waitcnt_vscnt s_setprio s_sleep s_sethalt s_icache_inv s_dcache_inv s_dcache_wb s_inst_prefetch "
    "s_wakeup s_ttracedata s_dcache_wb_vol s_dcache_inv_vol buffer_wbl2 buffer_inv s_setvskip_off s_clause".split()
)
LOADS = {f"s_{kind}load_dword{suffix}": count for suffix, count in {
    "": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}.items() for kind in ("", "buffer_")}  # fmt: skip
