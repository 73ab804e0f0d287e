"""What layer norm and RMS norm share: kernels, plans and references, with and without a residual that is added first.

    s  = x + r, rounded to their common dtype      (without a residual: s = x)
    c  = s - mean(s)                               (RMS: c = s)
    h  = c * rstd,  rstd = 1 / sqrt(mean(c * c) + eps)
    y  = h * w + b
    dx = rstd * (dy * w - mean(dy * w) - h * mean(dy * w * h)) + ds      (RMS: without mean(dy * w))
    dw = sum over rows of dy * h,  db = sum over rows of dy

x, r, y, s, dy, ds, dx: (M0, M1, M2, N), normalised over N; w, b: (N,); mean, rstd: one number a row, in the
accumulator's dtype. The variance is of centred values, by Welford's recurrence where a row does not fit a tile.

Gradient: each program keeps dw and db of its own rows, and a last launch adds these up. A row that fits no tile is read
twice by two launches: sums along rows, then blocks of columns over all rows; co-resident programs read it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, autocast_to_float32, check_dtype, check_int, check_tensor
from portkern.batching import Folded, InDims, stacked
from portkern.config import Blocks, Config
from portkern.errors import BadType, Mismatch
from portkern.kernels._rows import (
    TRITON_DTYPES,
    at,
    await_words,
    block_offsets,
    blocks_in,
    cast,
    column_sums_kernel,
    kept,
    number,
    numbers,
    opaque,
    pairs_at,
    part_of,
    peek,
    publish_any,
    store,
    tile_origin,
)
from portkern.layout import Rows, in_pairs, near, readable, rows_of
from portkern.op import Backward, Case, Op, Result
from portkern.plan import Buffer, In, Meta, Out, Plan, Value, like
from portkern.problem import Problem, Work
from portkern.row_plan import RowKernels, Sums, row_plan
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device

LONG: tl.constexpr = tl.constexpr(4_096)  # columns of a program


@triton.jit
def _load(base, offs_m, offs_n, mask_m, mask_n, stride_m, stride_n, EVICTION: tl.constexpr):
    """0 outside of the masks."""
    offsets = offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
    return tl.load(base + offsets, mask=mask_m[:, None] & mask_n[None, :], other=0, eviction_policy=EVICTION)


@triton.jit
def _input(
    x, r, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """s: x, or x + r as the sum's dtype holds it; 0 outside of the masks."""
    s = _load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], EVICTION)
    if ADD:
        other = _load(at(r, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, r[3], r[4], EVICTION)
        s = cast(s.to(COMPUTE) + other.to(COMPUTE), AS)
    return s


@triton.jit
def _vector(v, offs_n, mask_n, EVICTION: tl.constexpr, PAIRS: tl.constexpr):
    ptrs = pairs_at(v[0], PAIRS) + offs_n[None, :] * v[1]
    return tl.load(ptrs, mask=mask_n[None, :], other=0, eviction_policy=EVICTION)


@triton.jit
def _spread(v, offs_m, offs_n, mask_n):
    """``_vector`` for each row of a tile. A single row would be laid out for itself, over all warps, and the compiler
    then takes the tile into that layout too, where each sum along a row crosses the warps."""
    ptrs = v[0] + offs_m[:, None] * 0 + offs_n[None, :] * v[1]
    return tl.load(ptrs, mask=(offs_m >= 0)[:, None] & mask_n[None, :], other=0.0)


@triton.jit
def _row_numbers(operand, i0, i1, i2, offs_m, mask_m):
    """One number a row, [BLOCK_M, 1]."""
    return tl.load(at(operand, i0, i1, i2) + offs_m[:, None] * operand[3], mask=mask_m[:, None], other=0.0)


@triton.jit
def _store_row_numbers(operand, value, i0, i1, i2, offs_m, mask_m):
    ptrs = at(operand, i0, i1, i2) + offs_m[:, None] * operand[3]
    tl.store(ptrs, tl.broadcast_to(value, ptrs.shape), mask=mask_m[:, None])


@triton.jit
def _store_statistics(mean, rstd, row_mean, row_rstd, i0, i1, i2, offs_m, mask_m, RMS: tl.constexpr):
    if not RMS:
        # Of a row with an infinity, the ways to a mean end in infinity or NaN: NaN it is.
        _store_row_numbers(mean, tl.where(row_rstd == row_rstd, row_mean, row_rstd), i0, i1, i2, offs_m, mask_m)
    _store_row_numbers(rstd, row_rstd, i0, i1, i2, offs_m, mask_m)


@triton.jit
def _rstd(squares, N, eps, COMPUTE: tl.constexpr):
    """Of the sum of squares of centred values."""
    return tl.rsqrt(squares / tl.cast(N, COMPUTE) + number(eps, COMPUTE))


@triton.jit
def _scaled(
    h, w, b, offs_n, mask_n, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    EVICTION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """h of the columns; offs_n, mask_n: as of ``_words``."""
    if WEIGHT:
        h = h * numbers(_vector(w, offs_n, mask_n, EVICTION, PAIRS), AS, COMPUTE)
    if BIAS:
        h = h + numbers(_vector(b, offs_n, mask_n, EVICTION, PAIRS), AS, COMPUTE)
    return h


@triton.jit
def _words(block, N, BLOCK: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr):
    """Offsets and mask of a block of columns as they are loaded: PAIRS: of words of two."""
    if PAIRS:
        offs_n = block_offsets(block, BLOCK // 2, WIDE)
        return offs_n, offs_n < N // 2
    else:
        offs_n = block_offsets(block, BLOCK, WIDE)
        return offs_n, offs_n < N


@triton.jit
def _waiting(x, zero, COLUMNS: tl.constexpr):
    """``opaque``, where a program's columns are so many that registers are short; else it is 1.5 instructions more
    for each element, 0.5 where words of two are kept."""
    if COLUMNS >= LONG:
        x = kept(x, zero)
    return x


# ---- rows in registers, as PARTS tiles one after another ---------------------------------------------------------


@triton.jit
def _row_parts(
    x, r, i0, i1, i2, first, offs_m, mask_m, N,
    ADD: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """s from the block ``first`` of PART columns on, as PARTS tiles. Each row is read once: where it goes by parts, the
    nearest cache is for weights and biases, which all rows share. In one tile, that cost 3 % at 8,192 columns."""
    EVICTION: tl.constexpr = "evict_first" if PARTS > 1 else ""
    parts = ()
    for part in tl.static_range(PARTS):
        offs_n, mask_n = _words(first + part, N, PART, WIDE, PAIRS)
        if PAIRS:
            words = pairs_at(at(x, i0, i1, i2), PAIRS)
            part_of_row = _load(words, offs_m, offs_n, mask_m, mask_n, x[3] // 2, x[4], EVICTION)
            parts += (part_of_row,)  # type: ignore[assignment]
        else:
            part_of_row = _input(x, r, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD, AS, COMPUTE, EVICTION)
            parts += (part_of_row,)  # type: ignore[assignment]
    return parts


@triton.jit
def _vector_parts(v, first, N, WIDE: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    parts = ()
    for part in tl.static_range(PARTS):
        offs_n, mask_n = _words(first + part, N, PART, WIDE, PAIRS)
        parts += (_vector(v, offs_n, mask_n, "evict_last", PAIRS),)  # type: ignore[assignment]
    return parts


@triton.jit
def _part_moments(
    parts, first, count, N,
    RMS: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """(mean, sum of squares of centred values) of ``count`` columns, [BLOCK_M, 1] each; RMS: (0, sum of squares)."""
    mean = tl.zeros([parts[0].shape[0], 1], COMPUTE)
    if not RMS:
        total = numbers(parts[0], AS, COMPUTE)
        for part in tl.static_range(1, PARTS):
            total += numbers(parts[part], AS, COMPUTE)
        mean = tl.sum(total, axis=1, keep_dims=True) / tl.cast(count, COMPUTE)
    squares = tl.zeros([parts[0].shape[0], PART], COMPUTE)
    for part in tl.static_range(PARTS):
        centred = numbers(parts[part], AS, COMPUTE)
        if not RMS:
            offs_n = block_offsets(first + part, PART, WIDE)
            raw = _waiting(parts[part], mean != mean, PARTS * PART)
            centred = numbers(raw, AS, COMPUTE) - mean
            if raw.dtype != tl.int32:  # words of two are of full rows
                centred = tl.where((offs_n < N)[None, :], centred, 0.0)
        squares += centred * centred
    return mean, tl.sum(squares, axis=1, keep_dims=True)


@triton.jit
def _store_parts(
    parts, weights, biases, w, b, y, i0, i1, i2, first, mean, rstd, offs_m, mask_m, N, zero,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """y of the rows; EARLY: ``weights`` and ``biases`` are there. What waits for the sums shall be 16-bit values: with
    the zero of ``_part_moments`` the compiler would keep what was centred there. Where rstd is NaN, so is the row."""
    EVICTION: tl.constexpr = "evict_last" if PARTS > 1 else ""
    for part in tl.static_range(PARTS):
        offs_n = block_offsets(first + part, PART, WIDE)
        mask_n = offs_n < N
        raw = _waiting(parts[part], rstd != rstd, PARTS * PART)
        result = (numbers(raw, AS, COMPUTE) - mean) * rstd
        if EARLY:
            if WEIGHT:
                result = result * numbers(_waiting(weights[part], zero, PARTS * PART), AS, COMPUTE)
            if BIAS:
                result = result + numbers(_waiting(biases[part], zero, PARTS * PART), AS, COMPUTE)
        else:
            offs_l, mask_l = _words(first + part, N, PART, WIDE, PAIRS)
            result = _scaled(result, w, b, offs_l, mask_l, WEIGHT, BIAS, AS, COMPUTE, EVICTION, PAIRS)
        store(at(y, i0, i1, i2), result, offs_m, offs_n, mask_m, mask_n, y[3], y[4])


@triton.jit
def _store_sum(
    parts, s, i0, i1, i2, first, offs_m, mask_m, N, WIDE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr
):
    for part in tl.static_range(PARTS):
        offs_n = block_offsets(first + part, PART, WIDE)
        store(at(s, i0, i1, i2), parts[part], offs_m, offs_n, mask_m, offs_n < N, s[3], s[4])


# ---- whole rows in one tile -------------------------------------------------------------------------------------


@triton.jit
def _reread(
    x, w, b, y, mean, rstd, i0, i1, i2, offs_m, mask_m, N, eps,
    RMS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile whose row the nearest cache keeps instead of registers, so that a second row fits beside the first. The
    barriers keep the compiler from merging the reads."""
    base = at(x, i0, i1, i2)
    row_mean = tl.zeros([BLOCK_M, 1], COMPUTE)
    if not RMS:
        total = tl.zeros([BLOCK_M, PART], COMPUTE)
        for part in tl.static_range(PARTS):
            offs_n = block_offsets(part, PART, WIDE)
            total += _load(base, offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], "evict_last").to(COMPUTE)
        row_mean = tl.sum(total, axis=1, keep_dims=True) / tl.cast(N, COMPUTE)
        tl.debug_barrier()
    squares = tl.zeros([BLOCK_M, PART], COMPUTE)
    for part in tl.static_range(PARTS):
        offs_n = block_offsets(part, PART, WIDE)
        raw = _load(base, offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], "evict_last")
        centred = tl.where((offs_n < N)[None, :], raw.to(COMPUTE) - row_mean, 0.0)
        squares += centred * centred
    row_rstd = _rstd(tl.sum(squares, axis=1, keep_dims=True), N, eps, COMPUTE)
    tl.debug_barrier()
    for part in tl.static_range(PARTS):
        offs_n = block_offsets(part, PART, WIDE)
        raw = _load(base, offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], "evict_first")
        h = (raw.to(COMPUTE) - row_mean) * row_rstd
        result = _scaled(h, w, b, offs_n, offs_n < N, WEIGHT, BIAS, raw.dtype, COMPUTE, "evict_last", False)
        store(at(y, i0, i1, i2), result, offs_m, offs_n, mask_m, offs_n < N, y[3], y[4])
    _store_statistics(mean, rstd, row_mean, row_rstd, i0, i1, i2, offs_m, mask_m, RMS)


@triton.jit
def _norm_tile(
    tile, x, r, w, b, y, s, mean, rstd, M0, M1, M2, N, eps,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, REREAD: tl.constexpr, EARLY: tl.constexpr,
    PAIRS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = BLOCK_N // PARTS
    zero = N < 0
    if FULL:
        N = BLOCK_N  # of which the compiler sees that no column is outside
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    if REREAD:
        _reread(
            x, w, b, y, mean, rstd, i0, i1, i2, offs_m, mask_m, N, eps,
            RMS, WEIGHT, BIAS, COMPUTE, WIDE, PARTS, PART, BLOCK_M,
        )  # fmt: skip
        return
    parts = _row_parts(x, r, i0, i1, i2, 0, offs_m, mask_m, N, ADD, AS, COMPUTE, WIDE, PAIRS, PARTS, PART)
    weights, biases = parts, parts
    if EARLY:
        if WEIGHT:
            weights = _vector_parts(w, 0, N, WIDE, PAIRS, PARTS, PART)
        if BIAS:
            biases = _vector_parts(b, 0, N, WIDE, PAIRS, PARTS, PART)
    row_mean, squares = _part_moments(parts, 0, N, N, RMS, AS, COMPUTE, WIDE, PARTS, PART)
    row_rstd = _rstd(squares, N, eps, COMPUTE)
    if ADD:
        _store_sum(parts, s, i0, i1, i2, 0, offs_m, mask_m, N, WIDE, PARTS, PART)
    _store_parts(
        parts, weights, biases, w, b, y, i0, i1, i2, 0, row_mean, row_rstd, offs_m, mask_m, N,
        zero, WEIGHT, BIAS, AS, COMPUTE, WIDE, EARLY, PAIRS, PARTS, PART,
    )  # fmt: skip
    _store_statistics(mean, rstd, row_mean, row_rstd, i0, i1, i2, offs_m, mask_m, RMS)


@triton.jit(do_not_specialize=["eps"])
def norm_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, M0, M1, M2, N, eps: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_r0, stride_r1, stride_r2, stride_rn,
    stride_y0, stride_y1, stride_y2, stride_yn, stride_s0, stride_s1, stride_s2, stride_sn,
    stride_mean0, stride_mean1, stride_mean2, stride_w, stride_b,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
    REREAD: tl.constexpr, EARLY: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row, cached_row (REREAD, without a residual): a tile as PARTS of its columns, one after
    another; EARLY: weight and bias are read before the sums, not after them; FULL: rows of BLOCK_N; PAIRS, without a
    residual and for such rows alone: rows, weight and bias are read and kept as words of two.

    Grid: one program a tile, or PERSISTENT ones that fetch STAGES - 1 tiles ahead.
    """
    x, r = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (r_ptr, stride_r0, stride_r1, stride_r2, stride_rn)
    y, s = (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn), (s_ptr, stride_s0, stride_s1, stride_s2, stride_sn)
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    w, b = (w_ptr, stride_w), (b_ptr, stride_b)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _norm_tile(
                tile, x, r, w, b, y, s, mean, rstd, M0, M1, M2, N, eps,
                RMS, ADD, WEIGHT, BIAS, AS, COMPUTE, WIDE, FULL, REREAD, EARLY, PAIRS, PARTS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        _norm_tile(
            tl.program_id(0), x, r, w, b, y, s, mean, rstd, M0, M1, M2, N, eps,
            RMS, ADD, WEIGHT, BIAS, AS, COMPUTE, WIDE, FULL, REREAD, EARLY, PAIRS, PARTS, BLOCK_M, BLOCK_N,
        )  # fmt: skip


# ---- rows longer than a tile ------------------------------------------------------------------------------------


@triton.jit
def _moments(
    x, r, i0, i1, i2, first, last, offs_m, mask_m, N,
    RMS: tl.constexpr, ADD: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(mean, sum of squares of centred values) of the column blocks first to last, [BLOCK_M, 1] each; RMS: (0, sum of
    squares). Kept per element: a reduction per block would stall the loads at a barrier."""
    mean = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    squares = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    shift = tl.zeros([BLOCK_M, 1], COMPUTE)
    if not RMS:
        # Of values near the row's first one, so that a large mean does not round them.
        start = block_offsets(0, 1, WIDE)
        shift = _input(x, r, i0, i1, i2, offs_m, start, mask_m, start < N, ADD, AS, COMPUTE, "").to(COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        value = _input(x, r, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD, AS, COMPUTE, "").to(COMPUTE)
        if RMS:
            squares += value * value
        else:
            value -= shift
            delta = value - mean
            new_mean = mean + delta * (1.0 / tl.cast(block - first + 1, COMPUTE))
            squares = tl.where(mask_n[None, :], squares + delta * (value - new_mean), squares)
            mean = tl.where(mask_n[None, :], new_mean, mean)
    if RMS:
        return tl.zeros([BLOCK_M, 1], COMPUTE), tl.sum(squares, axis=1, keep_dims=True)
    # The last block may end early: its other columns saw one value less.
    missing = tl.where(block_offsets(last - 1, BLOCK_N, True) < N, 0, 1)
    counts = tl.cast(tl.maximum(last - first - missing, 0), COMPUTE)[None, :]
    count = tl.cast(tl.maximum(_columns(first, last, N, BLOCK_N), 1), COMPUTE)
    row_mean = tl.sum(mean * counts, axis=1, keep_dims=True) / count
    apart = mean - row_mean
    return row_mean + shift, tl.sum(squares + apart * apart * counts, axis=1, keep_dims=True)


@triton.jit
def _columns(first, last, N, BLOCK_N: tl.constexpr):
    """How many columns the blocks first to last have."""
    begin = tl.minimum(tl.cast(first, tl.int64) * BLOCK_N, N)
    return tl.minimum(tl.cast(last, tl.int64) * BLOCK_N, N) - begin


@triton.jit
def _merged(means, squares, counts, N, RMS: tl.constexpr, COMPUTE: tl.constexpr):
    """(mean, sum of squares of centred values) of rows, from those of their parts: [BLOCK_M, parts]."""
    if RMS:
        return tl.zeros([means.shape[0], 1], COMPUTE), tl.sum(squares, axis=1, keep_dims=True)
    counts = tl.cast(counts, COMPUTE)[None, :]
    mean = tl.sum(tl.where(counts > 0, means * counts, 0.0), axis=1, keep_dims=True) / tl.cast(N, COMPUTE)
    apart = means - mean
    return mean, tl.sum(tl.where(counts > 0, squares + apart * apart * counts, 0.0), axis=1, keep_dims=True)


@triton.jit
def _norm_blocks(
    x, r, w, b, y, s, i0, i1, i2, first, last, mean, rstd, offs_m, mask_m, N,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Last block first: what was read last is still in cache.
    for block in tl.range(0, last - first, num_stages=STAGES):
        offs_n = block_offsets(last - 1 - block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        raw = _input(x, r, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD, AS, COMPUTE, "")
        result = _scaled((raw.to(COMPUTE) - mean) * rstd, w, b, offs_n, mask_n, WEIGHT, BIAS, AS, COMPUTE, "", False)
        store(at(y, i0, i1, i2), result, offs_m, offs_n, mask_m, mask_n, y[3], y[4])
        if ADD:
            store(at(s, i0, i1, i2), raw, offs_m, offs_n, mask_m, mask_n, s[3], s[4])


@triton.jit(do_not_specialize=["eps"])
def norm_looped_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, M0, M1, M2, N, eps: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_r0, stride_r1, stride_r2, stride_rn,
    stride_y0, stride_y1, stride_y2, stride_yn, stride_s0, stride_s1, stride_s2, stride_sn,
    stride_mean0, stride_mean1, stride_mean2, stride_w, stride_b,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row. Grid: one program per BLOCK_M rows."""
    x, r = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (r_ptr, stride_r0, stride_r1, stride_r2, stride_rn)
    y, s = (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn), (s_ptr, stride_s0, stride_s1, stride_s2, stride_sn)
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    blocks = blocks_in(N, BLOCK_N)
    row_mean, squares = _moments(
        x, r, i0, i1, i2, 0, blocks, offs_m, mask_m, N, RMS, ADD, AS, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N
    )
    row_rstd = _rstd(squares, N, eps, COMPUTE)
    _store_statistics(mean, rstd, row_mean, row_rstd, i0, i1, i2, offs_m, mask_m, RMS)
    _norm_blocks(
        x, r, (w_ptr, stride_w), (b_ptr, stride_b), y, s, i0, i1, i2, 0, blocks, row_mean, row_rstd, offs_m, mask_m, N,
        ADD, WEIGHT, BIAS, AS, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


@triton.jit
def norm_partial_kernel(
    x_ptr, r_ptr, partial_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_r0, stride_r1, stride_r2, stride_rn,
    RMS: tl.constexpr, ADD: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """split_row, first launch. Grid: tiles * SPLITS. partial: (tiles, 2, BLOCK_M, SPLITS), COMPUTE."""
    x, r = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (r_ptr, stride_r0, stride_r1, stride_r2, stride_rn)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mean, squares = _moments(
        x, r, i0, i1, i2, first, last, offs_m, offs_m < M2 - i2, N,
        RMS, ADD, AS, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    partial = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS) + part
    offs_partial = tl.arange(0, BLOCK_M)[:, None] * SPLITS
    tl.store(partial + offs_partial, mean)
    tl.store(partial + BLOCK_M * SPLITS + offs_partial, squares)


@triton.jit(do_not_specialize=["eps"])
def norm_combine_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, partial_ptr, M0, M1, M2, N, eps: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_r0, stride_r1, stride_r2, stride_rn,
    stride_y0, stride_y1, stride_y2, stride_yn, stride_s0, stride_s1, stride_s2, stride_sn,
    stride_mean0, stride_mean1, stride_mean2, stride_w, stride_b,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: tiles * SPLITS. BLOCK_SPLITS = next_power_of_2(SPLITS)."""
    x, r = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (r_ptr, stride_r0, stride_r1, stride_r2, stride_rn)
    y, s = (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn), (s_ptr, stride_s0, stride_s1, stride_s2, stride_sn)
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    blocks = blocks_in(N, BLOCK_N)
    tile, part, first, last = part_of(tl.program_id(0), blocks, SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_s = block_offsets(0, BLOCK_M, WIDE), tl.arange(0, BLOCK_SPLITS)
    mask_m = offs_m < M2 - i2
    partial = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS)
    offs_partial, mask_s = tl.arange(0, BLOCK_M)[:, None] * SPLITS + offs_s[None, :], offs_s[None, :] < SPLITS
    means = tl.load(partial + offs_partial, mask=mask_s, other=0.0)
    squares = tl.load(partial + BLOCK_M * SPLITS + offs_partial, mask=mask_s, other=0.0)
    per_part = blocks_in(blocks, SPLITS)
    begin = tl.minimum(offs_s * per_part, blocks)
    counts = tl.where(offs_s < SPLITS, _columns(begin, tl.minimum(begin + per_part, blocks), N, BLOCK_N), 0)
    row_mean, total = _merged(means, squares, counts, N, RMS, COMPUTE)
    row_rstd = _rstd(total, N, eps, COMPUTE)
    if part == 0:
        _store_statistics(mean, rstd, row_mean, row_rstd, i0, i1, i2, offs_m, mask_m, RMS)
    _norm_blocks(
        x, r, (w_ptr, stride_w), (b_ptr, stride_b), y, s, i0, i1, i2, first, last, row_mean, row_rstd, offs_m, mask_m,
        N, ADD, WEIGHT, BIAS, AS, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _row_of_parts(
    x, r, row, rows, M0, M1, M2, first, width,
    ADD: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A program's columns of a row, 0 beyond the last row."""
    i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
    offs_m = block_offsets(0, 1, WIDE)
    return _row_parts(
        x, r, i0, i1, i2, first, offs_m, offs_m < rows - row, width, ADD, AS, COMPUTE, WIDE, PAIRS, PARTS, PART
    )


@triton.jit
def _publish_moments(
    parts, s, word_ptr, row, rows, M0, M1, M2, split, first, count, width,
    RMS: tl.constexpr, ADD: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Hand a program's moments of a row to the others, and store the sum that is normalised, if there is such a row."""
    offs_m = block_offsets(0, 1, WIDE)
    if ADD:
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        _store_sum(parts, s, i0, i1, i2, first, offs_m, offs_m < rows - row, width, WIDE, PARTS, PART)
    mean, squares = _part_moments(parts, first, count, width, RMS, AS, COMPUTE, WIDE, PARTS, PART)
    part_mean, part_squares = tl.sum(mean), tl.sum(squares)
    if row < rows:
        publish_any(word_ptr + tl.cast(row, tl.int64) * SPLITS + split, part_mean, part_squares)


@triton.jit(do_not_specialize=["eps"])
def norm_coresident_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, word_ptr, M0, M1, M2, N, eps: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_r0, stride_r1, stride_r2, stride_rn,
    stride_y0, stride_y1, stride_y2, stride_yn, stride_s0, stride_s1, stride_s2, stride_sn,
    stride_mean0, stride_mean1, stride_mean2, stride_w, stride_b,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AS: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr, LAG: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """coresident_row. Grid: a multiple of SPLITS programs, all running at once. word: (rows, SPLITS) int64 zeros.

    SPLITS is a power of 2, at most one warp wide, and SPLITS * BLOCK_N >= N. COMPUTE is float32. A program takes its
    BLOCK_N columns as PARTS tiles, one after another. FULL: rows of SPLITS * BLOCK_N. LAG: a program sums the next row
    before it waits for the words of this one, so that the exchange takes place while it loads. PAIRS: as `norm_kernel`.
    """
    x, r = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (r_ptr, stride_r0, stride_r1, stride_r2, stride_rn)
    y, s = (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn), (s_ptr, stride_s0, stride_s1, stride_s2, stride_sn)
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    PART: tl.constexpr = BLOCK_N // PARTS
    width = N
    if FULL:
        width = SPLITS * BLOCK_N  # of which the compiler sees that no column is outside
    w, b = (w_ptr, stride_w), (b_ptr, stride_b)
    split = tl.program_id(0) % SPLITS
    first = split * PARTS
    offs_m = block_offsets(0, 1, WIDE)
    mask_m = offs_m < 1
    splits = tl.arange(0, SPLITS)
    counts = tl.cast(_columns(splits, splits + 1, width, BLOCK_N), COMPUTE)
    count = tl.maximum(_columns(split, split + 1, width, BLOCK_N), 1)
    rows, group, groups = M0 * M1 * M2, tl.program_id(0) // SPLITS, tl.num_programs(0) // SPLITS
    here = _row_of_parts(x, r, group, rows, M0, M1, M2, first, width, ADD, AS, COMPUTE, WIDE, PAIRS, PARTS, PART)
    following = here
    if LAG:
        _publish_moments(
            here, s, word_ptr, group, rows, M0, M1, M2, split, first, count, width,
            RMS, ADD, AS, COMPUTE, WIDE, SPLITS, PARTS, PART,
        )  # fmt: skip
        following = _row_of_parts(
            x, r, group + groups, rows, M0, M1, M2, first, width, ADD, AS, COMPUTE, WIDE, PAIRS, PARTS, PART
        )
    for row in tl.range(group, rows, groups):
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        last = following
        if LAG:
            last = _row_of_parts(
                x, r, row + 2 * groups, rows, M0, M1, M2, first, width,
                ADD, AS, COMPUTE, WIDE, PAIRS, PARTS, PART,
            )  # fmt: skip
            found = peek(words, N, SPLITS, POLL_CACHE)
            _publish_moments(
                following, s, word_ptr, row + groups, rows, M0, M1, M2, split, first, count, width,
                RMS, ADD, AS, COMPUTE, WIDE, SPLITS, PARTS, PART,
            )  # fmt: skip
        else:
            _publish_moments(
                here, s, word_ptr, row, rows, M0, M1, M2, split, first, count, width,
                RMS, ADD, AS, COMPUTE, WIDE, SPLITS, PARTS, PART,
            )  # fmt: skip
            # The next row loads while this one waits.
            following = _row_of_parts(
                x, r, row + groups, rows, M0, M1, M2, first, width, ADD, AS, COMPUTE, WIDE, PAIRS, PARTS, PART
            )
            found = peek(words, N, SPLITS, POLL_CACHE)
        means, squares = await_words(found, words, N, SPLITS, POLL_CACHE)
        row_mean = tl.zeros((), COMPUTE)
        if not RMS:
            row_mean = tl.sum(means * counts, axis=0) / tl.cast(width, COMPUTE)
            apart = means - row_mean
            squares += apart * apart * counts
        row_rstd = _rstd(tl.sum(squares, axis=0), width, eps, COMPUTE)
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        _store_parts(
            here, here, here, w, b, y, i0, i1, i2, first, row_mean, row_rstd, offs_m, mask_m, width,
            N < 0, WEIGHT, BIAS, AS, COMPUTE, WIDE, False, PAIRS, PARTS, PART,
        )  # fmt: skip
        if split == 0:
            _store_statistics(mean, rstd, row_mean, row_rstd, i0, i1, i2, offs_m, mask_m, RMS)
        here = following
        if LAG:
            following = last


# ---- gradients --------------------------------------------------------------------------------------------------


@triton.jit
def _centred(raw, row_mean, RMS: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr):
    """c, of which sums and gradients are, not h: rstd is in numbers of the row and in dy * rstd, which both dw and dx
    take. Three instructions less for each element (RMS: two), and c is as exact for a mean far from zero."""
    c = numbers(raw, AS, COMPUTE)
    if not RMS:
        c = c - row_mean
    return c


@triton.jit
def _both_sums(a, b):
    """Sums along the rows of two tiles, in one reduction: half the barriers."""
    first, second = tl.split(tl.sum(tl.join(a, b), axis=1))
    return first[:, None], second[:, None]


@triton.jit
def _row_sums(u, c, RMS: tl.constexpr, COMPUTE: tl.constexpr):
    """Sums of u * c, and of u (RMS: 0), along rows."""
    if RMS:
        return tl.sum(u * c, axis=1, keep_dims=True), tl.zeros([u.shape[0], 1], COMPUTE)
    else:
        return _both_sums(u * c, u)


@triton.jit
def _input_gradient(u, c, sum_uc, sum_u, row_rstd, N, RMS: tl.constexpr, COMPUTE: tl.constexpr):
    """From u * rstd."""
    mean_uh = sum_uc * row_rstd / tl.cast(N, COMPUTE)
    if not RMS:
        u = u - sum_u / tl.cast(N, COMPUTE) * row_rstd
    return u - c * (mean_uh * row_rstd * row_rstd)


@triton.jit
def _weighted(dy, w, WEIGHT: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr):
    u = numbers(dy, AS, COMPUTE)
    if WEIGHT:
        u = u * numbers(w, AS, COMPUTE)
    return u


@triton.jit
def _store_gradient(
    dx, ds, value, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD: tl.constexpr, COMPUTE: tl.constexpr
):
    if ADD:
        value += _load(at(ds, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, ds[3], ds[4], "").to(COMPUTE)
    store(at(dx, i0, i1, i2), value, offs_m, offs_n, mask_m, mask_n, dx[3], dx[4])


@triton.jit
def _store_sums(sums0_ptr, sums1_ptr, program, dw, db, offs_n, mask_n, N, DW: tl.constexpr, DB: tl.constexpr):
    """This program's sums over its rows, from [BLOCK_M, BLOCK_N]."""
    first = tl.cast(program, tl.int64) * N
    if DW:
        tl.store(sums0_ptr + first + offs_n, cast(tl.sum(dw, axis=0), sums0_ptr.dtype.element_ty), mask=mask_n)
    if DB:
        base = sums1_ptr if DW else sums0_ptr
        tl.store(base + first + offs_n, cast(tl.sum(db, axis=0), base.dtype.element_ty), mask=mask_n)


@triton.jit
def _backward_tile(
    tile, dy, x, ds, dx, mean, rstd, w, dw, db, M0, M1, M2, N,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    AS: tl.constexpr = x[0].dtype.element_ty
    zero = N < 0
    if FULL:
        N = BLOCK_N
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_n = block_offsets(0, BLOCK_M, WIDE), block_offsets(0, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < M2 - i2, offs_n < N
    raw = _load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], "")
    gradient = _load(at(dy, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, dy[3], dy[4], "")
    row_rstd = _row_numbers(rstd, i0, i1, i2, offs_m, mask_m)
    row_mean = row_rstd
    if not RMS:
        row_mean = _row_numbers(mean, i0, i1, i2, offs_m, mask_m)
    sum_uc, sum_u = _row_sums(
        _weighted(gradient, w, WEIGHT, AS, COMPUTE), _centred(raw, row_mean, RMS, AS, COMPUTE), RMS, COMPUTE
    )
    # Two operands and two sums take four times as many registers: 1,000 columns spilled without.
    raw, gradient = _waiting(raw, zero, 4 * BLOCK_N), _waiting(gradient, zero, 4 * BLOCK_N)
    c = _centred(raw, row_mean, RMS, AS, COMPUTE)
    scaled = gradient.to(COMPUTE) * row_rstd
    value = _input_gradient(_weighted(scaled, w, WEIGHT, AS, COMPUTE), c, sum_uc, sum_u, row_rstd, N, RMS, COMPUTE)
    _store_gradient(dx, ds, value, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD, COMPUTE)
    if DW:
        dw += scaled * c
    if DB:
        db += gradient.to(COMPUTE)
    return dw, db


@triton.jit
def norm_backward_kernel(
    dy_ptr, x_ptr, ds_ptr, dx_ptr, mean_ptr, rstd_ptr, w_ptr, sums0_ptr, sums1_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_ds0, stride_ds1, stride_ds2, stride_dsn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_mean0, stride_mean1, stride_mean2, stride_w,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row. FULL: rows of BLOCK_N. sums0, sums1: one row of N a program for each of
    dw and db, if these are wanted."""
    dy, x = (
        (dy_ptr, stride_dy0, stride_dy1, stride_dy2, stride_dyn),
        (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn),
    )
    ds, dx = (
        (ds_ptr, stride_ds0, stride_ds1, stride_ds2, stride_dsn),
        (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn),
    )
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    offs_n = block_offsets(0, BLOCK_N, WIDE)
    dw = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    db = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    w = dw
    if WEIGHT:
        w = _spread((w_ptr, stride_w), block_offsets(0, BLOCK_M, WIDE), offs_n, offs_n < N)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            dw, db = _backward_tile(
                tile, dy, x, ds, dx, mean, rstd, w, dw, db, M0, M1, M2, N,
                RMS, ADD, WEIGHT, DW, DB, COMPUTE, WIDE, FULL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        dw, db = _backward_tile(
            tl.program_id(0), dy, x, ds, dx, mean, rstd, w, dw, db, M0, M1, M2, N,
            RMS, ADD, WEIGHT, DW, DB, COMPUTE, WIDE, FULL, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    _store_sums(sums0_ptr, sums1_ptr, tl.program_id(0), dw, db, offs_n, offs_n < N, N, DW, DB)


@triton.jit
def norm_backward_partial_kernel(
    dy_ptr, x_ptr, mean_ptr, w_ptr, partial_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_mean0, stride_mean1, stride_mean2, stride_w,
    RMS: tl.constexpr, WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row, split_row, first launch. Grid: tiles * SPLITS. partial: (tiles, 2, BLOCK_M, SPLITS), COMPUTE."""
    dy, x = (
        (dy_ptr, stride_dy0, stride_dy1, stride_dy2, stride_dyn),
        (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn),
    )
    mean = (mean_ptr, stride_mean0, stride_mean1, stride_mean2)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    row_mean = tl.zeros([BLOCK_M, 1], COMPUTE)
    if not RMS:
        row_mean = _row_numbers(mean, i0, i1, i2, offs_m, mask_m)
    total_uc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    total_u = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        raw = _load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], "")
        u = _load(at(dy, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, dy[3], dy[4], "").to(COMPUTE)
        if WEIGHT:
            u = u * _vector((w_ptr, stride_w), offs_n, mask_n, "", False).to(COMPUTE)
        total_uc += u * _centred(raw, row_mean, RMS, x_ptr.dtype.element_ty, COMPUTE)
        if not RMS:
            total_u += u
    partial = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS) + part
    offs_partial = tl.arange(0, BLOCK_M)[:, None] * SPLITS
    tl.store(partial + offs_partial, tl.sum(total_uc, axis=1, keep_dims=True))
    tl.store(partial + BLOCK_M * SPLITS + offs_partial, tl.sum(total_u, axis=1, keep_dims=True))


@triton.jit
def norm_backward_combine_kernel(
    dy_ptr, x_ptr, ds_ptr, dx_ptr, mean_ptr, rstd_ptr, w_ptr, partial_ptr, sums0_ptr, sums1_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_ds0, stride_ds1, stride_ds2, stride_dsn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_mean0, stride_mean1, stride_mean2, stride_w,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """looped_row, split_row, second launch: BLOCK_N columns of many rows, so that sums over rows stay in registers.

    Grid: groups * blocks of columns; each group takes its own tiles.
    """
    dy, x = (
        (dy_ptr, stride_dy0, stride_dy1, stride_dy2, stride_dyn),
        (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn),
    )
    ds, dx = (
        (ds_ptr, stride_ds0, stride_ds1, stride_ds2, stride_dsn),
        (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn),
    )
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    AS: tl.constexpr = x_ptr.dtype.element_ty
    blocks = blocks_in(N, BLOCK_N)
    group, groups = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    offs_m, offs_n = block_offsets(0, BLOCK_M, WIDE), block_offsets(tl.program_id(0) % blocks, BLOCK_N, WIDE)
    offs_s, mask_n = tl.arange(0, BLOCK_SPLITS)[None, :], offs_n < N
    offs_partial = tl.arange(0, BLOCK_M)[:, None] * SPLITS + offs_s
    dw = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    db = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    w = dw
    if WEIGHT:
        w = _vector((w_ptr, stride_w), offs_n, mask_n, "", False)
    tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
    for tile in tl.range(group, tiles, groups, num_stages=STAGES):
        i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
        mask_m = offs_m < M2 - i2
        raw = _load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], "")
        gradient = _load(at(dy, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, dy[3], dy[4], "")
        row_rstd = _row_numbers(rstd, i0, i1, i2, offs_m, mask_m)
        row_mean, sum_u = row_rstd, row_rstd
        partial = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS) + offs_partial
        sum_uc = tl.sum(tl.load(partial, mask=offs_s < SPLITS, other=0.0), axis=1, keep_dims=True)
        if not RMS:
            row_mean = _row_numbers(mean, i0, i1, i2, offs_m, mask_m)
            sums_u = tl.load(partial + BLOCK_M * SPLITS, mask=offs_s < SPLITS, other=0.0)
            sum_u = tl.sum(sums_u, axis=1, keep_dims=True)
        c = _centred(raw, row_mean, RMS, AS, COMPUTE)
        scaled = gradient.to(COMPUTE) * row_rstd
        value = _input_gradient(_weighted(scaled, w, WEIGHT, AS, COMPUTE), c, sum_uc, sum_u, row_rstd, N, RMS, COMPUTE)
        _store_gradient(dx, ds, value, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD, COMPUTE)
        if DW:
            dw += scaled * c
        if DB:
            db += gradient.to(COMPUTE)
    _store_sums(sums0_ptr, sums1_ptr, group, dw, db, offs_n, mask_n, N, DW, DB)


@triton.jit
def _load_part(
    dy, x, mean, rstd, row, rows, M0, M1, M2, offs_n, mask_n,
    RMS: tl.constexpr, WIDE: tl.constexpr, EVICTION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """x, dy, mean and 1 / deviation of a part of a row. Past the last row, those of the last one: a mask would cost
    an instruction for each register that it makes zero."""
    i0, i1, i2 = tile_origin(tl.minimum(row, rows - 1), M0, M1, M2, 1)
    offs_m = block_offsets(0, 1, WIDE)
    mask_m = offs_m < 1
    base_x, base_dy = pairs_at(at(x, i0, i1, i2), PAIRS), pairs_at(at(dy, i0, i1, i2), PAIRS)
    raw = _load(base_x, offs_m, offs_n, mask_m, mask_n, x[3], x[4], EVICTION)
    gradient = _load(base_dy, offs_m, offs_n, mask_m, mask_n, dy[3], dy[4], EVICTION)
    row_rstd = _row_numbers(rstd, i0, i1, i2, offs_m, mask_m)
    row_mean = row_rstd
    if not RMS:
        row_mean = _row_numbers(mean, i0, i1, i2, offs_m, mask_m)
    return raw, gradient, row_mean, row_rstd


@triton.jit
def _publish_sums(
    words, raw, gradient, row_mean, w, exists, part,
    RMS: tl.constexpr, WEIGHT: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Hand this part's two sums of a row to the other parts, if there is such a row."""
    c = _centred(raw, row_mean, RMS, AS, COMPUTE)
    part_uc, part_u = _row_sums(_weighted(gradient, w, WEIGHT, AS, COMPUTE), c, RMS, COMPUTE)
    sum_u, sum_uc = tl.sum(part_u), tl.sum(part_uc)
    if exists:
        publish_any(words + part, sum_u, sum_uc)


@triton.jit
def norm_backward_coresident_kernel(
    dy_ptr, x_ptr, ds_ptr, dx_ptr, mean_ptr, rstd_ptr, w_ptr, word_ptr, sums0_ptr, sums1_ptr, M0, M1, M2, N,
    stride_dy0, stride_dy1, stride_dy2, stride_dyn, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_ds0, stride_ds1, stride_ds2, stride_dsn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_mean0, stride_mean1, stride_mean2, stride_w,
    RMS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    POLL_CACHE: tl.constexpr, LAG: tl.constexpr, REREAD: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """coresident_row: as `norm_coresident_kernel`. A program has the same columns in all of its rows, so that their
    sums stay in registers.

    LAG: a program sums the next row before it waits for the words of this one, so that the exchange takes place while
    it loads. It then has three rows on the way, not two. PAIRS: x, dy and w are read and kept as words of two.
    """
    dy, x = (
        (dy_ptr, stride_dy0, stride_dy1, stride_dy2, stride_dyn),
        (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn),
    )
    ds, dx = (
        (ds_ptr, stride_ds0, stride_ds1, stride_ds2, stride_dsn),
        (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn),
    )
    mean, rstd = (
        (mean_ptr, stride_mean0, stride_mean1, stride_mean2),
        (rstd_ptr, stride_mean0, stride_mean1, stride_mean2),
    )
    part, group = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    offs_m, offs_n = block_offsets(0, 1, WIDE), block_offsets(part, BLOCK_N, WIDE)
    width = N
    if FULL:
        width = SPLITS * BLOCK_N
    mask_m, mask_n = offs_m < 1, offs_n < width
    offs_l, mask_l = offs_n, mask_n  # of what is loaded
    if PAIRS:
        offs_l = block_offsets(part, BLOCK_N // 2, WIDE)
        mask_l = offs_l < width // 2
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    dw = tl.zeros([1, BLOCK_N], COMPUTE)
    db = tl.zeros([1, BLOCK_N], COMPUTE)
    w = dw
    if WEIGHT:
        w = _vector((w_ptr, stride_w), offs_l, mask_l, "", PAIRS)
    AS: tl.constexpr = x_ptr.dtype.element_ty
    KEEP: tl.constexpr = "evict_last" if REREAD else ""
    x0, dy0, mean0, rstd0 = _load_part(
        dy, x, mean, rstd, group, rows, M0, M1, M2, offs_l, mask_l, RMS, WIDE, KEEP, PAIRS
    )
    x1, dy1, mean1, rstd1 = x0, dy0, mean0, rstd0
    if LAG:
        words = word_ptr + tl.cast(group, tl.int64) * SPLITS
        _publish_sums(words, x0, dy0, mean0, w, True, part, RMS, WEIGHT, AS, COMPUTE)
        x1, dy1, mean1, rstd1 = _load_part(
            dy, x, mean, rstd, group + groups, rows, M0, M1, M2, offs_l, mask_l, RMS, WIDE, KEEP, PAIRS
        )
    for row in tl.range(group, rows, groups):
        left = rows - groups - row  # from this group's next row on
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        x2, dy2, mean2, rstd2 = x1, dy1, mean1, rstd1
        if LAG:
            x2, dy2, mean2, rstd2 = _load_part(
                dy, x, mean, rstd, row + 2 * groups, rows, M0, M1, M2, offs_l, mask_l, RMS, WIDE, KEEP, PAIRS
            )
            found = peek(words, N, SPLITS, POLL_CACHE)
            if WEIGHT and not PAIRS:  # the nearest cache has it: a third row takes the registers that would keep it
                w = _vector((w_ptr, stride_w), offs_n, mask_n, "", False)
            following = word_ptr + tl.cast(row + groups, tl.int64) * SPLITS
            _publish_sums(following, x1, dy1, mean1, w, left > 0, part, RMS, WEIGHT, AS, COMPUTE)
            if WEIGHT and not PAIRS:
                w = _vector((w_ptr, stride_w), offs_n, mask_n, "", False)
        else:
            _publish_sums(words, x0, dy0, mean0, w, True, part, RMS, WEIGHT, AS, COMPUTE)
            # The next row loads while this one waits.
            x1, dy1, mean1, rstd1 = _load_part(
                dy, x, mean, rstd, row + groups, rows, M0, M1, M2, offs_l, mask_l, RMS, WIDE, KEEP, PAIRS
            )
            found = peek(words, N, SPLITS, POLL_CACHE)
        sums_u, sums_uc = await_words(found, words, N, SPLITS, POLL_CACHE)
        sum_u, sum_uc = tl.sum(sums_u, axis=0), tl.sum(sums_uc, axis=0)
        if REREAD:
            x0, dy0, mean0, rstd0 = _load_part(
                dy, x, mean, rstd, row, rows, M0, M1, M2, offs_l, mask_l, RMS, WIDE, "evict_first", PAIRS
            )
        raw, gradient = opaque(x0, N < 0), opaque(dy0, N < 0)
        c = _centred(raw, mean0, RMS, AS, COMPUTE)
        gradient = numbers(gradient, AS, COMPUTE)
        scaled = gradient * rstd0
        value = _input_gradient(_weighted(scaled, w, WEIGHT, AS, COMPUTE), c, sum_uc, sum_u, rstd0, width, RMS, COMPUTE)
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        _store_gradient(dx, ds, value, i0, i1, i2, offs_m, offs_n, mask_m, mask_n, ADD, COMPUTE)
        if DW:
            dw += scaled * c
        if DB:
            db += gradient
        x0, dy0, mean0, rstd0 = x1, dy1, mean1, rstd1
        if LAG:
            x1, dy1, mean1, rstd1 = x2, dy2, mean2, rstd2
    _store_sums(sums0_ptr, sums1_ptr, group, dw, db, offs_n, mask_n, N, DW, DB)


# ---- the ops ----------------------------------------------------------------------------------------------------

_FORWARD = RowKernels(
    whole=norm_kernel,
    looped=norm_looped_kernel,
    partial=norm_partial_kernel,
    combine=norm_combine_kernel,
    coresident=norm_coresident_kernel,
    partials=2,
)
_BACKWARD = RowKernels(
    whole=norm_backward_kernel,
    looped=None,
    partial=norm_backward_partial_kernel,
    combine=norm_backward_combine_kernel,
    coresident=norm_backward_coresident_kernel,
    partials=2,
    sums=column_sums_kernel,
)


@dataclass(frozen=True)
class Form:
    """One of the four ops: RMS norm or layer norm, with a residual added first or not."""

    name: str
    rms: bool
    add: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical arguments in their order."""
        residual, bias = ("residual",) * self.add, ("bias",) * (not self.rms)
        return ("input", *residual, "weight", *bias, "eps", "dtype")

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of the tensors among them."""
        return tuple(range(len(self.names) - 2))

    @property
    def schema(self) -> str:
        types = {"input": "Tensor", "residual": "Tensor", "eps": "float", "dtype": "ScalarType"}
        arguments = ", ".join(f"{types.get(name, 'Tensor?')} {name}" for name in self.names)
        return f"({arguments}) -> ({', '.join(['Tensor'] * (2 + self.add))})"

    @property
    def gradient(self) -> str:
        return "rms_norm_backward" if self.rms else "layer_norm_backward"

    def call(self, args: Sequence[Any]) -> _Call:
        given = dict(zip(self.names, args, strict=True))
        return _Call(**{"residual": None, "bias": None, **given})


@dataclass(frozen=True)
class _Call:
    """The canonical arguments of a forward op: tensors or their Metas."""

    input: Any
    residual: Any
    weight: Any
    bias: Any
    eps: Any
    dtype: torch.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of what is normalised."""
        dtype: torch.dtype = self.input.dtype
        return dtype if self.residual is None else torch.promote_types(dtype, self.residual.dtype)


def signature(
    form: Form, input: Tensor, residual: Tensor | None, normalized_shape: Sequence[int],
    weight: Tensor | None, bias: Tensor | None, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """The canonical arguments of a call: the normalised dims as one, so that the rest is about rows."""
    op = form.name
    shape = _checked_shape(op, input, normalized_shape)
    given = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None:
            check_dtype(op, name, check_tensor(op, name, tensor).dtype, FLOATS)
            wanted = tuple(input.shape) if name == "residual" else shape
            if tuple(tensor.shape) != wanted and name != "input":
                raise Mismatch(f"{op}(): {name} has the shape {list(tensor.shape)}, expected {list(wanted)}")
            given[name] = tensor.flatten(-len(shape)) if len(shape) > 1 else tensor
    for name in ("weight", "bias"):
        vector = given[name]
        given[name] = vector if vector is None else near(vector)
    x, r = given["input"], given["residual"]
    assert x is not None
    x = readable(x, x, x.dim() - 1)
    given["input"], given["residual"] = x, r if r is None else readable(r, x, x.dim() - 1)
    dtype = x.dtype if r is None else torch.promote_types(x.dtype, r.dtype)
    if dtype == x.dtype:
        dtype = autocast_to_float32(x)
    values = {**given, "eps": eps, "dtype": dtype}
    return tuple(values[name] for name in form.names)


def _checked_shape(op: str, input: Tensor, normalized_shape: Any) -> tuple[int, ...]:
    check_tensor(op, "input", input)
    if not isinstance(normalized_shape, Sequence):
        kind = type(normalized_shape).__name__
        raise BadType(f"{op}(): argument 'normalized_shape' must be a sequence of ints, not {kind}; write (n,)")
    shape = tuple(int(check_int(op, "normalized_shape", size)) for size in normalized_shape)
    if not shape:
        raise Mismatch(f"{op}(): normalized_shape is empty; name at least the last dim of input")
    if tuple(input.shape[-len(shape) :]) != shape or input.dim() < len(shape):
        raise Mismatch(
            f"{op}(): normalized_shape is {list(shape)}, so input must have the shape "
            f"[*, {', '.join(map(str, shape))}], and has {list(input.shape)}"
        )
    return shape


def unflattened(outputs: Sequence[Tensor], input: Tensor) -> Any:
    """The op's outputs in the shape of the call's ``input``."""
    found = tuple(output if output.shape == input.shape else output.view(input.shape) for output in outputs)
    return found[0] if len(found) == 1 else found


def _accumulator(*tensors: Any) -> torch.dtype:
    double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return torch.float64 if double else torch.float32


def _row_shaped(meta: Meta | Buffer, numbers: int, dtype: torch.dtype) -> Buffer:
    """``numbers`` numbers for each row of ``meta``, rows in its order."""
    rows = like(Meta(meta.shape[:-1], meta.strides[:-1], dtype))
    each = math.prod(rows.shape)
    return Buffer((numbers, *rows.shape), (each, *rows.strides), dtype, unread=True)


def _expanded(meta: Meta | Buffer, n: int) -> Meta:
    """One set of numbers of ``_row_shaped`` as an operand of rows of ``n``."""
    return Meta((*meta.shape[1:], n), (*meta.strides[1:], 0), meta.dtype)


def _outputs(form: Form, *args: Any) -> tuple[Buffer, ...]:
    call = form.call(args)
    s, y = like(call.input, call.sum_dtype), like(call.input, call.dtype)
    accumulator = _accumulator(call.input, call.residual, call.weight, call.bias)
    statistics = _row_shaped(y, 1 if form.rms else 2, accumulator)
    if y.shape[-1] == 0:
        statistics = replace(statistics, init=0)
    return (y, s, statistics) if form.add else (y, statistics)


def _operands(form: Form, call: _Call, outputs: Sequence[Buffer]) -> dict[str, Meta | Buffer]:
    y, *s, _ = outputs
    found: dict[str, Meta | Buffer] = {"y": y, "x": call.input}
    return {**found, "r": call.residual, "s": s[0]} if form.add else found


def _problem(form: Form, *args: Any) -> Problem:
    call, outputs = form.call(args), _outputs(form, *args)
    statistics = _expanded(outputs[-1], call.input.shape[-1])
    return row_problem(
        form.name, len(call.input.shape) - 1, _operands(form, call, outputs), first="y",
        others=(statistics,), vectors={"w": call.weight, "b": call.bias},
    )  # fmt: skip


# 32-bit registers per element, fitted on compiled kernels, by RMS, whether all operands are 16-bit, and whether there
# is a residual: of whole rows, of rows in blocks, of parts whose programs wait (without what these load meanwhile).
_LIVE = {
    (True, True, False): (1.2, 1.4, 1.4), (True, True, True): (1.2, 2.0, 1.7),
    (False, True, False): (1.4, 2.8, 2.2), (False, True, True): (1.9, 2.9, 2.7),
    (True, False, False): (2.1, 1.8, 2.2), (True, False, True): (2.1, 2.7, 2.8),
    (False, False, False): (2.2, 3.0, 3.2), (False, False, True): (2.1, 5.1, 3.2),
}  # fmt: skip
_LIVE_BACKWARD = {
    (True, True): (4.5, 4.5, 5.8), (False, True): (5.0, 6.0, 6.3),
    (True, False): (5.5, 5.8, 5.8), (False, False): (6.4, 8.0, 7.2),
}  # fmt: skip
_LIVE_PAIRED = {True: 5.3, False: 6.4}  # of parts whose programs wait, in words of two, by RMS


def _live(whole: float, looped: float, waiting: float) -> dict[str, float]:
    rows = {"packed_rows": whole, "resident_row": whole}
    return {**rows, "looped_row": looped, "split_row": looped, "coresident_row": waiting}


def _narrow(problem: Problem) -> bool:
    return all(dtype in ("float16", "bfloat16") for name, dtype in problem.dtypes.items() if name not in ("w", "b"))


def _work(form: Form, problem: Problem) -> Work:
    live: dict[str, float] = _live(*_LIVE[form.rms, _narrow(problem), form.add])
    if form.add:
        return row_work(problem, ("x", "r"), ("y", "s"), live, takes=("LAG",))
    narrow = all(dtype in ("float16", "bfloat16") for dtype in problem.dtypes.values())
    wide = set(problem.dtypes.values()) == {"float32"}
    if _narrow(problem):  # RMS norm keeps a whole row in as few registers as it would take to read it again
        live["cached_row"] = 1.05 if form.rms else 0.75
    return row_work(
        problem, ("x",), ("y",), live, takes=("EARLY", "LAG", "PAIRS", "PARTS") if narrow or wide else ("LAG",)
    )


def _plan(form: Form, config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    call, outputs = form.call(args), _outputs(form, *args)
    statistics, n = outputs[-1], call.input.shape[-1]
    metas = _operands(form, call, outputs)
    each = 0 if form.rms else statistics.strides[0]
    places: dict[str, In | Out] = {"y": Out(0), "x": In(0), "r": In(1), "s": Out(1)}
    operands = {name: places[name] for name in metas}
    operands |= {"mean": Out(len(outputs) - 1), "rstd": Out(len(outputs) - 1, each)}
    spread = _expanded(statistics, n)
    rows = rows_of([*metas.values(), spread, spread], len(call.input.shape) - 1)
    vectors = {"w": call.weight, "b": call.bias}
    read = [(number, call.input) for number, name in enumerate(metas) if name == "x"]
    full = n == blocks["SPLITS"] * blocks["BLOCK_N"]
    part = blocks["BLOCK_N"] // config.params.get("PARTS", 1)
    paired = bool(config.params.get("PAIRS")) and full and not form.add
    extras: dict[str, Any] = {"eps": Value(form.names.index("eps"))}
    for name, position in (("w", "weight"), ("b", "bias")):
        if vectors[name] is not None:
            extras |= {f"{name}_ptr": In(form.names.index(position)), f"stride_{name}": vectors[name].strides[0]}
    return row_plan(
        _FORWARD, config, blocks, rows, operands, outputs,
        compute=statistics.dtype, extras=extras, RMS=form.rms, ADD=form.add, WEIGHT=call.weight is not None,
        BIAS=call.bias is not None, AS=TRITON_DTYPES[call.sum_dtype], COMPUTE=TRITON_DTYPES[statistics.dtype],
        FULL=full,
        PAIRS=paired and in_pairs(rows, part, read, vectors.values()),
    )  # fmt: skip


@dataclass(frozen=True)
class _BackwardCall:
    """The canonical arguments of a backward op."""

    grad_output: Any
    grad_sum: Any
    input: Any
    weight: Any
    statistics: Any
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @property
    def operands(self) -> dict[str, Meta | Buffer]:
        found: dict[str, Meta | Buffer] = {"dx": like(self.input), "dy": self.grad_output, "x": self.input}
        return found if self.grad_sum is None else {**found, "ds": self.grad_sum}


def _backward_outputs(*args: Any) -> tuple[Buffer, ...]:
    call = _BackwardCall(*args)
    empty = 0 in call.input.shape
    sums = (
        Buffer.flat(0 if dtype is None else call.input.shape[-1], dtype or call.input.dtype, 0 if empty else None)
        for dtype in (call.weight_dtype, call.bias_dtype)
    )
    return (like(call.input), *sums)


def _backward_problem(op: str, *args: Any) -> Problem:
    call = _BackwardCall(*args)
    statistics = _expanded(call.statistics, call.input.shape[-1])
    sums = [name for name, dtype in (("w", call.weight_dtype), ("b", call.bias_dtype)) if dtype is not None]
    return row_problem(
        op, len(call.input.shape) - 1, call.operands, first="dx",
        others=(statistics,), vectors={"w": call.weight}, sums="".join(sums),
    )  # fmt: skip


def _backward_work(rms: bool, problem: Problem) -> Work:
    reads = [name for name in ("dy", "x", "ds") if name in problem.dtypes]
    whole, looped, waiting = _LIVE_BACKWARD[rms, _narrow(problem)]
    words = all(problem.layout[name] == "n16" for name in ("dy", "x")) and problem.sizes["N"] % 2 == 0
    read = {problem.dtypes[name] for name in ("dy", "x", "w") if name in problem.dtypes}
    if words and read in ({"float16"}, {"bfloat16"}):
        waiting = _LIVE_PAIRED[rms]
    live = _live(*(each + 0.5 * ("ds" in reads) for each in (whole, looped, waiting)))
    return row_work(problem, tuple(reads), ("dx",), live, sums=len(str(problem.flags["sums"])))


def _backward_plan(rms: bool, config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    call, outputs = _BackwardCall(*args), _backward_outputs(*args)
    metas, statistics = call.operands, call.statistics
    spread = _expanded(statistics, call.input.shape[-1])
    rows: Rows = rows_of([*metas.values(), spread, spread], len(call.input.shape) - 1)
    places: dict[str, In | Out] = {"dx": Out(0), "dy": In(0), "ds": In(1), "x": In(2)}
    operands = {name: places[name] for name in metas}
    operands |= {"mean": In(4), "rstd": In(4, 0 if rms else statistics.strides[0])}
    extras: dict[str, Any] = {}
    if call.weight is not None:
        extras = {"w_ptr": In(3), "stride_w": call.weight.strides[0]}
    wanted = (call.weight_dtype, call.bias_dtype)
    totals = tuple((Out(1 + number), 1) for number, dtype in enumerate(wanted) if dtype is not None)
    compute = _accumulator(call.input, call.grad_output, call.weight, statistics)
    read = [(number, meta) for number, (name, meta) in enumerate(metas.items()) if name in ("dy", "x")]
    return row_plan(
        _BACKWARD, config, blocks, rows, operands, outputs,
        compute=compute, extras=extras, sums=Sums(totals), RMS=rms, ADD=call.grad_sum is not None,
        WEIGHT=call.weight is not None, DW=wanted[0] is not None, DB=wanted[1] is not None,
        COMPUTE=TRITON_DTYPES[compute], FULL=call.input.shape[-1] == blocks["SPLITS"] * blocks["BLOCK_N"],
        PAIRS=in_pairs(rows, blocks["BLOCK_N"], read, [call.weight]),
    )  # fmt: skip


def _save(form: Form, args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    call = form.call(args)
    dtypes = (each.dtype if each is not None and each.requires_grad else None for each in (call.weight, call.bias))
    return (outputs[1] if form.add else call.input, call.weight, outputs[-1], *dtypes)


def _backward_arguments(form: Form, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...] | Result:
    s, *rest = saved
    grad_output, grad_sum = grads[0], grads[1] if form.add else None
    if grad_output is None:  # y was not used; zeros times a row that is not finite would be NaN
        return Result((grad_sum, grad_sum, *[None] * (len(form.tensors) - 2)))
    grad_output = readable(grad_output, s, s.dim() - 1)
    if grad_sum is not None:
        grad_sum = readable(grad_sum, s, s.dim() - 1)
    return grad_output, grad_sum, s, *rest


def _gradients(form: Form, saved: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """dx is the gradient of input and residual alike; what was not wanted is None."""
    *_, weight_dtype, bias_dtype = saved
    dx, dw, db = outputs
    dw, db = None if weight_dtype is None else dw, None if bias_dtype is None else db
    return (*((dx,) * (1 + form.add)), dw, *((db,) * (not form.rms)))


def _reference(form: Form, *args: Any) -> tuple[Tensor, ...]:
    call = form.call(args)
    s = call.input if call.residual is None else call.input + call.residual
    accumulator = _accumulator(call.input, call.residual, call.weight, call.bias)
    mean, rstd, h = _normal(s.to(accumulator), form.rms, call.eps)
    y = h if call.weight is None else h * call.weight.to(accumulator)
    y = y if call.bias is None else y + call.bias.to(accumulator)
    statistics = torch.stack([rstd] if form.rms else [mean, rstd]).squeeze(-1)
    statistics = statistics if s.shape[-1] else torch.zeros_like(statistics)
    return (y.to(call.dtype), s, statistics) if form.add else (y.to(call.dtype), statistics)


def _normal(s: Tensor, rms: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, rstd, h) of rows."""
    mean = torch.zeros_like(s[..., :1]) if rms else s.mean(-1, keepdim=True)
    c = s if rms else s - mean
    rstd = (c.square().mean(-1, keepdim=True) + eps).rsqrt()
    return torch.where(rstd.isnan(), rstd, mean), rstd, c * rstd


def _terms(form: Form, *args: Any) -> tuple[Tensor, ...]:
    """What outputs are sums and differences of: h of s and the mean, each rounded as such."""
    call = form.call(args)
    s = call.input if call.residual is None else call.input + call.residual
    mean, rstd, h = _normal(s, form.rms, call.eps)
    # The mean's rounding is in every centred value, by chance one way or the other.
    apart = rstd * (1 + mean.abs() * rstd / math.sqrt(max(s.shape[-1], 1)))
    statistics = torch.stack([rstd] if form.rms else [s.abs().mean(-1, keepdim=True), apart]).squeeze(-1)
    size = (s.abs() + s.abs().mean(-1, keepdim=True)) * rstd + h.abs()
    size = size if call.weight is None else size * call.weight.abs()
    size = size if call.bias is None else size + call.bias.abs()
    return (size, call.input.abs() + call.residual.abs(), statistics) if form.add else (size, statistics)


def _backward_parts(rms: bool, *args: Any) -> tuple[Tensor, ...]:
    """dy, u, h, rstd in the accumulator's dtype."""
    call = _BackwardCall(*args)
    accumulator = _accumulator(call.input, call.grad_output, call.weight, call.statistics)
    dy, rstd = call.grad_output.to(accumulator), call.statistics[-1].to(accumulator).unsqueeze(-1)
    h = call.input.to(accumulator)
    h = (h if rms else h - call.statistics[0].to(accumulator).unsqueeze(-1)) * rstd
    return dy, dy if call.weight is None else dy * call.weight.to(accumulator), h, rstd


def backward_reference(rms: bool, *args: Any) -> tuple[Tensor, ...]:
    """Gradient of a norm in plain torch."""
    call = _BackwardCall(*args)
    dy, u, h, rstd = _backward_parts(rms, *args)
    dx = u - h * (u * h).mean(-1, keepdim=True)
    dx = (dx if rms else dx - u.mean(-1, keepdim=True)) * rstd
    dx = dx if call.grad_sum is None else dx + call.grad_sum.to(dx.dtype)
    n = dx.shape[-1]
    rows = [(dy * h).reshape(-1, n) if n else dy.new_zeros(1, 0), dy.reshape(-1, n) if n else dy.new_zeros(1, 0)]
    sums = (
        dx.new_empty(0, dtype=call.input.dtype) if dtype is None else each.sum(0).to(dtype)
        for each, dtype in zip(rows, (call.weight_dtype, call.bias_dtype), strict=True)
    )
    return (dx.to(call.input.dtype), *sums)


def _backward_terms(rms: bool, *args: Any) -> tuple[Tensor, ...]:
    call = _BackwardCall(*args)
    dy, u, h, rstd = (each.abs() for each in _backward_parts(rms, *args))
    size = (u + h * (u * h).mean(-1, keepdim=True) + u.mean(-1, keepdim=True)) * rstd
    size = size if call.grad_sum is None else size + call.grad_sum.abs()
    n = size.shape[-1]
    rows = [(dy * h).reshape(-1, n) if n else dy.new_zeros(1, 0), dy.reshape(-1, n) if n else dy.new_zeros(1, 0)]
    wanted = (call.weight_dtype, call.bias_dtype)
    return (size, *(size.new_empty(0) if d is None else e.sum(0) for e, d in zip(rows, wanted, strict=True)))


def _values(
    sizes: tuple[int, ...], dtype: torch.dtype, device: Any, generator: torch.Generator | None, style: str
) -> Tensor:
    """``wide`` has a mean that is large beside its spread; ``nonfinite`` adds NaN and infinities to some rows."""
    x = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
    if style == "wide":
        return (x * 8 + 1000).to(dtype)
    if style == "nonfinite":
        x = torch.where(x > 2.5, math.nan, torch.where(x < -2.5, -math.inf, torch.where(x > 2.3, math.inf, x)))
    return x.to(dtype)


def _inputs(
    form: Form, sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", weight: str = "", residual: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """``weight`` and ``residual`` name dtypes other than ``dtype``; with ``none``, weight and bias are absent."""
    # Triton's interpreter passes eps as float32, so it is a power of 2.
    x = _values(sizes, dtype, device, generator, style)
    kinds = {name: getattr(torch, kind) if kind not in ("", "none") else dtype for name, kind in
             (("weight", weight), ("residual", residual))}  # fmt: skip
    values: dict[str, Any] = {"input": x, "eps": 2**-17, "weight": None, "bias": None}
    if form.add:
        values["residual"] = _values(sizes, kinds["residual"], device, generator, "normal")
    if weight != "none":
        for name in ("weight", "bias"):
            values[name] = torch.rand(sizes[-1:], generator=generator, device=device).to(kinds["weight"]) + 0.5
    values["dtype"] = torch.promote_types(x.dtype, kinds["residual"]) if form.add else x.dtype
    return tuple(values[name] for name in form.names)


def _backward_inputs(
    form: Form, sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", weight: str = "", add: bool = False,
    bias: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    args = _inputs(form, sizes, dtype, device=device, generator=generator, style=style, weight=weight)
    x, w = args[:2]
    given = [torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype) for _ in range(2)]
    if torch.device(device).type == "meta":
        rows = _outputs(form, *(Meta.of(arg) if isinstance(arg, Tensor) else arg for arg in args))[-1]
        statistics = torch.empty_strided(rows.shape, rows.strides, dtype=rows.dtype, device=device)
    else:
        exact = [arg.double() if isinstance(arg, Tensor) else arg for arg in args]
        statistics = _reference(form, *exact)[-1].to(_accumulator(x, w))
    weight_dtype = None if w is None else w.dtype
    bias_dtype = weight_dtype if bias and not form.rms else None
    return given[0], given[1] if add else None, x, w, statistics, weight_dtype, bias_dtype


CASES = (
    Case((1,)), Case((7, 1)), Case((0, 5)), Case((5, 0)), Case((4, 33)), Case((3, 130), {"weight": "none"}),
    Case((2, 3, 130)), Case((3, 130), {"weight": "float32"}), Case((2, 1000)), Case((3, 4097)), Case((2, 5, 3, 17)),
)  # fmt: skip
# RMS norm of one element is its sign, and the gradient of any norm of it nothing but rounding, as large as rstd
# makes it, beside which a residual's passes: tests have that apart.
_ADD_CASES = (*CASES[1:7], Case((3, 130), {"residual": "float32", "weight": "bfloat16"}), *CASES[8:])
_BACKWARD_CASES = (
    *CASES[:8], Case((20, 33), {"add": True}), Case((2, 1000)), Case((3, 2049), {"add": True, "weight": "none"}),
    Case((2, 5, 3, 17), {"bias": False}),
)  # fmt: skip
TUNE_CASES = tuple(
    Case(sizes)
    for sizes in (
        (4096, 1024), (4096, 4096), (8192, 8192), (4096, 32768), (4096, 131072), (32768, 256), (1, 1048576),
    )
)  # fmt: skip
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _fold(form: Form, in_dims: InDims, *args: Any) -> Folded | None:
    """A mapped dim holds more rows, which have one weight and bias."""
    dims, given = (dict(zip(form.names, each, strict=True)) for each in (in_dims, args))
    if dims.get("weight") is not None or dims.get("bias") is not None:
        return None
    rows = [name for name in ("input", "residual") if given.get(name) is not None]
    found = dict(zip(rows, stacked([dims[name] for name in rows], *(given[name] for name in rows)), strict=True))
    x = found["input"]
    found = {name: readable(each, x, x.dim() - 1) for name, each in found.items()}
    # Statistics have a dim of their own before those of the rows.
    return Folded(tuple({**given, **found}[name] for name in form.names), (0, 0, 1) if form.add else (0, 1))


def forward_op(form: Form, public: Any, result: Any, eager: Any) -> Op:
    """The op of one form; its gradient is that of the family."""
    return Op(
        form.name,
        form.schema,
        signature=public,
        result=result,
        saved=1,
        depends=((1, (0, 1)),) if form.add else (),
        problem=partial(_problem, form),
        work=partial(_work, form),
        outputs=partial(_outputs, form),
        fit=fit_rows,
        plan=partial(_plan, form),
        reference=partial(_reference, form),
        terms=partial(_terms, form),
        eager=eager,
        inputs=partial(_inputs, form),
        cases=tuple(
            case for case in (_ADD_CASES if form.add else CASES) if not (form.rms or form.add) or case.sizes[-1] != 1
        ),
        tune_cases=TUNE_CASES,
        dtypes=_DTYPES,
        values=(form.names.index("eps"),),
        vmap=partial(_fold, form),
        public=lambda input, *rest: {"normalized_shape": input.shape[-1:]},
        backward=Backward(
            form.gradient, partial(_save, form), partial(_backward_arguments, form), inputs=form.tensors,
            gradients=partial(_gradients, form),
        ),
    )  # fmt: skip


def backward_op(form: Form, eager: Any) -> Op:
    """The gradient of both ops of a family."""
    return Op(
        form.gradient,
        "(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? weight, Tensor statistics, "
        "ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
        problem=partial(_backward_problem, form.gradient),
        work=partial(_backward_work, form.rms),
        outputs=_backward_outputs,
        fit=fit_rows,
        plan=partial(_backward_plan, form.rms),
        reference=partial(backward_reference, form.rms),
        terms=partial(_backward_terms, form.rms),
        eager=eager,
        inputs=partial(_backward_inputs, form),
        cases=_BACKWARD_CASES,
        tune_cases=TUNE_CASES,
        dtypes=_DTYPES,
    )
