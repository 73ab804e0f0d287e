"""The numbers that a plugin states for ``row_reduction``, and the configs that they spell out.

Nothing here looks at registers or shared memory: ``_rows.py`` checks and shrinks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from portkern.backends._rows_model import Model, in_columns, inner_rows
from portkern.backends._shared import cdiv, next_power_of_2, power_of_2_below
from portkern.config import Config
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

FEWEST_COLUMNS = 16  # neighbouring rows in a tile: one 32-byte sector of 16-bit elements
MOST_PARTS = 32  # of a row whose programs wait: one exchanged word for each lane of a narrow warp
TILED = ("packed_rows", "looped_row", "split_row")  # take BLOCK_M
PERSISTENT = ("packed_rows", "resident_row")  # take PROGRAMS_PER_UNIT, 0 for one program a tile


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
    programs_per_unit: int  # how many programs each unit should get


class Columns(NamedTuple):
    """Where neighbouring rows, not elements, are neighbours in memory: ``rows`` x ``block``."""

    rows: int
    block: int
    num_warps: int
    longest: int  # longer columns are read in chunks of ``block``


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


def propose(table: RowTable, device: Device, work: Work, variant: str) -> Config:
    """The config that ``table`` gives for ``variant``."""
    rows, width = max(1, work.sizes["M"]), next_power_of_2(work.sizes["N"])
    if in_columns(work) and variant in TILED:
        return _columns(table, device, work, variant)
    if variant == "packed_rows":
        together = _together(device, work, table.packed.elements // width)
        params = {"BLOCK_M": together, "PROGRAMS_PER_UNIT": 0}
        return _config(variant, params, table.packed.num_warps, 1)
    if variant == "resident_row":
        fitting = (entry for entry in table.resident if width <= entry.longest)
        entry = next(fitting, table.resident[-1])
        per_unit = entry.programs_per_unit if rows > device.units * entry.programs_per_unit else 0
        stages = entry.num_stages if per_unit else 1  # else there is no next row to prefetch
        return _config(variant, {"PROGRAMS_PER_UNIT": per_unit}, entry.num_warps, stages)
    if variant == "looped_row":
        block, warps, stages = table.looped
        together = _together(device, work, block // min(block, width))
        params = {"BLOCK_M": together, "BLOCK_N": min(block, width)}
        return _config(variant, params, warps, stages)
    if variant == "split_row":
        block = min(table.split.block, width)
        params = {"BLOCK_M": 1, "BLOCK_N": block, "SPLITS": _splits(table, device, rows, width // block)}
        return _config(variant, params, table.split.num_warps, 1)
    return _coresident(table.coresident, device, rows, width)


def around(table: RowTable, device: Device, work: Work, variant: str) -> Iterator[Config]:
    """Configs worth trying in the neighbourhood of ``propose``."""
    base, search = propose(table, device, work, variant), table.search
    width, inner = next_power_of_2(work.sizes["N"]), next_power_of_2(inner_rows(work))
    changes: list[dict[str, int]] = [{}]
    if in_columns(work) and variant in TILED:
        changes = [{"BLOCK_M": min(together, inner)} for together in search.column_rows]
    elif variant == "packed_rows":
        sizes = {max(1, elements // width) for elements in search.packed_elements}
        alone = "resident_row" not in work.variants  # which one row is the same as
        changes = [{"BLOCK_M": min(size, inner)} for size in sorted(sizes) if size > 1 or alone]
    elif variant == "looped_row":
        changes = [{"BLOCK_N": min(block, width)} for block in search.looped_blocks]
    elif variant == "split_row":
        splits = base.params["SPLITS"]
        changes = [{"SPLITS": size} for size in (max(2, splits // 2), splits, splits * 2)]
    elif variant == "coresident_row":
        block = base.params["BLOCK_N"]
        changes = [{"BLOCK_N": size} for size in (max(1, block // 2), block, block * 2)]
    loops = search.persistent if variant in PERSISTENT else ((None, stages) for stages in search.num_stages)
    for change, warps, (per_unit, stages) in itertools.product(changes, search.num_warps, loops):
        extra = {} if per_unit is None else {"PROGRAMS_PER_UNIT": per_unit}
        yield base.replace(params={**change, **extra}, num_warps=warps, num_stages=stages)


def _config(variant: str, params: Mapping[str, int], num_warps: int, num_stages: int) -> Config:
    return Config(variant, FrozenMap(params), num_warps, num_stages)


def _together(device: Device, work: Work, most: int) -> int:
    """How many rows share a tile: ``most``, fewer where units would have none."""
    spread = next_power_of_2(cdiv(max(1, work.sizes["M"]), 2 * device.units))
    return max(1, min(power_of_2_below(most), spread, next_power_of_2(inner_rows(work))))


def _splits(table: RowTable, device: Device, tiles: int, most: int) -> int:
    """Parts of each tile so that every unit gets its programs, at most one part to a chunk."""
    wanted = next_power_of_2(cdiv(device.units * table.split.programs_per_unit, tiles))
    return max(2, min(wanted, most))


def _columns(table: RowTable, device: Device, work: Work, variant: str) -> Config:
    columns, rows = table.columns, max(1, work.sizes["M"])
    width = next_power_of_2(work.sizes["N"])
    together, block = min(columns.rows, next_power_of_2(inner_rows(work))), columns.block
    while together > FEWEST_COLUMNS and cdiv(rows, together) < device.units:
        together, block = together // 2, block * 2  # the same tile, for more programs
    params = {"BLOCK_M": together, "BLOCK_N": min(block, width)}
    if variant == "packed_rows":
        params = {"BLOCK_M": together, "PROGRAMS_PER_UNIT": 0}
    if variant == "split_row":
        params["SPLITS"] = _splits(table, device, cdiv(rows, together), width // params["BLOCK_N"])
    return _config(variant, params, columns.num_warps, 1)


def _coresident(parted: Parted, device: Device, rows: int, width: int) -> Config:
    parts = min(MOST_PARTS, max(1, device.units * parted.programs_per_unit // rows))
    block = min(width, max(parted.block, next_power_of_2(cdiv(width, parts))))
    params = {"BLOCK_N": block, "PROGRAMS_PER_UNIT": parted.programs_per_unit}
    return _config("coresident_row", params, parted.num_warps, 1)
