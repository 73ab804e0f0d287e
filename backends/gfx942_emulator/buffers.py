"""Buffer instructions: a descriptor of four scalar registers bounds them. Outside, loads give 0 and stores do nothing.

Inside the descriptor's bounds an address must lie in a buffer of the launch, as any other.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.access import WIDTHS, Step, Width, atomic_step, fill, known, narrow, widen
from portkern.backends.gfx942_emulator.numbers import I64, U32, Array
from portkern.backends.gfx942_emulator.operands import Decoder, scalar_reader, words
from portkern.backends.gfx942_emulator.reach import GLOBAL, Lanes, enabled
from portkern.backends.gfx942_emulator.state import LANES, M0, Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

# Word 3 of a descriptor: what plain accesses ignore, and the two formats of which neither may be 0 (that is a buffer
# that is not bound). Anything else changes what is accessed.
IGNORED, NUMBER_FORMAT, DATA_FORMAT = 0xFFF, 0x7000, 0x78000
_NAME = re.compile(r"buffer_(load|store|atomic)_(\w+)$")


def decode(instruction: Instruction, decoder: Decoder) -> Step | None:
    """The step of a buffer instruction; None for another. Raises UnmodelledInstruction."""
    found = _NAME.match(instruction.name)
    if not found:
        return None
    verb, what = found.groups()
    modifiers, texts = instruction.modifiers, list(instruction.operands)
    known(instruction, {"offset", "offen", "lds"})
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
        w0, w1, records, form = (w.S[w.rows, descriptor + i].astype(I64)[:, None] for i in range(4))
        _plain(w1, form)
        inner = np.full((w.count, LANES), offset, I64) if vector is None else vector(w).astype(I64) + offset
        inner = np.broadcast_to(inner + uniform(w)[:, None], (w.count, LANES))
        base = w0 | ((w1 & 0x7FFF) - (w1 & 0x8000)) << 32  # 48 bits, with their sign
        return base + inner, inner, records

    if verb == "atomic":
        return _atomic(instruction, decoder, what, data, place)
    if what not in WIDTHS:
        raise UnmodelledInstruction(f"width {what}")
    width = WIDTHS[what]
    if to_shared:
        return _to_shared(width, offset, place)
    register = decoder.operand(data).number

    def step(w: Waves) -> None:
        addresses, inner, records = place(w)
        for number in range(width.count):
            inside = (inner + width.size * (number + 1) <= records) & w.enabled()
            lanes = Lanes(inside, (addresses + width.size * number)[inside])
            if verb == "load":
                values = np.zeros((w.count, LANES), U32)
                if len(lanes.addresses):
                    (loaded,) = GLOBAL.load(w, lanes, width.size, 1)
                    values[inside] = widen(loaded, width)
                fill(w, register + number, values, width)
            elif len(lanes.addresses):
                unit = narrow(lanes.pick(w, w.vector(register + number)), width)
                GLOBAL.store(w, lanes, width.size, [unit])

    return step


def _plain(w1: Array, form: Array) -> None:
    """Raises UnmodelledInstruction for a descriptor that is not one of plain bytes, by its words 1 and 3."""
    if (w1 >> 16).any():
        raise UnmodelledInstruction(f"a buffer descriptor with a stride or swizzling (word 1 is {int(w1.max()):#x})")
    odd = form & ~(IGNORED | NUMBER_FORMAT | DATA_FORMAT)
    bad = (odd != 0) | (form & NUMBER_FORMAT == 0) | (form & DATA_FORMAT == 0)
    if bad.any():
        raise UnmodelledInstruction(
            f"a buffer descriptor whose word 3 is {int(form[bad][0]):#x} (of plain bytes it is like 0x27000)"
        )


def _atomic(instruction: Instruction, decoder: Decoder, what: str, data: str, place: Any) -> Step:
    def find(w: Waves) -> Lanes:
        addresses, inner, records = place(w)
        size = 8 if what.endswith(("_x2", "f64")) else 4
        inside = (inner + size <= records) & w.enabled()
        return Lanes(inside, addresses[inside])

    result = data if "sc0" in instruction.modifiers else ""
    return atomic_step(what, decoder, result, data, GLOBAL._replace(find=find))


def _to_shared(width: Width, offset: int, place: Any) -> Step:
    """Loads that go to shared memory: from M0 on, one word a lane."""
    if width != WIDTHS["dword"]:
        raise UnmodelledInstruction("a load of other than 4 bytes a lane into shared memory")

    def step(w: Waves) -> None:
        addresses, inner, records = place(w)
        inside = (inner + 4 <= records) & w.enabled()
        values = np.zeros((w.count, LANES), U32)
        if inside.any():
            values[inside] = GLOBAL.load(w, Lanes(inside, addresses[inside]), 4, 1)[0]
        target = (w.S[w.rows, M0] & U32(0xFFFF)).astype(I64)[:, None] + offset + 4 * np.arange(LANES)
        lanes = enabled(w, target)
        if len(lanes.addresses):
            w.machine.shared_store(w, lanes, 4, [lanes.pick(w, values)])

    return step
