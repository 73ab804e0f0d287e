"""Atomic operations: what each makes of the old value, one row each, and lanes that meet at one address in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.memory import Block
from portkern.backends.gfx942_emulator.numbers import (
    F16,
    F32,
    F64,
    I32,
    I64,
    U16,
    U32,
    U64,
    Array,
    fmax,
    fmin,
    from_bf16,
)

Function = Callable[..., Any]


def to_bf16(x: Array) -> Array:
    """bfloat16 bits of float32, to nearest even; NaN stays NaN."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded).astype(U16)


def _as(kind: Any, function: Function) -> Function:
    return lambda old, value: function(old.view(kind), value.view(kind)).astype(kind).view(old.dtype)


def _packed(add: Function) -> Function:
    def function(old: Array, value: Array) -> Array:
        pairs = [np.ascontiguousarray(each).view(U16) for each in (old, value)]
        return np.ascontiguousarray(add(*pairs)).view(U32)

    return function


def _increment(old: Array, value: Array) -> Array:
    return np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old: Array, value: Array) -> Array:
    return np.where((old == 0) | (old > value), value, old - old.dtype.type(1))


# name in a mnemonic: (bytes, function of the old and the given value)
OPERATIONS: dict[str, tuple[int, Function]] = {
    "swap": (4, lambda old, value: value),
    "add": (4, lambda old, value: old + value),
    "sub": (4, lambda old, value: old - value),
    "rsub": (4, lambda old, value: value - old),
    "smin": (4, _as(I32, np.minimum)),
    "umin": (4, np.minimum),
    "smax": (4, _as(I32, np.maximum)),
    "umax": (4, np.maximum),
    "and": (4, lambda old, value: old & value),
    "or": (4, lambda old, value: old | value),
    "xor": (4, lambda old, value: old ^ value),
    "inc": (4, _increment),
    "dec": (4, _decrement),
}
OPERATIONS.update({f"{name}_x2": (8, function) for name, (_, function) in list(OPERATIONS.items())})
OPERATIONS["smin_x2"] = (8, _as(I64, np.minimum))
OPERATIONS["smax_x2"] = (8, _as(I64, np.maximum))
OPERATIONS.update({
    "add_f32": (4, _as(F32, lambda old, value: old + value)),
    "add_f64": (8, _as(F64, lambda old, value: old + value)),
    "min_f32": (4, _as(F32, fmin)),
    "max_f32": (4, _as(F32, fmax)),
    "min_f64": (8, _as(F64, fmin)),
    "max_f64": (8, _as(F64, fmax)),
    "pk_add_f16": (4, _packed(lambda old, value: (old.view(F16) + value.view(F16)).view(U16))),
    "pk_add_bf16": (4, _packed(lambda old, value: to_bf16(from_bf16(old) + from_bf16(value)))),
})  # fmt: skip
COMPARE_AND_SWAP = {"cmpswap": 4, "cmpswap_x2": 8}
# The names that LDS instructions give to the same operations.
SHARED: dict[str, str] = {
    "add_u32": "add", "sub_u32": "sub", "rsub_u32": "rsub", "inc_u32": "inc", "dec_u32": "dec", "min_i32": "smin",
    "max_i32": "smax", "min_u32": "umin", "max_u32": "umax", "and_b32": "and", "or_b32": "or", "xor_b32": "xor",
    "wrxchg_b32": "swap", "add_f32": "add_f32", "min_f32": "min_f32", "max_f32": "max_f32", "add_f64": "add_f64",
    "min_f64": "min_f64", "max_f64": "max_f64", "pk_add_f16": "pk_add_f16", "pk_add_bf16": "pk_add_bf16",
    "add_u64": "add_x2", "sub_u64": "sub_x2", "min_i64": "smin_x2", "max_i64": "smax_x2", "min_u64": "umin_x2",
    "max_u64": "umax_x2", "and_b64": "and_x2", "or_b64": "or_x2", "xor_b64": "xor_x2", "wrxchg_b64": "swap_x2",
}  # fmt: skip


def apply(block: Block, offsets: Array, size: int, function: Function, *values: Array) -> Array:
    """Change the values at ``offsets`` one after another; give what each found there."""
    found = np.empty(len(offsets), U64 if size == 8 else U32)
    left = np.arange(len(offsets))
    while len(left):
        # The first of those that meet at an address goes, the others wait for the next round.
        _, first = np.unique(offsets[left], return_index=True)
        now = left[np.sort(first)]
        old = block.load(offsets[now], size)
        found[now] = old
        block.store(offsets[now], size, function(old, *(value[now] for value in values)))
        left = np.delete(left, first)
    return found
