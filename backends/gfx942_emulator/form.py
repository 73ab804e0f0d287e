"""The modifiers of a vector instruction, as changes to its sources and its result."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from portkern.backends.gfx942_emulator.lanes import (
    DPP,
    LaneMove,
    deposit,
    select,
)
from portkern.backends.gfx942_emulator.numbers import (
    Array,
)
from portkern.backends.gfx942_emulator.operands import (
    Operand,
    Read,
    Write,
    bits32,
    reader,
    writer,
)
from portkern.backends.gfx942_emulator.state import Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

Step = Callable[[Waves], None]
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
        transform: Callable[[Read], Read] | None = None
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
