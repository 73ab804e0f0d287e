"""Tiles of matrix products on sm90, and the constants of their time model. Data only."""

from __future__ import annotations

from portkern.backends._gemm_table import GemmTable, Model, Tile
from portkern.record import FrozenMap

# For products of few tiles: not measured yet.
_FEW = ((128, 64, 64, 6), (128, 64, 128, 4), (64, 128, 64, 6), (64, 128, 128, 4), (64, 64, 128, 5), (64, 32, 128, 5))
FEW_TILES = tuple(Tile(m, n, k, 4, stages, min(0.5, m * n / 2**14), on_trial=True) for m, n, k, stages in _FEW)

# The defaults compile without spills in Triton 3.6 and 3.9 (tests/crosscompile/test_gemm.py); speeds are estimates.
GEMMS = GemmTable(
    tiles=FrozenMap(
        half=(
            Tile(128, 256, 64, num_warps=8, num_stages=3, speed=0.62, whole_c=True),
            Tile(128, 128, 64, num_warps=8, num_stages=4, speed=0.58),
            Tile(128, 128, 64, num_warps=4, num_stages=4, speed=0.60, whole_c=True),
            Tile(64, 128, 64, num_warps=4, num_stages=4, speed=0.50),
            Tile(128, 64, 64, num_warps=4, num_stages=5, speed=0.48),
            Tile(64, 64, 128, num_warps=4, num_stages=4, speed=0.36),
            Tile(32, 64, 128, num_warps=4, num_stages=5, speed=0.15),
            Tile(16, 64, 128, num_warps=4, num_stages=4, speed=0.08),
            Tile(16, 32, 256, num_warps=4, num_stages=5, speed=0.04),
            *FEW_TILES,
        ),
        tf32=(
            Tile(128, 128, 32, num_warps=8, num_stages=4, speed=0.5, along_k=True),
            Tile(128, 64, 32, num_warps=4, num_stages=4, speed=0.45, along_k=True),
            Tile(64, 64, 32, num_warps=4, num_stages=4, speed=0.35, along_k=True),
            Tile(32, 128, 32, num_warps=4, num_stages=4, speed=0.25),
            Tile(32, 256, 32, num_warps=8, num_stages=3, speed=0.25),
            Tile(64, 64, 32, num_warps=2, num_stages=4, speed=0.25),
            Tile(16, 64, 64, num_warps=4, num_stages=4, speed=0.08),
        ),
        float32=(
            Tile(128, 128, 16, num_warps=8, num_stages=3, speed=0.6),
            # Of blocks of B that lie along k every bank of shared memory is hit again and again: 3.3 times slower.
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.7, along_n=True),
            Tile(64, 64, 16, num_warps=4, num_stages=1, speed=0.3),
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.25),
            Tile(32, 64, 16, num_warps=4, num_stages=4, speed=0.35),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.2),
        ),
        float64=(
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.8),
            Tile(32, 32, 32, num_warps=4, num_stages=3, speed=0.3),
        ),
    ),
    loose=FrozenMap(
        half=(
            Tile(128, 128, 64, num_warps=8, num_stages=2, speed=0.23),
            Tile(128, 128, 32, num_warps=8, num_stages=2, speed=0.20),
            Tile(64, 128, 32, num_warps=4, num_stages=2, speed=0.15),
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.12),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.04),
        ),
        tf32=(
            Tile(64, 64, 32, num_warps=4, num_stages=3, speed=0.3),
            Tile(16, 64, 64, num_warps=4, num_stages=3, speed=0.08),
        ),
        float32=(
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.5),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.35),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.2),
        ),
        float64=(Tile(32, 32, 16, num_warps=4, num_stages=2, speed=0.3),),
    ),
    persistent=FrozenMap(
        half=(
            # One loop of tiles and k: 2 % less time at 4096^3.
            Tile(128, 256, 64, 8, 4, speed=0.80, params=FrozenMap(FLATTEN=1, SLICES=2), whole_c=True),
            Tile(128, 256, 64, 8, 3, speed=0.79, params=FrozenMap(FLATTEN=1, SLICES=2), whole_c=True),
            Tile(128, 256, 64, 8, 3, speed=0.78, params=FrozenMap(FLATTEN=1), whole_c=True),
            Tile(128, 256, 64, 8, 3, speed=0.77, whole_c=True),
            Tile(128, 128, 64, 8, 4, speed=0.65, params=FrozenMap(FLATTEN=1)),
            Tile(128, 128, 64, 8, 4, speed=0.65),
            Tile(128, 128, 128, 8, 3, speed=0.64),
            *FEW_TILES,
        ),
        tf32=(
            Tile(128, 256, 32, 8, 3, speed=0.65, whole_c=True, along_k=True),
            Tile(128, 128, 32, 8, 4, speed=0.6, along_k=True),
        ),
        float32=(),
        float64=(),
    ),
    rates=FrozenMap(half=1.0, tf32=0.5, float32=0.068, float64=0.068),
    # Left to itself, the assembler spills a few bytes to fit one more program on a unit.
    options=FrozenMap(maxnreg=255),
    model=Model(load_us=0.8, tile_us=2.0, launch_us=3.0, cache_gbps=5_500.0, sum_us=4.0),
)
