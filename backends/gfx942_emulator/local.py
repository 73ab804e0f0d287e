"""LDS instructions: reads, writes, pairs, atomics, and the ones that only move values between lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import atomics
from portkern.backends.gfx942_emulator.access import Width, fill, join, narrow, split, widen
from portkern.backends.gfx942_emulator.lanes import permute, push, swizzle_lanes
from portkern.backends.gfx942_emulator.numbers import I64, U32, Array
from portkern.backends.gfx942_emulator.operands import Decoder, words
from portkern.backends.gfx942_emulator.reach import enabled
from portkern.backends.gfx942_emulator.state import LANES, Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

Step = Callable[[Waves], None]
WIDTHS: dict[str, Width] = {
    "b32": Width(4), "b64": Width(4, 2), "b96": Width(4, 3), "b128": Width(4, 4),
    "u8": Width(1), "i8": Width(1, 1, True), "u16": Width(2), "i16": Width(2, 1, True), "b8": Width(1), "b16": Width(2),
    "u8_d16": Width(1, 1, False, "low"), "u8_d16_hi": Width(1, 1, False, "high"),
    "i8_d16": Width(1, 1, True, "low"), "i8_d16_hi": Width(1, 1, True, "high"),
    "u16_d16": Width(2, 1, False, "low"), "u16_d16_hi": Width(2, 1, False, "high"),
    "b8_d16_hi": Width(1, 1, False, "high"), "b16_d16_hi": Width(2, 1, False, "high"),
}  # fmt: skip
_PAIR = re.compile(r"ds_(read|write)2(st64)?_(b32|b64)$")
_ATOMIC = re.compile(r"ds_(\w+?)(_rtn)?_(u32|i32|b32|u64|i64|b64|f32|f64|f16|bf16)$")


def narrowest(names: set[str]) -> int:
    """The fewest bytes that any LDS access among ``names`` touches, at most 4."""
    found = [4]
    for name in names:
        match = re.match(r"ds_(?:read|write)_(\w+)$", name)
        if match and match[1] in WIDTHS:
            found.append(WIDTHS[match[1]].size)
    return min(found)


def decode(instruction: Instruction, decoder: Decoder) -> Step | None:
    """The step of an LDS instruction; None for another. Raises UnmodelledInstruction for unknown modifiers."""
    name = instruction.name
    if not name.startswith("ds_"):
        return None
    if name == "ds_nop":
        return lambda w: None
    if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return _moves(instruction, decoder)
    unknown = sorted(set(instruction.modifiers) - {"offset", "offset0", "offset1"})
    if unknown:
        raise UnmodelledInstruction(f"modifier {unknown[0]}")
    pair = _PAIR.match(name)
    if pair:
        return _pair(instruction, decoder, *pair.groups())
    for verb in ("read", "write"):
        kind = name.removeprefix(f"ds_{verb}_")
        if name.startswith(f"ds_{verb}_") and kind in WIDTHS:
            return _plain(instruction, decoder, verb, WIDTHS[kind])
    return _atomic(instruction, decoder)


def _offset(instruction: Instruction, name: str = "offset") -> int:
    return int(instruction.modifiers.get(name, "0"), 0)


def _plain(instruction: Instruction, decoder: Decoder, verb: str, width: Width) -> Step:
    first, second = (decoder.operand(text) for text in instruction.operands)
    address, offset = words(second if verb == "read" else first), _offset(instruction)
    register = (first if verb == "read" else second).number
    if verb == "read":
        return lambda w: _load(w, address(w).astype(I64) + offset, register, width)
    return lambda w: _store(w, address(w).astype(I64) + offset, register, width)


def _load(w: Waves, offsets: Array, register: int, width: Width) -> None:
    lanes = enabled(w, offsets)
    if len(lanes.addresses):
        for number, values in enumerate(w.machine.shared_load(w, lanes, width.size, width.count)):
            fill(w, register + number, lanes.spread(w, widen(values, width)), width)


def _store(w: Waves, offsets: Array, register: int, width: Width) -> None:
    lanes = enabled(w, offsets)
    if len(lanes.addresses):
        values = [lanes.pick(w, w.vector(register + number)) for number in range(width.count)]
        w.machine.shared_store(w, lanes, width.size, [narrow(each, width) for each in values])


def _pair(instruction: Instruction, decoder: Decoder, verb: str, far: str | None, kind: str) -> Step:
    """Two accesses, at offsets in units of the element, or of 64 elements."""
    width = WIDTHS[kind]
    unit = width.size * width.count * (64 if far else 1)
    offsets = [unit * _offset(instruction, name) for name in ("offset0", "offset1")]
    operands = [decoder.operand(text) for text in instruction.operands]
    if verb == "read":
        address, register = words(operands[1]), operands[0].number

        def read(w: Waves) -> None:
            start = address(w).astype(I64)  # before the first result can overwrite it
            for number, offset in enumerate(offsets):
                _load(w, start + offset, register + number * width.count, width)

        return read
    address = words(operands[0])

    def write(w: Waves) -> None:
        start = address(w).astype(I64)
        for offset, operand in zip(offsets, operands[1:], strict=True):
            _store(w, start + offset, operand.number, width)

    return write


def _moves(instruction: Instruction, decoder: Decoder) -> Step:
    operands = [decoder.operand(text) for text in instruction.operands]
    target = operands[0].number
    if instruction.name == "ds_swizzle_b32":
        lanes, read = swizzle_lanes(instruction.modifiers.get("offset", "0")), words(operands[1])
        return lambda w: w.put(target, permute(read(w), lanes[None], w))
    address, data, offset = words(operands[1]), words(operands[2]), _offset(instruction)
    move = permute if instruction.name == "ds_bpermute_b32" else push

    def step(w: Waves) -> None:
        lanes = ((address(w) + U32(offset)) >> U32(2)) & U32(63)
        w.put(target, move(data(w), lanes, w))

    return step


def _atomic(instruction: Instruction, decoder: Decoder) -> Step | None:
    found = _ATOMIC.match(instruction.name)
    if not found:
        return None
    verb, returns, kind = found.groups()
    texts = list(instruction.operands)
    target = decoder.operand(texts.pop(0)).number if returns else None
    address, offset = words(decoder.operand(texts.pop(0))), _offset(instruction)
    registers = [decoder.operand(text).number for text in texts]
    if verb == "cmpst":
        size = 8 if kind == "b64" else 4
        function: Any = lambda old, wanted, new: np.where(old == wanted, new, old)  # noqa: E731
    elif f"{verb}_{kind}" in atomics.SHARED:
        size, function = atomics.OPERATIONS[atomics.SHARED[f"{verb}_{kind}"]]
    else:
        return None

    def step(w: Waves) -> None:
        lanes = enabled(w, np.broadcast_to(address(w).astype(I64) + offset, (w.count, LANES)))
        if len(lanes.addresses):
            values = [join(w, lanes, register, size) for register in registers]
            old = w.machine.shared_atomic(w, lanes, size, function, values)
            if target is not None:
                split(w, lanes, target, old)

    return step
