"""Machine state: the registers of many waves at once, and ``Waves``, those of them that stand at one instruction.

Vector registers are [register, wave, lane], scalar ones [wave, register], so that one numpy operation serves all waves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portkern.backends.gfx942_emulator.numbers import U8, U32, U64, Array
from portkern.errors import EmulationError

if TYPE_CHECKING:
    from portkern.backends.gfx942_emulator.machine import Machine

LANES = 64
SGPRS = 128  # by number as encoded: VCC is 106, M0 124, EXEC 126
VCC, M0, EXEC = 106, 124, 126
POISON = U32(0x7FC1A5A5)  # a NaN, and an offset within a buffer descriptor that reaches past any buffer
SCALAR_POISON = U32(0xFFC1A5A5)  # as a descriptor's size it lets the lanes through that code masks off by their offset
ALL = U64(0xFFFFFFFFFFFFFFFF)


class Registers:
    """The register files of ``waves`` waves. Accumulation registers follow the ``vgprs`` ordinary ones."""

    def __init__(self, waves: int, vgprs: int, agprs: int) -> None:
        self.vgprs = vgprs
        self.V = np.full((vgprs + agprs, waves, LANES), POISON, U32)
        self.S = np.full((waves, SGPRS), SCALAR_POISON, U32)
        self.S64 = self.S.view(U64)
        self.S64[:, EXEC >> 1] = ALL
        self.scc = np.zeros(waves, bool)
        self.written: Array = None  # [register, wave, lane], where reads of what nothing wrote are errors


def unpack(bits: Array) -> Array:
    """Lane masks [n] of 64 bits as booleans [n, 64]."""
    octets = np.ascontiguousarray(bits).view(U8).reshape(-1, 8)
    return np.unpackbits(octets, axis=1, bitorder="little").view(bool)


def pack(lanes: Array) -> Array:
    """Booleans [n, 64] as lane masks [n] of 64 bits."""
    return np.packbits(lanes, axis=1, bitorder="little").view(U64)[:, 0]


class Waves:
    """The waves ``rows`` of a machine that stand at ``pc``. What instructions read and write goes through here.

    ``rows`` is a slice where the waves are neighbours, so that reading a register copies nothing. ``full`` says that
    all lanes are enabled; else ``mask`` [n, 64] has the enabled ones.
    """

    __slots__ = ("S", "S64", "V", "cohort", "count", "full", "machine", "mask", "pc", "plain", "polled",
                 "rows", "scc", "steps")  # fmt: skip

    def __init__(self, machine: Machine, rows: Array, pc: int, cohort: int = 0) -> None:
        registers = machine.registers
        self.machine, self.pc, self.cohort, self.count = machine, pc, cohort, len(rows)
        self.V, self.S, self.S64, self.scc = registers.V, registers.S, registers.S64, registers.scc
        self.plain = bool(rows[-1] - rows[0] + 1 == len(rows))
        self.rows: Any = slice(int(rows[0]), int(rows[-1]) + 1) if self.plain else rows
        self.steps, self.polled = 0, False
        self.refresh()

    def refresh(self) -> None:
        """Read EXEC again: it was written."""
        execute = self.S64[self.rows, EXEC >> 1]
        self.full = bool((execute == ALL).all())
        self.mask = None if self.full else unpack(execute)

    def enabled(self) -> Array:
        """[n, 64], also where all are."""
        return np.ones((self.count, LANES), bool) if self.mask is None else self.mask

    def numbers(self) -> Array:
        """The waves' numbers in the machine, ascending."""
        return np.arange(self.rows.start, self.rows.stop) if self.plain else self.rows

    def clamps(self) -> Array:
        """[n, 1]: whether conversions that overflow are clamped."""
        return self.machine.clamps[self.rows, None]

    def vector(self, register: int) -> Array:
        """A vector register, [n, 64]; EmulationError where it was never written, if that is checked."""
        written = self.machine.registers.written
        if written is not None:
            known = written[register, self.rows]
            if not (known if self.mask is None else known | ~self.mask).all():
                raise EmulationError(f"reads vector register {register}, which nothing wrote")
        return self.V[register, self.rows]

    def put(self, register: int, value: Array) -> None:
        """Write 32-bit ``value`` ([n, 64], or what broadcasts to it) to the enabled lanes of a vector register."""
        if self.machine.registers.written is not None:
            self.machine.registers.written[register, self.rows] |= self.enabled()
        if self.full:
            self.V[register, self.rows] = value
        elif self.plain:
            np.copyto(self.V[register, self.rows], value, where=self.mask)
        else:
            old = self.V[register, self.rows]
            np.copyto(old, value, where=self.mask)
            self.V[register, self.rows] = old

    def put_scalar(self, register: int, value: Array) -> None:
        """Write 32-bit ``value`` [n] to a scalar register."""
        self.S[self.rows, register] = value
        if register >= EXEC:
            self.refresh()

    def put_pair(self, register: int, value: Array) -> None:
        """Write 64-bit ``value`` [n] to a pair of scalar registers."""
        self.S64[self.rows, register >> 1] = value
        if register >= EXEC:
            self.refresh()
