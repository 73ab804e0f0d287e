"""The configs that an architecture's numbers for ``row_reduction`` spell out.

Nothing here looks at registers or shared memory: ``_rows.py`` checks and shrinks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from portkern.backends._rows_cached import cached_configs
from portkern.backends._rows_exchange import MOST_PARTS, exchanging, exchanging_configs
from portkern.backends._rows_model import in_columns, inner_rows, is_gathered
from portkern.backends._rows_sums import grouped_of, lags, packed_config, parted_configs, sum_parameters
from portkern.backends._rows_table import Parted, RowTable
from portkern.config import Config
from portkern.integers import cdiv, next_power_of_2, power_of_2_below
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

COLUMN_BYTES = 32  # of neighbouring rows in the narrowest tile: the least that memory moves
MOST_GATHERED = 1_024  # elements of 32 bits of a row for each warp that only reduces it
HEAVY_LIVE = 5.0  # registers for an element, by which few programs of a row's parts fit on a unit
CROWDED = 4  # operands of a kernel from which on its addresses alone take many registers
TILED = ("packed_rows", "looped_row", "split_row")  # take BLOCK_M
PERSISTENT = ("packed_rows", "resident_row", "cached_row")  # take PROGRAMS_PER_UNIT, 0 for none


def column_rows(table: RowTable, work: Work) -> int:
    """Neighbouring rows in a tile of a column layout."""
    most = max(1, table.columns.rows * 2 // work.element_bytes)
    return min(most, next_power_of_2(inner_rows(work)))


def keeps_columns(table: RowTable, work: Work) -> bool:
    """Whether a tile of a column layout holds its rows whole."""
    largest = table.columns.rows * table.columns.longest * 4 // work.compute_bytes
    return column_rows(table, work) * next_power_of_2(work.sizes["N"]) <= largest


def propose(table: RowTable, device: Device, work: Work, variant: str) -> Config:
    """The config that ``table`` gives for ``variant``."""
    config = with_sums(table, device, work, _proposed(table, device, work, variant))
    return config.replace(options=table.crowded) if len(work.layout) >= CROWDED else config


def with_sums(table: RowTable, device: Device, work: Work, config: Config) -> Config:
    """``config`` with the parameters of its last launch, where it sums over rows."""
    return config.replace(params=sum_parameters(table.sums, device, work, config)) if work.partials else config


def _proposed(table: RowTable, device: Device, work: Work, variant: str) -> Config:
    rows, width = max(1, work.sizes["M"]), next_power_of_2(work.sizes["N"])
    scale = work.compute_bytes // 4  # half as many fp64 elements in a tile, or for a lane
    if variant == "coresident_row" and "SPLITS" in work.takes:
        return exchanging(table.exchange, device, work, *table.coresident[2:4])
    if in_columns(work) and variant in TILED:
        return _columns(table, device, work, variant)
    if work.partials:
        return _summing(table, device, work, variant)
    if variant == "packed_rows":
        together = rows_together(device, work, table.packed.elements // scale // width)
        warps = max(table.packed.num_warps, _warps(table, device, work, together * width))
        return _config(variant, {"BLOCK_M": together, "PROGRAMS_PER_UNIT": 0}, warps)
    if variant == "resident_row":
        fitting = (entry for entry in table.resident if width <= entry.longest)
        entry = next(fitting, table.resident[-1])
        per_unit = entry.programs_per_unit if rows > device.units * entry.programs_per_unit else 0
        stages = entry.num_stages if per_unit else 1  # else there is no next row to prefetch
        warps = entry.num_warps * scale
        if table.gathered and is_gathered(work):
            # What keeps a row only to reduce it: 44 us with 8 warps, 49 with 16, for the maxima of 8192 rows of 8192.
            warps = min(warps, max(table.gathered.num_warps * 2, width * scale // MOST_GATHERED))
        elif work.chained and work.element_bytes == 2:
            warps = min(warps, table.chained_warps)
        return _config(variant, {"PROGRAMS_PER_UNIT": per_unit}, warps, stages)
    if variant == "cached_row":
        found = cached_configs(table.cached, work)
        return found[0] if found else _config(variant, {"PROGRAMS_PER_UNIT": 0}, _warps(table, device, work, width))
    if variant == "looped_row":
        block, warps, stages = table.looped
        params = {"BLOCK_M": 1, "BLOCK_N": min(block // scale, width)}
        if "resident_row" not in work.variants and width < block // scale:
            # A short row of what is walked at any length: 32 elements a lane. 8 warps for 256 columns took 2.5 times as
            # long as one, on one H200.
            warps = max(1, warps * width // block // 2)
        if table.gathered and "SPLITS" in work.takes and work.element_bytes == 4:
            # Welford's recurrence on fp32, 1024 rows of 25,088 on one H200: 89.6 us with 4 warps and 3 stages, 109 so.
            warps, stages = table.gathered.num_warps, table.gathered.num_stages
        # Of fp64, the compiler spills a little to prefetch.
        return _config(variant, params, warps, 1 if scale > 1 else stages)
    if variant == "split_row":
        # Mean and variance of 64 rows of 1,048,576: 144 us in bf16, 225 in fp32 on one H200, 162 and 241 as other rows.
        gathered = table.gathered if is_gathered(work) or "SPLITS" in work.takes else None
        parted = gathered or table.split
        if gathered and work.element_bytes == 4 and work.live[variant] >= HEAVY_LIVE:
            # Of 96 registers a lane half as many programs run at once: moments of 1x67108864 took 77.3 us,
            # not 88.5, of 64x1048576 76.7, not 86.2. In bf16 that saves 7 % of these and costs 2 % of those.
            parted = parted._replace(programs_per_unit=parted.programs_per_unit // 2)
        block = min(parted.block, width)
        params = {"BLOCK_M": 1, "BLOCK_N": block, "SPLITS": _splits(parted, device, rows, width // block)}
        return _config(variant, params, parted.num_warps, 1 if scale > 1 else parted.num_stages)
    block = min(width, max(table.coresident.block, width // MOST_PARTS))
    params = {"BLOCK_N": block, "PROGRAMS_PER_UNIT": table.coresident.programs_per_unit}
    warps = max(1, table.coresident.num_warps * block // table.coresident.block)
    warps = min(warps, device.max_threads // device.target.warp_size)
    return _config(variant, params, warps).replace(options=table.coresident.options)


def around(table: RowTable, device: Device, work: Work, base: Config) -> Iterator[Config]:
    """Configs worth trying in the neighbourhood of ``base``."""
    variant, search = base.variant, table.search
    if variant == "coresident_row" and "SPLITS" in work.takes:
        yield from exchanging_configs(table.exchange, device, work, *table.coresident[2:4])
        return
    if work.partials and variant == "coresident_row":
        yield from parted_configs(device, work, base, table.coresident.programs_per_unit, MOST_PARTS)
        return
    if work.partials and variant == "packed_rows" and not in_columns(work):
        yield from (packed_config(device, work, base, grouped) for grouped in table.sums.packed)
        return
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
        block, programs = base.params["BLOCK_N"], base.params["PROGRAMS_PER_UNIT"]
        changes = [
            {"BLOCK_N": size, "PROGRAMS_PER_UNIT": count}
            for size in (block, block * 2)
            for count in sorted({1, max(1, programs - 1), programs, programs + 1})
        ]
    stages = search.num_stages if variant in ("looped_row", "split_row") else (1,)
    loops = search.persistent if variant in PERSISTENT else tuple((None, number) for number in stages)
    if work.partials and variant in PERSISTENT:  # one program a tile would keep too many sums
        loops = (*(loop for loop in loops if loop[0]), (2, 1), (2, 3), (4, 1), (8, 1))
    wanted = search.num_warps
    if work.partials and variant in ("looped_row", "split_row"):
        loops = tuple((count, number) for count in (2, 4, 8) for number in stages)
        if not in_columns(work):  # these read everything twice: a few will do
            loops = tuple((count, base.num_stages) for count in (4, 8))
            wanted = tuple(base.num_warps * factor for factor in (1, 2, 4))
    for change, warps, (per_unit, number) in itertools.product(changes, wanted, loops):
        extra = {} if per_unit is None else {"PROGRAMS_PER_UNIT": per_unit}
        yield base.replace(params={**change, **extra}, num_warps=warps, num_stages=number)


def _config(variant: str, params: Mapping[str, int], num_warps: int, num_stages: int = 1) -> Config:
    return Config(variant, FrozenMap(params), num_warps, num_stages)


def _summing(table: RowTable, device: Device, work: Work, variant: str) -> Config:
    """What an op that also sums over rows starts from: tiles of few elements a lane, since sums take registers too."""
    sums, rows, width = table.sums, max(1, work.sizes["M"]), next_power_of_2(work.sizes["N"])
    scale, lanes = work.compute_bytes // 4, device.target.warp_size
    if variant == "packed_rows":
        return packed_config(device, work, _config(variant, {}, 1), grouped_of(sums, work))
    if variant in PERSISTENT:
        warps = min(device.max_threads // lanes, power_of_2_below(width * scale // (lanes * sums.lane_elements)))
        per_unit = min(cdiv(sums.warps_per_unit, warps), cdiv(rows, device.units))
        return _config(variant, {"PROGRAMS_PER_UNIT": per_unit}, warps, sums.num_stages)
    if variant == "coresident_row":
        block = min(width, max(sums.parted_block, width // MOST_PARTS))
        lag = int(sums.lag and lags(work))
        most = table.coresident.programs_per_unit
        params = {"BLOCK_N": block, "PROGRAMS_PER_UNIT": most, "LAG": lag, "REREAD": 0}
        return _config(variant, params, sums.parted_warps).replace(options=table.coresident.options)
    block = min(sums.walked_block // scale, width)
    params = {"BLOCK_M": 1, "BLOCK_N": block, "PROGRAMS_PER_UNIT": sums.walked_programs}
    if variant == "split_row":
        params["SPLITS"] = _splits(table.split, device, rows, width // block)
    warps = power_of_2_below(block * scale // (lanes * sums.lane_elements))
    return _config(variant, params, warps, sums.num_stages)


def _warps(table: RowTable, device: Device, work: Work, elements: int) -> int:
    """Warps for a tile of ``elements`` at the table's number of elements a lane."""
    lanes = device.target.warp_size
    each = table.lane_elements * 4 // work.compute_bytes
    return min(device.max_threads // lanes, power_of_2_below(elements // (lanes * each)))


def rows_together(device: Device, work: Work, most: int) -> int:
    """How many rows share a tile: ``most``, fewer where units would have none."""
    spread = next_power_of_2(cdiv(max(1, work.sizes["M"]), 2 * device.units))
    return max(1, min(power_of_2_below(most), spread, next_power_of_2(inner_rows(work))))


def _splits(parted: Parted, device: Device, tiles: int, most: int) -> int:
    """Parts of each tile so that every unit gets its programs, at most one part to a chunk."""
    wanted = power_of_2_below(cdiv(device.units * parted.programs_per_unit, tiles))
    return max(2, min(wanted, most))


def _columns(table: RowTable, device: Device, work: Work, variant: str) -> Config:
    rows, width = max(1, work.sizes["M"]), next_power_of_2(work.sizes["N"])
    together = column_rows(table, work)
    while together * work.element_bytes > COLUMN_BYTES and cdiv(rows, together) < device.units:
        together //= 2  # for more programs
    if variant == "packed_rows":
        warps = min(table.columns.num_warps, _warps(table, device, work, together * width))
        programs = table.sums.walked_programs if work.partials else 0
        params = {"BLOCK_M": together, "PROGRAMS_PER_UNIT": programs}
        return _config(variant, params, warps)
    params = {"BLOCK_M": together, "BLOCK_N": min(table.columns.block, width)}
    if work.partials:
        params["PROGRAMS_PER_UNIT"] = table.sums.walked_programs
    if variant == "split_row":
        params["SPLITS"] = _splits(table.split, device, cdiv(rows, together), width // params["BLOCK_N"])
    return _config(variant, params, table.looped.num_warps)
