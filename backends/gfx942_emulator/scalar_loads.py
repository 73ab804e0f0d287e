"""Scalar loads: one address a wave."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from portkern.backends.gfx942_emulator import scalar
from portkern.backends.gfx942_emulator.access import known
from portkern.backends.gfx942_emulator.memory import Outside
from portkern.backends.gfx942_emulator.operands import (
    Decoder,
    Operand,
    scalar_reader,
)
from portkern.backends.gfx942_emulator.state import Waves
from portkern.backends.gfx942_emulator.text import Instruction


def decode(instruction: Instruction, decoder: Decoder) -> Callable[[Waves], None] | None:
    """The step of a scalar load; None for another instruction."""
    if instruction.name not in scalar.LOADS:
        return None
    count = scalar.LOADS[instruction.name]
    target, base, offset = (decoder.operand(text) for text in instruction.operands[:3])
    buffered = "buffer" in instruction.name
    known(instruction, {"offset"})
    extra = int(instruction.modifiers.get("offset", "0"), 0)
    start, moved = (
        scalar_reader(Operand("s", base.number, 2), "i64"),
        scalar_reader(offset, "i32" if offset.file == "c" else "u32"),
    )

    def step(w: Waves) -> None:
        first = np.broadcast_to(start(w), (w.count,))
        if buffered:
            first = ((first & ((1 << 48) - 1)) ^ (1 << 47)) - (1 << 47)  # 48 bits, with their sign
        addresses = np.broadcast_to((first + moved(w) + extra) & ~np.int64(3), (w.count,))
        try:
            found = w.machine.space.load(addresses, 4, count)
        except Outside as fault:
            raise w.machine.outside(w, "scalar", fault) from None
        w.S[w.rows, target.number : target.number + count] = np.stack(found, axis=1)

    return step
