"""Memory as bytes with bounds: the buffers of a launch in a private 64-bit address space, and flat blocks.

Buffers are the callers' own memory. Between two of them lie gaps of four gigabytes, so that no plausible index error
reaches from one into another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.numbers import U8, U16, U32, U64, Array

# Addresses are signed: 48 bits, the last of which the architecture extends.
BASE, UPPER_BASE, STEP = 0x7000_0000_0000, -0x7000_0000_0000, 1 << 36
GAP = 1 << 32
UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}


class Block:
    """Bytes that lanes read and write at offsets, whatever their alignment."""

    def __init__(self, data: Array) -> None:
        self.data = data  # u8, one dim
        self._views: dict[tuple[int, int], Array] = {}

    def _view(self, size: int, phase: int) -> Array:
        key = size, phase
        if key not in self._views:
            count = max(0, (len(self.data) - phase) // size)
            view = np.ndarray((count,), UNSIGNED[size], self.data.data, phase) if count else np.empty(0, UNSIGNED[size])
            self._views[key] = view
        return self._views[key]

    def place(self, offsets: Array, size: int) -> tuple[Array, Array] | None:
        """A view of units of ``size`` bytes and the indices of ``offsets`` in it; None where they are not aligned
        alike."""
        phase = int(offsets[0]) & (size - 1) if size > 1 else 0
        if size > 1 and ((offsets ^ phase) & (size - 1)).any():
            return None
        return self._view(size, phase), (offsets - phase) // size if size > 1 else offsets

    def load(self, offsets: Array, size: int) -> Array:
        """``size`` bytes (1, 2, 4, 8) at each of ``offsets`` (i64, one dim), as unsigned numbers."""
        placed = self.place(offsets, size)
        if placed:
            view, indices = placed
            return view[indices]
        octets = self.data[offsets[:, None] + np.arange(size)]
        return np.ascontiguousarray(octets).view(UNSIGNED[size])[:, 0]

    def store(self, offsets: Array, size: int, values: Array) -> None:
        """Write unsigned ``values`` of ``size`` bytes; of equal offsets the last wins."""
        placed = self.place(offsets, size)
        if placed:
            view, indices = placed
            view[indices] = values
            return
        octets = np.ascontiguousarray(values.astype(UNSIGNED[size])).view(U8).reshape(-1, size)
        self.data[offsets[:, None] + np.arange(size)] = octets


class Region(Block):
    """One buffer of the launch, at an address of the private space."""

    def __init__(self, name: str, data: Array, start: int) -> None:
        super().__init__(data)
        self.name, self.start, self.end = name, start, start + len(data)
        self.touched: Block | None = None

    def count_touched(self) -> int:
        return int(np.count_nonzero(self.touched.data)) if self.touched else 0


class Outside(Exception):
    """An access that no buffer holds: index of the lane among those that took part, its address, and a remark."""

    def __init__(self, position: int, address: int, remark: str) -> None:
        super().__init__(remark)
        self.position, self.address, self.remark = position, address, remark


class AddressSpace:
    """The buffers that a launch may touch; in the ``upper`` half of all addresses, if asked."""

    def __init__(self, count_touched: bool = False, upper: bool = False) -> None:
        self.base = UPPER_BASE if upper else BASE
        self.regions: list[Region] = []
        self.starts: Any = np.empty(0, np.int64)
        self.ends: Any = np.empty(0, np.int64)
        self.counting = count_touched
        self.requested = 0

    def add(self, name: str, data: Array, alignment: int = 0) -> Region:
        """A region over ``data`` (u8, contiguous), at an address that is ``alignment`` modulo 256."""
        start = self.base if not self.regions else (self.regions[-1].end + GAP + STEP - 1) // STEP * STEP
        region = Region(name, data, start + alignment % 256)
        if self.counting:
            region.touched = Block(np.zeros(len(data), U8))
        self.regions.append(region)
        self.reorder()
        return region

    def reorder(self) -> None:
        """The regions were changed: sort them, and note their bounds."""
        self.regions.sort(key=lambda each: each.start)
        self.starts = np.array([each.start for each in self.regions], np.int64)
        self.ends = np.array([each.end for each in self.regions], np.int64)

    def parts(self, addresses: Array, size: int) -> list[tuple[Region, Any]]:
        """Each region that ``addresses`` (i64, one dim) lie in, with a selection of them. Raises Outside."""
        low, high = int(addresses.min()), int(addresses.max())
        at = int(np.searchsorted(self.starts, low, "right")) - 1
        if at >= 0 and high + size <= self.ends[at]:
            return [(self.regions[at], slice(None))]
        where = np.searchsorted(self.starts, addresses, "right") - 1
        inside = (where >= 0) & (addresses + size <= self.ends[np.maximum(where, 0)]) if self.regions else where >= 0
        if not inside.all():
            position = int(np.argmin(inside))
            raise Outside(position, int(addresses[position]), self.nearest(int(addresses[position]), size))
        return [(self.regions[number], np.flatnonzero(where == number)) for number in np.unique(where)]

    def nearest(self, address: int, size: int) -> str:
        """Where ``address`` lies from the buffer that it comes nearest to."""
        if not self.regions:
            return "the launch has no buffers"
        region = min(self.regions, key=lambda each: max(each.start - address, address + size - each.end))
        where = (
            f"{region.start - address:,} bytes before"
            if address < region.start
            else (f"{address + size - region.end:,} bytes past the end of")
        )
        return f"{where} {region.name} ({len(region.data):,} bytes)"

    def load(self, addresses: Array, size: int, count: int = 1) -> list[Array]:
        """``count`` units of ``size`` bytes from each address on. Raises Outside."""
        parts = self.parts(addresses, size * count)
        self.requested += len(addresses) * size * count
        found = []
        for number in range(count):
            if len(parts) == 1 and isinstance(parts[0][1], slice):
                region = parts[0][0]
                found.append(region.load(addresses - (region.start - size * number), size))
            else:
                values = np.empty(len(addresses), UNSIGNED[size])
                for region, chosen in parts:
                    values[chosen] = region.load(addresses[chosen] - (region.start - size * number), size)
                found.append(values)
        self._touch(parts, addresses, size, count)
        return found

    def store(self, addresses: Array, size: int, values: list[Array]) -> None:
        """Write units of ``size`` bytes from each address on. Raises Outside."""
        parts = self.parts(addresses, size * len(values))
        self.requested += len(addresses) * size * len(values)
        for region, chosen in parts:
            for number, unit in enumerate(values):
                region.store(addresses[chosen] - (region.start - size * number), size, unit[chosen])
        self._touch(parts, addresses, size, len(values))

    def _touch(self, parts: list[tuple[Region, Any]], addresses: Array, size: int, count: int) -> None:
        if not self.counting:
            return
        ones = UNSIGNED[size](int("01" * size, 16))
        for region, chosen in parts:
            assert region.touched is not None
            for number in range(count):
                offsets = addresses[chosen] - (region.start - size * number)
                region.touched.store(offsets, size, np.full(len(offsets), ones))
