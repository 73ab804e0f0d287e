"""The rules of the kind ``pointwise``: a grid of elements, each computed by itself.

One variant, ``blocks``: a program computes a tile of BLOCK elements; with PROGRAMS_PER_UNIT above 0, that many programs
a unit walk the tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from portkern.backends._shared import CommonBackend, Kind, refuse_registers
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.integers import cdiv, next_power_of_2, power_of_2_below
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

VARIANT = "blocks"
BASE_REGISTERS = 14.0
LOOSE_REGISTERS = 2.0  # for each element and operand that cannot be read 16 bytes at a time: an address
SMALLEST_BLOCK = 128


@dataclass(frozen=True)
class PointwiseTable:
    """The numbers of one architecture: bytes that a lane reads of one operand before it computes, and what to try."""

    lane_bytes: int
    num_warps: int
    search_warps: tuple[int, ...]
    latency_us: float  # of one program
    launch_us: float
    lane_gops: float  # instructions of all lanes of one unit, 10^9 a second
    search_bytes: tuple[int, ...] = (16, 32, 64)
    search_programs: tuple[int, ...] = (0, 4, 8, 16)


@dataclass(frozen=True)
class Pointwise(Kind):
    """The kind ``pointwise`` with one architecture's numbers."""

    table: PointwiseTable

    def default(self, rules: CommonBackend, device: Device, work: Work, variant: str | None) -> Config:
        if VARIANT not in work.variants or variant not in (None, VARIANT):
            raise UnknownName(
                f"variant {variant or ', '.join(work.variants)!r} is none of the kind {work.kind}, which has {VARIANT}"
            )
        warps = self.table.num_warps
        numel = max(1, math.prod(work.sizes.values()))
        block = self._block(device, work, self.table.lane_bytes, warps)
        # Few elements are spread over all units.
        block = max(SMALLEST_BLOCK, min(block, next_power_of_2(cdiv(numel, device.units))))
        while True:
            lanes = device.target.warp_size
            chosen = max(1, min(warps, power_of_2_below(block * work.element_bytes // 16 // lanes)))
            config = Config(VARIANT, FrozenMap(BLOCK=block, PROGRAMS_PER_UNIT=0), num_warps=chosen, num_stages=1)
            reason = self._refuse(rules, device, work, config)
            if reason is None or block <= SMALLEST_BLOCK:
                break
            block //= 2
        if reason is not None and variant is not None:
            raise Infeasible(reason)
        return config

    def candidates(self, rules: CommonBackend, device: Device, work: Work) -> Iterable[Config]:
        table, default = self.table, self.default(rules, device, work, None)
        found: dict[Config, None] = {}
        for lane, warps, programs in itertools.product(table.search_bytes, table.search_warps, table.search_programs):
            block = self._block(device, work, lane, warps)
            params = FrozenMap(BLOCK=block, PROGRAMS_PER_UNIT=programs)
            found[Config(VARIANT, params, num_warps=warps, num_stages=1)] = None
        found.pop(default, None)
        scored = []
        for config in found:
            blocks = Blocks(BLOCK=config.params["BLOCK"])
            refused = self.refuse(rules, device, work, config, blocks) is not None
            scored.append((refused, self.estimate(rules, device, work, config, blocks), str(config), config))
        scored.sort(key=lambda entry: entry[:3])
        return (default, *(config for *_, config in scored))

    def refuse(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        return self._refuse(rules, device, work, config)

    def estimate(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        table, block = self.table, config.params["BLOCK"]
        numel = max(1, math.prod(work.sizes.values()))
        tiles = cdiv(numel, block)
        fits = rules.programs_per_unit(device, round(_registers(device, work, config)), 0, config.num_warps)
        per_unit = config.params.get("PROGRAMS_PER_UNIT", 0)
        resident = max(1, min(fits, per_unit) if per_unit else fits)
        programs = max(1, min(tiles, device.units * resident))
        rounds = cdiv(tiles, programs)
        moved = (work.reads + work.writes) / (device.memory_gbps * 1e3)
        # Bytes in flight hide latency; a unit with few of them waits.
        waits = rounds * table.latency_us / max(1.0, rounds)
        arithmetic = numel * sum(work.live.values()) * 4 / (min(programs, device.units) * table.lane_gops * 1e3)
        alone = rounds * (table.latency_us * 0.1 if per_unit == 0 else table.latency_us * 0.2)
        return max(moved, arithmetic, alone) + waits + table.launch_us

    def _block(self, device: Device, work: Work, lane_bytes: int, warps: int) -> int:
        """Elements of a tile of which a lane reads ``lane_bytes`` of the widest operand."""
        return warps * device.target.warp_size * max(1, lane_bytes // work.element_bytes)

    def _refuse(self, rules: CommonBackend, device: Device, work: Work, config: Config) -> str | None:
        if "BLOCK" not in config.params:
            return f"variant {config.variant!r} needs the parameter BLOCK"
        return refuse_registers(rules, device, _registers(device, work, config), config)


def _registers(device: Device, work: Work, config: Config) -> float:
    """Registers of a lane: what the function keeps of each element, and an address where loads are not wide."""
    elements = config.params["BLOCK"] / (config.num_warps * device.target.warp_size)
    loose = sum(LOOSE_REGISTERS for layout in work.layout.values() if layout not in ("n16", "r"))
    return BASE_REGISTERS + (work.live[VARIANT] + loose) * max(1.0, elements)
