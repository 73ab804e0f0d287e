"""What a plugin states for ops over rows that also sum over them, a weight's gradient, and what is tried for these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from portkern.backends._rows_model import inner_rows, row_blocks
from portkern.config import Config
from portkern.integers import cdiv, next_power_of_2, power_of_2_below
from portkern.problem import Work
from portkern.target import Device

LEAST_ADDENDS = 16
LANE_ADDENDS = 32  # of the launch that adds up sums, for each lane at most


class Grouped(NamedTuple):
    """Short rows that share a tile of ``elements``."""

    elements: int
    num_warps: int
    programs_per_unit: int
    num_stages: int


class Long(NamedTuple):
    """The default of rows of more than ``beyond`` and up to ``longest`` elements; elements of a tile are of 16 bits."""

    beyond: int
    longest: int
    grouped: Grouped


class Sums(NamedTuple):
    """Where each program also keeps sums over its rows, so that few of them walk all rows."""

    packed: tuple[Grouped, ...]  # the default of short rows, then what the tuner tries
    lane_elements: int  # of 32-bit arithmetic, that a lane should hold
    warps_per_unit: int  # in programs that keep whole rows
    longest: int  # row that one program keeps
    num_stages: int  # rows or chunks on their way at once
    walked_block: int  # elements of a row that is read by two launches
    walked_programs: int  # a unit, of the second one
    parted_block: int  # the narrowest part of a row whose programs wait
    parted_warps: int
    lag: bool  # whether such a program sums its next row before it waits for this one
    rows: int  # at most, in the tile of the launch that adds up the sums
    columns: int  # at least
    elements: int  # that such a tile should have, of 32 bits
    num_warps: int  # at least
    long: tuple[Long, ...] = ()  # longer rows of which several share a tile


def grouped_of(sums: Sums, work: Work) -> Grouped:
    """The default tile of rows that share one."""
    long = _long(sums, work)
    if long is None:
        return sums.packed[0]
    return long.grouped._replace(elements=long.grouped.elements * 2 // work.element_bytes)


def shares(sums: Sums, work: Work) -> bool:
    """Whether rows share a tile though they are longer than those that do where nothing is summed."""
    return bool(work.partials) and _long(sums, work) is not None


def _long(sums: Sums, work: Work) -> Long | None:
    width = next_power_of_2(work.sizes["N"])
    return next((each for each in sums.long if each.beyond < width <= each.longest), None)


def sum_parameters(sums: Sums, device: Device, work: Work, config: Config) -> dict[str, int]:
    """Those of the launch that adds up what the programs of ``config`` sum over their rows; none where they do not.

    One tile should hold all addends of its columns, so that all loads are on their way at once: a loop over 528
    addends, 64 at a time, waits nine times for memory. Few columns to a tile give enough programs.
    """
    if not work.partials:
        return {}
    n = max(1, work.sizes["N"])
    # An op may add up something else than what its programs sum, such as samples: then a few at a time.
    least = min(LEAST_ADDENDS, max(1, work.sizes["M"]))
    rows = min(sums.rows, next_power_of_2(max(least, _addends(device, work, config))))
    spread = next_power_of_2(cdiv(n, device.units))
    columns = max(sums.columns, min(sums.elements * 4 // (work.compute_bytes * rows), spread))
    columns = min(columns, next_power_of_2(n))
    warps = max(sums.num_warps, rows * columns // (LANE_ADDENDS * device.target.warp_size))
    most = device.max_threads // device.target.warp_size
    return {"SUM_BLOCK_M": rows, "SUM_BLOCK_N": columns, "SUM_WARPS": min(warps, most)}


def _addends(device: Device, work: Work, config: Config) -> int:
    """How many programs sum over rows of their own in each column."""
    blocks, rows = row_blocks(work, config), max(1, work.sizes["M"])
    programs = device.units * max(1, config.params["PROGRAMS_PER_UNIT"])
    parts = cdiv(max(1, work.sizes["N"]), blocks["BLOCK_N"])
    if config.variant == "coresident_row":
        parts = next_power_of_2(parts)
    return max(1, min(programs // parts, cdiv(rows, blocks["BLOCK_M"])))


def packed_config(device: Device, work: Work, base: Config, grouped: Grouped) -> Config:
    """``base`` with the tiles of ``grouped``, as far as there are rows for all units."""
    scale, width, rows = work.compute_bytes // 4, next_power_of_2(work.sizes["N"]), max(1, work.sizes["M"])
    most = min(next_power_of_2(cdiv(rows, 2 * device.units)), next_power_of_2(inner_rows(work)))
    together = max(1, min(grouped.elements // (scale * width), most))
    programs = min(grouped.programs_per_unit, cdiv(cdiv(rows, together), device.units))
    warps = power_of_2_below(grouped.num_warps * together * width * scale // grouped.elements)
    params = {"BLOCK_M": together, "PROGRAMS_PER_UNIT": programs}
    return base.replace(
        params=params,
        num_warps=min(warps, device.max_threads // device.target.warp_size),
        num_stages=grouped.num_stages,
    )


def parted_configs(device: Device, work: Work, base: Config, programs: int, most: int) -> Iterator[Config]:
    """Up to ``most`` parts around the width of ``base``, with 16 or 32 elements a lane, in programs that lag or do not.

    As many ``programs`` of each on a unit as fit.
    """
    block, lanes = base.params["BLOCK_N"], device.target.warp_size
    for size in (block // 2, block, block * 2):
        for each in (16, 32):
            for lag, reread in ((1, 0), (1, 1), (0, 0)):
                params = {"BLOCK_N": size, "PROGRAMS_PER_UNIT": programs, "LAG": lag, "REREAD": reread}
                if size >= lanes * each and size * most >= work.sizes["N"] and (not lag or lags(work)):
                    yield base.replace(params=params, num_warps=size // (lanes * each))


def lags(work: Work) -> bool:
    """Whether programs may hold a third row: each one's addresses take registers where they do not merge."""
    return all(layout == "n16" for layout in work.layout.values())
