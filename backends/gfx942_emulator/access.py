"""Memory instructions: where each lane looks, how wide, and what becomes of the bytes; scalar loads too.

global, flat and scratch instructions differ in the address only. LDS ones are in ``local.py``, those with a
descriptor in ``buffers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import atomics
from portkern.backends.gfx942_emulator.numbers import I32, I64, U8, U16, U32, U64, Array
from portkern.backends.gfx942_emulator.operands import (
    Decoder,
    Operand,
    reader,
    scalar_reader,
    words,
)
from portkern.backends.gfx942_emulator.reach import Lanes, Memory, Where, flat_memory, global_memory, private_memory
from portkern.backends.gfx942_emulator.state import LANES, Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

Step = Callable[[Waves], None]
_NAME = re.compile(r"(global|flat|scratch)_(load|store|atomic)_(\w+)$")
CACHE = {"sc0", "sc1", "nt", "glc", "slc"}  # they choose caches; here memory is one


@dataclass(frozen=True)
class Width:
    """``count`` units of ``size`` bytes; how a narrow one fills its register."""

    size: int
    count: int = 1
    signed: bool = False
    half: str = ""  # "low" and "high": 16 bits, the others stay


WIDTHS: dict[str, Width] = {
    "dword": Width(4), "dwordx2": Width(4, 2), "dwordx3": Width(4, 3), "dwordx4": Width(4, 4),
    "ubyte": Width(1), "sbyte": Width(1, 1, True), "ushort": Width(2), "sshort": Width(2, 1, True),
    "byte": Width(1), "short": Width(2),
    "ubyte_d16": Width(1, 1, False, "low"), "ubyte_d16_hi": Width(1, 1, False, "high"),
    "sbyte_d16": Width(1, 1, True, "low"), "sbyte_d16_hi": Width(1, 1, True, "high"),
    "short_d16": Width(2, 1, False, "low"), "short_d16_hi": Width(2, 1, False, "high"),
    "byte_d16_hi": Width(1, 1, False, "high"),
}  # fmt: skip


def decode(instruction: Instruction, decoder: Decoder) -> Step | None:
    """The step of a global, flat or scratch instruction; None for another."""
    found = _NAME.match(instruction.name)
    if not found:
        return None
    kind, verb, what = found.groups()
    texts = list(instruction.operands)
    known(instruction, {"offset"})
    data_first = verb == "load" or (verb == "atomic" and "sc0" in instruction.modifiers)
    target = texts.pop(0) if data_first else ""
    address = texts.pop(0)
    data = texts.pop(0) if verb != "load" else ""
    base = texts.pop(0) if texts else "off"
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    where = _address(kind, address, base, offset, decoder)
    memory = {"global": global_memory, "flat": flat_memory, "scratch": private_memory}[kind](where)
    if verb == "atomic":
        return atomic_step(what, decoder, target, data, memory)
    return _plain(verb, what, decoder, target or data, memory)


def known(instruction: Instruction, allowed: set[str]) -> None:
    """Raises UnmodelledInstruction for a modifier that is neither ``allowed`` nor about caches."""
    unknown = sorted(set(instruction.modifiers) - allowed - CACHE)
    if unknown:
        raise UnmodelledInstruction(f"modifier {unknown[0]}")


def _address(kind: str, address: str, base: str, offset: int, decoder: Decoder) -> Where:
    register = None if address == "off" else decoder.operand(address)
    scalar_base = None if base == "off" else decoder.operand(base)
    if kind == "scratch":
        vector = words(register) if register else None
        uniform = scalar_reader(scalar_base, "i32") if scalar_base else None

        def scratch(w: Waves) -> Array:
            where = np.full((w.count, LANES), offset, I64)
            if vector:
                where = where + vector(w).view(I32)
            return where + uniform(w)[:, None] if uniform else where

        return scratch
    assert register is not None
    if scalar_base is None:
        read = reader(register, "i64")
        return (lambda w: read(w) + offset) if offset else read
    low, start = words(Operand(register.file, register.number)), scalar_reader(scalar_base, "i64")
    return lambda w: low(w) + (start(w)[:, None] + offset)


def _plain(verb: str, what: str, decoder: Decoder, data: str, memory: Memory) -> Step:
    if what not in WIDTHS:
        raise UnmodelledInstruction(f"width {what}")
    width, register = WIDTHS[what], decoder.operand(data).number
    if verb == "load":

        def load(w: Waves) -> None:
            lanes = memory.find(w)
            if len(lanes.addresses):
                for number, values in enumerate(memory.load(w, lanes, width.size, width.count)):
                    fill(w, register + number, lanes.spread(w, widen(values, width)), width)

        return load

    def store(w: Waves) -> None:
        lanes = memory.find(w)
        if len(lanes.addresses):
            values = [lanes.pick(w, w.vector(register + number)) for number in range(width.count)]
            memory.store(w, lanes, width.size, [narrow(each, width) for each in values])

    return store


def widen(values: Array, width: Width) -> Array:
    """Loaded units as 32-bit words."""
    if width.size == 4:
        return values
    if width.signed:
        return values.view(np.int8 if width.size == 1 else np.int16).astype(I32).view(U32)
    return values.astype(U32)


def narrow(words_: Array, width: Width) -> Array:
    """What of a register is stored."""
    if width.half == "high":
        words_ = words_ >> U32(16)
    return words_ if width.size == 4 else words_.astype(U8 if width.size == 1 else U16)


def fill(w: Waves, register: int, values: Array, width: Width) -> None:
    """Put loaded words into a register, or into one half of it."""
    if width.half == "low":
        values = (w.V[register, w.rows] & U32(0xFFFF0000)) | (values & U32(0xFFFF))
    elif width.half == "high":
        values = (w.V[register, w.rows] & U32(0xFFFF)) | (values << U32(16))
    w.put(register, values)


def join(w: Waves, lanes: Lanes, register: int, size: int) -> Array:
    """One or two registers of each lane as numbers of ``size`` bytes."""
    low = lanes.pick(w, w.V[register, w.rows])
    if size == 4:
        return low
    return low.astype(U64) | (lanes.pick(w, w.V[register + 1, w.rows]).astype(U64) << U64(32))


def split(w: Waves, lanes: Lanes, register: int, values: Array) -> None:
    """Put numbers of 4 or 8 bytes into one or two registers."""
    if values.dtype == U32:
        w.put(register, lanes.spread(w, values))
        return
    w.put(register, lanes.spread(w, (values & U64(0xFFFFFFFF)).astype(U32)))
    w.put(register + 1, lanes.spread(w, (values >> U64(32)).astype(U32)))


def atomic_step(what: str, decoder: Decoder, target: str, data: str, memory: Memory) -> Step:
    """The step of an atomic operation; ``target`` is empty where it gives nothing back.

    Raises UnmodelledInstruction for an unknown operation.
    """
    register = decoder.operand(data).number
    result = decoder.operand(target).number if target else None
    swaps = what in atomics.COMPARE_AND_SWAP
    if swaps:
        size = atomics.COMPARE_AND_SWAP[what]
        # Data holds the new value, then the one to compare with.
        function: Any = lambda old, new, wanted: np.where(old == wanted, new, old)  # noqa: E731
    elif what in atomics.OPERATIONS:
        size, function = atomics.OPERATIONS[what]
    else:
        raise UnmodelledInstruction(f"atomic {what}")

    def step(w: Waves) -> None:
        lanes = memory.find(w)
        if not len(lanes.addresses):
            return
        values = [join(w, lanes, register, size)]
        if swaps:
            values.append(join(w, lanes, register + size // 4, size))
        found = memory.atomic(w, lanes, size, function, *values)
        if result is not None:
            split(w, lanes, result, found)

    return step
