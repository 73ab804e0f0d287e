"""Configs for rows in parts on sm90, the most promising first. Data only."""

from __future__ import annotations

from typing import Any

from portkern.backends._rows_parts import Stated
from portkern.record import FrozenMap


def _whole(warps: int, parts: int, early: int = 0, **more: Any) -> dict[str, Any]:
    params = FrozenMap[int](PROGRAMS_PER_UNIT=0, PARTS=parts, EARLY=early)
    return {"params": params, "num_warps": warps, "options": FrozenMap(more)}


def _parted(block: int, warps: int, parts: int, programs: int, registers: int) -> dict[str, Any]:
    params = FrozenMap[int](BLOCK_N=block, PROGRAMS_PER_UNIT=programs, PARTS=parts)
    return {"params": params, "num_warps": warps, "options": FrozenMap(maxnreg=registers)}


def _packed(rows: int, warps: int) -> dict[str, Any]:
    return {"params": FrozenMap[int](BLOCK_M=rows, PROGRAMS_PER_UNIT=0, EARLY=1), "num_warps": warps}


def _alone(params: dict[str, int], warps: int, registers: int, **more: Any) -> dict[str, Any]:
    options = FrozenMap[int](maxnreg=registers) if registers else FrozenMap[int]()
    return {"params": FrozenMap(params), "num_warps": warps, "options": options, "shared": False, **more}


def _lone(warps: int, parts: int, registers: int = 0, **more: Any) -> dict[str, Any]:
    return _alone({"PROGRAMS_PER_UNIT": 0, "PARTS": parts}, warps, registers, **more)


def _cut(block: int, warps: int, parts: int, programs: int, registers: int, **more: Any) -> dict[str, Any]:
    return _alone({"BLOCK_N": block, "PROGRAMS_PER_UNIT": programs, "PARTS": parts}, warps, registers, **more)


# A part is one 16-byte load of each lane, and each cap on registers holds without spills in Triton 3.6, so that 64 to
# 128 KB of rows are on their way to a unit. What comes first of a length is its default: of those that do not spill in
# Triton 3.9 either, the fastest on one H200 (docs/measurements.md). Ops that centre rows keep more than LIGHT
# registers. At 8,192 columns and below, rows in one tile won, of the others with 16 warps.
LIGHT = 1.2
SHARED = (
    # A warp of its own takes whole rows: more warps hand the vectors over through shared memory.
    *(Stated(128, 256, "packed_rows", **_packed(*each), live=LIGHT) for each in ((16, 4), (8, 4), (4, 1), (8, 2))),
    *(Stated(128, 256, "packed_rows", **_packed(*each)) for each in ((4, 1), (2, 1))),
    # Two rows of 1,024 took 9.1 and 9.9 us at 4096x1024, one 10.2 and 10.9.
    Stated(512, 1_024, "packed_rows", FrozenMap(BLOCK_M=2, PROGRAMS_PER_UNIT=0), 4, live=LIGHT),
    Stated(512, 1_024, "packed_rows", FrozenMap(BLOCK_M=2, PROGRAMS_PER_UNIT=0), 2, above=LIGHT),
    # 16 warps took 81 us at 8192x8192 of an op that centres rows, these 74.
    Stated(4_096, 8_192, "resident_row", FrozenMap(PROGRAMS_PER_UNIT=0), 8, above=LIGHT),
    Stated(8_192, 16_384, "resident_row", **_whole(16, 4, maxnreg=64), above=LIGHT),
    Stated(8_192, 16_384, "resident_row", **_whole(16, 4, maxnreg=40)),
    Stated(8_192, 16_384, "resident_row", **_whole(8, 8, maxnreg=64)),
    Stated(16_384, 32_768, "cached_row", **_whole(32, 4, maxnreg=32), live=LIGHT),
    Stated(16_384, 32_768, "cached_row", **_whole(16, 8, maxnreg=64), above=LIGHT),
    # Where registers hold two rows, the nearest cache is left to the vectors.
    Stated(16_384, 32_768, "resident_row", **_whole(16, 8, maxnreg=64)),
    Stated(16_384, 32_768, "cached_row", **_whole(32, 4, maxnreg=32), above=LIGHT),
    Stated(16_384, 32_768, "resident_row", **_whole(8, 16, maxnreg=128)),
    Stated(16_384, 32_768, "coresident_row", **_parted(4_096, 4, 4, programs=8, registers=64), live=LIGHT),
    Stated(16_384, 32_768, "coresident_row", **_parted(4_096, 4, 4, programs=7, registers=72), above=LIGHT),
    Stated(16_384, 32_768, "coresident_row", **_parted(8_192, 8, 4, programs=3, registers=72)),
    Stated(32_768, 65_536, "coresident_row", **_parted(4_096, 4, 4, programs=7, registers=72), above=LIGHT),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 4, 4, programs=8, registers=64)),
    Stated(65_536, 131_072, "coresident_row", **_parted(4_096, 4, 4, programs=7, registers=72)),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 4, 4, programs=9, registers=56), live=LIGHT),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 4, 4, programs=6, registers=80)),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 8, 2, programs=5, registers=48)),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 8, 2, programs=6, registers=40), live=LIGHT),
    Stated(32_768, 131_072, "coresident_row", **_parted(8_192, 8, 4, programs=3, registers=72)),
    Stated(32_768, 131_072, "coresident_row", **_parted(8_192, 8, 4, programs=4, registers=64), live=LIGHT),
)
# Rows that share nothing, so that lanes keep words alone: 32 elements of a lane in 32 to 40 registers. Of ops that
# reduce a row and read it once more (up to REDUCED registers), and of those that take exponentials of it twice.
# Chosen by compiled code of Triton 3.6 and 3.9 (registers, instructions, no spills), and not yet raced.
REDUCED = 2.2
WIDE: dict[str, Any] = {"element_bytes": 4}
LONE = (
    Stated(512, 1_024, "resident_row", **_lone(1, 4, live=REDUCED)),
    Stated(1_024, 2_048, "resident_row", **_lone(2, 4, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(4, 4, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(2, 8, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(8, 2, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(8, 4, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(4, 8, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 2, live=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 4, live=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(8, 8, live=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(32, 4, live=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(16, 8, live=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(8, 16, live=REDUCED)),
    Stated(16_384, 32_768, "cached_row", **_lone(16, 8, 40, live=REDUCED)),
    Stated(16_384, 32_768, "cached_row", **_lone(32, 4, 32, live=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 4, 7, 72, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(8, 8, live=REDUCED, **WIDE)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 4, live=REDUCED, **WIDE)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 8, live=REDUCED, **WIDE)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 8, 4, 4, 64, **WIDE)),
    Stated(16_384, 131_072, "coresident_row", **_cut(2_048, 4, 4, 8, 64, **WIDE)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 8, 5, 96, live=REDUCED, **WIDE)),
    Stated(16_384, 32_768, "cached_row", **_lone(32, 8, 32, live=REDUCED, **WIDE)),
    Stated(16_384, 32_768, "cached_row", **_lone(16, 16, live=REDUCED, **WIDE)),
    Stated(16_384, 32_768, "resident_row", **_lone(32, 8, live=REDUCED, **WIDE)),
    Stated(4_096, 8_192, "resident_row", **_lone(8, 4, 40, above=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 2, 32, above=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(4, 8, 64, above=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 4, 40, above=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(8, 8, 64, above=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(16, 8, 64, above=REDUCED)),
    Stated(16_384, 32_768, "cached_row", **_lone(16, 8, above=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(8, 16, 128, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 4, 8, 64, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 4, 7, 72, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(8_192, 8, 4, 4, 64, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 8, 2, 5, 48, above=REDUCED)),
)
STATED = (*SHARED, *LONE)
