"""Configs for rows in parts, and for rows whose programs lag, on sm90, the most promising first."""

from __future__ import annotations

from typing import Any

from portkern.backends._rows_parts import Stated
from portkern.record import FrozenMap


def _whole(warps: int, parts: int = 1, early: int = 0, pairs: int = 0, **more: Any) -> dict[str, Any]:
    params = FrozenMap[int](PROGRAMS_PER_UNIT=0, PARTS=parts, EARLY=early, PAIRS=pairs)
    return {"params": params, "num_warps": warps, "options": FrozenMap(more)}


def _parted(
    block: int, warps: int, parts: int, programs: int, registers: int, lag: int = 0, pairs: int = 0
) -> dict[str, Any]:
    params = FrozenMap[int](BLOCK_N=block, PROGRAMS_PER_UNIT=programs, PARTS=parts, LAG=lag, PAIRS=pairs)
    return {"params": params, "num_warps": warps, "options": FrozenMap(maxnreg=registers)}


def _waiting(block: int, warps: int, programs: int, pairs: int = 0, lag: int = 1, **more: Any) -> dict[str, Any]:
    params = {"BLOCK_N": block, "PROGRAMS_PER_UNIT": programs, "LAG": lag} | ({"PAIRS": pairs} if pairs else {})
    return {"params": FrozenMap(params), "num_warps": warps, **more}


def _lagging(*given: int, **more: Any) -> dict[str, Any]:
    return {**_waiting(*given), "shared": False, **more}


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
PLAIN, CHAINED = 1.5, 1.7  # of ops with no vectors that rows share, and of those that read something of each row
WIDE_LIGHT, WIDE_CHAINED = 2.1, 2.25  # of float32
SHARED = (
    # A warp of its own takes whole rows: more warps hand the vectors over through shared memory.
    *(Stated(128, 256, "packed_rows", **_packed(*each), live=LIGHT) for each in ((16, 4), (8, 4), (4, 1), (8, 2))),
    *(Stated(128, 256, "packed_rows", **_packed(*each)) for each in ((4, 1), (2, 1))),
    # Two rows of 1,024 took 9.1 and 9.9 us at 4096x1024, one 10.2 and 10.9.
    Stated(512, 1_024, "packed_rows", FrozenMap(BLOCK_M=2, PROGRAMS_PER_UNIT=0), 4, live=LIGHT),
    Stated(512, 1_024, "packed_rows", FrozenMap(BLOCK_M=2, PROGRAMS_PER_UNIT=0), 2, above=LIGHT),
    # Words of two took 23.1 us at 4096x4096, single numbers 23.8 and, with 4 warps, 24.5.
    Stated(2_048, 4_096, "resident_row", **_whole(8, pairs=1), above=LIGHT),
    # 16 warps took 81 us at 8192x8192 of an op that centres rows, these 72, and 76 in words of two.
    Stated(4_096, 8_192, "resident_row", FrozenMap(PROGRAMS_PER_UNIT=0), 8, above=LIGHT),
    Stated(8_192, 16_384, "resident_row", **_whole(16, 4, maxnreg=64), above=LIGHT),
    Stated(8_192, 16_384, "resident_row", **_whole(16, pairs=1, maxnreg=64)),
    Stated(8_192, 16_384, "resident_row", **_whole(16, 2, maxnreg=64), live=LIGHT),
    Stated(16_384, 32_768, "cached_row", **_whole(32, 4, maxnreg=32)),
    # Where registers hold two rows, the nearest cache is left to the vectors. Triton 3.9 spills here where rows are
    # centred: 139.4 us for 4096 rows of 32,768 against 141.5.
    Stated(16_384, 32_768, "resident_row", **_whole(16, 4, maxnreg=64)),
    Stated(16_384, 32_768, "resident_row", **_whole(16, 2, maxnreg=64), above=LIGHT),
    Stated(16_384, 32_768, "coresident_row", **_parted(4_096, 4, 4, programs=8, registers=64), live=LIGHT),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 8, 1, 4, 64, lag=1, pairs=1), live=LIGHT),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 8, 1, 5, 48, lag=1, pairs=1), live=LIGHT),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 4, 4, 5, 96, lag=1), live=LIGHT),
    Stated(32_768, 65_536, "coresident_row", **_parted(4_096, 4, 4, 8, 64), above=LIGHT),
    Stated(32_768, 65_536, "coresident_row", **_parted(4_096, 8, 1, 4, 64, lag=1, pairs=1), above=LIGHT),
    Stated(65_536, 131_072, "coresident_row", **_parted(4_096, 4, 2, 5, 96, lag=1, pairs=1), above=LIGHT),
    Stated(65_536, 131_072, "coresident_row", **_parted(4_096, 4, 4, 6, 80, lag=1), above=LIGHT),
    Stated(65_536, 131_072, "coresident_row", **_parted(4_096, 4, 4, 5, 96, lag=1), above=LIGHT),
    Stated(65_536, 131_072, "coresident_row", **_parted(4_096, 4, 4, 8, 64)),
    # In float32 a row of 128 KB is kept by 32 warps: 284 and 269 us for 4096 of them, shared by programs 318 and 285.
    Stated(16_384, 32_768, "resident_row", **_whole(32, 2, maxnreg=64), element_bytes=4),
    Stated(16_384, 32_768, "resident_row", **_whole(32, 4, maxnreg=64), element_bytes=4),
    Stated(16_384, 32_768, "resident_row", **_whole(32, 8, maxnreg=64), element_bytes=4),
    Stated(
        32_768, 131_072, "coresident_row", **_parted(8_192, 16, 2, 1, 128, lag=1), above=WIDE_LIGHT, element_bytes=4
    ),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 8, 2, 3, 80, lag=1), above=WIDE_LIGHT, element_bytes=4),
    # The next two spill 8 bytes with Triton 3.9: 1,103 us where the first takes 1,134.
    Stated(
        32_768, 131_072, "coresident_row", **_waiting(4_096, 4, 4, lag=0), above=PLAIN, live=WIDE_LIGHT, element_bytes=4
    ),
    Stated(32_768, 131_072, "coresident_row", **_waiting(4_096, 8, 3), above=PLAIN, live=WIDE_LIGHT, element_bytes=4),
    Stated(32_768, 131_072, "coresident_row", **_parted(4_096, 8, 2, 3, 80, lag=1), live=WIDE_LIGHT, element_bytes=4),
)
# Rows whose programs sum the next one before they wait for this one, or keep words of two, or both.
LAGGING = (
    # Of two operands: 1,126 us for 4096 rows of 131,072 in 16 bits, without the lag 1,387.
    Stated(16_384, 32_768, "coresident_row", **_lagging(4_096, 8, 2, above=PLAIN, operands=2)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 8, 3, above=PLAIN, operands=2)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 8, 3, live=LIGHT, operands=2)),
    Stated(16_384, 131_072, "coresident_row", **_lagging(4_096, 4, 3, above=PLAIN, operands=2)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 3, live=LIGHT, operands=2)),
    Stated(16_384, 131_072, "coresident_row", **_lagging(4_096, 8, 2, live=WIDE_LIGHT, operands=2, element_bytes=4)),
    Stated(16_384, 131_072, "coresident_row", **_lagging(4_096, 4, 2, live=WIDE_LIGHT, operands=2, element_bytes=4)),
    # What keeps its row and two numbers of it: 588 and 577 us for 4096 rows of 131,072, 624 and 605 without the lag and
    # in single numbers; of two operands, which spill where they are more, 787 and 866.
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 4, 1, above=LIGHT, live=PLAIN)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 5, 1, above=LIGHT, live=PLAIN)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 4, above=LIGHT, live=PLAIN)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 3, live=PLAIN, element_bytes=4)),
    Stated(65_536, 131_072, "coresident_row", **_lagging(4_096, 4, 3, above=LIGHT, live=PLAIN, operands=2)),
    # What also reads a class of each row: 612 us for 4096 rows of 128,256, 733 in single numbers, 647 with the lag. In
    # float32 1,155 us, 1,203 without; of 32,000 columns 278, and 296 kept by the nearest cache.
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 7, 1, 0, above=PLAIN, live=CHAINED)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 5, 1, above=PLAIN, live=CHAINED)),
    Stated(16_384, 32_768, "coresident_row", **_lagging(4_096, 8, 3, above=WIDE_CHAINED, element_bytes=4)),
    Stated(32_768, 131_072, "coresident_row", **_lagging(4_096, 4, 3, above=WIDE_CHAINED, element_bytes=4)),
)
# Rows that share nothing, so that lanes keep words alone: 32 elements of a lane in 32 to 40 registers. Of ops that
# reduce a row and read it once more (up to REDUCED registers), and of those that take exponentials of it twice.
# Of those lengths of which figures are named, the first is the fastest of a race on one H200 (docs/measurements.md).
REDUCED = 2.2
WIDE: dict[str, Any] = {"element_bytes": 4}
LONE = (
    Stated(512, 1_024, "resident_row", **_lone(1, 4, live=REDUCED)),
    Stated(1_024, 2_048, "resident_row", **_lone(2, 4, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(4, 2, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(4, 4, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(2, 8, live=REDUCED)),
    Stated(2_048, 4_096, "resident_row", **_lone(8, 2, live=REDUCED)),
    # 53.3 us for 8192 rows of 8,192, in parts 55.3 to 57.7.
    Stated(4_096, 8_192, "resident_row", **_lone(8, 1, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(8, 4, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(4, 8, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 2, live=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 1, live=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 4, live=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(8, 8, live=REDUCED)),
    # 97.6 us for 4096 rows of 32,768, kept in registers 104.7 to 106.2, shared by programs 115.6, walked 133.4.
    Stated(16_384, 32_768, "cached_row", **_lone(32, 4, 32, live=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(32, 4, live=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(16, 8, live=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(8, 16, live=REDUCED)),
    Stated(16_384, 32_768, "cached_row", **_lone(16, 8, 40, live=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 4, 7, 72, live=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 1, live=REDUCED, **WIDE)),
    Stated(4_096, 8_192, "resident_row", **_lone(8, 8, live=REDUCED, **WIDE)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 4, live=REDUCED, **WIDE)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 8, live=REDUCED, **WIDE)),
    # In float32 164 us, 168 in registers; of masked rows, which keep exponents too, 292, shared by programs 309.
    Stated(16_384, 32_768, "cached_row", **_lone(32, 8, 32, live=REDUCED, **WIDE)),
    Stated(16_384, 32_768, "resident_row", **_lone(32, 8, 64, above=REDUCED, **WIDE)),
    Stated(32_768, 131_072, "coresident_row", **_cut(8_192, 8, 8, 2, 128, above=REDUCED, **WIDE)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 8, 4, 4, 64, **WIDE)),
    Stated(16_384, 131_072, "coresident_row", **_cut(2_048, 4, 4, 8, 64, **WIDE)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 8, 5, 96, live=REDUCED, **WIDE)),
    Stated(16_384, 32_768, "cached_row", **_lone(16, 16, live=REDUCED, **WIDE)),
    Stated(16_384, 32_768, "resident_row", **_lone(32, 8, live=REDUCED, **WIDE)),
    Stated(4_096, 8_192, "resident_row", **_lone(8, 4, 40, above=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(16, 2, 32, above=REDUCED)),
    Stated(4_096, 8_192, "resident_row", **_lone(4, 8, 64, above=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(16, 4, 40, above=REDUCED)),
    Stated(8_192, 16_384, "resident_row", **_lone(8, 8, 64, above=REDUCED)),
    # A bool mask beside the row: 168 us for 4096 rows of 32,768, before they were kept as they are read 221.
    Stated(16_384, 32_768, "resident_row", **_lone(16, 8, 64, above=REDUCED)),
    Stated(16_384, 32_768, "cached_row", **_lone(16, 8, above=REDUCED)),
    Stated(16_384, 32_768, "resident_row", **_lone(8, 16, 128, above=REDUCED)),
    # 699 us for 4096 rows of 131,072, 995 before.
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 4, 8, 64, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 4, 4, 7, 72, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(8_192, 8, 4, 4, 64, above=REDUCED)),
    Stated(16_384, 131_072, "coresident_row", **_cut(4_096, 8, 2, 5, 48, above=REDUCED)),
)
STATED = (*SHARED, *LAGGING, *LONE)
