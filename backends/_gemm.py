"""The rules of the kind ``gemm``: C[b, m, n] = sum over (r, k) of A[b, r, m, k] B[b, r, k, n].

Variants: ``tiles`` (one program computes one tile of C and reads by pointers), ``persistent`` (as many programs as run
at once walk the tiles and read by tensor descriptors), ``split_k`` (either, with SPLITS programs for one tile, and a
second launch that adds their parts).

A table lists tiles that were compiled without spills, for each precision of the product; the model picks among them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from portkern.backends._gemm_table import GemmTable, SharedMemory, Tile, precision, vectors
from portkern.backends._shared import (
    CommonBackend,
    Kind,
    cdiv,
    next_power_of_2,
    power_of_2_below,
    refuse_registers,
)
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.gemm import by_descriptors
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

VARIANTS = ("tiles", "persistent", "split_k")
LEAST_BLOCK = 16  # that a matrix instruction takes
GROUPS = (4, 8, 16, 1)  # of rows of tiles, worth trying
MOST_SPLITS = 64
CROWDED = 128  # sums of a lane
LEAST_STEPS = 4  # of each part, so that the loads of one block cover for those of another
DISTINCT = 5  # tiles to try before the moves around the first


@dataclass(frozen=True)
class Gemm(Kind):
    """The kind ``gemm`` with one architecture's numbers."""

    table: GemmTable
    shared: SharedMemory

    def default(self, rules: CommonBackend, device: Device, work: Work, variant: str | None) -> Config:
        wanted = self._variants(work) if variant is None else (variant,)
        found: list[tuple[float, str, Config]] = []
        reasons = []
        for name in wanted:
            try:
                offered = self._offered(device, work, name)
            except Infeasible as error:
                reasons.append(str(error))
                continue
            for config in offered:
                blocks = gemm_blocks(device, work, config)
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
            return self._offered(device, work, "tiles")[-1]
        raise Infeasible(reasons[-1])

    def candidates(self, rules: CommonBackend, device: Device, work: Work) -> Iterable[Config]:
        default = self.default(rules, device, work, None)
        listed: dict[Config, None] = {}
        for variant in self._variants(work):
            try:
                listed |= dict.fromkeys(self._offered(device, work, variant, trials=True))
            except Infeasible:
                continue
        tiles = self._ranked(rules, device, work, listed)
        others = {config.variant: config for config in reversed(tiles) if config.variant != default.variant}
        first = [default, *reversed(others.values()), *tiles[:DISTINCT]]
        # What is cut has three times as many: moves around the best will do.
        moved = [tile for tile in tiles if tile.variant != "split_k" or tile in first]
        moves = self._ranked(rules, device, work, (near for tile in moved for near in _around(tile)))
        # Some tiles that differ, some moves around the best, then all the rest: a model is worth as much.
        return tuple(dict.fromkeys((*first, *_around(default), *tiles, *moves)))

    def _ranked(self, rules: CommonBackend, device: Device, work: Work, configs: Iterable[Config]) -> list[Config]:
        """``configs`` by the model, those that are sure to be refused last."""
        scored = []
        for config in dict.fromkeys(configs):
            blocks = gemm_blocks(device, work, config)
            refused = self.refuse(rules, device, work, config, blocks) is not None
            scored.append((refused, self.estimate(rules, device, work, config, blocks), str(config), config))
        return [entry[-1] for entry in sorted(scored, key=lambda entry: entry[:3])]

    def refuse(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        if by_descriptors(config) and self.table.no_descriptors:
            return self.table.no_descriptors
        return self._refuse_accumulator(rules, device, work, config, blocks) or self._refuse_shared(
            device, work, config, blocks
        )

    def estimate(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
        sizes, model, kind = work.sizes, self.table.model, precision(work)
        splits = blocks["SPLITS"]
        tiles = splits * _tiles(work, m, n)
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
        computing = cdiv(tiles, device.units) * steps * busy
        if config.variant == "persistent":
            rounds -= (cdiv(tiles, programs) - 1) * model.tile_us / 2  # the next tile loads while one is stored
        moved = (work.reads + work.writes) / (device.memory_gbps * 1e3 * model.memory_share)
        # What is hidden is not hidden quite: of tiles that wait for the same, those that do least besides come first.
        taken = max(rounds, computing, moved) + model.unhidden * (rounds + busy)
        return taken + model.launch_us + self._sum_us(device, work, splits)

    def _sum_us(self, device: Device, work: Work, splits: int) -> float:
        """What writing the parts of sums and adding them takes, beyond the result alone."""
        if splits == 1:
            return 0.0
        model, sizes = self.table.model, work.sizes
        parts = splits * sizes["BATCH"] * sizes["M"] * sizes["N"] * work.compute_bytes
        gbps = model.sum_gbps if parts <= device.cache_bytes else device.memory_gbps
        return model.sum_us + 2 * parts / (gbps * 1e3)

    def _variants(self, work: Work) -> tuple[str, ...]:
        found = tuple(name for name in VARIANTS if name in work.variants)
        if not found:
            raise UnknownName(
                f"none of the variants {', '.join(work.variants)} is one of the kind {work.kind}, which has "
                f"{', '.join(VARIANTS)}"
            )
        return found

    def _offered(self, device: Device, work: Work, variant: str, trials: bool = False) -> list[Config]:
        """The configs of the table for ``work``, with ``trials`` those too. Raises Infeasible, UnknownName."""
        if variant not in self._variants(work):
            raise UnknownName(f"variant {variant!r} is none of this work's: {', '.join(self._variants(work))}")
        kind = precision(work)
        options = {**self.table.options, **({"input_precision": "tf32"} if kind == "tf32" else {})}
        chosen: list[tuple[Tile, Mapping[str, int]]] = []
        if variant != "persistent":
            listed = (self.table.tiles if all(vectors(work)) else self.table.loose)[kind]
            chosen += [(tile, {}) for tile in listed]
        obstacle = self._no_descriptors(work)
        if variant == "persistent" and obstacle:
            raise Infeasible(obstacle)
        if variant != "tiles" and not obstacle:
            # What is cut gives each program one tile: there is no next one to make one loop with.
            left_out = () if variant == "persistent" else ("FLATTEN",)
            for tile in self.table.persistent[kind]:
                own = {name: value for name, value in tile.params.items() if name not in left_out}
                chosen.append((tile, {"PROGRAMS_PER_UNIT": 1, **own}))
        found = []
        for tile, params in chosen:
            blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": 8}
            for parts in self._splits(device, work, tile, trials) if variant == "split_k" else ({},):
                if "SPLITS" in parts and self._spills(device, work, tile, bool(params)):
                    continue
                if _takes(tile, work):
                    given = FrozenMap({**blocks, **params, **parts})
                    found.append(Config(variant, given, tile.num_warps, tile.num_stages, FrozenMap(options)))
        if not found:
            raise Infeasible(
                f"{variant} has no tile for {kind} operands in {dict(work.layout)} and K={work.sizes['K']} here: use "
                "another variant"
            )
        return list(dict.fromkeys(found))

    def _splits(self, device: Device, work: Work, tile: Tile, trials: bool) -> tuple[Mapping[str, int], ...]:
        """Parts of a sum that make as many programs as there are units; on trial twice as many, and a power of two."""
        m, n, k = (_block(work, name, block) for name, block in zip("MNK", (tile.m, tile.n, tile.k), strict=True))
        tiles, steps = _tiles(work, m, n), cdiv(work.sizes["K"], k)
        if steps < 2:
            return ()
        most = min(MOST_SPLITS, steps // LEAST_STEPS)
        programs = device.units * tile.programs
        once, twice = programs // tiles, 2 * programs // tiles
        asked = (max(2, min(each, most)) for each in ((once, twice, power_of_2_below(once)) if trials else (once,)))
        # Plain numbers, of traced sizes too, since a config holds no others; each narrows what a trace serves.
        return tuple({"SPLITS": each} for each in dict.fromkeys(map(operator.index, asked)))

    def _spills(self, device: Device, work: Work, tile: Tile, described: bool) -> bool:
        """Whether a tile that ends early leaves no registers for the store of a part: by descriptors 128x256 spilled up
        to 672 bytes, 128x128x128 80, with 8 warps."""
        m, n = _block(work, "M", tile.m), _block(work, "N", tile.n)
        sums = m * n * work.compute_bytes // 4 // (tile.num_warps * device.target.warp_size)
        ends_early = work.sizes["M"] % m != 0 or work.sizes["N"] % n != 0
        return sums >= (CROWDED // 2 if described else CROWDED) and ends_early

    def _no_descriptors(self, work: Work) -> str:
        """Why tensor descriptors are not offered for ``work``; empty if they are."""
        if self.table.no_descriptors:
            return self.table.no_descriptors
        if all(vectors(work)) and "BATCH_INNER" not in work.sizes and "R" not in work.sizes:
            return ""
        return (
            "persistent reads A and B by tensor descriptors, which need bases and strides that are multiples "
            f"of 16 bytes and a single batch dim; these lie as {dict(work.layout)} with {dict(work.sizes)}: "
            "use tiles"
        )

    def _speed(self, work: Work, config: Config) -> float:
        """The table's for this tile; of a tile that it does not list, less the smaller it is."""
        kind = precision(work)
        listed = (*self.table.tiles[kind], *self.table.loose[kind])
        if by_descriptors(config):
            listed = self.table.persistent[kind]
        m, n = config.params["BLOCK_M"], config.params["BLOCK_N"]
        same = [tile for tile in listed if (tile.m, tile.n, tile.num_warps) == (m, n, config.num_warps)]
        flatten = config.params.get("FLATTEN", 0)
        exact = [t for t in same if (t.num_stages, t.params.get("FLATTEN", 0)) == (config.num_stages, flatten)]
        return max((tile.speed for tile in exact or same), default=0.3)

    def _resident(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> int:
        registers = round(_accumulator(device, work, config, blocks)) + 60
        shared = self.shared.bytes_of(work, config, blocks)
        fits = rules.programs_per_unit(device, min(registers, device.max_registers), shared, config.num_warps)
        return max(1, min(fits, config.params.get("PROGRAMS_PER_UNIT", fits)))

    def _refuse_accumulator(
        self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks
    ) -> str | None:
        """Nothing simple predicts spills of a product, only the compiler does; but sums have to fit at the least."""
        registers = _accumulator(device, work, config, blocks)
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


def _takes(tile: Tile, work: Work) -> bool:
    """Whether ``tile`` is for operands that lie as those of ``work``."""
    layout = work.layout
    whole_c = layout["c"].endswith("16")
    along_k = layout["a"].startswith("k") and layout["b"].startswith("k")
    return whole_c >= tile.whole_c and along_k >= tile.along_k and layout["b"].startswith("n") >= tile.along_n


def _tiles(work: Work, m: int, n: int) -> int:
    """Tiles of ``m`` by ``n``."""
    sizes = work.sizes
    return max(1, sizes["BATCH"] * cdiv(max(1, sizes["M"]), m) * cdiv(max(1, sizes["N"]), n))


def _block(work: Work, name: str, block: int) -> int:
    """``block``, no larger than the problem."""
    return max(LEAST_BLOCK, min(block, next_power_of_2(work.sizes[name])))


def gemm_blocks(device: Device, work: Work, config: Config) -> Blocks:
    """The blocks of ``config``, no larger than the problem."""
    found = {f"BLOCK_{name}": _block(work, name, config.params[f"BLOCK_{name}"]) for name in ("M", "N", "K")}
    splits = min(config.params.get("SPLITS", 1), max(1, cdiv(work.sizes["K"], found["BLOCK_K"])))
    return Blocks({**found, "SLICES": config.params.get("SLICES", 1), "SPLITS": splits})


def _accumulator(device: Device, work: Work, config: Config, blocks: Blocks) -> float:
    """Registers of a lane that hold its part of C."""
    lanes = config.num_warps * device.target.warp_size
    return blocks["BLOCK_M"] * blocks["BLOCK_N"] * work.compute_bytes / 4 / lanes


def _around(config: Config) -> Iterator[Config]:
    """Configs worth trying in the neighbourhood of ``config``."""
    stages = sorted({max(1, config.num_stages - 1), config.num_stages, config.num_stages + 1})
    warps = sorted({max(1, config.num_warps // 2), config.num_warps, config.num_warps * 2})
    for group, number, count in itertools.product(GROUPS, stages, warps):
        if count == config.num_warps or (number == config.num_stages and group == 8):
            yield config.replace(params={"GROUP_M": group}, num_stages=number, num_warps=count)
