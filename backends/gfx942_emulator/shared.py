"""Shared memory (LDS) of all workgroups: bytes, who wrote and read them since the last barrier, and whether anyone did.

Two waves that touch the same cell with no barrier between, one of them writing another value, are a race; so are two
lanes that write other values to one place at once. A cell is as wide as the narrowest access of the kernel.
"""

from __future__ import annotations

import numpy as np

from portkern.backends.gfx942_emulator.memory import UNSIGNED, Block
from portkern.backends.gfx942_emulator.numbers import U8, U16, Array

POISON = 0xA5
SUM_UNITS = 4  # in the last place, by which one sum in two orders may differ


class Race(Exception):
    """Index of an access among those that took part, its byte offset, the other waves (bits; none: the same one), and
    what happened."""

    def __init__(self, position: int, offset: int, others: int, what: str) -> None:
        super().__init__(what)
        self.position, self.offset, self.others, self.what = position, offset, others, what


class Unwritten(Exception):
    """A read of bytes that nobody wrote."""

    def __init__(self, position: int, offset: int) -> None:
        super().__init__("read of shared memory that nobody wrote")
        self.position, self.offset = position, offset


class SharedMemory:
    """``size`` bytes for each of ``groups`` workgroups; ``cell`` is 1, 2 or 4 bytes."""

    def __init__(self, groups: int, size: int, cell: int, races: bool, unwritten: bool) -> None:
        self.size, self.cell = size, cell
        self.stride = (size + 15) // 16 * 16
        self.block = Block(np.full(groups * self.stride, POISON, U8))
        cells = (groups, self.stride // cell)
        self.written = np.zeros(cells, bool).reshape(-1) if unwritten else None
        self.races = races
        self.writers = np.zeros(cells if races else (0, 0), U16)
        self.readers = np.zeros_like(self.writers)
        self.atomics = np.zeros_like(self.writers)

    def barrier(self, groups: Array) -> None:
        """All waves of these workgroups met: what was touched before is no race any more."""
        if self.races:
            self.writers[groups] = 0
            self.readers[groups] = 0
            self.atomics[groups] = 0

    def _cells(self, offsets: Array, size: int) -> list[Array]:
        first = offsets // self.cell
        return [first + number for number in range(max(1, size // self.cell))]

    def load(self, offsets: Array, size: int, count: int, bits: Array) -> list[Array]:
        """``count`` units of ``size`` bytes at ``offsets`` into the whole block. ``bits`` name the waves."""
        for cells in self._cells(offsets, size * count):
            if self.written is not None and not self.written[cells].all():
                position = int(np.argmin(self.written[cells]))
                raise Unwritten(position, int(cells[position]) * self.cell)
            if self.races:
                self._check(cells, bits, self.writers, "reads what another wave writes")
                self._check(cells, bits, self.atomics, "reads what another wave changes atomically")
                _mark(self.readers.reshape(-1), cells, bits)
        return [self.block.load(offsets + size * number, size) for number in range(count)]

    def store(self, offsets: Array, size: int, values: list[Array], bits: Array) -> None:
        """Write units of ``size`` bytes from each offset on."""
        for number, unit in enumerate(values):
            self._store_one(offsets + size * number, size, unit, bits)
        self._lanes_agree(offsets, size, values)

    def _store_one(self, offsets: Array, size: int, values: Array, bits: Array) -> None:
        if self.races:
            for number, cells in enumerate(self._cells(offsets, size)):
                self._check_other(cells, bits, self.readers, "writes what another wave reads")
                self._check_other(cells, bits, self.atomics, "writes what another wave changes atomically")
                self._differs(number, offsets, size, values, cells, bits)
        self.block.store(offsets, size, values)
        for number, cells in enumerate(self._cells(offsets, size)):
            if self.written is not None:
                self.written[cells] = True
            if self.races:
                _mark(self.writers.reshape(-1), cells, bits)
                self._differs(number, offsets, size, values, cells, bits)

    def _differs(self, number: int, offsets: Array, size: int, values: Array, cells: Array, bits: Array) -> None:
        """Two waves may write a cell if they write the same: redundant stores do."""
        others = self.writers.reshape(-1)[cells] & ~bits
        doubtful = np.flatnonzero(others)
        if not len(doubtful):
            return
        width = min(self.cell, size)
        mine = np.ascontiguousarray(values[doubtful].astype(UNSIGNED[size])).view(UNSIGNED[width])
        mine = mine.reshape(len(doubtful), -1)[:, number]
        there = self.block.load(offsets[doubtful] + width * number, width)
        differs = (mine != there) & ~(_nan(mine) & _nan(there))
        if differs.any():
            position = int(doubtful[np.argmax(differs)])
            raise Race(
                position, int(cells[position]) * self.cell, int(others[position]), "writes what another wave writes"
            )

    def _lanes_agree(self, offsets: Array, size: int, values: list[Array]) -> None:
        """Lanes that write one place at once must write the same: the manual does not say whose value stays."""
        mine = np.stack([unit.astype(UNSIGNED[size]) for unit in values], axis=1)
        there = [self.block.load(offsets + size * number, size) for number in range(len(values))]
        kept = np.stack([unit.astype(UNSIGNED[size]) for unit in there], axis=1)
        agrees = _same_sum(mine, kept).all(axis=1)
        other = 12 - size  # numbers of 64 bits come in words of 32, and two words as one number
        if size in (4, 8) and size * len(values) % 8 == 0 and not agrees.all():
            agrees |= _same_sum(mine.view(UNSIGNED[other]), kept.view(UNSIGNED[other])).all(axis=1)
        if not agrees.all():
            position = int(np.argmin(agrees))
            raise Race(position, int(offsets[position]), 0, "writes what another lane writes")

    def _check(self, cells: Array, bits: Array, table: Array, what: str) -> None:
        marked = table.reshape(-1)[cells]
        bad = (marked != 0) & ((marked & bits) == 0)
        if bad.any():
            position = int(np.argmax(bad))
            raise Race(position, int(cells[position]) * self.cell, int(marked[position]), what)

    def _check_other(self, cells: Array, bits: Array, table: Array, what: str) -> None:
        others = table.reshape(-1)[cells] & ~bits
        if others.any():
            position = int(np.argmax(others != 0))
            raise Race(position, int(cells[position]) * self.cell, int(others[position]), what)

    def note_atomic(self, offsets: Array, size: int, bits: Array) -> None:
        """Atomic changes meet one another, but not plain accesses of other waves."""
        for cells in self._cells(offsets, size):
            if self.written is not None and not self.written[cells].all():
                position = int(np.argmin(self.written[cells]))
                raise Unwritten(position, int(cells[position]) * self.cell)
            if self.races:
                self._check_other(cells, bits, self.readers, "changes atomically what another wave reads")
                self._check_other(cells, bits, self.writers, "changes atomically what another wave writes")
                _mark(self.atomics.reshape(-1), cells, bits)


def _same_sum(a: Array, b: Array) -> Array:
    """Whether the bits are equal, or both NaNs, or normal numbers a few units in the last place apart: lanes that hold
    one sum twice may have added in another order. Seen: 1 unit, of 16 lanes that a row rotation adds up."""
    equal = a == b
    if a.itemsize < 4:
        return equal | (_nan(a) & _nan(b))
    sign, infinity, least = (1 << 31, 0x7F800000, 1 << 23) if a.itemsize == 4 else (1 << 63, 0x7FF << 52, 1 << 52)
    kind = a.dtype.type
    sizes = [each & kind(sign - 1) for each in (a, b)]
    small, large = np.minimum(*sizes), np.maximum(*sizes)
    near = (small >= kind(least)) & (large < kind(infinity)) & (large - small <= kind(SUM_UNITS))
    return equal | (near & ((a ^ b) < kind(sign))) | (small > kind(infinity))


def _nan(bits: Array) -> Array:
    """Whether a cell looks like a NaN: redundant sums may end in different ones."""
    if bits.itemsize == 1:
        return np.zeros(bits.shape, bool)
    top, infinity = (0x7FFFFFFF, 0x7F800000) if bits.itemsize == 4 else (0x7FFF, 0x7C00)
    return (bits & bits.dtype.type(top)) > infinity


def _mark(table: Array, cells: Array, bits: Array) -> None:
    """Add each access's bit to its cell. Several waves may mark one cell at once, so look again until all stand."""
    while True:
        found = table[cells]
        missing = (found & bits) == 0
        if not missing.any():
            return
        if missing.all():
            table[cells] = found | bits
        else:
            table[cells[missing]] = (found | bits)[missing]


def conflicts(offsets: Array, waves: Array, lanes: Array, size: int) -> int:
    """Extra cycles by which accesses to one of 32 banks wait for one another, all waves together.

    32 lanes of 4 bytes are served at once, 16 of 8, 8 of 16; different words of one bank take a turn each.
    """
    per_turn = max(1, 128 // max(4, size))
    turn = waves.astype(np.int64) * 64 + lanes // per_turn
    words = offsets // 4
    units = np.concatenate([words + number for number in range(max(1, size // 4))])
    turns = np.concatenate([turn] * max(1, size // 4))
    distinct = np.unique(np.stack([turns, units % 32, units]), axis=1)
    _, per_bank = np.unique(distinct[0] * 32 + distinct[1], return_counts=True)
    key = np.unique(distinct[0] * 32 + distinct[1])
    owner, start = np.unique(key // 32, return_index=True)
    return int(np.maximum.reduceat(per_bank, start).sum() - len(owner)) if len(owner) else 0
