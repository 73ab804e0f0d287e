"""The rules of the kind ``row_reduction``: M rows of N elements, each reduced along N.

Variants: ``packed_rows`` (several whole rows in one program), ``resident_row`` (one whole row, in
registers), ``cached_row`` (the same, kept by the nearest cache and read again), ``looped_row`` (a
row in chunks), ``split_row`` (a row over several programs, two launches), ``coresident_row`` (a row
over programs that run at once and wait for each other).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from portkern.backends._rows_cached import LEAN, cached_configs
from portkern.backends._rows_configs import (
    COLUMN_BYTES,
    CROWDED,
    TILED,
    around,
    column_rows,
    keeps_columns,
    propose,
    rows_together,
    with_sums,
)
from portkern.backends._rows_exchange import MOST_PARTS, most_parts
from portkern.backends._rows_model import (
    estimate_us,
    footprint,
    in_columns,
    is_gathered,
    operands_read,
    parts_of,
    row_blocks,
)
from portkern.backends._rows_parts import NARROW_BYTES, STATED, stated
from portkern.backends._rows_sums import shares
from portkern.backends._rows_table import RowTable
from portkern.backends._shared import CommonBackend, Kind, refuse_registers, refuse_shared
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.integers import cdiv, next_power_of_2
from portkern.problem import Work
from portkern.target import Device

VARIANTS = ("packed_rows", "resident_row", "cached_row", "looped_row", "split_row", "coresident_row")
SMALLEST_CHUNK = 64  # of a row, when a block is shrunk until it fits


@dataclass(frozen=True)
class RowReduction(Kind):
    """The kind ``row_reduction`` with one architecture's numbers."""

    table: RowTable

    def default(self, rules: CommonBackend, device: Device, work: Work, variant: str | None) -> Config:
        if variant is not None:
            return self._default_of(rules, device, work, variant)
        order = self._preference(rules, device, work)
        for name in order:
            try:
                return self._default_of(rules, device, work, name)
            except Infeasible:
                continue
        return propose(self.table, device, work, order[0])  # nothing fits: refuse() says why

    def candidates(self, rules: CommonBackend, device: Device, work: Work) -> Iterable[Config]:
        default = self.default(rules, device, work, None)
        found = {default, *self._stated(rules, device, work)}
        for variant in self._preference(rules, device, work):
            if variant == "cached_row":
                again = cached_configs(self.table.cached, work)
                found.update(again)
                if not again:
                    continue
            proposed = _with_programs(rules, device, work, propose(self.table, device, work, variant))
            for config in around(self.table, device, work, proposed):
                counted = work.partials or "SPLITS" in work.takes
                fitting = _with_programs(rules, device, work, config) if counted else config
                found.add(with_sums(self.table, device, work, fitting))
        scored: list[tuple[bool, float, str, Config]] = []
        for config in found - {default}:
            blocks = row_blocks(work, config)
            if footprint(rules, device, work, config, blocks).elements >= 1:
                refused = rules.refuse(device, work, config, blocks) is not None
                score = self.estimate(rules, device, work, config, blocks)
                scored.append((refused, score, str(config), config))
        scored.sort(key=lambda entry: entry[:3])  # what is sure to be refused comes last
        return (default, *(config for *_, config in scored))

    def refuse(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        use = footprint(rules, device, work, config, blocks)
        return (
            refuse_registers(rules, device, use.registers, config)
            or refuse_shared(device, use.shared_bytes, config)
            or _refuse_parts(rules, device, work, config, blocks)
        )

    def estimate(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        us = estimate_us(self.table.model, rules, device, work, config, blocks)
        return us * STATED if config in self._stated(rules, device, work) else us

    def _stated(self, rules: CommonBackend, device: Device, work: Work) -> Iterator[Config]:
        return (_with_programs(rules, device, work, each) for each in stated(self.table.stated, device, work))

    def _preference(self, rules: CommonBackend, device: Device, work: Work) -> tuple[str, ...]:
        """The variants of ``work``, the most promising first."""
        table, rows, width = self.table, work.sizes["M"], next_power_of_2(work.sizes["N"])
        few, long = rows < device.units, width >= table.split_from
        order: tuple[str, ...]
        if in_columns(work):
            idle = 2 * cdiv(rows, column_rows(table, work)) < device.units
            split = ("split_row",) if idle and long else ()
            whole = ("packed_rows",) if keeps_columns(table, work) else ()
            order = (*split, *whole, "looped_row", "packed_rows")
        elif width <= table.packed.longest or shares(table.sums, work):
            order = ("packed_rows", "resident_row")
        elif work.partials:
            held = ("resident_row", "coresident_row")
            # With less than two rows a unit its programs idle: 256 of 40,960 in fp16 took an H200 50 us, cut in two 42.
            cut = "split_row" if rows < 2 * device.units else "looped_row"
            order = (*(held[::-1] if width > table.sums.longest else held), cut)
        elif few and long:
            busy = rows * MOST_PARTS >= device.units
            shared = ("coresident_row", "split_row") if busy else ("split_row", "coresident_row")
            order = (*shared, "resident_row")
        elif width <= table.resident[-1].longest:
            cached = ("cached_row",) if cached_configs(table.cached, work) else ()
            order = (*cached, "resident_row", "coresident_row")
            lean = work.live.get("cached_row", math.inf) <= LEAN
            if table.gathered and is_gathered(work) and self._walks(work, width):
                order = ("looped_row", "resident_row")
            elif not (cached or lean) and self._alone(rules, device, work):
                order = ("coresident_row", "resident_row")
        else:
            order = ("coresident_row", "split_row" if few else "looped_row")
        first = next(stated(table.stated, device, work), None)
        known = dict.fromkeys((*((first.variant,) if first else ()), *order, "looped_row", *VARIANTS))
        found = tuple(variant for variant in known if variant in work.variants)
        if not found:
            raise UnknownName(
                f"none of the variants {', '.join(work.variants)} is one of the kind "
                f"{work.kind}, which has {', '.join(VARIANTS)}"
            )
        return found

    def _walks(self, work: Work, width: int) -> bool:
        """Whether a row of which nothing is written is walked though it could be kept: 4096 rows of 32,768 took an H200
        87 us walked and 106 kept in 16 bits, 147 and 134 in float32."""
        return work.element_bytes == NARROW_BYTES and width == self.table.resident[-1].longest

    def _alone(self, rules: CommonBackend, device: Device, work: Work) -> bool:
        """Whether a row that is kept whole leaves no room on its unit for a second one, to hide its latency. Where two
        operands are read it needs none: of four ops at 4096x32768 in 16 bits an H200 took 192 to 263 us with rows kept
        whole, 206 to 290 with shared ones. Nor does a row that is soon read: 256 of 10,240 took 9.4 us, shared 13.7."""
        if "resident_row" not in work.variants or next_power_of_2(work.sizes["N"]) < self.table.resident[-1].longest:
            return False
        config = propose(self.table, device, work, "resident_row")
        fitting = _programs(rules, device, work, config, row_blocks(work, config))
        return fitting < (1 if operands_read(work) > 1 else 2)

    def _default_of(self, rules: CommonBackend, device: Device, work: Work, variant: str) -> Config:
        known = [name for name in VARIANTS if name in work.variants]
        if variant not in known:
            raise UnknownName(f"variant {variant!r} is none of this work's: {', '.join(known)}")
        first = next(self._stated(rules, device, work), None)  # the others are for the tuner
        if first is not None and first.variant == variant and _has_rows(device, work, first):
            if rules.refuse(device, work, first, row_blocks(work, first)) is None:
                return first
        if variant == "cached_row" and not cached_configs(self.table.cached, work):
            raise Infeasible(
                f"{device.name} gains nothing from {variant} at N={work.sizes['N']} and {work.element_bytes} bytes an "
                "element: use a variant that keeps the row in registers, or one that walks it"
            )
        reason = ""
        proposed = _wider(rules, device, work, propose(self.table, device, work, variant))
        for smaller in _ever_smaller(device, work, proposed):
            config = _fuller(rules, device, work, smaller)
            config = with_sums(self.table, device, work, config)
            refused = rules.refuse(device, work, config, row_blocks(work, config))
            if refused is None:
                return config
            reason = reason or refused
        raise Infeasible(f"{device.name} cannot hold {variant} at N={work.sizes['N']}: {reason}")


def _with_programs(rules: CommonBackend, device: Device, work: Work, config: Config) -> Config:
    """``config`` with as many waiting programs on a unit as it names, as fit, and as find work."""
    if config.variant not in work.waiting:
        return config
    blocks = row_blocks(work, config)
    useful = cdiv(max(1, work.sizes["M"]) * parts_of(work, config, blocks), device.units)
    fits = _programs(rules, device, work, config, blocks)
    most = config.params["PROGRAMS_PER_UNIT"]
    return config.replace(params={"PROGRAMS_PER_UNIT": max(1, min(most, fits, useful))})


def _wider(rules: CommonBackend, device: Device, work: Work, config: Config) -> Config:
    """``config`` of an op with many operands, or the same with parts of twice the width, where its programs then hold
    more of their rows at once: two of 8,192 columns took an H200 1,201 us for what three of 4,096 took 1,383."""
    if config.variant not in work.waiting or work.partials or len(work.layout) < CROWDED:
        return config
    wide = config.replace(params={"BLOCK_N": config.params["BLOCK_N"] * 2})
    fits = {each: _with_programs(rules, device, work, each).params for each in (config, wide)}
    refused = rules.refuse(device, work, wide.replace(params=fits[wide]), row_blocks(work, wide)) is not None
    return config if refused else max(fits, key=lambda each: fits[each]["BLOCK_N"] * fits[each]["PROGRAMS_PER_UNIT"])


def _has_rows(device: Device, work: Work, config: Config) -> bool:
    """Whether there are rows enough for tiles of as many as ``config`` names, on all units."""
    rows = config.params.get("BLOCK_M", 1)
    return config.variant not in TILED or rows_together(device, work, rows) == rows


def _fuller(rules: CommonBackend, device: Device, work: Work, config: Config) -> Config:
    """``config`` with its programs, or the same that reads rows again, where more of its programs fit so.

    Half as many more, of wide elements: three programs in float32 took an H200 395 us, four that read again 491.
    """
    held = _with_programs(rules, device, work, config)
    if not config.params.get("LAG"):
        return held
    again = _with_programs(rules, device, work, config.replace(params={"REREAD": 1}))
    more, fits = again.params["PROGRAMS_PER_UNIT"], held.params["PROGRAMS_PER_UNIT"]
    narrow = work.element_bytes == NARROW_BYTES
    return again if more > fits and (narrow or 2 * more >= 3 * fits) else held


def _programs(rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> int:
    use = footprint(rules, device, work, config, blocks)
    return rules.programs_per_unit(device, int(use.registers), use.shared_bytes, config.num_warps)


def _ever_smaller(device: Device, work: Work, config: Config) -> Iterator[Config]:
    """``config``, then what takes less: other warps and fewer stages, then smaller blocks."""
    most = device.max_threads // device.target.warp_size
    start = min(config.num_warps, most)
    more = [2**power * start for power in range(16) if 2**power * start <= most]
    fewer = [start >> power for power in range(1, start.bit_length())]
    for smaller in _smaller_blocks(work, config):
        for warps in (*more, *fewer):
            for stages in range(config.num_stages, 0, -1):
                same = (warps, stages) == (smaller.num_warps, smaller.num_stages)
                yield smaller if same else smaller.replace(num_warps=warps, num_stages=stages)


def _smaller_blocks(work: Work, config: Config) -> Iterator[Config]:
    floor = max(1, COLUMN_BYTES // work.element_bytes) if in_columns(work) else 1
    yield config
    for name, least in (("BLOCK_M", floor), ("BLOCK_N", SMALLEST_CHUNK), ("BLOCK_M", 1)):
        while config.params.get(name, 0) > least:
            config = config.replace(params={name: config.params[name] // 2})
            yield config


def _refuse_parts(rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
    """Why the programs that share a row cannot all run at once, or None."""
    if config.variant not in work.waiting:
        return None
    width, most = blocks.get("BLOCK_N", next_power_of_2(work.sizes["N"])), most_parts(work)
    parts = parts_of(work, config, blocks)
    per_unit = max(1, config.params.get("PROGRAMS_PER_UNIT", 1))
    fits = _programs(rules, device, work, config, blocks)
    if parts > most:
        return (
            f"BLOCK_N={width} makes {parts} parts of a row; at most {most} can wait for each "
            f"other: use a BLOCK_N of {next_power_of_2(cdiv(work.sizes['N'], most))}"
        )
    if per_unit > fits:
        return (
            f"PROGRAMS_PER_UNIT={per_unit} waiting programs, but about {fits} fit on one unit of "
            f"{device.name}: ask for fewer, or for a smaller BLOCK_N"
        )
    if parts > device.units * per_unit:
        return (
            f"BLOCK_N={width} makes {parts} parts of a row, over the {device.units * per_unit} "
            f"programs that run at once on {device.name}: use a larger BLOCK_N"
        )
    return None
