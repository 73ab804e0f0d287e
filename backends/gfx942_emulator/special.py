"""Decoding of vector instructions: rows of ``vector.py`` become steps; those that fit no row are written out here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from portkern.backends.gfx942_emulator import division, vector
from portkern.backends.gfx942_emulator.comparisons import comparison
from portkern.backends.gfx942_emulator.form import Form, Step
from portkern.backends.gfx942_emulator.lanes import (
    count_below,
    read_first,
    read_lane,
    write_lane,
)
from portkern.backends.gfx942_emulator.numbers import (
    I64,
    U32,
    U64,
    Array,
)
from portkern.backends.gfx942_emulator.operands import (
    Decoder,
    Operand,
    mask_writer,
    words,
)
from portkern.backends.gfx942_emulator.packed import PACKED, from_float8, mixed, packed, to_float8, to_float8_stochastic
from portkern.backends.gfx942_emulator.state import VCC, Waves, unpack
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

VCC_OPERAND = Operand("s", VCC, 2)
SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")


def decode(instruction: Instruction, decoder: Decoder) -> Step | None:
    """The step of a vector instruction other than matrix and memory ones; None for another."""
    name = SUFFIX.sub("", instruction.name)
    if not name.startswith("v_"):
        return None
    operands = [decoder.operand(text) for text in instruction.operands]
    if name in vector.ROWS:
        return _row(name, instruction, operands)
    if name.startswith(("v_cmp_", "v_cmpx_")):
        return _compare(name, instruction, operands)
    if name in PACKED:
        return packed(name, instruction, operands)
    if name.startswith("v_fma_mix"):
        return mixed(name, instruction, operands)
    maker = _WRITTEN_OUT.get(name)
    return maker(name, Form(instruction, "op_sel"), operands) if maker else None


def _row(name: str, instruction: Instruction, operands: list[Operand]) -> Step:
    kind, kinds, function = vector.ROWS[name]
    if "clamp" in instruction.modifiers and name in vector.SATURATING:
        function = vector.SATURATING[name]
        kept = {key: value for key, value in instruction.modifiers.items() if key != "clamp"}
        instruction = replace(instruction, modifiers=kept)
    form = Form(instruction, "op_sel")
    sources = operands[1:] + ([operands[0]] if name in vector.ACCUMULATING else [])
    reads = [form.read(i, *each) for i, each in enumerate(zip(sources, kinds.split(), strict=True))]
    write = form.write(operands[0], kind, keep=name in vector.KEEPING_UPPER)
    if len(reads) == 1:
        (only,) = reads
        return lambda w: write(w, function(only(w)))
    if len(reads) == 2:
        first, second = reads
        return lambda w: write(w, function(first(w), second(w)))
    first, second, third = reads
    return lambda w: write(w, function(first(w), second(w), third(w)))


def _compare(name: str, instruction: Instruction, operands: list[Operand]) -> Step | None:
    found = comparison(name)
    if found is None:
        return None
    kinds, function = found
    form = Form(instruction)
    first, second = (form.read(i, *each) for i, each in enumerate(zip(operands[1:], kinds.split(), strict=True)))
    if form.move:
        raise UnmodelledInstruction("a comparison across lanes")
    write = mask_writer(operands[0])
    if not name.startswith("v_cmpx"):
        return lambda w: write(w, function(first(w), second(w)))
    execute = mask_writer(Operand("s", 126, 2))

    def step(w: Waves) -> None:
        found = function(first(w), second(w))
        write(w, found)
        execute(w, found)

    return step


def lane_mask(operand: Operand) -> Callable[[Waves], Array]:
    """Reads a pair of scalar registers as booleans [n, 64]."""
    if operand.file == "c":
        value = unpack(np.array([int(operand.value) & 0xFFFFFFFFFFFFFFFF], U64))
        return lambda w: value
    pair = operand.number >> 1
    return lambda w: unpack(w.S64[w.rows, pair])


def _select(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_cndmask_b32``: the second source where the mask says so."""
    chosen = lane_mask(operands[3] if len(operands) > 3 else VCC_OPERAND)
    no, yes = form.read(0, operands[1], "f32"), form.read(1, operands[2], "f32")
    if not (operands[1].negate or operands[1].absolute or operands[2].negate or operands[2].absolute):
        no, yes = form.read(0, operands[1], "b32"), form.read(1, operands[2], "b32")
    write = form.write(operands[0], "b32")
    return lambda w: write(w, np.where(chosen(w), yes(w).view(U32), no(w).view(U32)))


def _carries(name: str, form: Form, operands: list[Operand]) -> Step:
    """Additions and subtractions that give a carry, and may take one."""
    takes = name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
    first, second = form.read(0, operands[2], "u32"), form.read(1, operands[3], "u32")
    carry_in = lane_mask(operands[4]) if takes else None
    write, flag = form.write(operands[0], "u32"), mask_writer(operands[1])

    def step(w: Waves) -> None:
        a, b = first(w).astype(I64), second(w).astype(I64)
        carry = carry_in(w).astype(I64) if carry_in else 0
        if "rev" in name:
            a, b = b, a
        result = a + b + carry if "add" in name else a - b - carry
        write(w, result.astype(U32))
        flag(w, (result > 0xFFFFFFFF) | (result < 0))

    return step


def _wide_product(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_mad_u64_u32`` and ``v_mad_i64_i32``: 64-bit sum, and its overflow as lane mask."""
    kind, wide, dtype = ("u32", "u64", U64) if "u64" in name else ("i32", "i64", I64)
    first, second, third = (form.read(i, operands[2 + i], each) for i, each in enumerate((kind, kind, wide)))
    write, flag = form.write(operands[0], wide), mask_writer(operands[1])

    def step(w: Waves) -> None:
        a, b, c = first(w).astype(dtype), second(w).astype(dtype), third(w)
        product = a * b
        result = product + c
        over = result < c if dtype is U64 else ((product ^ result) & (c ^ result)) < 0
        flag(w, over)
        write(w, result)

    return step


def _division_scale(name: str, form: Form, operands: list[Operand]) -> Step:
    kind, parts = ("f32", division.SINGLE) if name.endswith("f32") else ("f64", division.DOUBLE)
    first, second, third = (form.read(i, operands[2 + i], kind) for i in range(3))
    write, flag = form.write(operands[0], kind), mask_writer(operands[1])

    def step(w: Waves) -> None:
        value, scaled = division.scale(parts, first(w), second(w), third(w))
        write(w, value)
        flag(w, scaled)

    return step


def _division_fmas(name: str, form: Form, operands: list[Operand]) -> Step:
    kind, parts = ("f32", division.SINGLE) if name.endswith("f32") else ("f64", division.DOUBLE)
    first, second, third = (form.read(i, operands[1 + i], kind) for i in range(3))
    write, flag = form.write(operands[0], kind), lane_mask(VCC_OPERAND)
    return lambda w: write(w, division.fmas(parts, first(w), second(w), third(w), flag(w)))


def _lane_count(name: str, form: Form, operands: list[Operand]) -> Step:
    function = count_below(name.startswith("v_mbcnt_hi"))
    first, second = form.read(0, operands[1], "u32"), form.read(1, operands[2], "u32")
    write = form.write(operands[0], "u32")
    return lambda w: write(w, function(first(w), second(w)))


def _swap(name: str, form: Form, operands: list[Operand]) -> Step:
    first, second = words(operands[0]), words(operands[1])

    def step(w: Waves) -> None:
        a, b = first(w).copy(), second(w).copy()
        w.put(operands[0].number, b)
        w.put(operands[1].number, a)

    return step


_WRITTEN_OUT: dict[str, Callable[[str, Form, list[Operand]], Step]] = {
    "v_cndmask_b32": _select,
    **dict.fromkeys(
        ("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"),
        _carries,
    ),
    **dict.fromkeys(("v_mad_u64_u32", "v_mad_i64_i32"), _wide_product),
    **dict.fromkeys(("v_div_scale_f32", "v_div_scale_f64"), _division_scale),
    **dict.fromkeys(("v_div_fmas_f32", "v_div_fmas_f64"), _division_fmas),
    **dict.fromkeys(("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32"), _lane_count),
    "v_swap_b32": _swap,
    **dict.fromkeys(("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32"), to_float8),
    **dict.fromkeys(("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32"), to_float8_stochastic),
    **dict.fromkeys(("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8"), from_float8),
    "v_readfirstlane_b32": lambda name, form, operands: read_first(operands[0], operands[1]),
    "v_readlane_b32": lambda name, form, operands: read_lane(*operands),
    "v_writelane_b32": lambda name, form, operands: write_lane(*operands),
    "v_nop": lambda name, form, operands: lambda w: None,
}
