"""NVIDIA Ampere (sm80: A100). Lends its choices to sm86 and sm89."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

from portkern.backend import Backend
from portkern.backends._gemm import Gemm
from portkern.backends._gemm_table import VECTORS, GemmTable, Tile
from portkern.backends._gemm_table import Model as GemmModel
from portkern.backends._nvidia import ENVIRONMENT, KIB, NvidiaBackend, TensorCores, device_of, knobs, parse
from portkern.backends._pointwise import Pointwise, PointwiseTable
from portkern.backends._rows import RowReduction
from portkern.backends._rows_cached import Cached
from portkern.backends._rows_model import Model
from portkern.backends._rows_sums import Grouped, Sums
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
from portkern.hookspecs import hookimpl
from portkern.record import FrozenMap
from portkern.target import Device, Target
from portkern.translator import NAME as TRANSLATE

A100 = Part(
    name="NVIDIA A100-SXM4-80GB",
    units=108,
    memory_bytes=80 * 10**9,
    shared_bytes=163 * KIB,
    shared_bytes_per_unit=164 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=64,
    max_programs_per_unit=32,
    cache_bytes=40 * KIB**2,
    memory_gbps=2_039.0,
    matrix_tflops=312.0,
)
A6000 = Part(
    name="NVIDIA RTX A6000",
    units=84,
    memory_bytes=48 * 10**9,
    shared_bytes=99 * KIB,
    shared_bytes_per_unit=100 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=48,
    max_programs_per_unit=16,
    cache_bytes=6 * KIB**2,
    memory_gbps=768.0,
    matrix_tflops=150.0,
)
L40S = Part(
    name="NVIDIA L40S",
    units=142,
    memory_bytes=48 * 10**9,
    shared_bytes=99 * KIB,
    shared_bytes_per_unit=100 * KIB,
    registers_per_unit=65_536,
    max_registers=255,
    max_warps_per_unit=48,
    max_programs_per_unit=24,
    cache_bytes=96 * KIB**2,
    memory_gbps=864.0,
    matrix_tflops=362.0,
)
PARTS: FrozenMap[Part] = FrozenMap(sm80=A100, sm86=A6000, sm89=L40S)

# What was measured on an H200 (nvidia_sm90.py), not on an A100: the register file and its limits are the same.
ROWS = RowTable(
    lane_elements=16,  # at 32, rows of two 16-bit operands spill 16 to 24 bytes in Triton 3.9
    packed=Packed(longest=512, elements=1_024, num_warps=2),
    resident=(
        Resident(longest=1_024, num_warps=2, programs_per_unit=0, num_stages=1),
        Resident(longest=2_048, num_warps=4, programs_per_unit=0, num_stages=1),
        Resident(longest=4_096, num_warps=8, programs_per_unit=0, num_stages=1),
        Resident(longest=8_192, num_warps=16, programs_per_unit=0, num_stages=1),
        Resident(longest=16_384, num_warps=16, programs_per_unit=0, num_stages=1),
        Resident(longest=32_768, num_warps=32, programs_per_unit=0, num_stages=1),
    ),
    cached=(
        Cached(8_192, 16_384, num_warps=16, options=FrozenMap()),
        Cached(16_384, 32_768, num_warps=32, options=FrozenMap(), live=1.0),
    ),
    looped=Looped(block=4_096, num_warps=8, num_stages=1),
    split=Parted(block=2_048, num_warps=8, programs_per_unit=4),
    # Triton 3.6 takes up to 106 registers here, so that no more fit without spills.
    coresident=Parted(block=4_096, num_warps=4, programs_per_unit=4),
    # 32 neighbouring rows are 64 bytes of 16-bit elements.
    columns=Columns(rows=32, block=64, num_warps=16, longest=1_024),
    # Left to itself, the assembler spills 8 bytes to fit one more program on a unit.
    crowded=FrozenMap(maxnreg=255),
    # Not measured. One program of 16 warps a unit walks rows of 8,192; two rows are on their way in shared memory.
    sums=Sums(
        packed=(
            Grouped(1_024, num_warps=4, programs_per_unit=4, num_stages=4),
            Grouped(2_048, num_warps=4, programs_per_unit=3, num_stages=3),
            Grouped(1_024, num_warps=4, programs_per_unit=8, num_stages=1),
            Grouped(4_096, num_warps=4, programs_per_unit=2, num_stages=3),
            Grouped(1_024, num_warps=1, programs_per_unit=8, num_stages=1),
        ),
        lane_elements=16,
        warps_per_unit=16,
        longest=8_192,
        num_stages=3,
        walked_block=1_024,
        walked_programs=8,
        parted_block=2_048,
        parted_warps=4,
        lag=False,
        rows=1_024,
        columns=8,
        elements=4_096,
        num_warps=8,
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
    model=Model(latency_us=1.2, program_us=0.3, launch_us=3.5, lane_gops=90.0, unit_share=2.0),
)


# Not measured. The defaults compile without spills in Triton 3.6 and 3.9 (tests/crosscompile/test_gemm.py).
# Tiles for one sum spill 16 to 464 bytes with two summed dims apart from k, in some order of the operands.
GEMMS = GemmTable(
    tiles=FrozenMap(
        half=(
            Tile(128, 256, 32, num_warps=8, num_stages=3, speed=0.75, whole_c=True, one_sum=True),
            Tile(128, 128, 32, num_warps=4, num_stages=4, speed=0.75, whole_c=True, one_sum=True),
            Tile(128, 128, 64, num_warps=8, num_stages=3, speed=0.72, one_sum=True),
            Tile(64, 128, 32, num_warps=4, num_stages=4, speed=0.6),
            Tile(64, 64, 64, num_warps=4, num_stages=4, speed=0.45),
            Tile(32, 64, 64, num_warps=4, num_stages=4, speed=0.25),
            Tile(16, 64, 128, num_warps=4, num_stages=4, speed=0.12),
        ),
        tf32=(
            Tile(128, 128, 32, num_warps=8, num_stages=3, speed=0.7),
            Tile(64, 64, 32, num_warps=4, num_stages=4, speed=0.5),
            Tile(16, 64, 64, num_warps=4, num_stages=4, speed=0.12),
        ),
        float32=(
            *VECTORS,
            # Measured on sm90 alone: with B along k products take twice as long, or longer. That comes from how the
            # compiler lays blocks out for what the matrix unit does not do, here as there.
            Tile(128, 128, 16, num_warps=8, num_stages=3, speed=0.6, along_n=True),
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.5, along_n=True),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.35, along_n=True),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.2, along_n=True),
            Tile(128, 128, 16, num_warps=8, num_stages=3, speed=0.3),
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.25),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.17),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.1),
        ),
        float64=(
            *VECTORS,
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.6),
            Tile(32, 32, 32, num_warps=4, num_stages=3, speed=0.4),
        ),
    ),
    loose=FrozenMap(
        half=(
            *VECTORS,
            Tile(128, 128, 32, num_warps=8, num_stages=2, speed=0.3),
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.25),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.08),
        ),
        tf32=(
            *VECTORS,
            Tile(64, 64, 32, num_warps=4, num_stages=3, speed=0.4, one_sum=True),
            Tile(16, 64, 64, num_warps=4, num_stages=3, speed=0.12, one_sum=True),
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.27),
            Tile(16, 64, 32, num_warps=4, num_stages=3, speed=0.08),
        ),
        float32=(
            *VECTORS,
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.5, along_n=True),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.35, along_n=True),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.2, along_n=True),
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.25),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.17, one_sum=True),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.1),
        ),
        float64=(
            *VECTORS,
            Tile(32, 32, 16, num_warps=4, num_stages=2, speed=0.4),
        ),
    ),
    persistent=FrozenMap(),
    rates=FrozenMap(half=1.0, tf32=0.5, float32=0.0625, float64=0.0625),
    orders=FrozenMap(float32=("", "n")),
    # Left to itself, the assembler spills a few bytes to fit one more program on a unit.
    options=FrozenMap(maxnreg=255),
    model=GemmModel(
        load_us=0.9, loose_us=1.8, tile_us=2.0, launch_us=3.5, cache_gbps=4_000.0, sum_us=5.0, sum_gbps=4_000.0
    ),
    no_descriptors="persistent is no gain here: this architecture has no tensor descriptors, and what Triton makes of "
    "them loads each block only when it is needed: use tiles",
)

# Two 16-byte loads of each operand and lane; not measured.
POINTWISE = PointwiseTable(
    lane_bytes=32, num_warps=4, search_warps=(2, 4, 8), latency_us=1.2, launch_us=3.5, lane_gops=90.0
)


class Ampere(NvidiaBackend):
    """The choices for sm80."""

    arch = "sm80"
    verified = (
        "compiled and checked for spills and limits, every op executed on an H200, whose driver translates it "
        "(portkern verify --as sm80), some before their kernels last changed, never timed"
    )
    register_margin = 1.4  # 1.4 seen in Triton 3.9, for rows of two 16-bit operands
    parts = PARTS
    kinds: ClassVar[Mapping[str, Kind]] = FrozenMap(
        gemm=Gemm(GEMMS, TensorCores(warp_groups=False)),
        pointwise=Pointwise(POINTWISE),
        row_reduction=RowReduction(ROWS),
    )
    knobs = knobs(max_ctas=1)

    def executors(self) -> Mapping[str, Any]:
        """Its code, translated by the driver of a later GPU."""
        return {TRANSLATE: self._translator}

    @cached_property
    def _translator(self) -> Any:
        from portkern.backends._nvidia_translator import PtxTranslator

        return PtxTranslator()


@hookimpl
def portkern_parse_arch(text: str) -> Target | None:
    return parse(text, PARTS)


@hookimpl
def portkern_device(properties: Any, index: int) -> Device | None:
    return device_of(properties, index, PARTS)


@hookimpl
def portkern_backend(target: Target) -> Backend | None:
    return Ampere(target) if target.backend == "cuda" and target.arch in PARTS else None


@hookimpl
def portkern_targets() -> Iterable[Target]:
    return (Target("cuda", "sm80", 32),)


@hookimpl
def portkern_environment() -> Mapping[str, str]:
    return ENVIRONMENT
