"""Tiles of matrix products on sm90, and the constants of their time model. Data only."""

from __future__ import annotations

from portkern.backends._gemm_table import VECTORS, GemmTable, Model, Tile
from portkern.record import FrozenMap

# For products of few tiles. On one H200 1024^3 took 10.3 us in tiles of 64x128x128, 12.6 in 128x128x128; 256x4096x4096
# 23.7 and 33.2.
FEW_TILES = (
    Tile(64, 128, 128, num_warps=4, num_stages=4, speed=0.60),
    Tile(128, 64, 128, num_warps=4, num_stages=4, speed=0.58),
    Tile(64, 128, 64, num_warps=4, num_stages=6, speed=0.59),
    Tile(128, 64, 64, num_warps=4, num_stages=6, speed=0.575),
    Tile(64, 64, 128, num_warps=4, num_stages=5, speed=0.36),
    Tile(64, 32, 128, num_warps=4, num_stages=5, speed=0.24),
)

# Of B along n, where 1x4096x4096 in fp32 in 8 parts took 28.2 us, 30.0 by VECTORS. 1x4095x4095 in bf16: 32.4 and 24.1.
ALONG_N = Tile(1, 64, 64, num_warps=4, num_stages=1, speed=0.51, along_n=True, programs=4)

# The defaults compile without spills in Triton 3.6 and 3.9 (tests/crosscompile/test_gemm.py). Speeds and constants that
# decide products of few tiles follow a race of 15 products on one H200: of the 12 whose default ran, it took at most
# 3 % more than the fastest config.
# Tiles for one sum spill 8 to 648 bytes with two summed dims apart from k, in some order of the operands.
GEMMS = GemmTable(
    tiles=FrozenMap(
        half=(
            *VECTORS,
            ALONG_N,
            Tile(128, 256, 64, num_warps=8, num_stages=3, speed=0.62, whole_c=True, one_sum=True),
            Tile(128, 128, 64, num_warps=8, num_stages=4, speed=0.58),
            Tile(128, 128, 64, num_warps=4, num_stages=4, speed=0.60, whole_c=True, one_sum=True),
            Tile(64, 128, 64, num_warps=4, num_stages=4, speed=0.50),
            Tile(128, 64, 64, num_warps=4, num_stages=5, speed=0.48),
            Tile(64, 64, 128, num_warps=4, num_stages=4, speed=0.36, one_sum=True),
            Tile(32, 64, 128, num_warps=4, num_stages=5, speed=0.21, one_sum=True),
            Tile(16, 64, 128, num_warps=4, num_stages=4, speed=0.08),
            Tile(16, 32, 256, num_warps=4, num_stages=5, speed=0.09),
            Tile(64, 32, 128, num_warps=4, num_stages=5, speed=0.25),
        ),
        tf32=(
            *VECTORS,
            ALONG_N,
            Tile(128, 128, 32, num_warps=8, num_stages=4, speed=0.5, along_k=True),
            Tile(128, 64, 32, num_warps=4, num_stages=4, speed=0.4, along_k=True),
            Tile(64, 64, 32, num_warps=4, num_stages=4, speed=0.27, along_k=True),
            # Of operands that do not lie along k 4096^3 took 887 us, of packed ones 415.
            Tile(32, 128, 32, num_warps=4, num_stages=4, speed=0.17),
            Tile(32, 256, 32, num_warps=8, num_stages=3, speed=0.17),
            Tile(64, 64, 32, num_warps=2, num_stages=4, speed=0.18, one_sum=True),
            Tile(16, 64, 64, num_warps=4, num_stages=4, speed=0.08),
        ),
        float32=(
            *VECTORS,
            ALONG_N,
            # Blocks of B that lie along k are read at one bank of shared memory: 4096^3 took 6,740 us, else 3,147.
            Tile(128, 128, 16, num_warps=8, num_stages=3, speed=0.6, along_n=True),
            # Cut, it wants company: 256x1024x1024 took 23.4 us with four programs a unit, 23.6 with two, 26.0 with one;
            # 512x512x32768 421 with four, 458 with two.
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.61, along_n=True, programs=4),
            Tile(32, 64, 16, num_warps=4, num_stages=4, speed=0.40, along_n=True),
            # 16x4096x4096 in 8 parts: 29.3 us; in 4 parts 36.2, with 4 warps 36.1.
            Tile(32, 64, 16, num_warps=2, num_stages=4, speed=0.39, along_n=True, programs=4),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.2, along_n=True),
            Tile(128, 128, 16, num_warps=8, num_stages=3, speed=0.3, one_sum=True),
            Tile(64, 64, 16, num_warps=4, num_stages=1, speed=0.3),
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.25),
            Tile(32, 64, 16, num_warps=4, num_stages=4, speed=0.15),
            # Of B along k 16x4096x4096 took 82.9 us in 4 parts, 84.8 in 8, with 4 warps 94.0 and 91.4.
            Tile(32, 64, 16, num_warps=2, num_stages=4, speed=0.16, programs=2, one_sum=True),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.1),
        ),
        float64=(
            *VECTORS,
            ALONG_N,
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.8),
            Tile(32, 32, 32, num_warps=4, num_stages=3, speed=0.3),
        ),
    ),
    loose=FrozenMap(
        half=(
            *VECTORS,
            # On one H200 4095^3 took 932 us; the others keep their ratio to this one.
            Tile(128, 128, 64, num_warps=8, num_stages=2, speed=0.155, one_sum=True),
            Tile(128, 128, 32, num_warps=8, num_stages=2, speed=0.135),
            Tile(64, 128, 32, num_warps=4, num_stages=2, speed=0.10, one_sum=True),
            Tile(64, 64, 32, num_warps=4, num_stages=2, speed=0.08),
            Tile(16, 64, 64, num_warps=4, num_stages=2, speed=0.027),
            # Of B along k, and tiles of 32 rows, it spills. 255^3 took 7.5 us, in two parts 10.1, packed 11.9.
            Tile(16, 32, 256, num_warps=4, num_stages=5, speed=0.05, along_n=True, one_sum=True),
        ),
        tf32=(
            *VECTORS,
            # 4095^3 took 1,901 us, of operands along k 1,628; packed 485.
            Tile(64, 64, 32, num_warps=4, num_stages=3, speed=0.18, one_sum=True),
            Tile(16, 64, 64, num_warps=4, num_stages=3, speed=0.05, one_sum=True),
            # Not measured.
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.12),
            Tile(16, 64, 32, num_warps=4, num_stages=3, speed=0.035),
        ),
        float32=(
            *VECTORS,
            # 4 warps take a fifth less time (4095^3: 5,525 us, not 6,873), but spill 24 bytes with Triton 3.9. With B
            # along k 22,306. The others keep their ratio to these.
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.3, along_n=True),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.21, along_n=True, one_sum=True),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.12, along_n=True),
            Tile(64, 64, 16, num_warps=8, num_stages=3, speed=0.09),
            Tile(32, 64, 16, num_warps=4, num_stages=3, speed=0.055, one_sum=True),
            Tile(16, 64, 32, num_warps=8, num_stages=3, speed=0.036),
        ),
        float64=(
            *VECTORS,
            # 1001^3 took 60.1 us, packed 66.2 in the same tiles; 255^3 in 32x32x32 10.2, packed 14.6.
            Tile(64, 64, 16, num_warps=4, num_stages=3, speed=0.79, one_sum=True),
            Tile(32, 32, 32, num_warps=4, num_stages=3, speed=0.3, one_sum=True),
            Tile(32, 32, 16, num_warps=4, num_stages=3, speed=0.25),  # not measured
        ),
    ),
    persistent=FrozenMap(
        half=(
            # One loop of tiles and k: 2 % less time at 4096^3.
            Tile(128, 256, 64, 8, 3, speed=0.80, params=FrozenMap(FLATTEN=1, SLICES=2), whole_c=True),
            Tile(128, 256, 64, 8, 4, speed=0.79, params=FrozenMap(FLATTEN=1, SLICES=2), whole_c=True),
            Tile(128, 256, 64, 8, 3, speed=0.78, params=FrozenMap(FLATTEN=1), whole_c=True),
            Tile(128, 256, 64, 8, 4, speed=0.79, params=FrozenMap(SLICES=2), whole_c=True),
            Tile(128, 256, 64, 8, 3, speed=0.77, whole_c=True),
            Tile(128, 128, 64, 8, 4, speed=0.65, params=FrozenMap(FLATTEN=1), whole_c=True),
            Tile(128, 128, 64, 8, 4, speed=0.65, whole_c=True),
            Tile(128, 128, 128, 8, 3, speed=0.64, whole_c=True),
            # 512x4096x4096, a tile for each unit: 28.9 us, 29.6 in 5 stages, 32.9 in 4, 33.9 in 3 of twice the depth.
            Tile(128, 128, 64, 8, 6, speed=0.655, whole_c=True),
            # Stored by pointers in halves, since whole they spill up to 104 bytes with Triton 3.9. 4095^3, packed, took
            # 247 us with 6 stages, 249 with FLATTEN, 267 to 269 in blocks of 128 of k.
            Tile(128, 128, 128, 8, 3, speed=0.64, params=FrozenMap(SLICES=2)),
            Tile(128, 128, 64, 8, 6, speed=0.645, params=FrozenMap(SLICES=2)),
            Tile(128, 128, 64, 8, 4, speed=0.64, params=FrozenMap(FLATTEN=1, SLICES=2)),
            *FEW_TILES,
        ),
        tf32=(
            # 4096^3 took 379 us, 383 without FLATTEN, 424 in tiles of 128x128.
            Tile(128, 256, 32, 8, 3, 0.88, params=FrozenMap(FLATTEN=1, SLICES=2), whole_c=True, along_k=True),
            Tile(128, 256, 32, 8, 3, 0.87, params=FrozenMap(SLICES=2), whole_c=True, along_k=True),
            Tile(128, 128, 32, 8, 4, speed=0.78, whole_c=True, along_k=True),
            Tile(128, 128, 32, 8, 4, speed=0.77, params=FrozenMap(SLICES=2), along_k=True),
        ),
        float32=(),
        float64=(),
    ),
    rates=FrozenMap(half=1.0, tf32=0.5, float32=0.068, float64=0.068),
    # The matrix unit takes tf32 along k alone; without it B is read from all banks at once if it lies along n.
    orders=FrozenMap(tf32=("k", "k"), float32=("", "n")),
    # 4096^3 took 3,014 us with A along m, 3,147 along k, in less than half the registers.
    copied=FrozenMap(float32=("m", "")),
    # Left to itself, the assembler spills a few bytes to fit one more program on a unit.
    options=FrozenMap(maxnreg=255),
    model=Model(
        load_us=0.9,
        loose_us=1.9,
        tile_us=2.0,
        launch_us=5.0,
        cache_gbps=14_000.0,
        sum_us=2.0,
        sum_gbps=5_500.0,
        memory_share=0.7,
        unit_gbps=106.0,
        unhidden=0.02,
        descriptor_us=0.3,  # 512^3 in tiles of 64x32: 7.5 us for 7.2
        split_margin=1.05,
    ),
)
