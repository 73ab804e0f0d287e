"""The rules of the kind ``gemm``: C[b, m, n] = sum over (r, k) of A[b, r, m, k] B[b, r, k, n].

Variants: ``tiles`` (one program computes one tile of C and reads by pointers), ``persistent`` (as many programs as run
at once walk the tiles and read by tensor descriptors), ``split_k`` (either, with SPLITS programs for one tile, and a
second launch that adds their parts). PACK_A, PACK_B: a launch before copies an operand so that it is read well.

A table lists tiles that were compiled without spills, for each precision of the product; the model picks among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from portkern.backends._gemm_offers import accumulator, around, gemm_blocks, offered, takes, tiles_of, variants_of
from portkern.backends._gemm_table import GemmTable, SharedMemory, precision, vectors
from portkern.backends._shared import CommonBackend, Kind, refuse_registers
from portkern.config import Blocks, Config
from portkern.errors import Infeasible
from portkern.gemm import by_descriptors, copies, copies_of, packed
from portkern.integers import cdiv
from portkern.problem import Work
from portkern.target import Device

DISTINCT = 5  # tiles to try before the moves around the first
UNLISTED = 0.3  # the speed of a tile that no table lists, at most
COPIES_SHARE = 8  # copies of operands take no more than this part of the memory: what nearly fills it runs without them


@dataclass(frozen=True)
class Gemm(Kind):
    """The kind ``gemm`` with one architecture's numbers."""

    table: GemmTable
    shared: SharedMemory

    def default(self, rules: CommonBackend, device: Device, work: Work, variant: str | None) -> Config:
        wanted = variants_of(work) if variant is None else (variant,)
        found: list[tuple[float, str, Config]] = []
        reasons = []
        for name in wanted:
            try:
                configs = offered(self.table, device, work, name)
            except Infeasible as error:
                reasons.append(str(error))
                continue
            for config in configs:
                blocks = gemm_blocks(work, config)
                refusal = self.refuse(rules, device, work, config, blocks)
                if refusal:
                    reasons.append(refusal)
                else:
                    taken = self.estimate(rules, device, work, config, blocks)
                    margin = self.table.model.split_margin if name == "split_k" else 1.0
                    found.append((taken * margin, str(config), config))
        if found:
            return min(found, key=lambda entry: entry[:2])[2]
        if variant is None:  # nothing fits: refuse() says why
            return offered(self.table, device, work, "tiles")[-1]
        raise Infeasible(reasons[-1])

    def candidates(self, rules: CommonBackend, device: Device, work: Work) -> Iterable[Config]:
        default = self.default(rules, device, work, None)
        listed: dict[Config, None] = {}
        for variant in variants_of(work):
            try:
                listed |= dict.fromkeys(offered(self.table, device, work, variant, trials=True))
            except Infeasible:
                continue
        tiles = self._ranked(rules, device, work, listed)
        others = {config.variant: config for config in reversed(tiles) if config.variant != default.variant}
        # The model knows least of operands that cannot be read 16 bytes at a time: the best with and without copies.
        otherwise = [config for config in tiles if copies(config) != copies(default)][:1]
        first = [default, *otherwise, *reversed(others.values()), *tiles[:DISTINCT]]
        # What is cut has three times as many: moves around the best will do.
        moved = [tile for tile in tiles if tile.variant != "split_k" or tile in first]
        moves = self._ranked(rules, device, work, (near for tile in moved for near in around(tile)))
        # Some tiles that differ, some moves around the best, then all the rest: a model is worth as much.
        return tuple(dict.fromkeys((*first, *around(default), *tiles, *moves)))

    def _ranked(self, rules: CommonBackend, device: Device, work: Work, configs: Iterable[Config]) -> list[Config]:
        """``configs`` by the model, those that are sure to be refused last."""
        scored = []
        for config in dict.fromkeys(configs):
            blocks = gemm_blocks(work, config)
            refused = self.refuse(rules, device, work, config, blocks) is not None
            scored.append((refused, self.estimate(rules, device, work, config, blocks), str(config), config))
        return [entry[-1] for entry in sorted(scored, key=lambda entry: entry[:3])]

    def refuse(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        if by_descriptors(config) and self.table.no_descriptors:
            return self.table.no_descriptors
        refusal = self._refuse_copies(device, work, config)
        work = packed(work, config.params)
        return (
            refusal
            or self._refuse_accumulator(rules, device, work, config, blocks)
            or self._refuse_shared(device, work, config, blocks)
        )

    def estimate(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
        work = packed(work, config.params)
        sizes, model, kind = work.sizes, self.table.model, precision(work)
        splits = blocks["SPLITS"]
        tiles = splits * tiles_of(work, m, n)
        steps = max(1, sizes.get("R", 1) * cdiv(cdiv(max(1, sizes["K"]), k), splits))
        rate = device.matrix_tflops * 1e6 * self.table.rates[kind] / device.units * self._speed(work, config)
        read = (m + n) * k * work.element_bytes / (model.cache_gbps * 1e3 / device.units)
        busy = max(2 * m * n * k / rate, read)
        fit = self._resident(rules, device, work, config, blocks)
        programs = min(tiles, device.units * fit)
        # A unit's programs share its matrix unit; each of them waits for its own blocks.
        waits = model.loose_us
        if all(vectors(work)) or work.element_bytes >= 4:
            coming = (m + n) * k * work.element_bytes / (model.unit_gbps * 1e3)
            waits = (model.load_us + coming) / max(1, config.num_stages - 1)
        alone = steps * max(busy, waits) + model.tile_us
        rounds = cdiv(tiles, programs) * alone
        if by_descriptors(config):
            rounds += model.descriptor_us
        computing = cdiv(tiles, device.units) * steps * busy
        if config.variant == "persistent":
            rounds -= (cdiv(tiles, programs) - 1) * model.tile_us / 2  # the next tile loads while one is stored
        moved = (work.reads + work.writes) / (device.memory_gbps * 1e3 * model.memory_share)
        # What is hidden is not hidden quite: of tiles that wait for the same, those that do least besides come first.
        taken = max(rounds, computing, moved) + model.unhidden * (rounds + busy)
        return taken + model.launch_us + self._sum_us(device, work, splits) + self._pack_us(device, work, config)

    def _sum_us(self, device: Device, work: Work, splits: int) -> float:
        """What writing the parts of sums and adding them takes, beyond the result alone."""
        if splits == 1:
            return 0.0
        model, sizes = self.table.model, work.sizes
        parts = splits * sizes["BATCH"] * sizes["M"] * sizes["N"] * work.compute_bytes
        gbps = model.sum_gbps if parts <= device.cache_bytes else device.memory_gbps
        return model.sum_us + 2 * parts / (gbps * 1e3)

    def _pack_us(self, device: Device, work: Work, config: Config) -> float:
        """What the launches take that copy operands, once over each."""
        model, sizes, taken = self.table.model, work.sizes, 0.0
        for name, rows in (("PACK_A", "M"), ("PACK_B", "N")):
            if config.params.get(name):
                size = sizes["BATCH"] * sizes[rows] * sizes["K"] * sizes.get("R", 1) * work.element_bytes
                taken += model.sum_us + 2 * size / (device.memory_gbps * 1e3 * model.memory_share)
        return taken

    def _speed(self, work: Work, config: Config) -> float:
        """The table's for this tile; less of one that it lists with other warps alone, or not at all."""
        kind = precision(work)
        listed = (self.table.tiles if all(vectors(work)) else self.table.loose)[kind]
        if by_descriptors(config):
            listed = self.table.persistent[kind]
        m, n = config.params["BLOCK_M"], config.params["BLOCK_N"]
        listed = tuple(tile for tile in listed if takes(tile, work))
        alike = [tile for tile in listed if (tile.m, tile.n) == (m, n)]
        same = [tile for tile in alike if tile.num_warps == config.num_warps]
        flatten, slices = config.params.get("FLATTEN", 0), config.params.get("SLICES", 1)
        exact = [t for t in same if (t.num_stages, t.params.get("FLATTEN", 0)) == (config.num_stages, flatten)]
        sliced = [tile for tile in exact if tile.params.get("SLICES", 1) == slices]
        if same:
            return max(tile.speed for tile in sliced or exact or same)
        return min(UNLISTED, 0.9 * max((tile.speed for tile in alike), default=1.0))

    def _resident(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> int:
        registers = round(accumulator(device, work, config, blocks)) + 60
        shared = self.shared.bytes_of(work, config, blocks)
        fits = rules.programs_per_unit(device, min(registers, device.max_registers), shared, config.num_warps)
        return max(1, min(fits, config.params.get("PROGRAMS_PER_UNIT", fits)))

    def _refuse_copies(self, device: Device, work: Work, config: Config) -> str | None:
        taken = sum(math.prod(copy) for copy in copies_of(work, config.params)) * work.element_bytes
        if taken * COPIES_SHARE <= device.memory_bytes:
            return None
        return (
            f"its copies of operands would take {taken:,} bytes, over the {device.memory_bytes // COPIES_SHARE:,} of "
            f"{device.name}'s {device.memory_bytes:,} that are left to them: pack nothing, or one operand alone"
        )

    def _refuse_accumulator(
        self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks
    ) -> str | None:
        """Nothing simple predicts spills of a product, only the compiler does; but sums have to fit at the least."""
        registers = accumulator(device, work, config, blocks)
        if registers >= rules.register_cap(device, config):
            return refuse_registers(rules, device, registers / rules.register_margin + 1, config)
        return None

    def _refuse_shared(self, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        taken = self.shared.bytes_of(work, config, blocks)
        if taken <= device.shared_bytes:
            return None
        m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
        return (
            f"blocks of {m}x{k} and {k}x{n} in num_stages={config.num_stages} would take {taken:,} bytes of shared "
            f"memory, over the {device.shared_bytes:,} that {device.name} gives a program: use fewer stages or "
            "smaller blocks"
        )
