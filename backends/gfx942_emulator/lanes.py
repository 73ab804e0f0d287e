"""Lane and byte modifiers of vector instructions (DPP, SDWA), and instructions that move values between lanes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.numbers import I32, U32, Array
from portkern.backends.gfx942_emulator.operands import Operand, Read, Write, scalar_reader, words
from portkern.backends.gfx942_emulator.state import LANES, Waves
from portkern.errors import UnmodelledInstruction

LANE = np.arange(LANES)
ROW, IN_ROW = LANE // 16, LANE % 16
DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
       "wave_shl", "wave_shr", "wave_rol", "wave_ror")  # fmt: skip


def source_lanes(modifiers: Mapping[str, str]) -> tuple[Array, Array]:
    """For each lane the lane that DPP reads, and whether that lane exists."""
    kind = next(name for name in DPP if name in modifiers)
    value = modifiers[kind]
    if kind == "quad_perm":
        order = np.array([int(each) for each in re.findall(r"\d+", value)])
        return LANE // 4 * 4 + order[LANE % 4], np.ones(LANES, bool)
    if kind == "row_mirror":
        return ROW * 16 + 15 - IN_ROW, np.ones(LANES, bool)
    if kind == "row_half_mirror":
        return LANE // 8 * 8 + 7 - LANE % 8, np.ones(LANES, bool)
    number = int(value)
    if kind in ("row_shl", "row_shr", "row_ror"):
        moved = IN_ROW + number if kind == "row_shl" else IN_ROW - number
        exists = (moved >= 0) & (moved < 16) | (kind == "row_ror")
        return ROW * 16 + moved % 16, exists
    if kind == "row_bcast":  # lane 15 of each row to the next row, or lane 31 to rows 2 and 3
        if number == 15:
            return np.maximum(ROW * 16 - 1, 0), ROW > 0
        return np.full(LANES, 31), ROW > 1
    if kind == "row_newbcast":
        return ROW * 16 + number, np.ones(LANES, bool)
    moved = LANE + 1 if kind in ("wave_shl", "wave_rol") else LANE - 1
    exists = (moved >= 0) & (moved < LANES) | (kind in ("wave_rol", "wave_ror"))
    return moved % LANES, exists


class LaneMove:
    """DPP: the first source is read from other lanes; rows, banks and lanes without a source may be left out."""

    def __init__(self, modifiers: Mapping[str, str]) -> None:
        self.lanes, self.exists = source_lanes(modifiers)
        rows = int(modifiers.get("row_mask", "0xf"), 0)
        banks = int(modifiers.get("bank_mask", "0xf"), 0)
        self.written = ((rows >> ROW) & 1 == 1) & ((banks >> (IN_ROW // 4)) & 1 == 1)
        self.zero = modifiers.get("bound_ctrl", "") in ("1", "0")  # older assemblers write 0 for the set bit
        self.plain = bool(self.exists.all() and self.written.all())

    def valid(self, w: Waves) -> Array:
        """Lanes whose source lane exists and is enabled."""
        if w.mask is None:
            return self.exists[None]
        return self.exists & w.mask[:, self.lanes]

    def transform(self, read: Read) -> Read:
        """All lanes are read before any is written."""

        def moved(w: Waves) -> Array:
            value = np.broadcast_to(read(w), (w.count, LANES))[:, self.lanes]
            if w.mask is None and self.plain:
                return value
            return np.where(self.valid(w), value, U32(0))

        return moved

    def limit(self, write: Write) -> Write:
        """``write`` with the lanes disabled that DPP does not write."""
        if self.plain and self.zero:
            return write

        def limited(w: Waves, value: Array) -> None:
            full, mask = w.full, w.mask
            if mask is None and self.plain:
                return write(w, value)
            allowed = np.broadcast_to(self.written[None] & (True if self.zero else self.valid(w)), (w.count, LANES))
            w.full, w.mask = False, allowed if mask is None else allowed & mask
            write(w, value)
            w.full, w.mask = full, mask
            return None

        return limited


SELECTED = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), "BYTE_0": (0, 8), "BYTE_1": (8, 8),
            "BYTE_2": (16, 8), "BYTE_3": (24, 8)}  # fmt: skip


def select(part: str, extend: bool) -> Callable[[Read], Read] | None:
    """SDWA of a source: a byte or word of it, with zeros or its sign above."""
    start, width = SELECTED[part]
    if width == 32:
        return None
    left, right = U32(32 - width - start), U32(32 - width)
    if extend:
        return lambda read: lambda w: ((read(w) << left).view(I32) >> right.view(I32)).view(U32)
    return lambda read: lambda w: (read(w) << left) >> right


def deposit(part: str, unused: str, number: int) -> Callable[[Waves, Array], None]:
    """SDWA of a result: into a byte or word of the register, the rest zero, sign or as it was."""
    start, width = SELECTED[part]
    field = U32(((1 << width) - 1) << start)

    def write(w: Waves, value: Array) -> None:
        placed = (value << U32(start)) & field
        if unused == "UNUSED_PRESERVE":
            placed = placed | (w.V[number, w.rows] & ~field)
        elif unused == "UNUSED_SEXT":
            up = U32(32 - width - start)
            signed = ((placed << up).view(I32) >> up.view(I32)).view(U32)
            placed = signed  # zeros stay below the part
        w.put(number, placed)

    return write


def first_lane(w: Waves) -> Array:
    """The first enabled lane of each wave, lane 0 where none is."""
    if w.mask is None:
        return np.zeros(w.count, np.int64)
    return w.mask.argmax(axis=1)


def read_first(target: Operand, source: Operand) -> Callable[[Waves], None]:
    """``v_readfirstlane_b32``."""
    read = words(source)

    def step(w: Waves) -> None:
        values = np.broadcast_to(read(w), (w.count, LANES))
        w.put_scalar(target.number, values[np.arange(w.count), first_lane(w)])

    return step


def read_lane(target: Operand, source: Operand, lane: Operand) -> Callable[[Waves], None]:
    """``v_readlane_b32``: EXEC is not looked at."""
    read, which = words(source), scalar_reader(lane, "u32")

    def step(w: Waves) -> None:
        values = np.broadcast_to(read(w), (w.count, LANES))
        lanes = np.broadcast_to(which(w) & U32(63), (w.count,))
        w.put_scalar(target.number, values[np.arange(w.count), lanes])

    return step


def write_lane(target: Operand, source: Operand, lane: Operand) -> Callable[[Waves], None]:
    """``v_writelane_b32``: EXEC is not looked at."""
    read, which = scalar_reader(source, "b32"), scalar_reader(lane, "u32")

    def step(w: Waves) -> None:
        lanes = np.broadcast_to(which(w) & U32(63), (w.count,))
        w.V[target.number, w.numbers(), lanes] = read(w)
        if w.machine.registers.written is not None:
            w.machine.registers.written[target.number, w.numbers(), lanes] = True

    return step


def permute(values: Array, lanes: Array, w: Waves) -> Array:
    """``ds_bpermute_b32``: each lane reads another one; disabled lanes give 0."""
    values = np.broadcast_to(values, (w.count, LANES))
    if w.mask is not None:
        values = np.where(w.mask, values, U32(0))
    return np.take_along_axis(values, np.broadcast_to(lanes, (w.count, LANES)).astype(np.int64), axis=1)


def push(values: Array, lanes: Array, w: Waves) -> Array:
    """``ds_permute_b32``: each enabled lane writes to another one; the highest lane wins, the rest get 0."""
    result = np.zeros((w.count, LANES), U32)
    values, lanes = (np.broadcast_to(each, (w.count, LANES)) for each in (values, lanes))
    enabled = w.enabled()
    rows = np.arange(w.count)
    for lane in range(LANES):
        on = enabled[:, lane]
        result[rows[on], lanes[on, lane]] = values[on, lane]
    return result


def swizzle_lanes(offset: str) -> Array:
    """The lanes that ``ds_swizzle_b32`` reads, from its offset as a number or in words.

    Raises UnmodelledInstruction for another mode.
    """
    if offset.startswith("swizzle("):
        words_ = [each.strip().strip('"') for each in offset[8:-1].split(",")]
        kind, values = words_[0], words_[1:]
        if kind == "QUAD_PERM":
            order = np.array([int(each) for each in values])
            return LANE // 4 * 4 + order[LANE % 4]
        if kind == "SWAP":
            return LANE ^ int(values[0])
        if kind == "REVERSE":
            return LANE ^ (int(values[0]) - 1)
        if kind == "BROADCAST":
            size = int(values[0])
            return LANE // size * size + int(values[1])
        if kind == "BITMASK_PERM":
            masks = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}
            bits = [masks[char] for char in values[0]]
            both = [int("".join(str(bit[i]) for bit in bits), 2) for i in range(3)]
            return LANE // 32 * 32 + (((LANE % 32 & both[0]) | both[1]) ^ both[2])
        raise UnmodelledInstruction(f"ds_swizzle_b32 in mode {kind}")
    number = int(offset, 0)
    if number & 0x8000:
        order = np.array([(number >> 2 * i) & 3 for i in range(4)])
        return LANE // 4 * 4 + order[LANE % 4]
    keep, set_, flip = number & 31, (number >> 5) & 31, (number >> 10) & 31
    return LANE // 32 * 32 + (((LANE % 32 & keep) | set_) ^ flip)


def count_below(upper: bool) -> Callable[[Array, Array], Array]:
    """``v_mbcnt_lo/hi_u32_b32``: bits of the mask below each lane, added to the second source."""
    below = LANE - 32 if upper else np.minimum(LANE, 32)
    ones = [((1 << int(max(0, count))) - 1) & 0xFFFFFFFF for count in below]
    under: Any = np.array(ones, U32)[None]

    def function(a: Array, b: Array) -> Array:
        from portkern.backends.gfx942_emulator.numbers import count_ones

        return count_ones(np.broadcast_to(a, np.broadcast_shapes(a.shape, under.shape)) & under) + b

    return function
