"""Decoding of scalar instructions: rows of ``scalar.py`` become steps; those that fit no row are written out here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import scalar
from portkern.backends.gfx942_emulator.numbers import I32, I64, U32
from portkern.backends.gfx942_emulator.operands import Decoder, Operand, scalar_reader, scalar_writer
from portkern.backends.gfx942_emulator.scalar import Function
from portkern.backends.gfx942_emulator.state import EXEC, Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction


def decode(instruction: Instruction, decoder: Decoder) -> Callable[[Waves], None] | None:
    """The step of a scalar instruction that neither branches nor loads; None for another."""
    name = instruction.name
    if name in scalar.NO_EFFECT:
        return lambda w: None
    if not name.startswith("s_") or name in scalar.LOADS:
        return None
    operands = [decoder.operand(text) for text in instruction.operands]
    if name in scalar.SOP2 or name in scalar.SOP1:
        return _computes((scalar.SOP2.get(name) or scalar.SOP1[name]), operands)
    if name in scalar.SOPC:
        kinds, function = scalar.SOPC[name]
        if name.startswith("s_cmpk"):
            operands[1] = _extended(operands[1], name.endswith("i32"))
        first, second = (scalar_reader(each, kind) for each, kind in zip(operands, kinds.split(), strict=True))

        def compare(w: Waves) -> None:
            w.scc[w.rows] = function(first(w), second(w))

        return compare
    if name in scalar.SAVEEXEC or name in scalar.WREXEC:
        return _saves_exec(name, operands)
    return _irregular(name, operands)


def _computes(row: tuple[str, str, Function, Function | None], operands: list[Any]) -> Callable[[Waves], None]:
    kind, kinds, function, condition = row
    write = scalar_writer(operands[0], kind)
    reads = [scalar_reader(each, source) for each, source in zip(operands[1:], kinds.split(), strict=True)]
    if len(reads) == 1:
        (read,) = reads

        def unary(w: Waves) -> None:
            a = read(w)
            result = function(a)
            if condition:
                w.scc[w.rows] = condition(result, a)
            write(w, result)

        return unary
    first, second = reads

    def binary(w: Waves) -> None:
        a, b = first(w), second(w)
        result = function(a, b)
        if condition:
            w.scc[w.rows] = condition(result, a, b)
        write(w, result)

    return binary


def _saves_exec(name: str, operands: list[Any]) -> Callable[[Waves], None]:
    function = scalar.SAVEEXEC.get(name) or scalar.WREXEC[name]
    read, write = scalar_reader(operands[1], "b64"), scalar_writer(operands[0], "b64")
    saves = name in scalar.SAVEEXEC

    def step(w: Waves) -> None:
        old = w.S64[w.rows, EXEC >> 1].copy()
        new = function(read(w), old)
        write(w, old if saves else new)
        w.scc[w.rows] = new != 0
        w.put_pair(EXEC, new)

    return step


def _irregular(name: str, operands: list[Any]) -> Callable[[Waves], None] | None:
    if name in ("s_addc_u32", "s_subb_u32"):
        return _with_carry(name, operands)
    if name in ("s_cselect_b32", "s_cselect_b64"):
        kind = name[-3:]
        write = scalar_writer(operands[0], kind)
        first, second = scalar_reader(operands[1], kind), scalar_reader(operands[2], kind)
        return lambda w: write(w, np.where(w.scc[w.rows], first(w), second(w)))
    if name in ("s_cmov_b32", "s_cmov_b64", "s_cmovk_i32"):
        kind = "b64" if name.endswith("64") else "b32"
        write = scalar_writer(operands[0], kind)
        old, new = scalar_reader(operands[0], kind), scalar_reader(operands[1], kind)
        return lambda w: write(w, np.where(w.scc[w.rows], new(w), old(w)))
    if name == "s_movk_i32":
        return _immediate(operands, lambda old, value: value, None)
    if name == "s_addk_i32":
        return _immediate(operands, lambda old, value: old + value, scalar.overflow_add)
    if name == "s_mulk_i32":
        return _immediate(operands, lambda old, value: old * value, None)
    if name in ("s_bitset0_b32", "s_bitset1_b32"):
        write, old, bit = (
            scalar_writer(operands[0], "b32"),
            scalar_reader(operands[0], "b32"),
            scalar_reader(operands[1], "u32"),
        )
        if name == "s_bitset1_b32":
            return lambda w: write(w, old(w) | (U32(1) << (bit(w) & U32(31))))
        return lambda w: write(w, old(w) & ~(U32(1) << (bit(w) & U32(31))))
    return None


def _with_carry(name: str, operands: list[Any]) -> Callable[[Waves], None]:
    write = scalar_writer(operands[0], "u32")
    first, second = scalar_reader(operands[1], "u32"), scalar_reader(operands[2], "u32")

    def step(w: Waves) -> None:
        a, b, carry = first(w).astype(I64), second(w).astype(I64), w.scc[w.rows].astype(I64)
        result = a + b + carry if name == "s_addc_u32" else a - b - carry
        w.scc[w.rows] = (result > 0xFFFFFFFF) | (result < 0)
        write(w, result.astype(U32))

    return step


def _extended(operand: Operand, signed: bool) -> Operand:
    """A 16-bit constant, as the ``k`` forms hold it, widened."""
    value = int(operand.value) & 0xFFFF
    return replace(operand, value=value - 0x10000 if signed and value >= 0x8000 else value)


def _immediate(operands: list[Any], function: Function, condition: Function | None) -> Callable[[Waves], None]:
    """Instructions with a 16-bit constant, which is sign-extended."""
    if operands[1].file != "c":
        raise UnmodelledInstruction("a register where a 16-bit constant belongs")
    value = np.array([int(operands[1].value)]).astype(np.int16).astype(I32)
    write, read = scalar_writer(operands[0], "i32"), scalar_reader(operands[0], "i32")

    def step(w: Waves) -> None:
        old = read(w).copy()
        result = function(old, value)
        if condition:
            w.scc[w.rows] = condition(result, old, value)
        write(w, result)

    return step
