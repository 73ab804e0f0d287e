"""Softmax and log-softmax over one dimension, and their gradients.

    y  = exp(x - max(x)) / sum(exp(x - max(x)))        dx = y * (dy - sum(y * dy))
    y  = x - max(x) - log(sum(exp(x - max(x))))        dx = dy - exp(y) * sum(dy)        (LOG)

The kernels also serve kernels/masked_softmax.py, with logits z made of x and of a mask (MASKED), and dx times a number
(SCALED).

x, y, dy, dx: (M0, M1, M2, N), reduced over N. A tile is BLOCK_M rows, neighbours along M2, by BLOCK_N columns.
One tile holds whole rows (packed, resident and cached rows), or a program walks a row twice (looped rows), or a row is
cut into SPLITS parts: two launches that exchange (max, sum) through scratch (split rows), or one launch of programs
that all run at once and wait for each other (co-resident rows).

A NaN or +inf makes its row NaN, a row of only -inf is NaN, any other -inf gives 0 (-inf for LOG), as in torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import (
    FLOATS,
    INTEGERS,
    autocast_to_float32,
    check_dim,
    check_dtype,
    check_one_dim,
    check_tensor,
)
from portkern.batching import Folded, InDims, stacked
from portkern.config import Blocks, Config
from portkern.kernels._rows import (
    TRITON_DTYPES,
    at,
    await_words,
    block_offsets,
    blocks_in,
    collect,
    exp,
    kept,
    load,
    load_logits,
    load_masked,
    lowest,
    number,
    numbers,
    opaque,
    part_of,
    peek,
    publish,
    row_base,
    store,
    tile_origin,
)
from portkern.layout import Rows, in_pairs, readable, rows_of
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Meta, Out, Plan, like
from portkern.problem import Problem, Work
from portkern.row_plan import RowKernels, row_plan
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device


@triton.jit
def _logits(
    x, masking, i0, i1, i2, offs_m, offs_n, mask_m, mask_n,
    AS: tl.constexpr, COMPUTE: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """What exponentials are taken of, -inf outside of the row.

    masking: (mask, what counts rows, scale). Without a scale, x as AS. With one, x * scale as COMPUTE, of which a mask
    and, where rows are counted, the diagonal take some away. A mask is bool, or a number to add; its pointer may be
    None.
    """
    x_base, stride_m, stride_n = x
    x_ptrs = x_base + (offs_m[:, None] * stride_m + offs_n[None, :] * stride_n)
    keep = mask_m[:, None] & mask_n[None, :]
    z = load_masked(x_ptrs, keep, -float("inf"), AS, COMPUTE, EVICTION)
    mask, stride_position, scale = masking
    if scale is not None:
        z = z.to(COMPUTE) * scale
        if mask[0] is not None:
            mask_ptrs = at(mask, i0, i1, i2) + offs_m[:, None] * mask[3] + offs_n[None, :] * mask[4]
            given = tl.load(mask_ptrs, mask=keep, other=0, eviction_policy=EVICTION)
            if given.dtype == tl.int1:
                keep &= given
            else:
                z += given.to(COMPUTE)
        if stride_position is not None:
            keep &= offs_n[None, :] <= (-stride_position * (i2 + offs_m))[:, None]
        z = tl.where(keep, z, -float("inf"))
    return z


@triton.jit
def _row_maximum(x, masking, COMPUTE: tl.constexpr):
    """[BLOCK_M, 1]. Finite where a row has nothing but -inf if masked: the row is then 0, not NaN."""
    maximum = tl.max(x, axis=1, keep_dims=True)
    return maximum if masking[2] is None else tl.maximum(maximum, lowest(COMPUTE))


@triton.jit
def _inverse(total, masking):
    return 1.0 / total if masking[2] is None else tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def _normalise(x, maximum, total, masking, LOG: tl.constexpr):
    if LOG:
        return x - maximum - tl.log(total)
    return exp(x - maximum) * _inverse(total, masking)


@triton.jit
def _gradient(dy, y, total, scale, LOG: tl.constexpr):
    if LOG:
        dx = dy - exp(y) * total
    else:
        dx = y * (dy - total)
    return dx if scale is None else dx * scale


@triton.jit
def _row_total(dy, y, LOG: tl.constexpr):
    return dy if LOG else dy * y


# ---- whole rows in one tile -------------------------------------------------------------------------------------


@triton.jit
def _softmax_tile(
    tile, x, masking, y, M0, M1, M2, N,
    LOG: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, REREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_n = block_offsets(0, BLOCK_M, WIDE), block_offsets(0, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < M2 - i2, offs_n < N
    x_row = (at(x, i0, i1, i2), x[3], x[4])
    if REREAD:
        # Long 16-bit rows are kept by the nearest cache instead of registers, so that a second row fits beside the
        # first: 132 us, not 165, for 4096 rows of 32768. The barriers keep the compiler from merging the reads.
        z = _logits(x_row, masking, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, AS, COMPUTE, "evict_last")
        maximum = _row_maximum(z.to(COMPUTE), masking, COMPUTE)
        tl.debug_barrier()
        z = _logits(x_row, masking, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, AS, COMPUTE, "evict_last")
        total = tl.sum(exp(z.to(COMPUTE) - maximum), axis=1, keep_dims=True)
        tl.debug_barrier()
        z = _logits(x_row, masking, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, AS, COMPUTE, "evict_first")
        result = _normalise(z.to(COMPUTE), maximum, total, masking, LOG)
    else:
        z = _logits(x_row, masking, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, AS, COMPUTE, "").to(COMPUTE)
        z -= _row_maximum(z, masking, COMPUTE)
        exp_z = exp(z)
        total = tl.sum(exp_z, axis=1, keep_dims=True)
        result = z - tl.log(total) if LOG else exp_z * _inverse(total, masking)
    store(at(y, i0, i1, i2), result, offs_m, offs_n, mask_m, mask_n, y[3], y[4])


@triton.jit
def _softmax_kernel(
    x_ptr, y_ptr, mask_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, stride_position2, scale: tl.float64,
    LOG: tl.constexpr, MASKED: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr, REREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row, cached_row (REREAD).

    Grid: one program a tile, or PERSISTENT programs that fetch STAGES - 1 tiles ahead.
    """
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    masking = (mask, stride_position2, number(scale, COMPUTE) if MASKED else None)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _softmax_tile(tile, x, masking, y, M0, M1, M2, N, LOG, AS, COMPUTE, WIDE, REREAD, BLOCK_M, BLOCK_N)
    else:
        _softmax_tile(tl.program_id(0), x, masking, y, M0, M1, M2, N, LOG, AS, COMPUTE, WIDE, REREAD, BLOCK_M, BLOCK_N)


@triton.jit
def _softmax_backward_tile(
    tile, dy_ptr, y_ptr, dx_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale,
    LOG: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_n = block_offsets(0, BLOCK_M, WIDE), block_offsets(0, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < M2 - i2, offs_n < N
    dy_base = row_base(dy_ptr, i0, i1, i2, stride_dy0, stride_dy1, stride_dy2)
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    dy = load(dy_base, offs_m, offs_n, mask_m, mask_n, stride_dy2, stride_dyn, 0.0)
    y = load(y_base, offs_m, offs_n, mask_m, mask_n, stride_y2, stride_yn, 0.0)
    total = tl.sum(_row_total(dy.to(COMPUTE), y.to(COMPUTE), LOG), axis=1, keep_dims=True)
    dx_base = row_base(dx_ptr, i0, i1, i2, stride_dx0, stride_dx1, stride_dx2)
    dy, y = opaque(dy, N < 0), opaque(y, N < 0)
    dx = _gradient(dy.to(COMPUTE), y.to(COMPUTE), total, scale, LOG)
    store(dx_base, dx, offs_m, offs_n, mask_m, mask_n, stride_dx2, stride_dxn)


@triton.jit
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale: tl.float64,
    LOG: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, PERSISTENT: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row: as `_softmax_kernel`."""
    scale = number(scale, COMPUTE) if SCALED else None
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _softmax_backward_tile(
                tile, dy_ptr, y_ptr, dx_ptr, M0, M1, M2, N,
                stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
                stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale,
                LOG, COMPUTE, WIDE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        _softmax_backward_tile(
            tl.program_id(0), dy_ptr, y_ptr, dx_ptr, M0, M1, M2, N,
            stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
            stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale,
            LOG, COMPUTE, WIDE, BLOCK_M, BLOCK_N,
        )  # fmt: skip


# ---- rows longer than a tile ------------------------------------------------------------------------------------


@triton.jit
def _statistics(
    x, masking, first, last, i0, i1, i2, offs_m, mask_m, N,
    AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(max, sum of exponentials relative to it) of the column blocks first to last, [BLOCK_M, 1] each."""
    # Kept per element: a reduction per block would stall the loads at a barrier.
    maximum = tl.full([BLOCK_M, BLOCK_N], lowest(COMPUTE), COMPUTE)
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        z = _logits(x, masking, i0, i1, i2, offs_m, offs_n, mask_m, offs_n < N, AS, COMPUTE, "").to(COMPUTE)
        new_maximum = tl.maximum(maximum, z)
        total = total * exp(maximum - new_maximum) + exp(z - new_maximum)
        maximum = new_maximum
    row_maximum = tl.max(maximum, axis=1, keep_dims=True)
    return row_maximum, tl.sum(total * exp(maximum - row_maximum), axis=1, keep_dims=True)


@triton.jit
def _normalise_blocks(
    x, masking, y, first, last, maximum, total, i0, i1, i2, offs_m, mask_m, N,
    LOG: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Last block first: what was read last is still in cache.
    for block in tl.range(0, last - first, num_stages=STAGES):
        offs_n = block_offsets(last - 1 - block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        z = _logits(x, masking, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, AS, COMPUTE, "").to(COMPUTE)
        result = _normalise(z, maximum, total, masking, LOG)
        store(y[0], result, offs_m, offs_n, mask_m, mask_n, y[1], y[2])


@triton.jit
def _softmax_looped_kernel(
    x_ptr, y_ptr, mask_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, stride_position2, scale: tl.float64,
    LOG: tl.constexpr, MASKED: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row. Grid: one program per BLOCK_M rows."""
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    masking = (mask, stride_position2, number(scale, COMPUTE) if MASKED else None)
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    blocks = blocks_in(N, BLOCK_N)
    x_row = (at(x, i0, i1, i2), x[3], x[4])
    maximum, total = _statistics(
        x_row, masking, 0, blocks, i0, i1, i2, offs_m, mask_m, N, AS, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N
    )
    y_row = (at(y, i0, i1, i2), y[3], y[4])
    _normalise_blocks(
        x_row, masking, y_row, 0, blocks, maximum, total, i0, i1, i2, offs_m, mask_m, N,
        LOG, AS, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _softmax_partial_kernel(
    x_ptr, partial_ptr, mask_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, stride_position2, scale: tl.float64,
    MASKED: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """split_row, first launch. Grid: tiles * SPLITS. partial: (tiles, 2, BLOCK_M, SPLITS), COMPUTE."""
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    masking = (mask, stride_position2, number(scale, COMPUTE) if MASKED else None)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    x_row = (at(x, i0, i1, i2), x[3], x[4])
    maximum, total = _statistics(
        x_row, masking, first, last, i0, i1, i2, offs_m, offs_m < M2 - i2, N,
        AS, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    partial = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS) + part
    offs_partial = tl.arange(0, BLOCK_M)[:, None] * SPLITS
    tl.store(partial + offs_partial, maximum)
    tl.store(partial + BLOCK_M * SPLITS + offs_partial, total)


@triton.jit
def _softmax_combine_kernel(
    x_ptr, y_ptr, partial_ptr, mask_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, stride_position2, scale: tl.float64,
    LOG: tl.constexpr, MASKED: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: tiles * SPLITS. BLOCK_SPLITS = next_power_of_2(SPLITS)."""
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    masking = (mask, stride_position2, number(scale, COMPUTE) if MASKED else None)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_s = tl.arange(0, BLOCK_SPLITS)[None, :]
    partial = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS)
    offs_partial = tl.arange(0, BLOCK_M)[:, None] * SPLITS + offs_s
    maximums = tl.load(partial + offs_partial, mask=offs_s < SPLITS, other=lowest(COMPUTE))
    totals = tl.load(partial + BLOCK_M * SPLITS + offs_partial, mask=offs_s < SPLITS, other=0.0)
    maximum = tl.max(maximums, axis=1, keep_dims=True)
    total = tl.sum(totals * exp(maximums - maximum), axis=1, keep_dims=True)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    x_row, y_row = (at(x, i0, i1, i2), x[3], x[4]), (at(y, i0, i1, i2), y[3], y[4])
    _normalise_blocks(
        x_row, masking, y_row, first, last, maximum, total, i0, i1, i2, offs_m, offs_m < M2 - i2, N,
        LOG, AS, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _total(
    dy_base, y_base, first, last, offs_m, mask_m, N, stride_dy2, stride_dyn, stride_y2, stride_yn,
    LOG: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        dy = load(dy_base, offs_m, offs_n, mask_m, mask_n, stride_dy2, stride_dyn, 0.0).to(COMPUTE)
        if LOG:
            total += dy
        else:
            total += dy * load(y_base, offs_m, offs_n, mask_m, mask_n, stride_y2, stride_yn, 0.0).to(COMPUTE)
    return tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def _gradient_blocks(
    dy_base, y_base, dx_base, first, last, total, offs_m, mask_m, N,
    stride_dy2, stride_dyn, stride_y2, stride_yn, stride_dx2, stride_dxn, scale,
    LOG: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for block in tl.range(0, last - first, num_stages=STAGES):
        offs_n = block_offsets(last - 1 - block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        dy = load(dy_base, offs_m, offs_n, mask_m, mask_n, stride_dy2, stride_dyn, 0.0).to(COMPUTE)
        y = load(y_base, offs_m, offs_n, mask_m, mask_n, stride_y2, stride_yn, 0.0).to(COMPUTE)
        store(dx_base, _gradient(dy, y, total, scale, LOG), offs_m, offs_n, mask_m, mask_n, stride_dx2, stride_dxn)


@triton.jit
def _softmax_backward_looped_kernel(
    dy_ptr, y_ptr, dx_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale: tl.float64,
    LOG: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row: as `_softmax_looped_kernel`."""
    scale = number(scale, COMPUTE) if SCALED else None
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    blocks = blocks_in(N, BLOCK_N)
    dy_base = row_base(dy_ptr, i0, i1, i2, stride_dy0, stride_dy1, stride_dy2)
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    total = _total(
        dy_base, y_base, 0, blocks, offs_m, mask_m, N, stride_dy2, stride_dyn, stride_y2, stride_yn,
        LOG, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dx_base = row_base(dx_ptr, i0, i1, i2, stride_dx0, stride_dx1, stride_dx2)
    _gradient_blocks(
        dy_base, y_base, dx_base, 0, blocks, total, offs_m, mask_m, N,
        stride_dy2, stride_dyn, stride_y2, stride_yn, stride_dx2, stride_dxn, scale,
        LOG, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _softmax_backward_partial_kernel(
    dy_ptr, y_ptr, partial_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    LOG: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """split_row, first launch. Grid: tiles * SPLITS. partial: (tiles, BLOCK_M, SPLITS), COMPUTE."""
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    dy_base = row_base(dy_ptr, i0, i1, i2, stride_dy0, stride_dy1, stride_dy2)
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    total = _total(
        dy_base, y_base, first, last, offs_m, offs_m < M2 - i2, N, stride_dy2, stride_dyn, stride_y2, stride_yn,
        LOG, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    partial = partial_ptr + tl.cast(tile, tl.int64) * (BLOCK_M * SPLITS) + part
    tl.store(partial + tl.arange(0, BLOCK_M)[:, None] * SPLITS, total)


@triton.jit
def _softmax_backward_combine_kernel(
    dy_ptr, y_ptr, dx_ptr, partial_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale: tl.float64,
    LOG: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: tiles * SPLITS. BLOCK_SPLITS = next_power_of_2(SPLITS)."""
    scale = number(scale, COMPUTE) if SCALED else None
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_s = tl.arange(0, BLOCK_SPLITS)[None, :]
    partial = partial_ptr + tl.cast(tile, tl.int64) * (BLOCK_M * SPLITS)
    totals = tl.load(partial + tl.arange(0, BLOCK_M)[:, None] * SPLITS + offs_s, mask=offs_s < SPLITS, other=0.0)
    total = tl.sum(totals, axis=1, keep_dims=True)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    dy_base = row_base(dy_ptr, i0, i1, i2, stride_dy0, stride_dy1, stride_dy2)
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    dx_base = row_base(dx_ptr, i0, i1, i2, stride_dx0, stride_dx1, stride_dx2)
    _gradient_blocks(
        dy_base, y_base, dx_base, first, last, total, offs_m, offs_m < M2 - i2, N,
        stride_dy2, stride_dyn, stride_y2, stride_yn, stride_dx2, stride_dxn, scale,
        LOG, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


# ---- programs that share a row and wait for each other ----------------------------------------------------------


@triton.jit
def _row_logits(
    x, masking, row, rows, M0, M1, M2, part, N,
    AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A part of a row, -inf beyond the last row. PAIRS, without a mask: as words of two."""
    i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
    offs_m = block_offsets(0, 1, WIDE)
    if PAIRS:
        return load_logits(
            at(x, i0, i1, i2), offs_m, part, offs_m < rows - row, N, x[3], x[4], AS, WIDE, PAIRS, BLOCK_N
        )
    else:
        offs_n = block_offsets(part, BLOCK_N, WIDE)
        x_row = (at(x, i0, i1, i2), x[3], x[4])
        return _logits(x_row, masking, i0, i1, i2, offs_m, offs_n, offs_m < rows - row, offs_n < N, AS, COMPUTE, "")


@triton.jit
def _publish_statistics(raw, words, part, exists, AS: tl.constexpr, COMPUTE: tl.constexpr):
    """Hand this part's maximum and sum of exponentials to the other parts of its row, if there is such a row."""
    part_maximum = tl.maximum(tl.max(numbers(raw, AS, COMPUTE)), lowest(COMPUTE))
    part_total = tl.sum(exp(numbers(raw, AS, COMPUTE) - part_maximum))
    if exists:
        publish(words + part, part_total, part_maximum)


@triton.jit
def _softmax_coresident_kernel(
    x_ptr, y_ptr, word_ptr, mask_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, stride_position2, scale: tl.float64,
    LOG: tl.constexpr, MASKED: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr, LAG: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """coresident_row. Grid: a multiple of SPLITS programs, all running at once. word: (rows, SPLITS) int64 zeros.

    SPLITS is a power of 2, at most one warp wide, and SPLITS * BLOCK_N >= N. COMPUTE is float32. LAG: a program sums
    the next row before it waits for the words of this one, so that the exchange takes place while it loads.
    """
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    masking = (mask, stride_position2, number(scale, COMPUTE) if MASKED else None)
    part, group = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    offs_m, offs_n = block_offsets(0, 1, WIDE), block_offsets(part, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < 1, offs_n < N
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    z = _row_logits(x, masking, group, rows, M0, M1, M2, part, N, AS, COMPUTE, WIDE, PAIRS, BLOCK_N)
    following = z
    if LAG:
        _publish_statistics(z, word_ptr + tl.cast(group, tl.int64) * SPLITS, part, True, AS, COMPUTE)
        following = _row_logits(
            x, masking, group + groups, rows, M0, M1, M2, part, N, AS, COMPUTE, WIDE, PAIRS, BLOCK_N
        )
    for row in tl.range(group, rows, groups):
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        last = following
        if LAG:
            last = _row_logits(
                x, masking, row + 2 * groups, rows, M0, M1, M2, part, N, AS, COMPUTE, WIDE, PAIRS, BLOCK_N
            )
            found = peek(words, N, SPLITS, POLL_CACHE)
            next_words = word_ptr + tl.cast(row + groups, tl.int64) * SPLITS
            _publish_statistics(following, next_words, part, row + groups < rows, AS, COMPUTE)
        else:
            _publish_statistics(z, words, part, True, AS, COMPUTE)
            # The next row loads while this one waits.
            following = _row_logits(
                x, masking, row + groups, rows, M0, M1, M2, part, N, AS, COMPUTE, WIDE, PAIRS, BLOCK_N
            )
            found = peek(words, N, SPLITS, POLL_CACHE)
        totals, maximums = await_words(found, words, N, SPLITS, POLL_CACHE)
        maximum = tl.max(maximums, axis=0)
        total = tl.sum(totals * exp(maximums - maximum), axis=0)
        if LAG:
            z = kept(z, N < 0)
        result = _normalise(numbers(z, AS, COMPUTE), maximum, total, masking, LOG)
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        store(at(y, i0, i1, i2), result, offs_m, offs_n, mask_m, mask_n, y[3], y[4])
        z = following
        if LAG:
            following = last


@triton.jit
def _row_operands(dy, y, row, rows, M0, M1, M2, offs_n, mask_n, WIDE: tl.constexpr):
    """A part of a row of both, 0 beyond the last row."""
    i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
    offs_m = block_offsets(0, 1, WIDE)
    mask_m = offs_m < rows - row
    return (
        load(at(dy, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, dy[3], dy[4], 0.0),
        load(at(y, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, y[3], y[4], 0.0),
    )


@triton.jit
def _publish_total(dy, y, words, part, exists, LOG: tl.constexpr, COMPUTE: tl.constexpr):
    """Hand this part's sum to the other parts of its row, if there is such a row."""
    part_total = tl.sum(_row_total(dy.to(COMPUTE), y.to(COMPUTE), LOG))
    if exists:
        publish(words + part, tl.full((), 1.0, tl.float32), part_total)


@triton.jit
def _lagging_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, word_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale: tl.float64,
    LOG: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr, LAG: tl.constexpr,
):  # fmt: skip
    """coresident_row: as `_softmax_coresident_kernel`. Of log-softmax: without LAG too, the compiler keeps registers
    for a third row, and six programs a unit, which sum products, then spill 40 bytes with Triton 3.9, not 24."""
    scale = number(scale, COMPUTE) if SCALED else None
    dy = (dy_ptr, stride_dy0, stride_dy1, stride_dy2, stride_dyn)
    y = (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    dx = (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn)
    part, group = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    offs_m, offs_n = block_offsets(0, 1, WIDE), block_offsets(part, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < 1, offs_n < N
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    dy0, y0 = _row_operands(dy, y, group, rows, M0, M1, M2, offs_n, mask_n, WIDE)
    dy1, y1 = dy0, y0
    if LAG:
        _publish_total(dy0, y0, word_ptr + tl.cast(group, tl.int64) * SPLITS, part, True, LOG, COMPUTE)
        dy1, y1 = _row_operands(dy, y, group + groups, rows, M0, M1, M2, offs_n, mask_n, WIDE)
    for row in tl.range(group, rows, groups):
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        dy2, y2 = dy1, y1
        if LAG:
            dy2, y2 = _row_operands(dy, y, row + 2 * groups, rows, M0, M1, M2, offs_n, mask_n, WIDE)
            found = peek(words, N, SPLITS, POLL_CACHE)
            next_words = word_ptr + tl.cast(row + groups, tl.int64) * SPLITS
            _publish_total(dy1, y1, next_words, part, row + groups < rows, LOG, COMPUTE)
        else:
            _publish_total(dy0, y0, words, part, True, LOG, COMPUTE)
            # The next row loads while this one waits: 386 us, not 395, for 4096 float32 rows of 32768.
            dy1, y1 = _row_operands(dy, y, row + groups, rows, M0, M1, M2, offs_n, mask_n, WIDE)
            found = peek(words, N, SPLITS, POLL_CACHE)
        _, totals = await_words(found, words, N, SPLITS, POLL_CACHE)
        dy0, y0 = opaque(dy0, N < 0), opaque(y0, N < 0)
        value = _gradient(dy0.to(COMPUTE), y0.to(COMPUTE), tl.sum(totals, axis=0), scale, LOG)
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        store(at(dx, i0, i1, i2), value, offs_m, offs_n, mask_m, mask_n, dx[3], dx[4])
        dy0, y0 = dy1, y1
        if LAG:
            dy1, y1 = dy2, y2


@triton.jit
def _softmax_backward_coresident_kernel(
    dy_ptr, y_ptr, dx_ptr, word_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn, scale: tl.float64,
    LOG: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr,
):  # fmt: skip
    """coresident_row: as `_softmax_coresident_kernel`."""
    scale = number(scale, COMPUTE) if SCALED else None
    part = tl.program_id(0) % SPLITS
    offs_m, offs_n = block_offsets(0, 1, WIDE), block_offsets(part, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < 1, offs_n < N
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    i0, i1, i2 = tile_origin(tl.program_id(0) // SPLITS, M0, M1, M2, 1)
    dy_base = row_base(dy_ptr, i0, i1, i2, stride_dy0, stride_dy1, stride_dy2)
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    next_dy = load(dy_base, offs_m, offs_n, mask_m, mask_n, stride_dy2, stride_dyn, 0.0)
    next_y = load(y_base, offs_m, offs_n, mask_m, mask_n, stride_y2, stride_yn, 0.0)
    for row in tl.range(tl.program_id(0) // SPLITS, rows, groups):
        dy, y = next_dy, next_y
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        part_total = tl.sum(_row_total(dy.to(COMPUTE), y.to(COMPUTE), LOG))
        publish(words + part, tl.full((), 1.0, tl.float32), part_total)
        dx_base = row_base(dx_ptr, i0, i1, i2, stride_dx0, stride_dx1, stride_dx2)
        # The next row loads while this one waits: 386 us, not 395, for 4096 float32 rows of 32768.
        i0, i1, i2 = tile_origin(row + groups, M0, M1, M2, 1)
        dy_base = row_base(dy_ptr, i0, i1, i2, stride_dy0, stride_dy1, stride_dy2)
        y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
        mask_next = mask_m & (row + groups < rows)
        next_dy = load(dy_base, offs_m, offs_n, mask_next, mask_n, stride_dy2, stride_dyn, 0.0)
        next_y = load(y_base, offs_m, offs_n, mask_next, mask_n, stride_y2, stride_yn, 0.0)
        _, totals = collect(words, N, SPLITS, POLL_CACHE)
        dy, y = opaque(dy, N < 0), opaque(y, N < 0)
        dx = _gradient(dy.to(COMPUTE), y.to(COMPUTE), tl.sum(totals, axis=0), scale, LOG)
        store(dx_base, dx, offs_m, offs_n, mask_m, mask_n, stride_dx2, stride_dxn)


# ---- the ops ----------------------------------------------------------------------------------------------------


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Softmax of ``input`` along ``dim``, as ``torch.nn.functional.softmax``.

    Args:
        input: any shape (0-d and empty too) and strides; float16, bfloat16, float32, float64, or an
            integer type with ``dtype`` given.
        dim: the dim whose slices sum to 1; by default the last, where torch chooses by rank, and warns: 0 for 0, 1 and
            3 dims, else 1.
        dtype: the type of the result; ``input`` is converted to it first. Without it, a 16-bit ``input`` on a GPU
            gives float32 where autocast is on, as in torch.

    Returns a tensor of ``input``'s shape and memory format. A slice with a NaN or +inf, or of only
    -inf, is NaN; other -inf entries are exactly 0, and so is their gradient.

    Raises BadDim (an IndexError), BadType (a TypeError), UnsupportedDtype (a NotImplementedError).
    """
    return _arguments("softmax", input, dim, dtype)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Logarithm of the softmax of ``input`` along ``dim``, as ``torch.nn.functional.log_softmax``.

    Args, result and errors are those of ``softmax``; an entry of -inf stays -inf.
    """
    return _arguments("log_softmax", input, dim, dtype)


def _arguments(op: str, input: Tensor, dim: int, dtype: torch.dtype | None) -> tuple[Any, ...]:
    check_tensor(op, "input", input)
    index = check_one_dim(op, dim, input.dim())
    if dtype is None:
        check_dtype(op, "input", input.dtype, FLOATS, "pass dtype=torch.float32 to convert")
        result = autocast_to_float32(input)
    else:
        check_dtype(op, "input", input.dtype, (*FLOATS, *INTEGERS, torch.bool))
        result = check_dtype(op, "dtype", dtype, FLOATS)
    return readable(input, input, index), index, result


FORWARD = RowKernels(
    whole=_softmax_kernel,
    looped=_softmax_looped_kernel,
    partial=_softmax_partial_kernel,
    combine=_softmax_combine_kernel,
    coresident=_softmax_coresident_kernel,
    partials=2,
)
_BACKWARD = RowKernels(
    whole=_softmax_backward_kernel,
    looped=_softmax_backward_looped_kernel,
    partial=_softmax_backward_partial_kernel,
    combine=_softmax_backward_combine_kernel,
    coresident=_softmax_backward_coresident_kernel,
    partials=1,
)
_LOG_BACKWARD = dataclasses.replace(_BACKWARD, coresident=_lagging_backward_kernel)

# 32-bit registers per element, fitted on compiled kernels. A co-resident row keeps what it waits with, by LOG and by
# whether all operands are 16-bit; the part of the next row that it loads meanwhile is for the plugin to add.
_LIVE = {"packed_rows": 1.4, "resident_row": 1.4, "cached_row": 0.6, "looped_row": 2.8, "split_row": 2.8}
_LIVE_WAITING = {(False, True): 1.375, (True, True): 1.375, (False, False): 1.625, (True, False): 1.875}
_LIVE_BACKWARD = {"packed_rows": 2.2, "resident_row": 2.2, "looped_row": 2.8, "split_row": 2.8}
_LIVE_BACKWARD_NARROW = {**_LIVE_BACKWARD, "packed_rows": 1.4, "resident_row": 1.4}
_LIVE_BACKWARD_WAITING = {(False, True): 1.125, (True, True): 2.0, (False, False): 2.65, (True, False): 2.65}


def _narrow(problem: Problem) -> bool:
    return all(dtype in ("float16", "bfloat16") for dtype in problem.dtypes.values())


def _outputs(input: Meta, dim: int, dtype: torch.dtype) -> tuple[Buffer, ...]:
    return (like(input, dtype),)


def _problem(op: str, input: Meta, dim: int, dtype: torch.dtype) -> Problem:
    return row_problem(op, dim, {"x": input, "y": like(input, dtype)}, first="y")


def _work(log: bool, problem: Problem) -> Work:
    live = {**_LIVE, "coresident_row": _LIVE_WAITING[log, _narrow(problem)]}
    return row_work(problem, reads=("x",), writes=("y",), live=live, takes=("LAG", "PAIRS"))


# None, since of stride_mask0 and the like every call would otherwise pass a 0.
_UNMASKED: dict[str, Any] = dict.fromkeys((*(f"stride_mask{axis}" for axis in "012n"), "stride_position2"))


def _plan(log: bool, config: Config, blocks: Blocks, device: Device, input: Meta, dim: int, dtype: torch.dtype) -> Plan:
    output = like(input, dtype)
    rows = rows_of((output, input), dim)
    operands: dict[str, In | Out] = {"y": Out(0), "x": In(0)}
    pairs = (
        bool(config.params.get("PAIRS")) and input.dtype == dtype and in_pairs(rows, blocks["BLOCK_N"], [(1, input)])
    )
    return softmax_plan(
        FORWARD, log, config, blocks, rows, operands, output, dtype, extras={**_UNMASKED, "scale": 1.0},
        MASKED=False, AS=TRITON_DTYPES[dtype], PAIRS=pairs,
    )  # fmt: skip


def _backward_outputs(grad_output: Meta, output: Meta, dim: int, input_dtype: torch.dtype) -> tuple[Buffer, ...]:
    return (like(output, input_dtype),)


def _backward_problem(op: str, grad_output: Meta, output: Meta, dim: int, input_dtype: torch.dtype) -> Problem:
    operands: dict[str, Meta | Buffer] = {"dy": grad_output, "y": output, "dx": like(output, input_dtype)}
    return row_problem(op, dim, operands, first="dx")


def backward_work(log: bool, problem: Problem) -> Work:
    narrow = _narrow(problem)
    live = dict(_LIVE_BACKWARD_NARROW if narrow else _LIVE_BACKWARD)
    live["coresident_row"] = _LIVE_BACKWARD_WAITING[log, narrow]
    # Where sums are of products, programs that lag are slower: 801 us at 4096x131072, 784 without.
    return row_work(problem, reads=("dy", "y"), writes=("dx",), live=live, takes=("LAG",) if log else ())


def backward_plan(
    log: bool, config: Config, blocks: Blocks, device: Device,
    grad_output: Meta, output: Meta, dim: int, input_dtype: torch.dtype, scale: float | None = None,
) -> Plan:  # fmt: skip
    """The plan of the gradient, times ``scale`` if given."""
    gradient = like(output, input_dtype)
    rows = rows_of((gradient, grad_output, output), dim)
    operands: dict[str, In | Out] = {"dx": Out(0), "dy": In(0), "y": In(1)}
    scaled: dict[str, Any] = {"extras": {"scale": 1.0 if scale is None else scale}, "SCALED": scale is not None}
    kernels = _LOG_BACKWARD if log else _BACKWARD
    return softmax_plan(kernels, log, config, blocks, rows, operands, gradient, output.dtype, **scaled)


def _parallel(input: Meta, dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    return tuple(axis for axis in range(len(input.shape)) if axis != dim)


def softmax_plan(
    kernels: RowKernels, log: bool, config: Config, blocks: Blocks, rows: Rows, operands: dict[str, In | Out],
    output: Buffer, dtype: torch.dtype, **more: Any,
) -> Plan:  # fmt: skip
    double = dtype == torch.float64
    return row_plan(
        kernels,
        config,
        blocks,
        rows,
        operands,
        (output,),
        compute=torch.float64 if double else torch.float32,
        LOG=log,
        COMPUTE=tl.float64 if double else tl.float32,
        **more,
    )


def reference(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Softmax in plain torch."""
    return torch.softmax(input, dim, dtype=dtype)


def _exact(forward: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The reference in fp64, of the input as ``dtype`` holds it."""
    return forward(input.to(dtype).double(), dim, torch.float64)


def _distance(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """From the maximum of the row."""
    x = input.to(dtype)
    return x if x.numel() == 0 else x.amax(dim, keepdim=True) - x


def _terms(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """y, and y times the exponent's argument, which is rounded before the exponential."""
    y = torch.softmax(input, dim, dtype=dtype)
    return y * (1 + _distance(input, dim, dtype)).nan_to_num(0.0, 0.0, 0.0)


def _log_terms(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The distance from the maximum, and the logarithm of a sum that is at least 1 and rounded as such."""
    distance = _distance(input, dim, dtype)
    return 1 + distance + torch.logsumexp(-distance, dim, keepdim=True).abs()


def log_reference(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Log-softmax in plain torch."""
    return torch.log_softmax(input, dim, dtype=dtype)


def backward_reference(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Gradient of softmax in plain torch."""
    total = (grad_output * output).sum(dim, keepdim=True, dtype=_accumulator(output))
    return (output * (grad_output - total)).to(input_dtype)


def _backward_terms(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """What the gradient of softmax is the difference of: y * dy, and y times a sum over the row."""
    total: Tensor = torch.linalg.vector_norm(grad_output * output, dim=dim, keepdim=True)
    return output.abs() * (grad_output.abs() + total)


def _log_backward_terms(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """The same for log-softmax: dy, and exp(y), whose argument is rounded, times a sum over the row."""
    total: Tensor = torch.linalg.vector_norm(grad_output, dim=dim, keepdim=True)
    return grad_output.abs() + (output.exp() * (1 + output.abs())).nan_to_num(0.0, 0.0, 0.0) * total


def log_backward_reference(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Gradient of log-softmax in plain torch."""
    total = grad_output.sum(dim, keepdim=True, dtype=_accumulator(output))
    return (grad_output - output.exp() * total).to(input_dtype)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _values(
    sizes: tuple[int, ...], dtype: torch.dtype, device: Any, generator: torch.Generator | None, style: str
) -> Tensor:
    """Input logits. ``wide`` needs its maximum subtracted and mixes in -inf; ``nonfinite`` adds NaN
    and +inf to some rows."""
    x = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
    if style == "normal":
        return x.to(dtype)
    x = x * 40
    # Random entries, by value: a tail of the normal distribution.
    x = torch.where(x < -60, -math.inf, x)
    if style == "nonfinite":
        x = torch.where(x > 100, math.nan, torch.where(x > 90, math.inf, x))
    return x.to(dtype)


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", dim: int = -1, source: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """``source`` names the input's own type, where ``dtype`` converts it: its values do not survive unrounded."""
    index = check_dim("softmax", dim, len(sizes))
    if not source:
        return _values(sizes, dtype, device, generator, style), index, dtype
    kind: torch.dtype = getattr(torch, source)
    scaled = _values(sizes, torch.float32, device, generator, "normal") * (3 if kind == torch.float64 else 300)
    return scaled.to(kind), index, dtype


def _backward_inputs(
    forward: Callable[..., Tensor], sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", dim: int = -1,
) -> tuple[Any, ...]:  # fmt: skip
    x, index, _ = _inputs(sizes, dtype, device=device, generator=generator, style=style, dim=dim)
    grad_output = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return grad_output, forward(x.float(), index, torch.float32).to(dtype), index, dtype


CASES = tuple(
    Case(sizes, {"dim": dim})
    for sizes, dim in (
        ((), -1), ((1,), 0), ((7,), 0), ((3, 1), -1), ((0, 5), -1), ((5, 0), -1), ((5, 7), 0),
        ((4, 33), -1), ((2, 3, 130), -1), ((3, 129, 4), 1), ((65, 2, 3), 0), ((2, 1000), -1),
        ((3, 4097), -1), ((2, 5, 3, 17), 2),
    )
)  # fmt: skip
# The forward also converts: to a wider type, to a narrower one, and from integers.
FORWARD_CASES = (
    *CASES,
    *(Case((3, 130), {"source": source}) for source in ("float64", "float32", "bfloat16", "int64", "uint8", "bool")),
)
TUNE_CASES = tuple(
    Case(sizes)
    for sizes in (
        (4096, 1024),
        (4096, 4096),
        (8192, 8192),
        (4096, 32768),
        (4096, 131072),
        (32768, 256),
        (1, 1048576),
    )  # fmt: skip
)
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    input, dim, _ = args
    return outputs[0], dim, input.dtype


def _backward_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    output, dim, input_dtype = saved
    return readable(grads[0], output, dim), output, dim, input_dtype


def _fold(in_dims: InDims, input: Tensor, dim: int, dtype: torch.dtype) -> Folded:
    """A mapped dim holds more rows."""
    (x,) = stacked(in_dims, input)
    if x.dim() == 1:  # of numbers, each of which is a row
        return Folded((x.unsqueeze(1), 1, dtype), view=lambda y: y.squeeze(1))
    return Folded((readable(x, x, dim + 1), dim + 1, dtype))


def _fold_backward(in_dims: InDims, grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Folded:
    grad, y = stacked(in_dims, grad_output, output)
    if y.dim() == 1:
        return Folded((grad.unsqueeze(1), y.unsqueeze(1), 1, input_dtype), view=lambda dx: dx.squeeze(1))
    return Folded((readable(grad, y, dim + 1), y, dim + 1, input_dtype))


def _family(
    name: str, signature: Callable[..., tuple[Any, ...]], log: bool,
    forward: Callable[..., Tensor], backward: Callable[..., Tensor],
) -> tuple[Op, Op]:  # fmt: skip
    """One of the two functions with its gradient: they share kernels, plans and cases."""
    gradient = f"{name}_backward"
    common: dict[str, Any] = {"fit": fit_rows, "tune_cases": TUNE_CASES, "dtypes": _DTYPES}
    return (
        Op(
            name,
            "(Tensor input, int dim, ScalarType dtype) -> Tensor",
            signature=signature,
            problem=partial(_problem, name),
            work=partial(_work, log),
            outputs=_outputs,
            plan=partial(_plan, log),
            reference=forward,
            exact=partial(_exact, forward),
            terms=_log_terms if log else _terms,
            inputs=_inputs,
            cases=FORWARD_CASES,
            parallel=_parallel,
            vmap=_fold,
            backward=Backward(gradient, _save, _backward_arguments, inputs=(0,)),
            **common,
        ),
        Op(
            gradient,
            "(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor",
            problem=partial(_backward_problem, gradient),
            work=partial(backward_work, log),
            outputs=_backward_outputs,
            plan=partial(backward_plan, log),
            reference=backward,
            eager=_EAGER_BACKWARD[log],
            terms=_log_backward_terms if log else _backward_terms,
            inputs=partial(_backward_inputs, forward),
            cases=CASES,
            vmap=_fold_backward,
            **common,
        ),
    )


_EAGER_BACKWARD = (torch._softmax_backward_data, torch._log_softmax_backward_data)

OPS = (
    *_family("softmax", softmax, False, reference, backward_reference),
    *_family("log_softmax", log_softmax, True, log_reference, log_backward_reference),
)
