"""What a plugin states for ops over rows that also sum over them: a weight's gradient."""

from __future__ import annotations

from typing import NamedTuple

from portkern.backends._shared import next_power_of_2
from portkern.problem import Work


class Sums(NamedTuple):
    """Where each program also keeps sums over its rows, so that few of them walk all rows."""

    packed_elements: int  # of the rows that share a tile
    lane_elements: int  # of 32-bit arithmetic, that a lane should hold
    warps_per_unit: int  # in programs that keep whole rows
    longest: int  # row that one program keeps
    num_stages: int  # rows or chunks on their way at once
    walked_block: int  # elements of a row that is read by two launches
    walked_programs: int  # a unit, of the second one
    parted_block: int  # the narrowest part of a row whose programs wait
    parted_warps: int
    rows: int  # the tile of the launch that adds up the sums
    columns: int
    num_warps: int


def sum_parameters(sums: Sums, work: Work) -> dict[str, int]:
    """Those of the launch that adds up what programs sum over their rows; none where they do not."""
    if not work.partials:
        return {}
    columns = min(sums.columns, next_power_of_2(work.sizes["N"]))
    return {"SUM_BLOCK_M": sums.rows, "SUM_BLOCK_N": columns, "SUM_WARPS": sums.num_warps}
