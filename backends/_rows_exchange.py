"""Rows that more programs share than a warp has lanes, of ops whose kernels collect words a warp's width at a time.

Such an op takes AHEAD, 1 where the part of the next row loads while this one waits, and SPLITS, the number of parts
that are walked in blocks before the exchange and again after it; 0, or none: a part is one block, which its program
keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from portkern.backends._rows_model import operands_read
from portkern.backends._rows_parts import NARROW_BYTES
from portkern.config import Config
from portkern.integers import cdiv, next_power_of_2, power_of_2_below
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

MOST_PARTS = 32  # of a row whose programs wait: one exchanged word for each lane of a narrow warp
MOST_WORDS = 4 * MOST_PARTS  # where they are collected one warp's width after another


class Exchange(NamedTuple):
    """What a program takes of a row that it shares: a part that it keeps, or, of rows that so would have too many
    parts, one that it walks."""

    lane_elements: int  # of all operands that are read
    num_warps: int
    ahead: bool = False  # whether a part of 16-bit elements loads while the one before waits, if one operand is read
    walked_block: int = 2_048
    walked_parts: int = 64
    walked_warps: int = 4
    walked_stages: int = 1


def most_parts(work: Work) -> int:
    """Programs that may share a row."""
    return MOST_WORDS if "SPLITS" in work.takes else MOST_PARTS


def exchanging(exchange: Exchange, device: Device, work: Work, programs: int, options: FrozenMap[Any]) -> Config:
    """The default for ``work``."""
    base = _kept(exchange, device, work, programs).replace(options=options)
    parts = cdiv(work.sizes["N"], base.params["BLOCK_N"])
    if parts <= MOST_WORDS:
        return base
    if base.params["AHEAD"] and parts <= 2 * MOST_WORDS:
        return base.replace(params={"BLOCK_N": 2 * base.params["BLOCK_N"]})
    params = {"BLOCK_N": exchange.walked_block, "SPLITS": exchange.walked_parts, "AHEAD": 0}
    return base.replace(params=params, num_warps=exchange.walked_warps, num_stages=exchange.walked_stages)


def exchanging_configs(
    exchange: Exchange, device: Device, work: Work, programs: int, options: FrozenMap[Any]
) -> Iterator[Config]:
    """Parts that are kept, of other sizes and ahead of their turn, and parts that are walked."""
    base = _kept(exchange, device, work, programs).replace(options=options)
    lanes, most = device.target.warp_size, device.max_threads // device.target.warp_size
    block, each = base.params["BLOCK_N"], base.params["BLOCK_N"] // (base.num_warps * lanes)
    for size in (block // 2, block, block * 2):
        for hold in (each // 2, each, each * 2):
            for ahead in (0, 1):
                params = {"BLOCK_N": size, "AHEAD": ahead}
                if hold >= 1 and lanes * hold <= size <= lanes * hold * most:
                    yield base.replace(params=params, num_warps=power_of_2_below(size // (lanes * hold)))
    for size, warps in ((2_048, 4), (4_096, 8)):
        for stages in (1, 3):
            for splits in (16, 32, 64, 128):
                if size * splits <= next_power_of_2(work.sizes["N"]):
                    params = {"BLOCK_N": size, "SPLITS": splits, "AHEAD": 0}
                    yield base.replace(params=params, num_warps=warps, num_stages=stages)


def _kept(exchange: Exchange, device: Device, work: Work, programs: int) -> Config:
    lanes, width = device.target.warp_size, next_power_of_2(work.sizes["N"])
    ahead = exchange.ahead and work.element_bytes == NARROW_BYTES and operands_read(work) == 1
    each = max(1, exchange.lane_elements // operands_read(work))
    block = min(width, (exchange.num_warps // 2 if ahead else exchange.num_warps) * lanes * each)
    params = FrozenMap[int](BLOCK_N=block, PROGRAMS_PER_UNIT=programs, AHEAD=int(ahead))
    return Config("coresident_row", params, max(1, block // (lanes * each)))
