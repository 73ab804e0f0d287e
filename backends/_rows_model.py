"""What a ``row_reduction`` config costs: registers and shared memory, and a time for ranking.

Registers follow ``12 + live * e``, and ``1.6 * e`` more for addresses and masks where operands are
strided or unaligned, 2.6 in tiles of several rows (e: elements a lane holds). Prefetched tiles were
read off the compiler's shared memory. All of it was fitted on kernels that Triton 3.6 and 3.9
compiled.
"""

from __future__ import annotations

from typing import NamedTuple

from portkern.backends._rows_parts import part_registers
from portkern.backends._shared import CommonBackend
from portkern.config import Blocks, Config
from portkern.integers import cdiv, next_power_of_2
from portkern.problem import Work
from portkern.target import Device

BASE_REGISTERS = 12.0
LOOSE_REGISTERS = 1.6  # for each element, where operands are strided or unaligned
LOOSE_TILE_REGISTERS = 2.6  # the same in a tile of several rows
# The same where programs wait, for each operand: addresses and masks of this part and of the next one.
SCATTERED_REGISTERS = 4.0  # no neighbours along the row: 2.5 to 4.2, and 8 bytes spilled at 168 registers of 255
UNALIGNED_REGISTERS = 0.8
SEGMENT_REGISTERS = 12.0  # for each weight that a lane needs beyond the first one
WEIGHT_REGISTERS = 0.5  # for each element, of a vector along the row that is not kept
DOUBLE = 1.75  # fp64 has no exponential of its own: what the long way round takes, 1.7 at most
CONVERTED_BYTES = 32  # of shared memory for each lane, to hand a tile over to another width
FEW = 64  # bytes read for each one written, from which on rows count as read alone
SECTOR_BYTES = 32  # the least that memory moves at once
CACHED_REREAD = 0.35  # of a read from memory, for what is still in the last-level cache
OPS_PER_ELEMENT = 12.0  # instructions of one pass, conversions and an exponential included


class Model(NamedTuple):
    """Constants of one architecture's time model: only good for ranking."""

    latency_us: float  # one tile from load to store, nothing else running
    program_us: float  # starting one program
    launch_us: float
    lane_gops: float  # instructions of all lanes of one unit, 10^9 a second
    unit_share: float  # bandwidth that one unit alone can draw, in fair shares


class Footprint(NamedTuple):
    """What one program takes: elements and registers of a lane, bytes of shared memory."""

    elements: float
    registers: float
    shared_bytes: int


class Traffic(NamedTuple):
    """How a config goes over the data."""

    tiles: int
    chunks: int = 1  # of each tile, one after another
    passes: int = 1  # over the data
    waits: int = 0  # for other programs
    launches: int = 1


def in_columns(work: Work) -> bool:
    """Whether neighbouring rows of some operand are neighbours in memory."""
    return any(layout.startswith("m") for layout in work.layout.values())


def is_gathered(work: Work) -> bool:
    """Whether rows are read, and next to nothing is written."""
    return work.writes * FEW <= work.reads


def inner_rows(work: Work) -> int:
    """Rows along the innermost row dim, which no tile crosses."""
    return max(1, work.sizes.get("INNER", work.sizes["M"]))


def row_blocks(work: Work, config: Config) -> Blocks:
    """The tile of ``config``: a whole row where the variant keeps it, else its own chunk."""
    whole = next_power_of_2(work.sizes["N"])
    params = config.params
    rows = params.get("BLOCK_M", 1) if config.variant in ("packed_rows", "looped_row", "split_row") else 1
    rows = min(rows, next_power_of_2(inner_rows(work)))
    keeps_row = config.variant in ("packed_rows", "resident_row", "cached_row")
    return Blocks(BLOCK_M=rows, BLOCK_N=whole if keeps_row else params.get("BLOCK_N", whole))


def footprint(rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> Footprint:
    """What one program of ``config`` takes."""
    tile = _tile(work, blocks)
    elements = tile[0] * tile[1] / (config.num_warps * device.target.warp_size)
    parted = part_registers(work, config, elements)
    # A part that is walked takes what a walk takes, and nothing is kept of it.
    live = work.live["split_row" if walks(config) else config.variant]
    registers = BASE_REGISTERS + live * elements if parted is None else parted
    registers += _loose_registers(work, config, tile) * elements
    registers += _segment_registers(work, config, tile, device.target.warp_size)
    copies = (_depth(work, config) - 1) * operands_read(work)
    registers += copies * elements * rules.stage_registers(work.element_bytes)
    staged = copies * tile[0] * tile[1] * work.element_bytes if rules.stages_in_shared else 0
    if config.variant in work.waiting and not walks(config):
        # The next part is loaded while this one waits, where AHEAD does not say otherwise, and a third one with LAG.
        lag = config.params.get("LAG", 0)
        parts = config.params.get("AHEAD", 1) + lag - config.params.get("REREAD", 0)
        registers += (parts * operands_read(work) * work.element_bytes / 4 - lag * WEIGHT_REGISTERS) * elements
    if work.compute_bytes == 8:
        registers *= DOUBLE
    exchanged = work.compute_bytes * config.num_warps * tile[0]  # each row's sums, between warps
    if len(set(work.dtypes.values())) > 1:  # lanes hold other elements of a wider operand
        exchanged = max(exchanged, CONVERTED_BYTES * config.num_warps * device.target.warp_size)
    return Footprint(elements, registers, staged + exchanged)


def estimate_us(
    model: Model, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks
) -> float:
    """Memory, latency and arithmetic, overlapped as far as programs and stages allow."""
    use = footprint(rules, device, work, config, blocks)
    traffic = _traffic(work, config, blocks)
    fits = rules.programs_per_unit(device, round(use.registers), use.shared_bytes, config.num_warps)
    per_unit = config.params.get("PROGRAMS_PER_UNIT", 0)
    resident = max(1, min(fits, per_unit) if per_unit else fits)
    programs = min(traffic.tiles, device.units * per_unit) if per_unit else traffic.tiles
    slots = max(1, min(programs, device.units * resident))
    rounds = cdiv(traffic.tiles, slots)
    steps = rounds * (traffic.chunks * traffic.passes + traffic.waits)
    depth = _depth(work, config) if steps > 1 else 1
    step = model.latency_us * (0.5 + 0.5 / depth) * (1 + 0.05 * config.num_warps.bit_length())
    times = (
        _memory_us(model, device, work, config, blocks, traffic, slots),
        steps * step + cdiv(programs, slots) * model.program_us,
        _arithmetic_us(model, device, work, blocks, traffic, slots),
    )
    overlap = max(1.0, slots / device.units) * depth
    return max(times) + (sum(times) - max(times)) / overlap + model.launch_us * traffic.launches


def _segment_registers(work: Work, config: Config, tile: tuple[int, int], lanes: int) -> float:
    """Where only PLACES neighbours of a row share a weight: what a lane holds for each further one whose weight it has
    to know. In a tile of several, a warp goes along one of them, 16 bytes a lane."""
    if "PLACES" not in work.sizes or config.variant not in work.waiting:
        return 0.0
    long = min(next_power_of_2(work.sizes["PLACES"]), tile[1])
    together = max(1, config.num_warps * lanes * 16 // work.element_bytes // long)
    return SEGMENT_REGISTERS * max(0, cdiv(tile[1] // long, together) - 1)


def walks(config: Config) -> bool:
    """Whether programs that share a row walk their parts, before they wait and after."""
    return config.variant == "coresident_row" and bool(config.params.get("SPLITS", 0))


def parts_of(work: Work, config: Config, blocks: Blocks) -> int:
    """Programs that share a row and wait for each other; about as many, where ``blocks`` are not those of ``fit``."""
    chunks = cdiv(work.sizes["N"], blocks.get("BLOCK_N", next_power_of_2(work.sizes["N"])))
    if "SPLITS" not in work.takes:
        return next_power_of_2(chunks)
    return blocks.get("PARTS", min(chunks, config.params["SPLITS"]) if walks(config) else chunks)


def _loose_registers(work: Work, config: Config, tile: tuple[int, int]) -> float:
    """For each element of a lane, what operands take that cannot be read 16 bytes at a time."""
    loose = [layout for layout in work.layout.values() if layout != "n16"]
    if not loose:
        return 0.0
    least = LOOSE_TILE_REGISTERS if tile[0] > 1 else LOOSE_REGISTERS
    if config.variant not in work.waiting:
        return least
    each = (UNALIGNED_REGISTERS if layout.startswith("n") else SCATTERED_REGISTERS for layout in loose)
    return max(least, sum(each))


def _depth(work: Work, config: Config) -> int:
    """Tiles on their way at once. Lone 16-bit elements are not prefetched, in Triton 3.6 and 3.9."""
    vectors = all(layout.endswith("16") for layout in work.layout.values())
    return config.num_stages if vectors or work.element_bytes >= 4 else 1


def _tile(work: Work, blocks: Blocks) -> tuple[int, int]:
    return blocks.get("BLOCK_M", 1), blocks.get("BLOCK_N", next_power_of_2(work.sizes["N"]))


def operands_read(work: Work) -> int:
    """How many operands of the size of the problem are read."""
    numel = max(1, work.sizes["M"] * work.sizes["N"])
    return max(1, round(work.reads / (numel * work.element_bytes)))


def _traffic(work: Work, config: Config, blocks: Blocks) -> Traffic:
    rows, width = _tile(work, blocks)
    inner = inner_rows(work)
    tiles = max(1, work.sizes["M"]) // inner * cdiv(inner, rows)
    chunks = cdiv(max(1, work.sizes["N"]), width)
    if config.variant == "looped_row":
        return Traffic(tiles, chunks, passes=2)
    if config.variant == "split_row":
        splits = max(1, config.params.get("SPLITS", 1))
        return Traffic(tiles * splits, cdiv(chunks, splits), passes=2, launches=2)
    if walks(config):
        parts = parts_of(work, config, blocks)
        return Traffic(tiles * parts, cdiv(chunks, parts), passes=2, waits=1)
    if config.variant == "coresident_row":
        # Which costs about as much as a load, unless the program has the next row to sum meanwhile.
        return Traffic(tiles * chunks, waits=0 if config.params.get("LAG") else 1)
    return Traffic(tiles)


def _memory_us(
    model: Model,
    device: Device,
    work: Work,
    config: Config,
    blocks: Blocks,
    traffic: Traffic,
    slots: int,
) -> float:
    reads = float(work.reads)
    if traffic.passes > 1:
        rows, _ = _tile(work, blocks)
        span = work.sizes["N"] // max(1, config.params.get("SPLITS", 1))
        live_bytes = slots * rows * span * work.element_bytes * operands_read(work)
        if work.partials:  # the second launch begins after the first one has gone over all rows
            live_bytes = work.reads
        cached = live_bytes <= device.cache_bytes / 2
        reads *= 1 + (traffic.passes - 1) * (CACHED_REREAD if cached else 1.0)
    share = min(1.0, min(slots, device.units) * model.unit_share / device.units)
    idle = cdiv(traffic.tiles, slots) * slots / traffic.tiles  # the last round is not full
    moved = (reads + work.writes) * _wasted(work, blocks) * (1 + (idle - 1) / 2)
    return moved / (device.memory_gbps * 1e3 * share)


def _wasted(work: Work, blocks: Blocks) -> float:
    """Bytes moved for each byte wanted, over all operands."""
    rows, _ = _tile(work, blocks)

    def factor(layout: str) -> float:
        if layout.startswith("n"):
            return 1.0
        together = rows if layout.startswith("m") else 1
        return max(1.0, SECTOR_BYTES / (together * work.element_bytes))

    factors = [factor(layout) for layout in work.layout.values()] or [1.0]
    return sum(factors) / len(factors)


def _arithmetic_us(model: Model, device: Device, work: Work, blocks: Blocks, traffic: Traffic, slots: int) -> float:
    rows, width = _tile(work, blocks)
    elements = traffic.tiles * rows * width * traffic.chunks * traffic.passes
    cost = OPS_PER_ELEMENT * work.compute_bytes / 4
    return elements * cost / (min(slots, device.units) * model.lane_gops * 1e3)
