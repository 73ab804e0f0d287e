"""The rules of the kind ``gemm``: C[b, m, n] = sum over (r, k) of A[b, r, m, k] B[b, r, k, n].

Variants: ``tiles`` (one program computes one tile of C and reads by pointers), ``persistent`` (as many programs as run
at once walk the tiles and read by tensor descriptors).

A table lists tiles that were compiled without spills, for each precision of the product; the model picks among them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from portkern.backends._shared import CommonBackend, Kind, cdiv, next_power_of_2, refuse_registers
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

VARIANTS = ("tiles", "persistent")
LEAST_BLOCK = 16  # that a matrix instruction takes
GROUPS = (4, 8, 16, 1)  # of rows of tiles, worth trying
DISTINCT = 5  # tiles to try before the moves around the first


@dataclass(frozen=True)
class Tile:
    """A tile of C, and how it is computed. ``speed`` is the share of the nominal rate that a unit reaches with it;
    ``whole_c`` leaves it to results that can be stored 16 bytes at a time, since others take more registers;
    ``along_k`` to operands that both lie along k, where the matrix unit takes no others; ``along_n`` to B along n."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    speed: float = 0.6
    params: FrozenMap[int] = FrozenMap()
    whole_c: bool = False
    along_k: bool = False
    along_n: bool = False


@dataclass(frozen=True)
class Model:
    """Constants of one architecture's time model: only good for ranking."""

    load_us: float  # from asking for a block to having it
    tile_us: float  # the first block of a tile, and its store
    launch_us: float
    cache_gbps: float  # of the cache that all units share


@dataclass(frozen=True)
class GemmTable:
    """The numbers of one architecture, by precision: ``float32``, ``tf32``, ``float64``, or ``half``.

    ``loose`` has the tiles for operands that cannot be read 16 bytes at a time. ``rates`` are those of
    the matrix unit, or of what stands in for it, over that of 16-bit operands.
    """

    tiles: Mapping[str, tuple[Tile, ...]]
    loose: Mapping[str, tuple[Tile, ...]]
    persistent: Mapping[str, tuple[Tile, ...]]
    rates: Mapping[str, float]
    model: Model
    options: FrozenMap[Any] = FrozenMap()
    no_descriptors: str = ""  # why ``persistent`` is not offered


class SharedMemory(ABC):
    """How an architecture's compiler lays out shared memory for a product."""

    @abstractmethod
    def bytes_of(self, work: Work, config: Config, blocks: Blocks) -> int:
        """What one program of ``config`` takes."""


def tile_bytes(work: Work, blocks: Blocks) -> tuple[int, int, int]:
    """Bytes of one block of A, of B, and of C."""
    m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
    return m * k * work.element_bytes, k * n * work.element_bytes, m * n * work.element_bytes


def vectors(work: Work) -> tuple[bool, bool]:
    """Whether A and B can be read 16 bytes at a time."""
    return work.layout["a"].endswith("16"), work.layout["b"].endswith("16")


def precision(work: Work) -> str:
    """The entry of a table for ``work``."""
    dot = work.dtypes.get("dot", "float32")
    return "half" if dot in ("float16", "bfloat16") else dot


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
                offered = tuple(self._offered(work, name))
            except Infeasible as error:
                reasons.append(str(error))
                continue
            for config in offered:
                blocks = gemm_blocks(device, work, config)
                refusal = self.refuse(rules, device, work, config, blocks)
                if refusal:
                    reasons.append(refusal)
                else:
                    found.append((self.estimate(rules, device, work, config, blocks), str(config), config))
        if found:
            return min(found, key=lambda entry: entry[:2])[2]
        if variant is None:  # nothing fits: refuse() says why
            return tuple(self._offered(work, "tiles"))[-1]
        raise Infeasible(reasons[-1])

    def candidates(self, rules: CommonBackend, device: Device, work: Work) -> Iterable[Config]:
        default = self.default(rules, device, work, None)
        listed: dict[Config, None] = {}
        for variant in self._variants(work):
            try:
                listed |= dict.fromkeys(self._offered(work, variant))
            except Infeasible:
                continue
        tiles = self._ranked(rules, device, work, listed)
        moves = self._ranked(rules, device, work, (near for tile in tiles for near in _around(tile)))
        # Some tiles that differ, some moves around the best, then all the rest: a model is worth as much.
        order = (default, *tiles[:DISTINCT], *_around(default), *tiles, *moves)
        return tuple(dict.fromkeys(order))

    def _ranked(self, rules: CommonBackend, device: Device, work: Work, configs: Iterable[Config]) -> list[Config]:
        """``configs`` by the model, those that are sure to be refused last."""
        scored = []
        for config in dict.fromkeys(configs):
            blocks = gemm_blocks(device, work, config)
            refused = self.refuse(rules, device, work, config, blocks) is not None
            scored.append((refused, self.estimate(rules, device, work, config, blocks), str(config), config))
        return [entry[-1] for entry in sorted(scored, key=lambda entry: entry[:3])]

    def refuse(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        if config.variant == "persistent" and self.table.no_descriptors:
            return self.table.no_descriptors
        return self._refuse_accumulator(rules, device, work, config, blocks) or self._refuse_shared(
            device, work, config, blocks
        )

    def estimate(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
        sizes, model, kind = work.sizes, self.table.model, precision(work)
        tiles = max(1, sizes["BATCH"] * cdiv(max(1, sizes["M"]), m) * cdiv(max(1, sizes["N"]), n))
        steps = max(1, sizes.get("R", 1) * cdiv(max(1, sizes["K"]), k))
        rate = device.matrix_tflops * 1e6 * self.table.rates[kind] / device.units * self._speed(work, config)
        read = (m + n) * k * work.element_bytes / (model.cache_gbps * 1e3 / device.units)
        busy = max(2 * m * n * k / rate, read)
        fit = self._resident(rules, device, work, config, blocks)
        programs = min(tiles, device.units * fit)
        # A unit's programs share its matrix unit; each of them waits for its own blocks.
        depth = max(1, config.num_stages - 1) if all(vectors(work)) or work.element_bytes >= 4 else 0.5
        alone = steps * max(busy, model.load_us / depth) + model.tile_us
        rounds = cdiv(tiles, programs) * alone
        computing = cdiv(tiles, device.units) * steps * busy
        if config.variant == "persistent":
            rounds -= (cdiv(tiles, programs) - 1) * model.tile_us / 2  # the next tile loads while one is stored
        moved = (work.reads + work.writes) / (device.memory_gbps * 1e3)
        return max(rounds, computing, moved) + model.launch_us

    def _variants(self, work: Work) -> tuple[str, ...]:
        found = tuple(name for name in VARIANTS if name in work.variants)
        if not found:
            raise UnknownName(
                f"none of the variants {', '.join(work.variants)} is one of the kind {work.kind}, which has "
                f"{', '.join(VARIANTS)}"
            )
        return found

    def _offered(self, work: Work, variant: str) -> Iterator[Config]:
        """The configs of the table for ``work``. Raises Infeasible, UnknownName."""
        if variant not in self._variants(work):
            raise UnknownName(f"variant {variant!r} is none of this work's: {', '.join(self._variants(work))}")
        kind, reading = precision(work), all(vectors(work))
        options = {**self.table.options, **({"input_precision": "tf32"} if kind == "tf32" else {})}
        if variant == "tiles":
            chosen, programs = (self.table.tiles if reading else self.table.loose)[kind], 0
        else:
            if self.table.no_descriptors:
                raise Infeasible(self.table.no_descriptors)
            if not reading or "BATCH_INNER" in work.sizes or "R" in work.sizes:
                raise Infeasible(
                    "persistent reads A and B by tensor descriptors, which need bases and strides that are multiples "
                    f"of 16 bytes and a single batch dim; these lie as {dict(work.layout)} with {dict(work.sizes)}: "
                    "use tiles"
                )
            chosen, programs = self.table.persistent[kind], 1
        whole_c = work.layout["c"].endswith("16")
        along_k = work.layout["a"].startswith("k") and work.layout["b"].startswith("k")
        along_n = work.layout["b"].startswith("n")
        chosen = tuple(
            tile for tile in chosen if whole_c >= tile.whole_c and along_k >= tile.along_k and along_n >= tile.along_n
        )
        if not chosen:
            raise Infeasible(
                f"{variant} has no tile for {kind} operands in {dict(work.layout)} here: use another variant"
            )
        for tile in chosen:
            blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": 8}
            params = {**blocks, **({"PROGRAMS_PER_UNIT": programs} if programs else {}), **tile.params}
            yield Config(variant, FrozenMap(params), tile.num_warps, tile.num_stages, FrozenMap(options))

    def _speed(self, work: Work, config: Config) -> float:
        """The table's for this tile; of a tile that it does not list, less the smaller it is."""
        kind = precision(work)
        listed = (*self.table.tiles[kind], *self.table.loose[kind])
        if config.variant == "persistent":
            listed = self.table.persistent[kind]
        m, n = config.params["BLOCK_M"], config.params["BLOCK_N"]
        same = [tile for tile in listed if (tile.m, tile.n, tile.num_warps) == (m, n, config.num_warps)]
        exact = [tile for tile in same if tile.num_stages == config.num_stages]
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


def gemm_blocks(device: Device, work: Work, config: Config) -> Blocks:
    """The blocks of ``config``, no larger than the problem."""
    found = {
        f"BLOCK_{name}": max(LEAST_BLOCK, min(config.params[f"BLOCK_{name}"], next_power_of_2(work.sizes[name])))
        for name in ("M", "N", "K")
    }
    return Blocks({**found, "SLICES": config.params.get("SLICES", 1)})


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
