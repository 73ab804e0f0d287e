"""What a plugin states for ``row_reduction``: one architecture's numbers, and what each of them means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from portkern.backends._rows_cached import Cached
from portkern.backends._rows_exchange import Exchange
from portkern.backends._rows_model import Model
from portkern.backends._rows_parts import Stated
from portkern.backends._rows_sums import Grouped, Sums
from portkern.record import FrozenMap


class Packed(NamedTuple):
    """Rows no longer than ``longest`` share a program of about ``elements``."""

    longest: int
    elements: int
    num_warps: int


class Resident(NamedTuple):
    """One whole row of up to ``longest`` elements."""

    longest: int
    num_warps: int
    programs_per_unit: int  # 0: one program for each row
    num_stages: int


class Looped(NamedTuple):
    """A row in chunks of ``block`` elements."""

    block: int
    num_warps: int
    num_stages: int


class Parted(NamedTuple):
    """A row over several programs: chunks of ``block``, or parts no narrower than that."""

    block: int
    num_warps: int
    programs_per_unit: int  # how many programs each unit should get, at most
    options: FrozenMap[Any] = FrozenMap()
    num_stages: int = 1


class Columns(NamedTuple):
    """Where neighbouring rows, not elements, are neighbours in memory."""

    rows: int  # in a tile, of 16-bit elements; fewer of wider ones
    block: int  # elements of each row in a tile that does not keep them whole
    num_warps: int  # at most
    longest: int  # row of 16-bit elements that such a tile keeps whole


class Search(NamedTuple):
    """What the tuner may try around the defaults."""

    num_warps: tuple[int, ...]
    num_stages: tuple[int, ...]
    persistent: tuple[tuple[int, int], ...]  # (PROGRAMS_PER_UNIT, num_stages)
    packed_elements: tuple[int, ...]
    looped_blocks: tuple[int, ...]
    column_rows: tuple[int, ...]


@dataclass(frozen=True)
class RowTable:
    """One architecture's numbers.

    ``resident`` is ordered by length; a row longer than its last entry is wide. A row of
    ``split_from`` elements and more is split where there are fewer rows than units.
    """

    packed: Packed
    resident: tuple[Resident, ...]
    looped: Looped
    split: Parted
    coresident: Parted
    columns: Columns
    split_from: int
    search: Search
    model: Model
    cached: tuple[Cached, ...] = ()
    stated: tuple[Stated, ...] = ()  # of ops whose rows share vectors; the first that fits is the default
    crowded: FrozenMap[Any] = FrozenMap()  # options of kernels with CROWDED operands or more
    gathered: Parted | None = None  # as ``split``, for rows of which little is written
    chained_warps: int = 32  # of a row's program that waits for one load after another: others stream meanwhile
    lane_elements: int = 32  # that a lane should hold where a tile's size is free
    exchange: Exchange = Exchange(lane_elements=32, num_warps=8)  # of rows that more programs may share
    sums: Sums = Sums(
        packed=(Grouped(1_024, num_warps=4, programs_per_unit=4, num_stages=1),), lane_elements=16, warps_per_unit=16,
        longest=8_192, num_stages=1, walked_block=1_024, walked_programs=4, parted_block=2_048, parted_warps=4,
        lag=False, rows=1_024, columns=8, elements=4_096, num_warps=8,
    )  # fmt: skip
