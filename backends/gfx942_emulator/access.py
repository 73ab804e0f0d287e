"""Memory instructions: where each lane looks, how wide, and what becomes of the bytes; scalar loads too.

global, flat, scratch and buffer instructions differ in the address only; LDS ones are in ``local.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from portkern.backends.gfx942_emulator import atomics, scalar
from portkern.backends.gfx942_emulator.memory import Outside
from portkern.backends.gfx942_emulator.numbers import I32, I64, U8, U16, U32, U64, Array
from portkern.backends.gfx942_emulator.operands import (
    PRIVATE_APERTURE,
    SHARED_APERTURE,
    Decoder,
    Operand,
    reader,
    scalar_reader,
    words,
)
from portkern.backends.gfx942_emulator.state import LANES, M0, Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

Step = Callable[[Waves], None]
Where = Callable[[Waves], Array]  # byte addresses [n, 64], i64
_NAME = re.compile(r"(global|flat|scratch|buffer)_(load|store|atomic)_(\w+)$")
CACHE = {"sc0", "sc1", "nt", "glc", "slc"}  # they choose caches; here memory is one


class Width(NamedTuple):
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
    """The step of a vector memory instruction or scalar load; None for another."""
    if instruction.name in scalar.LOADS:
        return _scalar_load(instruction, decoder)
    found = _NAME.match(instruction.name)
    if not found:
        return None
    kind, verb, what = found.groups()
    if kind == "buffer":
        return _buffer(instruction, decoder, verb, what)
    texts = list(instruction.operands)
    _known(instruction, {"offset"})
    data_first = verb == "load" or (verb == "atomic" and "sc0" in instruction.modifiers)
    target = texts.pop(0) if data_first else ""
    address = texts.pop(0)
    data = texts.pop(0) if verb != "load" else ""
    base = texts.pop(0) if texts else "off"
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    where = _address(kind, address, base, offset, decoder)
    memory = {"global": _global, "flat": _flat, "scratch": _scratch}[kind](where)
    if verb == "atomic":
        return _atomic(what, decoder, target, data, memory)
    return _plain(verb, what, decoder, target or data, memory)


def _known(instruction: Instruction, allowed: set[str]) -> None:
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


class Lanes(NamedTuple):
    """The enabled lanes of an access, flat: which they are, and their addresses."""

    chosen: Any  # booleans [n, 64], or None for all
    addresses: Array

    def spread(self, w: Waves, values: Array) -> Array:
        if self.chosen is None:
            return values.reshape(w.count, LANES)
        full = np.zeros((w.count, LANES), values.dtype)
        full[self.chosen] = values
        return full

    def pick(self, w: Waves, values: Array) -> Array:
        values = np.broadcast_to(values, (w.count, LANES))
        return values.reshape(-1) if self.chosen is None else values[self.chosen]


def enabled(w: Waves, where: Array) -> Lanes:
    """The enabled lanes and their addresses."""
    where = np.broadcast_to(where, (w.count, LANES))
    if w.mask is None:
        return Lanes(None, where.reshape(-1))
    return Lanes(w.mask, where[w.mask])


class Memory(NamedTuple):
    """How one instruction reaches its memory: ``find`` gives the lanes that take part."""

    find: Callable[[Waves], Lanes]
    load: Callable[[Waves, Lanes, int, int], list[Array]]
    store: Callable[[Waves, Lanes, int, list[Array]], None]
    atomic: Callable[..., Array]


def _global(where: Where) -> Memory:
    def find(w: Waves) -> Lanes:
        return enabled(w, where(w))

    def load(w: Waves, lanes: Lanes, size: int, count: int) -> list[Array]:
        try:
            return w.machine.space.load(lanes.addresses, size, count)
        except Outside as fault:
            raise w.machine.outside(w, lanes.chosen, fault) from None

    def store(w: Waves, lanes: Lanes, size: int, values: list[Array]) -> None:
        try:
            w.machine.space.store(lanes.addresses, size, values)
        except Outside as fault:
            raise w.machine.outside(w, lanes.chosen, fault) from None

    def atomic(w: Waves, lanes: Lanes, size: int, function: Any, *values: Array) -> Array:
        try:
            parts = w.machine.space.parts(lanes.addresses, size)
        except Outside as fault:
            raise w.machine.outside(w, lanes.chosen, fault) from None
        space = w.machine.space
        space.requested += 2 * size * len(lanes.addresses)
        found = np.empty(len(lanes.addresses), U64 if size == 8 else U32)
        for region, chosen in parts:
            offsets = lanes.addresses[chosen] - region.start
            found[chosen] = atomics.apply(region, offsets, size, function, *(value[chosen] for value in values))
            space._touch([(region, chosen)], lanes.addresses, size, 1)
        return found

    return Memory(find, load, store, atomic)


def _scratch(where: Where) -> Memory:
    """Private memory: each lane has its own bytes."""

    def find(w: Waves) -> Lanes:
        machine = w.machine
        offsets = where(w)
        taking = enabled(w, offsets)
        machine.check_private(w, taking.chosen, taking.addresses)
        own = (w.numbers()[:, None] * LANES + np.arange(LANES)) * machine.private_bytes
        return enabled(w, offsets + own)

    def load(w: Waves, lanes: Lanes, size: int, count: int) -> list[Array]:
        return [w.machine.private.load(lanes.addresses + size * number, size) for number in range(count)]

    def store(w: Waves, lanes: Lanes, size: int, values: list[Array]) -> None:
        for number, unit in enumerate(values):
            w.machine.private.store(lanes.addresses + size * number, size, unit)

    def atomic(w: Waves, lanes: Lanes, size: int, function: Any, *values: Array) -> Array:
        raise UnmodelledInstruction("an atomic operation on private memory")

    return Memory(find, load, store, atomic)


def _flat(where: Where) -> Memory:
    """Global memory, unless the upper half of an address says shared or private: those are not modelled here."""
    memory = _global(where)

    def find(w: Waves) -> Lanes:
        lanes = memory.find(w)
        upper = lanes.addresses >> 32
        if ((upper == SHARED_APERTURE) | (upper == PRIVATE_APERTURE)).any():
            raise UnmodelledInstruction("a flat address in shared or private memory")
        return lanes

    return memory._replace(find=find)


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
            values = [lanes.pick(w, w.V[register + number, w.rows]) for number in range(width.count)]
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


def _atomic(what: str, decoder: Decoder, target: str, data: str, memory: Memory) -> Step:
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


def _buffer(instruction: Instruction, decoder: Decoder, verb: str, what: str) -> Step:
    """Buffer instructions: a descriptor of four scalar registers bounds them; outside, loads give 0 and stores nothing."""
    modifiers, texts = instruction.modifiers, list(instruction.operands)
    _known(instruction, {"offset", "offen", "lds"})
    to_shared = "lds" in modifiers
    data = "" if to_shared else texts.pop(0)
    vector = words(decoder.operand(texts.pop(0))) if "offen" in modifiers else None
    if texts[0] == "off":
        texts.pop(0)
    elif vector is None:
        raise UnmodelledInstruction("a buffer address without offen")
    descriptor = decoder.operand(texts.pop(0)).number
    uniform, offset = scalar_reader(decoder.operand(texts.pop(0)), "u32"), int(modifiers.get("offset", "0"), 0)

    def place(w: Waves) -> tuple[Array, Array, Array]:
        """Addresses, offsets within the buffer, and its size, [n, 64] or [n, 1]."""
        w0, w1, records = (w.S[w.rows, descriptor + i].astype(I64)[:, None] for i in range(3))
        if (w1 >> 31).any():
            raise UnmodelledInstruction("a buffer descriptor that swizzles")
        inner = np.full((w.count, LANES), offset, I64) if vector is None else vector(w).astype(I64) + offset
        inner = np.broadcast_to(inner + uniform(w)[:, None], (w.count, LANES))
        return (w0 | ((w1 & 0xFFFF) << 32)) + inner, inner, records

    if verb == "atomic":
        return _buffer_atomic(instruction, decoder, what, data, place)
    if what not in WIDTHS:
        raise UnmodelledInstruction(f"width {what}")
    width = WIDTHS[what]
    if to_shared:
        return _buffer_to_shared(width, offset, place)
    register = decoder.operand(data).number

    def step(w: Waves) -> None:
        addresses, inner, records = place(w)
        for number in range(width.count):
            inside = (inner + width.size * (number + 1) <= records) & w.enabled()
            lanes = Lanes(inside, (addresses + width.size * number)[inside])
            if verb == "load":
                values = np.zeros((w.count, LANES), U32)
                if len(lanes.addresses):
                    (loaded,) = _loaded(w, lanes, width.size)
                    values[inside] = widen(loaded, width)
                fill(w, register + number, values, width)
            elif len(lanes.addresses):
                unit = narrow(lanes.pick(w, w.V[register + number, w.rows]), width)
                _GLOBAL.store(w, lanes, width.size, [unit])

    return step


def _loaded(w: Waves, lanes: Lanes, size: int) -> list[Array]:
    return _GLOBAL.load(w, lanes, size, 1)


def _buffer_atomic(instruction: Instruction, decoder: Decoder, what: str, data: str, place: Any) -> Step:
    def find(w: Waves) -> Lanes:
        addresses, inner, records = place(w)
        size = 8 if what.endswith(("_x2", "f64")) else 4
        inside = (inner + size <= records) & w.enabled()
        return Lanes(inside, addresses[inside])

    result = data if "sc0" in instruction.modifiers else ""
    return _atomic(what, decoder, result, data, _GLOBAL._replace(find=find))


def _buffer_to_shared(width: Width, offset: int, place: Any) -> Step:
    """Loads that go to shared memory: from M0 on, one word a lane."""
    if width != WIDTHS["dword"]:
        raise UnmodelledInstruction("a load of other than 4 bytes a lane into shared memory")

    def step(w: Waves) -> None:
        addresses, inner, records = place(w)
        inside = (inner + 4 <= records) & w.enabled()
        values = np.zeros((w.count, LANES), U32)
        if inside.any():
            values[inside] = _loaded(w, Lanes(inside, addresses[inside]), 4)[0]
        target = (w.S[w.rows, M0] & U32(0xFFFF)).astype(I64)[:, None] + offset + 4 * np.arange(LANES)
        lanes = enabled(w, target)
        if len(lanes.addresses):
            w.machine.shared_store(w, lanes, 4, [lanes.pick(w, values)])

    return step


def _scalar_load(instruction: Instruction, decoder: Decoder) -> Step:
    count = scalar.LOADS[instruction.name]
    target, base, offset = (decoder.operand(text) for text in instruction.operands[:3])
    buffered = "buffer" in instruction.name
    _known(instruction, {"offset"})
    extra = int(instruction.modifiers.get("offset", "0"), 0)
    start, moved = (
        scalar_reader(Operand("s", base.number, 2), "i64"),
        scalar_reader(offset, "i32" if offset.file == "c" else "u32"),
    )

    def step(w: Waves) -> None:
        first = np.broadcast_to(start(w), (w.count,))
        if buffered:
            first = first & 0xFFFFFFFFFFFF
        addresses = np.broadcast_to((first + moved(w) + extra) & ~np.int64(3), (w.count,))
        try:
            found = w.machine.space.load(addresses, 4, count)
        except Outside as fault:
            raise w.machine.outside(w, "scalar", fault) from None
        w.S[w.rows, target.number : target.number + count] = np.stack(found, axis=1)

    return step


_GLOBAL = _global(lambda w: np.empty(0, I64))
