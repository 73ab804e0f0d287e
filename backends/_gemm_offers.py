"""What a table of tiles offers for a product of the kind ``gemm``."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping

from portkern.backends._gemm_table import GemmTable, Tile, precision, vectors
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.gemm import COPIES, PACKS, descriptor_obstacle, packed
from portkern.integers import cdiv, next_power_of_2, power_of_2_below
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

VARIANTS = ("tiles", "persistent", "split_k")
LEAST_BLOCK = 16  # that a matrix instruction takes
GROUPS = (4, 8, 16, 1)  # of rows of tiles, worth trying
MOST_SPLITS = 64
CROWDED = 128  # sums of a lane
LEAST_STEPS = 4  # of each part, so that the loads of one block cover for those of another
# Rows of A that a copy of B has to serve at least, or columns of B one of A. On one H200 64x4096x4096 took 102 us so,
# 172 without, in float32 with B along k.
PACKED_FOR = 64


def variants_of(work: Work) -> tuple[str, ...]:
    """The variants of ``work``, in the order of this kind. Raises UnknownName if it has none."""
    found = tuple(name for name in VARIANTS if name in work.variants)
    if not found:
        raise UnknownName(
            f"none of the variants {', '.join(work.variants)} is one of the kind {work.kind}, which has "
            f"{', '.join(VARIANTS)}"
        )
    return found


def offered(table: GemmTable, device: Device, work: Work, variant: str, trials: bool = False) -> list[Config]:
    """The configs of the table for ``work``, with ``trials`` those too. Raises Infeasible, UnknownName."""
    if variant not in variants_of(work):
        raise UnknownName(f"variant {variant!r} is none of this work's: {', '.join(variants_of(work))}")
    kind = precision(work)
    options = {**table.options, **({"input_precision": "tf32"} if kind == "tf32" else {})}
    found = []
    for packing in _packings(table, work):
        seen = packed(work, packing)
        for tile, params in _tiles_for(table, seen, variant):
            blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": 8, **packing}
            for parts in _splits(device, work, tile, trials) if variant == "split_k" else ({},):
                if "SPLITS" in parts and _spills(device, work, tile, bool(params)):
                    continue
                if takes(tile, seen):
                    given = FrozenMap({**blocks, **params, **parts})
                    found.append(Config(variant, given, tile.num_warps, tile.num_stages, FrozenMap(options)))
    if not found:
        obstacle = _no_descriptors(table, work) if variant == "persistent" else ""
        raise Infeasible(
            obstacle
            or f"{variant} has no tile for {kind} operands in {dict(work.layout)} and K={work.sizes['K']} here: use "
            "another variant"
        )
    return list(dict.fromkeys(found))


def _packings(table: GemmTable, work: Work) -> list[Mapping[str, int]]:
    """How to pack the operands: not, or one or both of them, in the order in which the dot reads them well."""
    kind, asked = precision(work), ("", "")
    orders, copied = table.orders.get(kind, asked), table.copied.get(kind, asked)
    copies = [_copies(work, *each) for each in zip("ab", orders, copied, "NM", strict=True)]
    found = [
        {PACKS[name]: value for name, value in zip("ab", chosen, strict=True) if value}
        for chosen in itertools.product(*copies)
    ]
    return [packing for packing in found if _worth_a_copy(work, packing, orders)]


def _copies(work: Work, name: str, order: str, copied: str, shared: str) -> tuple[int, ...]:
    """The values of operand ``name``'s parameter: 0, and that of a copy where it lies in another order than ``order``,
    or where it cannot be read 16 bytes at a time: then as ``copied`` says, or in its own order, which is the least
    work."""
    lies = work.layout[name]
    if work.sizes[shared] < PACKED_FOR or lies.endswith("16") and lies.startswith(order):
        return (0,)
    wanted = order or copied or ("k" if lies == "s" else lies[0])
    return (0, *(value for value, letter in COPIES[name].items() if letter == wanted))


def _worth_a_copy(work: Work, packing: Mapping[str, int], orders: tuple[str, str]) -> bool:
    """A copy for loads of 16 bytes alone is worth nothing while the other operand cannot be read so."""
    alone = (
        pack in packing and work.layout[name].startswith(order)
        for (name, pack), order in zip(PACKS.items(), orders, strict=True)
    )
    return all(vectors(packed(work, packing))) or not any(alone)


def _tiles_for(table: GemmTable, work: Work, variant: str) -> list[tuple[Tile, Mapping[str, int]]]:
    """The tiles of ``variant``, each with the parameters of its way to read."""
    kind = precision(work)
    chosen: list[tuple[Tile, Mapping[str, int]]] = []
    if variant != "persistent":
        listed = (table.tiles if all(vectors(work)) else table.loose)[kind]
        alone = tuple(tile for tile in listed if 1 in (tile.m, tile.n) and takes(tile, work))
        # Dots of 16 rows hide their waste behind memory where they are fed well: 16-bit operands, 16 bytes at a time.
        if kind != "half" or not all(vectors(work)):
            listed = alone or listed
        chosen += [(tile, {}) for tile in listed]
    if variant != "tiles" and not _no_descriptors(table, work):
        # What is cut gives each program one tile: there is no next one to make one loop with.
        left_out = () if variant == "persistent" else ("FLATTEN",)
        for tile in table.persistent[kind]:
            own = {name: value for name, value in tile.params.items() if name not in left_out}
            chosen.append((tile, {"PROGRAMS_PER_UNIT": 1, **own}))
    # A tile that most rows of are missing keeps the warps and the speed of a whole one: 16x4096x4096 in fp32 took 82.9
    # us in tiles of 32 rows, 93.7 in those of 128; 1x14336x4096 297 in those of 32, 333 of 128, 372 of 64.
    rows = 2 * _block(work, "M", max((tile.m for tile, _ in chosen), default=1))
    return [entry for entry in chosen if entry[0].m <= rows] or chosen


def _splits(device: Device, work: Work, tile: Tile, trials: bool) -> tuple[Mapping[str, int], ...]:
    """Parts of a sum that make as many programs as there are units, or that give each unit as much; on trial twice as
    many, and a power of two."""
    m, n, k = (_block(work, name, block) for name, block in zip("MNK", (tile.m, tile.n, tile.k), strict=True))
    tiles, steps = tiles_of(work, m, n), cdiv(work.sizes["K"], k)
    if steps < 2:
        return ()
    most = min(MOST_SPLITS, steps // LEAST_STEPS)
    programs = device.units * tile.programs
    once, twice = programs // tiles, 2 * programs // tiles
    # 224 tiles on 132 units: 4 parts of each took an H200 308 us, where 92 units have two whole ones 345.
    even = min(range(2, 5), key=lambda parts: cdiv(parts * tiles, device.units) / parts)
    wanted = (once, even, twice, power_of_2_below(once)) if trials else (once, even)
    asked = (max(2, min(each, most)) for each in wanted)
    # Plain numbers, of traced sizes too, since a config holds no others; each narrows what a trace serves.
    return tuple({"SPLITS": each} for each in dict.fromkeys(map(operator.index, asked)))


def _spills(device: Device, work: Work, tile: Tile, described: bool) -> bool:
    """Whether a tile that ends early leaves no registers for the store of a part: by descriptors 128x256 spilled up
    to 672 bytes, 128x128x128 80, with 8 warps."""
    m, n = _block(work, "M", tile.m), _block(work, "N", tile.n)
    sums = m * n * work.compute_bytes // 4 // (tile.num_warps * device.target.warp_size)
    ends_early = work.sizes["M"] % m != 0 or work.sizes["N"] % n != 0
    return sums >= (CROWDED // 2 if described else CROWDED) and ends_early


def _no_descriptors(table: GemmTable, work: Work) -> str:
    """Why tensor descriptors are not offered for ``work``; empty if they are."""
    if table.no_descriptors:
        return table.no_descriptors
    obstacle = descriptor_obstacle(work)
    return f"persistent reads A and B by tensor descriptors: {obstacle}: use tiles" if obstacle else ""


def takes(tile: Tile, work: Work) -> bool:
    """Whether ``tile`` is for operands that lie as those of ``work``, and for its rows and columns."""
    layout, sizes = work.layout, work.sizes
    if tile.m == 1 != sizes["M"] or tile.n == 1 != sizes["N"]:
        return False
    slices = tile.params.get("SLICES", 1)
    if slices > 1 and _block(work, "N", tile.n) < LEAST_BLOCK * slices:
        return False
    if tile.one_sum and "R" in sizes:
        return False
    whole_c = layout["c"].endswith("16")
    along_k = layout["a"].startswith("k") and layout["b"].startswith("k")
    return whole_c >= tile.whole_c and along_k >= tile.along_k and layout["b"].startswith("n") >= tile.along_n


def tiles_of(work: Work, m: int, n: int) -> int:
    """Tiles of ``m`` by ``n``."""
    sizes = work.sizes
    return max(1, sizes["BATCH"] * cdiv(max(1, sizes["M"]), m) * cdiv(max(1, sizes["N"]), n))


def _block(work: Work, name: str, block: int) -> int:
    """``block``, no larger than the problem."""
    return 1 if block == 1 else max(LEAST_BLOCK, min(block, next_power_of_2(work.sizes[name])))


def gemm_blocks(work: Work, config: Config) -> Blocks:
    """The blocks of ``config``, no larger than the problem."""
    found = {f"BLOCK_{name}": _block(work, name, config.params[f"BLOCK_{name}"]) for name in ("M", "N", "K")}
    splits = min(config.params.get("SPLITS", 1), max(1, cdiv(work.sizes["K"], found["BLOCK_K"])))
    return Blocks({**found, "SLICES": config.params.get("SLICES", 1), "SPLITS": splits})


def accumulator(device: Device, work: Work, config: Config, blocks: Blocks) -> float:
    """Registers of a lane that hold its part of C, or of the products that are summed at last."""
    lanes = config.num_warps * device.target.warp_size
    m, n, k = (blocks[f"BLOCK_{name}"] for name in "MNK")
    sums = k * n if m == 1 else m * k if n == 1 else m * n
    return sums * work.compute_bytes / 4 / lanes


def around(config: Config) -> Iterator[Config]:
    """Configs worth trying in the neighbourhood of ``config``."""
    stages = sorted({max(1, config.num_stages - 1), config.num_stages, config.num_stages + 1})
    warps = sorted({max(1, config.num_warps // 2), config.num_warps, config.num_warps * 2})
    for group, number, count in itertools.product(GROUPS, stages, warps):
        if count == config.num_warps or (number == config.num_stages and group == 8):
            yield config.replace(params={"GROUP_M": group}, num_stages=number, num_warps=count)
