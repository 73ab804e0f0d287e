"""AMD CDNA3 (gfx942: MI300X, MI300A, MI325X). Lends its choices to gfx950 and gfx90a."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

from portkern.backend import Backend
from portkern.backends._amd import ENVIRONMENT, KIB, AmdBackend, LocalDataShare, device_of, parse
from portkern.backends._gemm import Gemm
from portkern.backends._gemm_table import VECTORS, GemmTable, Tile
from portkern.backends._gemm_table import Model as GemmModel
from portkern.backends._pointwise import Pointwise, PointwiseTable
from portkern.backends._rows import RowReduction
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
from portkern.emulator import NAME as EMULATE
from portkern.hookspecs import hookimpl
from portkern.record import FrozenMap
from portkern.target import Device, Target

MI300X = Part(
    name="AMD Instinct MI300X",
    units=304,
    memory_bytes=192 * 10**9,
    shared_bytes=64 * KIB,
    shared_bytes_per_unit=64 * KIB,
    registers_per_unit=131_072,  # 512 a lane on each of four SIMDs, accumulators among them
    max_registers=512,
    max_warps_per_unit=32,
    max_programs_per_unit=32,
    cache_bytes=256 * KIB**2,
    memory_gbps=5_300.0,
    matrix_tflops=1_307.4,
    transfers=4,
)
MI355X = Part(
    name="AMD Instinct MI355X",
    units=256,
    memory_bytes=288 * 10**9,
    shared_bytes=160 * KIB,
    shared_bytes_per_unit=160 * KIB,
    registers_per_unit=131_072,
    max_registers=512,
    max_warps_per_unit=32,
    max_programs_per_unit=32,
    cache_bytes=256 * KIB**2,
    memory_gbps=8_000.0,
    matrix_tflops=2_500.0,
    transfers=4,
)
MI250X = Part(  # one of the two dies, which is what the driver calls a device
    name="AMD Instinct MI250X",
    units=110,
    memory_bytes=64 * 10**9,
    shared_bytes=64 * KIB,
    shared_bytes_per_unit=64 * KIB,
    registers_per_unit=131_072,
    max_registers=512,
    max_warps_per_unit=32,
    max_programs_per_unit=32,
    cache_bytes=8 * KIB**2,
    memory_gbps=1_600.0,
    matrix_tflops=191.5,
)
PARTS: FrozenMap[Part] = FrozenMap(gfx942=MI300X, gfx950=MI355X, gfx90a=MI250X)

# Not measured: compiled only. 32 elements a lane take about 57 registers, at which every wave slot of a unit can be
# used, and won on an H200 (nvidia_sm90.py). The nearest cache is 32 KB: too small for a row that is read again.
ROWS = RowTable(
    packed=Packed(longest=1_024, elements=2_048, num_warps=1),
    resident=(
        Resident(longest=2_048, num_warps=1, programs_per_unit=0, num_stages=1),
        Resident(longest=4_096, num_warps=2, programs_per_unit=0, num_stages=1),
        Resident(longest=8_192, num_warps=4, programs_per_unit=0, num_stages=1),
        Resident(longest=16_384, num_warps=8, programs_per_unit=0, num_stages=1),
        Resident(longest=32_768, num_warps=16, programs_per_unit=0, num_stages=1),
    ),
    # Prefetched chunks would wait in registers: more programs hide latency for less.
    looped=Looped(block=8_192, num_warps=8, num_stages=1),
    split=Parted(block=4_096, num_warps=4, programs_per_unit=2),
    coresident=Parted(block=8_192, num_warps=4, programs_per_unit=4, options=FrozenMap(poll_cache=".cv")),
    # 32 neighbouring rows are 64 bytes of 16-bit elements, one of the vendor's sectors.
    columns=Columns(rows=32, block=128, num_warps=8, longest=1_024),
    # Not measured. Prefetched rows would wait in registers, beside the sums: two programs a unit instead.
    sums=Sums(
        packed=(
            Grouped(2_048, num_warps=4, programs_per_unit=4, num_stages=1),
            Grouped(4_096, num_warps=4, programs_per_unit=4, num_stages=1),
            Grouped(1_024, num_warps=4, programs_per_unit=4, num_stages=1),
            Grouped(2_048, num_warps=2, programs_per_unit=8, num_stages=1),
        ),
        lane_elements=16,
        warps_per_unit=16,
        longest=8_192,
        num_stages=1,
        walked_block=2_048,
        walked_programs=8,
        parted_block=4_096,
        parted_warps=4,
        lag=False,
        rows=1_024,
        columns=8,
        elements=4_096,
        num_warps=4,
    ),
    # A single unit draws a few per cent of the bandwidth: 64 KB of one row is worth two launches.
    split_from=32_768,
    search=Search(
        num_warps=(1, 2, 4, 8, 16),
        num_stages=(1, 2),
        persistent=((0, 1), (1, 1), (2, 1), (4, 1), (2, 2)),
        packed_elements=(1_024, 2_048, 4_096, 8_192),
        looped_blocks=(2_048, 4_096, 8_192, 16_384),
        column_rows=(16, 32, 64, 128),
    ),
    model=Model(latency_us=1.8, program_us=0.3, launch_us=5.0, lane_gops=134.0, unit_share=2.0),
)


# Not measured. The defaults compile without spills in Triton 3.6 and 3.9 (tests/crosscompile/test_gemm.py).
# 256x256x64 with 8 waves, a common choice, spills in 3.9. Instructions of 16 rows and columns take fewer registers
# than those of 32.
GEMMS = GemmTable(
    tiles=FrozenMap(
        half=(
            Tile(256, 128, 64, num_warps=8, num_stages=2, speed=0.55),
            Tile(128, 128, 64, num_warps=4, num_stages=2, speed=0.5),
            Tile(128, 128, 64, num_warps=8, num_stages=2, speed=0.45),
            Tile(64, 128, 64, num_warps=4, num_stages=2, speed=0.38),
            Tile(64, 64, 64, num_warps=4, num_stages=2, speed=0.3),
            Tile(32, 64, 128, num_warps=4, num_stages=2, speed=0.15),
            Tile(16, 64, 128, num_warps=4, num_stages=2, speed=0.08),
        ),
        tf32=(
            Tile(128, 128, 32, num_warps=8, num_stages=2, speed=0.4),
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.3),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.1),
        ),
        float32=(
            *VECTORS,
            Tile(128, 128, 32, num_warps=8, num_stages=2, speed=0.6),
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.45),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.15),
        ),
        float64=(
            *VECTORS,
            Tile(64, 64, 16, num_warps=4, num_stages=2, speed=0.5),
            Tile(32, 32, 32, num_warps=4, num_stages=2, speed=0.3),
        ),
    ),
    loose=FrozenMap(
        half=(
            *VECTORS,
            Tile(128, 128, 32, num_warps=8, num_stages=2, speed=0.25),
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.2),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.06),
        ),
        tf32=(
            *VECTORS,
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.25),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.1),
        ),
        float32=(
            *VECTORS,
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.35),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.12),
        ),
        float64=(
            *VECTORS,
            Tile(32, 32, 16, num_warps=4, num_stages=2, speed=0.3),
        ),
    ),
    persistent=FrozenMap(),
    rates=FrozenMap(half=1.0, tf32=0.5, float32=0.125, float64=0.125),
    model=GemmModel(
        load_us=1.2, loose_us=2.4, tile_us=3.0, launch_us=5.0, cache_gbps=10_000.0, sum_us=8.0, sum_gbps=10_000.0
    ),
    options=FrozenMap(matrix_instr_nonkdim=16),
    no_descriptors="persistent is no gain here: this architecture has no tensor descriptors, and what Triton makes of "
    "them loads each block only when it is needed: use tiles",
)

# Two 16-byte loads of each operand and lane; not measured.
POINTWISE = PointwiseTable(
    lane_bytes=32, num_warps=4, search_warps=(2, 4, 8), latency_us=1.8, launch_us=5.0, lane_gops=134.0
)


class Cdna3(AmdBackend):
    """The choices for gfx942."""

    arch = "gfx942"
    verified = "executed in emulation on the CPU (portkern verify --device gfx942), never on hardware, never timed"
    parts = PARTS
    kinds: ClassVar[Mapping[str, Kind]] = FrozenMap(
        gemm=Gemm(GEMMS, LocalDataShare()), pointwise=Pointwise(POINTWISE), row_reduction=RowReduction(ROWS)
    )

    def executors(self) -> Mapping[str, Any]:
        """The emulator, for the architecture itself only: its neighbours have other instructions."""
        if self.target.arch != self.arch:
            return {}
        return {EMULATE: self._emulator}

    @cached_property
    def _emulator(self) -> Any:
        from portkern.backends.gfx942_emulator.emulator import Gfx942Emulator

        return Gfx942Emulator()

    def fp8(self) -> tuple[str, bool]:
        return {"gfx942": "float8_e4m3fnuz"}.get(self.target.arch, "float8_e4m3fn"), self.target.arch != "gfx90a"


@hookimpl
def portkern_parse_arch(text: str) -> Target | None:
    return parse(text, PARTS)


@hookimpl
def portkern_device(properties: Any, index: int) -> Device | None:
    return device_of(properties, index, PARTS)


@hookimpl
def portkern_backend(target: Target) -> Backend | None:
    return Cdna3(target) if target.backend == "hip" and target.arch in PARTS else None


@hookimpl
def portkern_targets() -> Iterable[Target]:
    return (Target("hip", "gfx942", 64),)


@hookimpl
def portkern_environment() -> Mapping[str, str]:
    return ENVIRONMENT
