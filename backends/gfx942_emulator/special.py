"""Decoding of vector instructions: rows of ``vector.py`` become steps, and those that fit no row are written out here."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from portkern.backends.gfx942_emulator import division, vector
from portkern.backends.gfx942_emulator.lanes import (
    DPP,
    LaneMove,
    count_below,
    deposit,
    read_first,
    read_lane,
    select,
    write_lane,
)
from portkern.backends.gfx942_emulator.numbers import (
    BF8,
    F16,
    F32,
    FP8,
    I64,
    U8,
    U16,
    U32,
    U64,
    Array,
    fma32,
    from_fp8,
    to_fp8,
)
from portkern.backends.gfx942_emulator.operands import (
    Decoder,
    Operand,
    Read,
    Write,
    bits32,
    mask_writer,
    reader,
    words,
    writer,
)
from portkern.backends.gfx942_emulator.state import VCC, Waves, unpack
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

Step = Callable[[Waves], None]
VCC_OPERAND = Operand("s", VCC, 2)
SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")
FREE = {"row_mask", "bank_mask", "bound_ctrl", "fi", *DPP}  # read by LaneMove
BYTES = {"src0_sel", "src1_sel", "dst_sel", "dst_unused"}
OUTPUT = {"clamp", "mul", "div"}


class Form:
    """The modifiers of one instruction, as changes to its sources and its result."""

    def __init__(self, instruction: Instruction, *allowed: str) -> None:
        self.modifiers = modifiers = instruction.modifiers
        self.sdwa = instruction.name.endswith("_sdwa")
        self.move = LaneMove(modifiers) if any(name in modifiers for name in DPP) else None
        known = {*allowed, *(FREE if self.move else ()), *(BYTES if self.sdwa else ()), *OUTPUT}
        unknown = sorted(set(modifiers) - known)
        if unknown:
            raise UnmodelledInstruction(f"modifier {unknown[0]}")
        self.halves = [int(each) for each in re.findall(r"\d", modifiers.get("op_sel", ""))]

    def read(self, position: int, operand: Operand, kind: str) -> Read:
        """Source ``position`` as ``kind``."""
        transform = None
        if self.move and position == 0:
            transform = self.move.transform
        if self.sdwa and position < 2:
            transform = select(self.modifiers.get(f"src{position}_sel", "DWORD"), operand.extend)
        half = self.halves[position] if position < len(self.halves) - 1 else 0
        return reader(operand, kind, transform, half)

    def write(self, operand: Operand, kind: str, keep: bool = False) -> Write:
        """The result, of ``kind``."""
        upper = bool(self.halves and self.halves[-1] and len(self.halves) > 1)
        if self.sdwa:
            part, unused = self.modifiers.get("dst_sel", "DWORD"), self.modifiers.get("dst_unused", "UNUSED_PAD")
            place = deposit(part, unused, operand.number)
            write: Write = lambda w, value: place(w, bits32(value))  # noqa: E731
            if kind in ("f64", "b64", "u64", "i64"):
                raise UnmodelledInstruction("a 64-bit result with byte selection")
        else:
            write = writer(operand, kind, upper, keep or bool(self.halves))
        if self.move:
            write = self.move.limit(write)
        return self._modified(write, kind)

    def _modified(self, write: Write, kind: str) -> Write:
        """Output modifiers: times 2 or 4, half, and clamping of floats to 0 to 1."""
        factor = {"2": 2.0, "4": 4.0}.get(self.modifiers.get("mul", ""), 0.5 if "div" in self.modifiers else 1.0)
        clamp = "clamp" in self.modifiers
        if factor == 1.0 and not clamp:
            return write
        if not kind.startswith("f"):
            raise UnmodelledInstruction("an output modifier on integers")

        def modified(w: Waves, value: Array) -> None:
            value = value * value.dtype.type(factor)
            if clamp:
                value = np.fmin(np.fmax(value, value.dtype.type(0)), value.dtype.type(1))
            write(w, value)

        return modified


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
    if name in vector.PACKED:
        return _packed(name, instruction, operands)
    if name.startswith("v_fma_mix"):
        return _mixed(name, instruction, operands)
    maker = _WRITTEN_OUT.get(name)
    return maker(name, Form(instruction, "op_sel"), operands) if maker else None


def _row(name: str, instruction: Instruction, operands: list[Operand]) -> Step:
    kind, kinds, function = vector.ROWS[name]
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
    found = vector.comparison(name)
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


def _flags(text: str, count: int, default: int) -> list[int]:
    found = [int(each) for each in re.findall(r"\d", text)]
    return found if found else [default] * count


def _packed(name: str, instruction: Instruction, operands: list[Operand]) -> Step:
    kind, kinds, function = vector.PACKED[name]
    modifiers, count = instruction.modifiers, len(kinds.split())
    Form(instruction, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    low, high = _flags(modifiers.get("op_sel", ""), count, 0), _flags(modifiers.get("op_sel_hi", ""), count, 1)
    if name == "v_pk_mov_b32":  # the low half is from the first source, the high half from the second
        low, high = [low[0], low[0]], [low[1], low[1]]
    signs = [_flags(modifiers.get(key, ""), count, 0) for key in ("neg_lo", "neg_hi")]
    wide = kind in ("f32", "b32")
    sources = [
        [_half(each, part, halves[i], signs[upper][i], wide) for i, (each, part) in enumerate(zip(operands[1:], kinds.split(), strict=True))]
        for upper, halves in enumerate((low, high))
    ]  # fmt: skip
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
        constant = number.view(vector.F16 if kind == "f16" else np.int16 if kind == "i16" else U16)
        read = lambda w: constant  # noqa: E731
    elif operand.file == "c":
        plain = reader(operand if not upper else Operand("c"), kind)
        read = plain
    else:
        read = reader(Operand(operand.file, operand.number), kind, None, upper)
    if not (negate ^ operand.negate):
        return read
    return lambda w: -read(w)


def _mixed(name: str, instruction: Instruction, operands: list[Operand]) -> Step:
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


def _to_float8(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_cvt_pk_fp8_f32``, ``v_cvt_pk_bf8_f32``: two bytes, into the half that op_sel names; the other half stays."""
    shape = FP8 if "fp8" in name else BF8
    first, second = reader(operands[1], "f32"), reader(operands[2], "f32")
    upper = bool(form.halves and form.halves[-1])
    write = writer(operands[0], "b16", upper=upper, keep=True)

    def step(w: Waves) -> None:
        low, high = np.broadcast_arrays(to_fp8(first(w), shape), to_fp8(second(w), shape))
        write(w, low.astype(U16) | (high.astype(U16) << U16(8)))

    return step


def _to_float8_stochastic(name: str, form: Form, operands: list[Operand]) -> Step:
    """``v_cvt_sr_*``: one byte, into the byte that op_sel names (its bits 2 and 3)."""
    shape = FP8 if "fp8" in name else BF8
    value, noise = reader(operands[1], "f32"), reader(operands[2], "u32")
    halves = [*form.halves, 0, 0, 0, 0]
    place = deposit(f"BYTE_{halves[2] + 2 * halves[3]}", "UNUSED_PRESERVE", operands[0].number)
    return lambda w: place(w, to_fp8(value(w), shape, noise(w)).astype(U32))


def _from_float8(name: str, form: Form, operands: list[Operand]) -> Step:
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
    **dict.fromkeys(("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32"), _to_float8),
    **dict.fromkeys(("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32"), _to_float8_stochastic),
    **dict.fromkeys(("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8"), _from_float8),
    "v_readfirstlane_b32": lambda name, form, operands: read_first(operands[0], operands[1]),
    "v_readlane_b32": lambda name, form, operands: read_lane(*operands),
    "v_writelane_b32": lambda name, form, operands: write_lane(*operands),
    "v_nop": lambda name, form, operands: lambda w: None,
}
