"""Vector instructions on two numbers at once (VOP3P), in mixed precision, and on 8-bit floats."""

from __future__ import annotations

import re

import numpy as np

from portkern.backends.gfx942_emulator import vector
from portkern.backends.gfx942_emulator.form import Form, Step
from portkern.backends.gfx942_emulator.lanes import (
    deposit,
)
from portkern.backends.gfx942_emulator.numbers import (
    BF8,
    F16,
    F32,
    FP8,
    U8,
    U16,
    U32,
    U64,
    fma16,
    fma32,
    fmax,
    fmin,
    from_fp8,
    to_fp8,
)
from portkern.backends.gfx942_emulator.operands import (
    Operand,
    Read,
    bits32,
    reader,
    writer,
)
from portkern.backends.gfx942_emulator.state import Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

# Both halves, or both 32-bit registers, at once: the type of a half, and the function.
PACKED: dict[str, vector.Row] = {
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
    "v_pk_ashrrev_i16": ("i16", "u16 i16", lambda a, b: b >> (a & U16(15)).view(np.int16)),
}


def _flags(text: str, count: int, default: int) -> list[int]:
    found = [int(each) for each in re.findall(r"\d", text)]
    return found if found else [default] * count


def packed(name: str, instruction: Instruction, operands: list[Operand]) -> Step:
    """Both halves at once. Raises UnmodelledInstruction for clamped integers."""
    kind, kinds, function = PACKED[name]
    modifiers, count = instruction.modifiers, len(kinds.split())
    Form(instruction, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    low, high = _flags(modifiers.get("op_sel", ""), count, 0), _flags(modifiers.get("op_sel_hi", ""), count, 1)
    if name == "v_pk_mov_b32":  # the low half is from the first source, the high half from the second
        low, high = [low[0], low[0]], [low[1], low[1]]
    signs = [_flags(modifiers.get(key, ""), count, 0) for key in ("neg_lo", "neg_hi")]
    wide = kind in ("f32", "b32")
    parts = list(zip(operands[1:], kinds.split(), strict=True))
    sources = [
        [_half(each, part, halves[i], signs[upper][i], wide) for i, (each, part) in enumerate(parts)]
        for upper, halves in enumerate((low, high))
    ]
    if name == "v_pk_mov_b32":
        sources[1].reverse()
    write = writer(operands[0], "b64" if wide else "b32")
    clamp = "clamp" in modifiers

    def step(w: Waves) -> None:
        lower, upper = (function(*(read(w) for read in reads)) for reads in sources)
        if clamp:
            lower, upper = (np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)) for x in (lower, upper))
        lower, upper = np.broadcast_arrays(lower, upper)
        if wide:
            both = np.empty((*lower.shape, 2), U32)
            both[..., 0], both[..., 1] = lower.view(U32), upper.view(U32)
            write(w, both.view(U64)[..., 0])
        else:
            write(w, bits32(lower) | (bits32(upper) << U32(16)))

    if clamp and not kind.startswith("f"):
        raise UnmodelledInstruction("clamping of packed integers")
    return step


def _half(operand: Operand, kind: str, upper: int, negate: int, wide: bool) -> Read:
    """One half of a packed source. A constant of packed 16-bit operands has its value in the low half."""
    if wide:
        shifted = operand if operand.file == "c" else Operand(operand.file, operand.number + upper)
        read = reader(shifted, kind)
    elif operand.file == "c" and isinstance(operand.value, int):
        number = np.array([[(operand.value >> 16 if upper else operand.value) & 0xFFFF]], U16)
        constant = number.view(F16 if kind == "f16" else np.int16 if kind == "i16" else U16)
        read = lambda w: constant  # noqa: E731
    elif operand.file == "c":
        plain = reader(operand if not upper else Operand("c"), kind)
        read = plain
    else:
        read = reader(Operand(operand.file, operand.number), kind, None, upper)
    if not (negate ^ operand.negate):
        return read
    return lambda w: -read(w)


def mixed(name: str, instruction: Instruction, operands: list[Operand]) -> Step:
    """``v_fma_mix*``: each source is a float32, or a half of a register as float16."""
    modifiers = instruction.modifiers
    Form(instruction, "op_sel", "op_sel_hi")
    upper, narrow = (_flags(modifiers.get(key, ""), 3, 0) for key in ("op_sel", "op_sel_hi"))
    reads = []
    for operand, half, is_half in zip(operands[1:], upper, narrow, strict=True):
        read = reader(operand, "f16" if is_half else "f32", None, half if is_half and operand.file != "c" else 0)
        reads.append((lambda w, r=read: r(w).astype(F32)) if is_half else read)
    first, second, third = reads
    number, clamp = operands[0].number, "clamp" in modifiers
    kind = {"v_fma_mix_f32": "f32", "v_fma_mixlo_f16": "f16", "v_fma_mixhi_f16": "f16"}[name]
    write = writer(Operand("v", number), kind, upper=name == "v_fma_mixhi_f16", keep=True)

    def step(w: Waves) -> None:
        result = fma32(first(w), second(w), third(w))
        if clamp:
            result = np.fmin(np.fmax(result, F32(0)), F32(1))
        write(w, result if kind == "f32" else result.astype(F16))

    return step


def to_float8(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_cvt_pk_fp8_f32``, ``v_cvt_pk_bf8_f32``: two bytes, into the half that op_sel names; the other half stays."""
    shape = FP8 if "fp8" in name else BF8
    first, second = reader(operands[1], "f32"), reader(operands[2], "f32")
    upper = bool(form.halves and form.halves[-1])
    write = writer(operands[0], "b16", upper=upper, keep=True)

    def step(w: Waves) -> None:
        low, high = np.broadcast_arrays(to_fp8(first(w), shape, w.clamps()), to_fp8(second(w), shape, w.clamps()))
        write(w, low.astype(U16) | (high.astype(U16) << U16(8)))

    return step


def to_float8_stochastic(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_cvt_sr_*``: one byte, into the byte that op_sel names (its bits 2 and 3)."""
    shape = FP8 if "fp8" in name else BF8
    value, noise = reader(operands[1], "f32"), reader(operands[2], "u32")
    halves = [*form.halves, 0, 0, 0, 0]
    place = deposit(f"BYTE_{halves[2] + 2 * halves[3]}", "UNUSED_PRESERVE", operands[0].number)
    return lambda w: place(w, to_fp8(value(w), shape, w.clamps(), noise(w)).astype(U32))


def from_float8(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_cvt_pk_f32_fp8``: two bytes of a half as two float32."""
    shape = FP8 if "fp8" in name else BF8
    half = form.halves[0] if form.halves else int(form.modifiers.get("src0_sel") == "WORD_1")
    read, write = reader(operands[1], "b16", None, half), writer(operands[0], "b64")

    def step(w: Waves) -> None:
        octets = read(w)
        both = np.empty((*octets.shape, 2), F32)
        both[..., 0] = from_fp8((octets & U16(0xFF)).astype(U8), shape)
        both[..., 1] = from_fp8((octets >> U16(8)).astype(U8), shape)
        write(w, both.view(U64)[..., 0])

    return step
