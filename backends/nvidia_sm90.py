"""NVIDIA Hopper (sm90: H100, H200). Lends its choices to sm100, sm103 and sm120."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from portkern.backend import Backend
from portkern.backends._gemm import Gemm
from portkern.backends._nvidia import ENVIRONMENT, KIB, NvidiaBackend, TensorCores, device_of, knobs, parse
from portkern.backends._pointwise import Pointwise, PointwiseTable
from portkern.backends._rows import RowReduction
from portkern.backends._rows_cached import Cached
from portkern.backends._rows_exchange import Exchange
from portkern.backends._rows_model import Model
from portkern.backends._rows_sums import Grouped, Long, Sums
from portkern.backends._rows_table import (
    Columns,
    Looped,
    Packed,
    Parted,
    Resident,
    RowTable,
    Search,
)
from portkern.backends._shared import Kind, Part
from portkern.backends._sm90_gemms import GEMMS
from portkern.backends._sm90_rows import STATED
from portkern.hookspecs import hookimpl
from portkern.record import FrozenMap
from portkern.target import Device, Target

H200 = Part(
    name="NVIDIA H200",
    units=132,
    memory_bytes=141 * 10**9,
    shared_bytes=227 * KIB,
    shared_bytes_per_unit=228 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=64,
    max_programs_per_unit=32,
    cache_bytes=50 * KIB**2,
    memory_gbps=4_800.0,
    matrix_tflops=989.4,
)
B200 = Part(
    name="NVIDIA B200",
    units=148,
    memory_bytes=180 * 10**9,
    shared_bytes=227 * KIB,
    shared_bytes_per_unit=228 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=64,
    max_programs_per_unit=32,
    cache_bytes=126 * KIB**2,
    memory_gbps=8_000.0,
    matrix_tflops=2_250.0,
)
B300 = Part(
    name="NVIDIA B300",
    units=148,
    memory_bytes=288 * 10**9,
    shared_bytes=227 * KIB,
    shared_bytes_per_unit=228 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=64,
    max_programs_per_unit=32,
    cache_bytes=126 * KIB**2,
    memory_gbps=8_000.0,
    matrix_tflops=2_250.0,
)
RTX_5090 = Part(
    name="NVIDIA GeForce RTX 5090",
    units=170,
    memory_bytes=32 * 10**9,
    shared_bytes=99 * KIB,
    shared_bytes_per_unit=100 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=48,
    max_programs_per_unit=24,
    cache_bytes=96 * KIB**2,
    memory_gbps=1_792.0,
    matrix_tflops=210.0,
)
PARTS: FrozenMap[Part] = FrozenMap(sm90=H200, sm100=B200, sm103=B300, sm120=RTX_5090)

# Measured on one H200 (docs/measurements.md): 32 elements a lane, whatever the shape; a persistent grid that
# prefetches the next row never won.
ROWS = RowTable(
    packed=Packed(longest=512, elements=1_024, num_warps=1),
    resident=(
        Resident(longest=1_024, num_warps=1, programs_per_unit=0, num_stages=1),
        Resident(longest=2_048, num_warps=2, programs_per_unit=0, num_stages=1),
        Resident(longest=4_096, num_warps=4, programs_per_unit=0, num_stages=1),
        # 16 elements a lane here: 2 % less time than 32.
        Resident(longest=8_192, num_warps=16, programs_per_unit=0, num_stages=1),
        Resident(longest=16_384, num_warps=16, programs_per_unit=0, num_stages=1),
        Resident(longest=32_768, num_warps=32, programs_per_unit=0, num_stages=1),
    ),
    cached=(
        Cached(8_192, 16_384, num_warps=16, options=FrozenMap()),
        Cached(16_384, 32_768, num_warps=32, options=FrozenMap(maxnreg=32)),  # so that two rows fit on a unit
        # For ops that take more, and for those that take less: three rows.
        Cached(16_384, 32_768, num_warps=16, options=FrozenMap(maxnreg=64), live=1.0),
        Cached(16_384, 32_768, num_warps=16, options=FrozenMap(maxnreg=40)),
    ),
    stated=STATED,
    looped=Looped(block=4_096, num_warps=8, num_stages=1),
    split=Parted(block=2_048, num_warps=8, programs_per_unit=4),
    # The sum of 67 million bf16: 46 us, not 52.
    gathered=Parted(block=2_048, num_warps=4, programs_per_unit=8, num_stages=3),
    # Losses of 8192 rows of 8192 with their gradient: 81 us with 8 warps, 89 with 16.
    chained_warps=8,
    # As many programs as registers allow, since bytes in flight decide.
    coresident=Parted(block=4_096, num_warps=4, programs_per_unit=16),
    # 64 elements a lane, of both operands together, were within 0.5 % of the fastest part that is kept or walked in 10
    # of 12 cases: three shapes, bf16 and fp32, forward and gradient.
    # In 16 bits forwards win by loading ahead, with two warps: 19.9 us for 21.9 and 38.5 for 44.0. Gradients of rows of
    # a million are faster walked: 161 us for 179, in float32 316 for 360.
    exchange=Exchange(lane_elements=64, num_warps=4, ahead=True, walked_stages=3),
    # 32 neighbouring rows are 64 bytes of 16-bit elements.
    columns=Columns(rows=32, block=64, num_warps=16, longest=1_024),
    # Left to itself, the assembler spills 8 bytes to fit one more program on a unit.
    crowded=FrozenMap(maxnreg=255),
    # One program of 16 warps a unit walks rows of 8,192; two rows are on their way in shared memory.
    sums=Sums(
        packed=(
            # A warp of its own takes two rows of 256: 24.5 and 23.6 us for 32768 rows on one H200; two warps that share
            # them took 26.8 and 23.9. The last launch has all of the 1,056 sums in one tile.
            Grouped(512, num_warps=1, programs_per_unit=8, num_stages=3),
            Grouped(512, num_warps=2, programs_per_unit=7, num_stages=4),
            Grouped(256, num_warps=1, programs_per_unit=12, num_stages=3),
            Grouped(512, num_warps=1, programs_per_unit=7, num_stages=3),
            Grouped(512, num_warps=2, programs_per_unit=4, num_stages=4),
            Grouped(1_024, num_warps=2, programs_per_unit=4, num_stages=3),
            Grouped(1_024, num_warps=2, programs_per_unit=7, num_stages=3),
            Grouped(1_024, num_warps=4, programs_per_unit=4, num_stages=4),
            Grouped(1_024, num_warps=4, programs_per_unit=6, num_stages=3),
            Grouped(2_048, num_warps=8, programs_per_unit=2, num_stages=4),
            Grouped(2_048, num_warps=8, programs_per_unit=3, num_stages=3),
            Grouped(2_048, num_warps=4, programs_per_unit=2, num_stages=4),
            Grouped(2_048, num_warps=4, programs_per_unit=4, num_stages=3),
            Grouped(4_096, num_warps=16, programs_per_unit=1, num_stages=4),
            Grouped(4_096, num_warps=8, programs_per_unit=2, num_stages=3),
            Grouped(1_024, num_warps=4, programs_per_unit=8, num_stages=1),
        ),
        lane_elements=32,
        warps_per_unit=8,
        longest=8_192,
        num_stages=3,
        walked_block=1_024,
        walked_programs=8,
        parted_block=2_048,
        parted_warps=4,
        lag=True,
        rows=2_048,
        columns=8,
        elements=4_096,
        num_warps=8,
        long=(
            # 4096 rows of 1,024 took 15.0 to 16.4 us in pairs, 15.4 to 17.6 each in a warp of its own; in float32 22.8
            # with four warps for each (and four stages), 25.7 with one.
            Long(512, 1_024, Grouped(2_048, num_warps=4, programs_per_unit=4, num_stages=3)),
            # 4096 rows of 4,096 took 36.1 and 37.1 us in pairs, 36.8 to 39.9 in two programs that take one at a time,
            # which have twice as many sums to add up; in float32, one at a time in one program, 59.0 and 62.1 in two.
            Long(2_048, 4_096, Grouped(8_192, num_warps=8, programs_per_unit=1, num_stages=3)),
        ),
    ),
    # A single unit draws a few per cent of the bandwidth: 64 KB of one row is worth two launches.
    split_from=32_768,
    search=Search(
        num_warps=(1, 2, 4, 8, 16, 32),
        num_stages=(1, 2, 3),
        persistent=((0, 1), (1, 2), (1, 3), (2, 2), (4, 2)),
        packed_elements=(1_024, 2_048, 4_096, 8_192),
        looped_blocks=(2_048, 4_096, 8_192, 16_384),
        column_rows=(16, 32, 64, 128),
    ),
    model=Model(latency_us=1.0, program_us=0.3, launch_us=3.0, lane_gops=230.0, unit_share=2.0),
)

# Two 16-byte loads of each operand and lane; not measured.
POINTWISE = PointwiseTable(
    lane_bytes=32, num_warps=4, search_warps=(2, 4, 8), latency_us=1.0, launch_us=3.0, lane_gops=230.0
)


class Hopper(NvidiaBackend):
    """The choices for sm90."""

    arch = "sm90"
    verified = "verified and measured on hardware (H200); docs/measurements.md names what had no time or changed since"
    parts = PARTS
    kinds: ClassVar[Mapping[str, Kind]] = FrozenMap(
        gemm=Gemm(GEMMS, TensorCores(warp_groups=True)),
        pointwise=Pointwise(POINTWISE),
        row_reduction=RowReduction(ROWS),
    )
    knobs = knobs(max_ctas=16)  # programs of one cluster share memory from sm90 on


@hookimpl
def portkern_parse_arch(text: str) -> Target | None:
    return parse(text, PARTS)


@hookimpl
def portkern_device(properties: Any, index: int) -> Device | None:
    return device_of(properties, index, PARTS)


@hookimpl
def portkern_backend(target: Target) -> Backend | None:
    return Hopper(target) if target.backend == "cuda" and target.arch in PARTS else None


@hookimpl
def portkern_targets() -> Iterable[Target]:
    return (Target("cuda", "sm90", 32),)


@hookimpl
def portkern_environment() -> Mapping[str, str]:
    return ENVIRONMENT
