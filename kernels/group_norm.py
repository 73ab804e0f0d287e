"""Group norm: y = (x - mean) / sqrt(var + eps) * weight + bias, where channels that belong together share mean and var.

    c  = x - mean(x),  h = c * rstd,  rstd = 1 / sqrt(mean(c * c) + eps)
    dx = rstd * (u - mean(u) - h * mean(u * h)),  u = dy * w
    dw = sum over samples and places of dy * h,  db = sum of dy

x, y, dy, dx: (B, C, S), G groups of C / G channels; weight, bias: (C,). A row is a group of a sample: C / G * S
elements, and a tile of it BLOCK_C channels by BLOCK_S places, so that any strides are read in place. A tile holds a
row (resident row), or tiles are walked twice, by one program (looped row) or by SPLITS of them and two launches (split
row), or one launch of programs that run at once takes a part of a row each, and these exchange what they sum
(co-resident row). The gradient of a weight is summed over places first, to one number for each sample and channel, or
for each part that a channel is cut into, then over these by a last launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, autocast_to_float32, check_dtype, check_int, check_number, check_tensor
from portkern.config import Blocks, Config
from portkern.errors import BadArgument, Infeasible, Mismatch
from portkern.integers import cdiv, next_power_of_2
from portkern.kernels._rows import (
    TRITON_DTYPES,
    block_offsets,
    blocks_in,
    cast,
    collect,
    column_sums_kernel,
    number,
    numbers,
    opaque,
    pairs_at,
    part_of,
    publish_any,
)
from portkern.layout import near
from portkern.op import Backward, Case, Op
from portkern.plan import Argument, Buffer, In, Launch, Meta, Out, Plan, Scratch, Value, like
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.row_reduction import MAX_EXCHANGE, MAX_TILE, row_work, sum_blocks
from portkern.target import Device

WORDS: tl.constexpr = tl.constexpr(32)  # that a program collects at a time: one for each lane of the narrowest warp
MAX_PARTS = 4 * MAX_EXCHANGE  # of a row whose programs wait for each other: four times that many words


@triton.jit
def _tile(chunk, CHANNELS, PLACES, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Channels within the group and places of one tile of a row, and which of them exist."""
    across = blocks_in(PLACES, BLOCK_S)
    offs_c = chunk // across * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_s = tl.cast(chunk % across, tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    return offs_c, offs_s, (offs_c < CHANNELS)[:, None] & (offs_s < PLACES)[None, :]


@triton.jit
def _row(operand, row, GROUPS, CHANNELS):
    """Where a row of ``operand`` (pointer, sb, sc, ss) begins."""
    sample, group = tl.cast(row // GROUPS, tl.int64), tl.cast(row % GROUPS, tl.int64)
    return operand[0] + sample * operand[1] + group * CHANNELS * operand[2]


@triton.jit
def _ptrs(base, operand, offs_c, offs_s):
    return base + tl.cast(offs_c, tl.int64)[:, None] * operand[2] + offs_s[None, :] * operand[3]


@triton.jit
def _weights(w, row, GROUPS, CHANNELS, offs_c, COMPUTE: tl.constexpr):
    """The channels' numbers of a vector (pointer, stride), [BLOCK_C, 1]."""
    base = w[0] + tl.cast(row % GROUPS, tl.int64) * CHANNELS * w[1]
    return tl.load(base + offs_c * w[1], mask=offs_c < CHANNELS, other=0.0).to(COMPUTE)[:, None]


@triton.jit
def _normalised(
    value,
    mean,
    rstd,
    w,
    b,
    row,
    GROUPS,
    CHANNELS,
    offs_c,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    h = (value - mean) * rstd
    if WEIGHT:
        h = h * _weights(w, row, GROUPS, CHANNELS, offs_c, COMPUTE)
    if BIAS:
        h = h + _weights(b, row, GROUPS, CHANNELS, offs_c, COMPUTE)
    return h


@triton.jit
def _rstd(squares, count, eps, COMPUTE: tl.constexpr):
    return tl.rsqrt(squares / count + number(eps, COMPUTE))


@triton.jit
def _store_statistics(statistics_ptr, rows, row, mean, rstd):
    tl.store(statistics_ptr + row, tl.where(rstd == rstd, mean, rstd))
    tl.store(statistics_ptr + rows + row, rstd)


@triton.jit
def _moments(
    x, row, first, last, GROUPS, CHANNELS, PLACES, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(count, mean, sum of squares of centred values) of the tiles first to last of a row, by Welford's recurrence for
    each element of a tile, on distances from the row's first value."""
    base = _row(x, row, GROUPS, CHANNELS)
    shift = tl.load(base).to(COMPUTE)
    count = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    mean = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    squares = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    for chunk in tl.range(first, last, num_stages=STAGES):
        offs_c, offs_s, mask = _tile(chunk, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
        value = tl.load(_ptrs(base, x, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE) - shift
        new_count = tl.where(mask, count + 1.0, count)
        delta = value - mean
        new_mean = tl.where(mask, mean + delta / tl.maximum(new_count, 1.0), mean)
        squares = tl.where(mask, squares + delta * (value - new_mean), squares)
        mean, count = new_mean, new_count
    total = tl.sum(count)
    row_mean = tl.sum(mean * count) / tl.maximum(total, 1.0)
    apart = mean - row_mean
    return total, row_mean + shift, tl.sum(squares + apart * apart * count)


@triton.jit
def _apply(
    x, y, w, b, row, first, last, mean, rstd, GROUPS, CHANNELS, PLACES,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    x_base, y_base = _row(x, row, GROUPS, CHANNELS), _row(y, row, GROUPS, CHANNELS)
    for chunk in tl.range(0, last - first, num_stages=STAGES):
        # Last tile first: what was read last is still in cache.
        offs_c, offs_s, mask = _tile(last - 1 - chunk, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
        value = tl.load(_ptrs(x_base, x, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE)
        value = _normalised(value, mean, rstd, w, b, row, GROUPS, CHANNELS, offs_c, WEIGHT, BIAS, COMPUTE)
        tl.store(_ptrs(y_base, y, offs_c, offs_s), cast(value, y[0].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def _group_norm_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, statistics_ptr, GROUPS, CHANNELS, PLACES, eps: tl.float64,
    stride_xb, stride_xc, stride_xs, stride_yb, stride_yc, stride_ys, stride_w, stride_b,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """resident_row (WHOLE), looped_row. Grid: one program a row."""
    x, y = (x_ptr, stride_xb, stride_xc, stride_xs), (y_ptr, stride_yb, stride_yc, stride_ys)
    w, b = (w_ptr, stride_w), (b_ptr, stride_b)
    row, count = tl.program_id(0), tl.cast(CHANNELS, COMPUTE) * tl.cast(PLACES, COMPUTE)
    if WHOLE:
        offs_c, offs_s, mask = _tile(0, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
        raw = tl.load(_ptrs(_row(x, row, GROUPS, CHANNELS), x, offs_c, offs_s), mask=mask, other=0.0)
        mean = tl.sum(raw.to(COMPUTE)) / count
        apart = tl.where(mask, opaque(raw, PLACES < 0).to(COMPUTE) - mean, 0.0)
        rstd = _rstd(tl.sum(apart * apart), count, eps, COMPUTE)
        value = opaque(raw, PLACES < 0).to(COMPUTE)
        value = _normalised(value, mean, rstd, w, b, row, GROUPS, CHANNELS, offs_c, WEIGHT, BIAS, COMPUTE)
        ptrs = _ptrs(_row(y, row, GROUPS, CHANNELS), y, offs_c, offs_s)
        tl.store(ptrs, cast(value, y_ptr.dtype.element_ty), mask=mask)
    else:
        chunks = blocks_in(CHANNELS, BLOCK_C) * blocks_in(PLACES, BLOCK_S)
        _, mean, squares = _moments(x, row, 0, chunks, GROUPS, CHANNELS, PLACES, COMPUTE, STAGES, BLOCK_C, BLOCK_S)
        rstd = _rstd(squares, count, eps, COMPUTE)
        _apply(
            x, y, w, b, row, 0, chunks, mean, rstd, GROUPS, CHANNELS, PLACES,
            WEIGHT, BIAS, COMPUTE, STAGES, BLOCK_C, BLOCK_S,
        )  # fmt: skip
    _store_statistics(statistics_ptr, tl.num_programs(0), row, mean, rstd)


@triton.jit
def _group_norm_partial_kernel(
    x_ptr, partial_ptr, GROUPS, CHANNELS, PLACES, stride_xb, stride_xc, stride_xs,
    COMPUTE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """split_row, first launch. Grid: rows * SPLITS. partial: (rows, 3, SPLITS), COMPUTE."""
    chunks = blocks_in(CHANNELS, BLOCK_C) * blocks_in(PLACES, BLOCK_S)
    row, part, first, last = part_of(tl.program_id(0), chunks, SPLITS)
    x = (x_ptr, stride_xb, stride_xc, stride_xs)
    count, mean, squares = _moments(x, row, first, last, GROUPS, CHANNELS, PLACES, COMPUTE, STAGES, BLOCK_C, BLOCK_S)
    partial = partial_ptr + tl.cast(row, tl.int64) * (3 * SPLITS) + part
    tl.store(partial, count)
    tl.store(partial + SPLITS, mean)
    tl.store(partial + 2 * SPLITS, squares)


@triton.jit(do_not_specialize=["eps"])
def _group_norm_combine_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, statistics_ptr, partial_ptr, GROUPS, CHANNELS, PLACES, eps: tl.float64,
    stride_xb, stride_xc, stride_xs, stride_yb, stride_yc, stride_ys, stride_w, stride_b,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: rows * SPLITS. BLOCK_SPLITS = next_power_of_2(SPLITS)."""
    chunks = blocks_in(CHANNELS, BLOCK_C) * blocks_in(PLACES, BLOCK_S)
    row, part, first, last = part_of(tl.program_id(0), chunks, SPLITS)
    offs = tl.arange(0, BLOCK_SPLITS)
    partial = partial_ptr + tl.cast(row, tl.int64) * (3 * SPLITS) + offs
    counts = tl.load(partial, mask=offs < SPLITS, other=0.0)
    means = tl.load(partial + SPLITS, mask=offs < SPLITS, other=0.0)
    squares = tl.load(partial + 2 * SPLITS, mask=offs < SPLITS, other=0.0)
    count = tl.sum(counts, axis=0)
    mean = tl.sum(means * counts, axis=0) / count
    apart = means - mean
    rstd = _rstd(tl.sum(squares + apart * apart * counts, axis=0), count, eps, COMPUTE)
    x, y = (x_ptr, stride_xb, stride_xc, stride_xs), (y_ptr, stride_yb, stride_yc, stride_ys)
    _apply(
        x, y, (w_ptr, stride_w), (b_ptr, stride_b), row, first, last, mean, rstd, GROUPS, CHANNELS, PLACES,
        WEIGHT, BIAS, COMPUTE, STAGES, BLOCK_C, BLOCK_S,
    )  # fmt: skip
    if part == 0:
        _store_statistics(statistics_ptr, tl.num_programs(0) // SPLITS, row, mean, rstd)


# ---- programs that share a row and wait for each other ----------------------------------------------------------


@triton.jit
def _part(part, PLACES, CUTS, PER, BLOCK_S: tl.constexpr):
    """The tiles, first to last, of a part of a row: PER of them at most, BLOCK_C channels of CUTS parts."""
    across = blocks_in(PLACES, BLOCK_S)
    first = part % CUTS * PER
    return part // CUTS * across + first, part // CUTS * across + tl.minimum(first + PER, across)


@triton.jit
def _elements(part, CHANNELS, PLACES, CUTS, PER, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """How many elements a part has; none beyond the last."""
    first = tl.cast(part % CUTS * PER, tl.int64) * BLOCK_S
    places = tl.minimum(first + tl.cast(PER, tl.int64) * BLOCK_S, PLACES) - first
    return tl.maximum(tl.minimum(CHANNELS - part // CUTS * BLOCK_C, BLOCK_C), 0) * places


@triton.jit
def _publish(words, part, PARTS, high, low, SPLITS: tl.constexpr):
    """The word of a part, and one of zeros in the place of a part that there is not: SPLITS is a power of 2."""
    publish_any(words + part, high, low)
    if part + PARTS < SPLITS:
        publish_any(words + PARTS + part, tl.zeros((), tl.float32), tl.zeros((), tl.float32))


@triton.jit
def _kept_tile(
    chunk, CHANNELS, PLACES, WIDE: tl.constexpr, FULL: tl.constexpr, EACH: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(first channel, first place, channels and words of EACH places from there on, which of them exist) of a tile.

    Addresses are one number for the tile and 32-bit offsets, which take no registers where neighbours are neighbours in
    memory. FULL: no tile is cut, of which the compiler then sees that no element is outside.
    """
    across = blocks_in(PLACES, BLOCK_S)
    first_c, first_s = chunk // across * BLOCK_C, tl.cast(chunk % across, tl.int64) * BLOCK_S
    offs_c, offs_s = block_offsets(0, BLOCK_C, WIDE), block_offsets(0, BLOCK_S // EACH, WIDE)
    if FULL:
        mask = (offs_c < BLOCK_C)[:, None] & (offs_s < BLOCK_S // EACH)[None, :]
    else:
        places = tl.minimum(PLACES - first_s, BLOCK_S).to(tl.int32) // EACH
        mask = (offs_c < CHANNELS - first_c)[:, None] & (offs_s < places)[None, :]
    return first_c, first_s, offs_c, offs_s, mask


@triton.jit
def _tile_base(operand, row, GROUPS, CHANNELS, tile):
    base = _row(operand, row, GROUPS, CHANNELS)
    return base + tl.cast(tile[0], tl.int64) * operand[2] + tile[1] * operand[3]


@triton.jit
def _load_kept(operand, row, ROWS, GROUPS, CHANNELS, tile, PAIRS: tl.constexpr):
    """A tile of a row, of the last one beyond it. PAIRS: as words of two, which take a register each. Triton unpacks
    what it loads, and across the wait a number of 16 bits takes a register of its own."""
    base = pairs_at(_tile_base(operand, tl.minimum(row, ROWS - 1), GROUPS, CHANNELS, tile), PAIRS)
    if PAIRS:
        offsets = tile[2][:, None] * (operand[2] // 2) + tile[3][None, :]
    else:
        offsets = tile[2][:, None] * operand[2] + tile[3][None, :] * operand[3]
    return tl.load(base + offsets, mask=tile[4], other=0)


@triton.jit
def _numbers(raw, zero, AS: tl.constexpr, COMPUTE: tl.constexpr):
    """What was loaded, anew: ``zero`` is one that the compiler does not know, so that it unpacks again what waits.

    Zeros that depend on the sum before: with one and the same, the compiler kept 32-bit values for the wait. They are 1
    where a sum is NaN, and so is the row then.
    """
    if raw.dtype == tl.int32:
        return numbers(raw ^ tl.cast(zero, tl.int32), AS, COMPUTE)
    else:
        return opaque(raw, zero).to(COMPUTE)


@triton.jit
def _store_kept(operand, value, row, GROUPS, CHANNELS, tile):
    offsets = tile[2][:, None] * operand[2] + tile[3][None, :] * operand[3]
    base = _tile_base(operand, row, GROUPS, CHANNELS, tile)
    tl.store(base + offsets, cast(value, operand[0].dtype.element_ty), mask=tile[4])


@triton.jit
def _walked_moments(
    x, row, first, last, count, GROUPS, CHANNELS, PLACES, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(mean, sum of squares of centred values) of tiles of the same channels, of which only the last one may be cut:
    so the elements of a tile share a count, and Welford's recurrence takes no division for each."""
    base = _row(x, row, GROUPS, CHANNELS)
    shift = tl.load(base).to(COMPUTE)
    mean = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    squares = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    for step in tl.range(0, last - first, num_stages=STAGES):
        offs_c, offs_s, mask = _tile(first + step, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
        value = tl.load(_ptrs(base, x, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE) - shift
        delta = tl.where(mask, value - mean, 0.0)
        mean += delta * (1.0 / tl.cast(step + 1, COMPUTE))
        squares += delta * (value - mean)
    offs_c, offs_s, mask = _tile(last - 1, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
    steps = tl.cast(last - first, COMPUTE)
    counts = tl.where((offs_c < CHANNELS)[:, None], tl.where(mask, steps, steps - 1.0), 0.0)
    part_mean = tl.sum(mean * counts) / count
    apart = mean - part_mean
    return part_mean + shift, tl.sum(squares + apart * apart * counts)


@triton.jit
def _collected_moments(
    words, N, CHANNELS, PLACES, CUTS, PER, COMPUTE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, POLL_CACHE: tl.constexpr,
):  # fmt: skip
    """(mean, sum of squares of centred values) of a row, from the words of its parts."""
    WIDTH: tl.constexpr = SPLITS if SPLITS < WORDS else WORDS
    found = ()
    mean = tl.zeros((), COMPUTE)
    for block in tl.static_range(SPLITS // WIDTH):
        counts = _elements(block * WIDTH + tl.arange(0, WIDTH), CHANNELS, PLACES, CUTS, PER, BLOCK_C, BLOCK_S)
        means, squares = collect(words + block * WIDTH, N, WIDTH, POLL_CACHE)
        mean += tl.sum(means * counts.to(COMPUTE), axis=0)
        found += ((means, squares),)  # type: ignore[assignment]
    mean = mean / (tl.cast(CHANNELS, COMPUTE) * tl.cast(PLACES, COMPUTE))
    total = tl.zeros((), COMPUTE)
    for block in tl.static_range(SPLITS // WIDTH):
        counts = _elements(block * WIDTH + tl.arange(0, WIDTH), CHANNELS, PLACES, CUTS, PER, BLOCK_C, BLOCK_S)
        apart = found[block][0] - mean
        total += tl.sum(found[block][1] + apart * apart * counts.to(COMPUTE), axis=0)
    return mean, total


@triton.jit(do_not_specialize=["eps"])
def _group_norm_coresident_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, statistics_ptr, word_ptr, ROWS, PARTS, CUTS, PER, GROUPS, CHANNELS, PLACES, N,
    eps: tl.float64, stride_xb, stride_xc, stride_xs, stride_yb, stride_yc, stride_ys, stride_w, stride_b,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    AHEAD: tl.constexpr, WALK: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, POLL_CACHE: tl.constexpr,
):  # fmt: skip
    """coresident_row. Grid: a multiple of PARTS programs, all running at once. word: (rows, SPLITS) int64 zeros,
    SPLITS = next_power_of_2(PARTS). COMPUTE is float32. N: elements of a row, 2 at least.

    A part is one tile, which its program keeps; AHEAD: that of the next row loads while this one waits. WALK: it is PER
    tiles, walked before the exchange and, last one first, after it.
    """
    AS: tl.constexpr = x_ptr.dtype.element_ty
    x, y = (x_ptr, stride_xb, stride_xc, stride_xs), (y_ptr, stride_yb, stride_yc, stride_ys)
    w, b = (w_ptr, stride_w), (b_ptr, stride_b)
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    first, last = _part(part, PLACES, CUTS, PER, BLOCK_S)
    count = _elements(part, CHANNELS, PLACES, CUTS, PER, BLOCK_C, BLOCK_S).to(COMPUTE)
    tile = _kept_tile(first, CHANNELS, PLACES, WIDE, FULL, 1, BLOCK_C, BLOCK_S)
    read = _kept_tile(first, CHANNELS, PLACES, WIDE, FULL, 2 if PAIRS else 1, BLOCK_C, BLOCK_S)
    offs_c = tile[0] + tl.arange(0, BLOCK_C)
    if AHEAD:
        following = _load_kept(x, group, ROWS, GROUPS, CHANNELS, read, PAIRS)
    for row in tl.range(group, ROWS, groups, num_stages=1):
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        if WALK:
            part_mean, part_squares = _walked_moments(
                x, row, first, last, count, GROUPS, CHANNELS, PLACES, COMPUTE, STAGES, BLOCK_C, BLOCK_S
            )
        else:
            if AHEAD:
                raw = following
            else:
                raw = _load_kept(x, row, ROWS, GROUPS, CHANNELS, read, PAIRS)
            part_mean = tl.sum(_numbers(raw, N < 0, AS, COMPUTE)) / count
            apart = tl.where(tile[4], _numbers(raw, part_mean != part_mean, AS, COMPUTE) - part_mean, 0.0)
            part_squares = tl.sum(apart * apart)
        _publish(words, part, PARTS, part_mean, part_squares, SPLITS)
        if AHEAD:
            following = _load_kept(x, row + groups, ROWS, GROUPS, CHANNELS, read, PAIRS)
        mean, squares = _collected_moments(
            words, N, CHANNELS, PLACES, CUTS, PER, COMPUTE, SPLITS, BLOCK_C, BLOCK_S, POLL_CACHE
        )
        rstd = _rstd(squares, tl.cast(CHANNELS, COMPUTE) * tl.cast(PLACES, COMPUTE), eps, COMPUTE)
        if WALK:
            _apply(
                x, y, w, b, row, first, last, mean, rstd, GROUPS, CHANNELS, PLACES,
                WEIGHT, BIAS, COMPUTE, STAGES, BLOCK_C, BLOCK_S,
            )  # fmt: skip
        else:
            value = _numbers(raw, rstd != rstd, AS, COMPUTE)
            value = _normalised(value, mean, rstd, w, b, row, GROUPS, CHANNELS, offs_c, WEIGHT, BIAS, COMPUTE)
            _store_kept(y, value, row, GROUPS, CHANNELS, tile)
        if part == 0:
            _store_statistics(statistics_ptr, ROWS, row, mean, rstd)


# ---- gradients --------------------------------------------------------------------------------------------------


@triton.jit
def _statistics(statistics, row, GROUPS, COMPUTE: tl.constexpr):
    """(mean, rstd) of a row; statistics: (pointer, stride between the two, sb, sg)."""
    base = statistics[0] + tl.cast(row // GROUPS, tl.int64) * statistics[2] + row % GROUPS * statistics[3]
    return tl.load(base).to(COMPUTE), tl.load(base + statistics[1]).to(COMPUTE)


@triton.jit
def _store_sums(sums_ptr, stride_sums, row, cut, CUTS, GROUPS, CHANNELS, offs_c, sum_h, sum_1):
    """Sums over places of dy * h and of dy, for channels of one of CUTS parts of one row: sums is (2, B, CUTS, C)."""
    sample = tl.cast(row // GROUPS, tl.int64) * CUTS + cut
    offset = sample * GROUPS * CHANNELS + row % GROUPS * CHANNELS + offs_c
    tl.store(sums_ptr + offset, sum_h, mask=offs_c < CHANNELS)
    tl.store(sums_ptr + stride_sums + offset, sum_1, mask=offs_c < CHANNELS)


@triton.jit
def _group_norm_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, w_ptr, statistics_ptr, sums_ptr, GROUPS, CHANNELS, PLACES, stride_sums,
    stride_dyb, stride_dyc, stride_dys, stride_xb, stride_xc, stride_xs, stride_dxb, stride_dxc, stride_dxs,
    stride_w, stride_statistics, stride_sb, stride_sg,
    WEIGHT: tl.constexpr, SUMS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """resident_row. Grid: one program a row."""
    row, count = tl.program_id(0), tl.cast(CHANNELS, COMPUTE) * tl.cast(PLACES, COMPUTE)
    x, dy = (x_ptr, stride_xb, stride_xc, stride_xs), (dy_ptr, stride_dyb, stride_dyc, stride_dys)
    dx = (dx_ptr, stride_dxb, stride_dxc, stride_dxs)
    offs_c, offs_s, mask = _tile(0, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
    raw = tl.load(_ptrs(_row(x, row, GROUPS, CHANNELS), x, offs_c, offs_s), mask=mask, other=0.0)
    gradient = tl.load(_ptrs(_row(dy, row, GROUPS, CHANNELS), dy, offs_c, offs_s), mask=mask, other=0.0)
    mean, rstd = _statistics((statistics_ptr, stride_statistics, stride_sb, stride_sg), row, GROUPS, COMPUTE)
    h = (raw.to(COMPUTE) - mean) * rstd
    sum_h = tl.sum(gradient.to(COMPUTE) * h, axis=1)
    sum_1 = tl.sum(gradient.to(COMPUTE), axis=1)
    if SUMS:
        _store_sums(sums_ptr, stride_sums, row, 0, 1, GROUPS, CHANNELS, offs_c, sum_h, sum_1)
    u = opaque(gradient, PLACES < 0).to(COMPUTE)
    if WEIGHT:
        w = _weights((w_ptr, stride_w), row, GROUPS, CHANNELS, offs_c, COMPUTE)
        u, sum_h, sum_1 = u * w, tl.sum(sum_h[:, None] * w, axis=1), tl.sum(sum_1[:, None] * w, axis=1)
    h = (opaque(raw, PLACES < 0).to(COMPUTE) - mean) * rstd
    value = (u - tl.sum(sum_1) / count - h * (tl.sum(sum_h) / count)) * rstd
    ptrs = _ptrs(_row(dx, row, GROUPS, CHANNELS), dx, offs_c, offs_s)
    tl.store(ptrs, cast(value, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _walked_sums(
    dy, x, row, first, last, mean, rstd, GROUPS, CHANNELS, PLACES,
    COMPUTE: tl.constexpr, STAGES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sums of dy * h and of dy over tiles of the same channels, [BLOCK_C] each."""
    x_base, dy_base = _row(x, row, GROUPS, CHANNELS), _row(dy, row, GROUPS, CHANNELS)
    sum_h = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    sum_1 = tl.zeros([BLOCK_C, BLOCK_S], COMPUTE)
    for chunk in tl.range(first, last, num_stages=STAGES):
        offs_c, offs_s, mask = _tile(chunk, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
        value = tl.load(_ptrs(x_base, x, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE)
        gradient = tl.load(_ptrs(dy_base, dy, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE)
        sum_h += gradient * ((value - mean) * rstd)
        sum_1 += gradient
    return tl.sum(sum_h, axis=1), tl.sum(sum_1, axis=1)


@triton.jit
def _apply_gradient(
    dy, x, dx, w, row, first, last, mean, rstd, mean_h, mean_1, GROUPS, CHANNELS, PLACES,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    x_base, dy_base = _row(x, row, GROUPS, CHANNELS), _row(dy, row, GROUPS, CHANNELS)
    dx_base = _row(dx, row, GROUPS, CHANNELS)
    for chunk in tl.range(0, last - first, num_stages=STAGES):
        offs_c, offs_s, mask = _tile(last - 1 - chunk, CHANNELS, PLACES, BLOCK_C, BLOCK_S)
        value = tl.load(_ptrs(x_base, x, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE)
        u = tl.load(_ptrs(dy_base, dy, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE)
        if WEIGHT:
            u = u * _weights(w, row, GROUPS, CHANNELS, offs_c, COMPUTE)
        value = (u - mean_1 - (value - mean) * rstd * mean_h) * rstd
        tl.store(_ptrs(dx_base, dx, offs_c, offs_s), cast(value, dx[0].dtype.element_ty), mask=mask)


@triton.jit
def _group_norm_sums_kernel(
    dy_ptr, x_ptr, statistics_ptr, sums_ptr, GROUPS, CHANNELS, PLACES, stride_sums,
    stride_dyb, stride_dyc, stride_dys, stride_xb, stride_xc, stride_xs, stride_statistics, stride_sb, stride_sg,
    COMPUTE: tl.constexpr, STAGES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """looped_row, split_row, first launch. Grid: rows * blocks of channels. sums: (2, B, C), COMPUTE."""
    blocks, across = blocks_in(CHANNELS, BLOCK_C), blocks_in(PLACES, BLOCK_S)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    x, dy = (x_ptr, stride_xb, stride_xc, stride_xs), (dy_ptr, stride_dyb, stride_dyc, stride_dys)
    mean, rstd = _statistics((statistics_ptr, stride_statistics, stride_sb, stride_sg), row, GROUPS, COMPUTE)
    sum_h, sum_1 = _walked_sums(
        dy, x, row, block * across, block * across + across, mean, rstd, GROUPS, CHANNELS, PLACES,
        COMPUTE, STAGES, BLOCK_C, BLOCK_S,
    )  # fmt: skip
    channels = block * BLOCK_C + tl.arange(0, BLOCK_C)
    _store_sums(sums_ptr, stride_sums, row, 0, 1, GROUPS, CHANNELS, channels, sum_h, sum_1)


@triton.jit
def _group_norm_apply_kernel(
    dy_ptr, x_ptr, dx_ptr, w_ptr, statistics_ptr, sums_ptr, GROUPS, CHANNELS, PLACES, stride_sums,
    stride_dyb, stride_dyc, stride_dys, stride_xb, stride_xc, stride_xs, stride_dxb, stride_dxc, stride_dxs,
    stride_w, stride_statistics, stride_sb, stride_sg,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_SUMS: tl.constexpr,
):  # fmt: skip
    """looped_row, split_row, second launch. Grid: rows * SPLITS. A row's sums are read BLOCK_SUMS at a time."""
    chunks = blocks_in(CHANNELS, BLOCK_C) * blocks_in(PLACES, BLOCK_S)
    row, part, first, last = part_of(tl.program_id(0), chunks, SPLITS)
    count = tl.cast(CHANNELS, COMPUTE) * tl.cast(PLACES, COMPUTE)
    mean, rstd = _statistics((statistics_ptr, stride_statistics, stride_sb, stride_sg), row, GROUPS, COMPUTE)
    base = sums_ptr + tl.cast(row // GROUPS, tl.int64) * GROUPS * CHANNELS + row % GROUPS * CHANNELS
    sum_h = tl.zeros([BLOCK_SUMS], COMPUTE)
    sum_1 = tl.zeros([BLOCK_SUMS], COMPUTE)
    for start in tl.range(0, CHANNELS, BLOCK_SUMS):
        offs = start + tl.arange(0, BLOCK_SUMS)
        part_h = tl.load(base + offs, mask=offs < CHANNELS, other=0.0)
        part_1 = tl.load(base + stride_sums + offs, mask=offs < CHANNELS, other=0.0)
        if WEIGHT:
            w = tl.load(
                w_ptr + (row % GROUPS * CHANNELS + offs) * stride_w, mask=offs < CHANNELS, other=0.0
            ).to(COMPUTE)  # fmt: skip
            part_h, part_1 = part_h * w, part_1 * w
        sum_h += part_h
        sum_1 += part_1
    mean_h, mean_1 = tl.sum(sum_h) / count, tl.sum(sum_1) / count
    x, dy = (x_ptr, stride_xb, stride_xc, stride_xs), (dy_ptr, stride_dyb, stride_dyc, stride_dys)
    dx = (dx_ptr, stride_dxb, stride_dxc, stride_dxs)
    _apply_gradient(
        dy, x, dx, (w_ptr, stride_w), row, first, last, mean, rstd, mean_h, mean_1, GROUPS, CHANNELS, PLACES,
        WEIGHT, COMPUTE, STAGES, BLOCK_C, BLOCK_S,
    )  # fmt: skip


@triton.jit
def _group_norm_backward_coresident_kernel(
    dy_ptr, x_ptr, dx_ptr, w_ptr, statistics_ptr, sums_ptr, word_ptr,
    ROWS, PARTS, CUTS, PER, GROUPS, CHANNELS, PLACES, N, stride_sums,
    stride_dyb, stride_dyc, stride_dys, stride_xb, stride_xc, stride_xs, stride_dxb, stride_dxc, stride_dxs,
    stride_w, stride_statistics, stride_sb, stride_sg,
    WEIGHT: tl.constexpr, SUMS: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    AHEAD: tl.constexpr, WALK: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, POLL_CACHE: tl.constexpr,
):  # fmt: skip
    """coresident_row: as `_group_norm_coresident_kernel`. sums: (2, B, CUTS, C), COMPUTE."""
    WIDTH: tl.constexpr = SPLITS if SPLITS < WORDS else WORDS
    x, dy = (x_ptr, stride_xb, stride_xc, stride_xs), (dy_ptr, stride_dyb, stride_dyc, stride_dys)
    dx, w = (dx_ptr, stride_dxb, stride_dxc, stride_dxs), (w_ptr, stride_w)
    statistics = (statistics_ptr, stride_statistics, stride_sb, stride_sg)
    size = tl.cast(CHANNELS, COMPUTE) * tl.cast(PLACES, COMPUTE)
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    first, last = _part(part, PLACES, CUTS, PER, BLOCK_S)
    tile = _kept_tile(first, CHANNELS, PLACES, WIDE, FULL, 1, BLOCK_C, BLOCK_S)
    read = _kept_tile(first, CHANNELS, PLACES, WIDE, FULL, 2 if PAIRS else 1, BLOCK_C, BLOCK_S)
    offs_c = tile[0] + tl.arange(0, BLOCK_C)
    if AHEAD:
        next_raw = _load_kept(x, group, ROWS, GROUPS, CHANNELS, read, PAIRS)
        next_gradient = _load_kept(dy, group, ROWS, GROUPS, CHANNELS, read, PAIRS)
    for row in tl.range(group, ROWS, groups, num_stages=1):
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        mean, rstd = _statistics(statistics, row, GROUPS, COMPUTE)
        if WALK:
            sum_h, sum_1 = _walked_sums(
                dy, x, row, first, last, mean, rstd, GROUPS, CHANNELS, PLACES, COMPUTE, STAGES, BLOCK_C, BLOCK_S
            )
        else:
            if AHEAD:
                raw, gradient = next_raw, next_gradient
            else:
                raw = _load_kept(x, row, ROWS, GROUPS, CHANNELS, read, PAIRS)
                gradient = _load_kept(dy, row, ROWS, GROUPS, CHANNELS, read, PAIRS)
            u = _numbers(gradient, N < 0, dy_ptr.dtype.element_ty, COMPUTE)
            sum_h = tl.sum(u * ((_numbers(raw, N < 0, x_ptr.dtype.element_ty, COMPUTE) - mean) * rstd), axis=1)
            sum_1 = tl.sum(u, axis=1)
        if SUMS:
            _store_sums(sums_ptr, stride_sums, row, part % CUTS, CUTS, GROUPS, CHANNELS, offs_c, sum_h, sum_1)
        if WEIGHT:
            each = _weights(w, row, GROUPS, CHANNELS, offs_c, COMPUTE)
            sum_h, sum_1 = tl.sum(sum_h[:, None] * each, axis=1), tl.sum(sum_1[:, None] * each, axis=1)
        _publish(words, part, PARTS, tl.sum(sum_1), tl.sum(sum_h), SPLITS)
        if AHEAD:
            next_raw = _load_kept(x, row + groups, ROWS, GROUPS, CHANNELS, read, PAIRS)
            next_gradient = _load_kept(dy, row + groups, ROWS, GROUPS, CHANNELS, read, PAIRS)
        mean_1 = tl.zeros((), COMPUTE)
        mean_h = tl.zeros((), COMPUTE)
        for block in tl.static_range(SPLITS // WIDTH):
            sums_1, sums_h = collect(words + block * WIDTH, N, WIDTH, POLL_CACHE)
            mean_1 += tl.sum(sums_1, axis=0)
            mean_h += tl.sum(sums_h, axis=0)
        mean_1, mean_h = mean_1 / size, mean_h / size
        if WALK:
            _apply_gradient(
                dy, x, dx, w, row, first, last, mean, rstd, mean_h, mean_1, GROUPS, CHANNELS, PLACES,
                WEIGHT, COMPUTE, STAGES, BLOCK_C, BLOCK_S,
            )  # fmt: skip
        else:
            u = _numbers(gradient, mean_h != mean_h, dy_ptr.dtype.element_ty, COMPUTE)
            if WEIGHT:
                u = u * _weights(w, row, GROUPS, CHANNELS, offs_c, COMPUTE)
            value = _numbers(raw, mean_h != mean_h, x_ptr.dtype.element_ty, COMPUTE)
            value = (u - mean_1 - (value - mean) * rstd * mean_h) * rstd
            _store_kept(dx, value, row, GROUPS, CHANNELS, tile)


# ---- the ops ----------------------------------------------------------------------------------------------------


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05
) -> tuple[Any, ...]:
    """Group norm of ``input``, as ``torch.nn.functional.group_norm``.

    Args:
        input: (B, C, ...), any strides (channels last too); float16, bfloat16, float32 or float64.
        num_groups: into how many groups the C channels fall; it divides C.
        weight, bias: (C,), of any of these dtypes; each may be None.
        eps: is added to the variance.

    Returns a tensor of ``input``'s shape, memory format and dtype (float32 where autocast is on, for a 16-bit ``input``
    on a GPU). Statistics are those of float32 (float64 where an operand is). A group with a NaN or an infinity is NaN.
    As in torch, one batch whose groups have one value each is refused, though more batches of such are not.

    Raises BadType (a TypeError), BadArgument (a ValueError), Mismatch (a RuntimeError), UnsupportedDtype (a
    NotImplementedError).
    """
    op = "group_norm"
    check_dtype(op, "input", check_tensor(op, "input", input).dtype, FLOATS)
    num_groups = check_int(op, "num_groups", num_groups, size=False)
    if input.dim() < 2:
        raise Mismatch(f"{op}(): input has {input.dim()} dims, expected at least 2: (B, C, ...)")
    channels = input.shape[1]
    if num_groups < 1:
        raise Mismatch(f"{op}(): num_groups is {num_groups}, expected 1 or more")
    if channels % num_groups:
        raise Mismatch(f"{op}(): {channels} channels do not fall into {num_groups} groups: take a divisor")
    if input.numel() == num_groups:
        raise BadArgument(
            f"{op}(): input of shape {list(input.shape)} has 1 value for each of {num_groups} groups, expected more "
            "than 1: take fewer groups"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_dtype(op, name, check_tensor(op, name, vector).dtype, FLOATS)
            if tuple(vector.shape) != (channels,):
                raise Mismatch(f"{op}(): {name} has the shape {list(vector.shape)}, expected [{channels}]")
    weight, bias = (vector if vector is None else near(vector) for vector in (weight, bias))
    x = input.flatten(2) if input.dim() > 3 else input.unsqueeze(2) if input.dim() == 2 else input
    return x, num_groups, weight, bias, check_number(op, "eps", eps), autocast_to_float32(input)


def _result(outputs: Sequence[Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return outputs[0] if outputs[0].shape == input.shape else outputs[0].view(input.shape)


def _accumulator(*tensors: Any) -> torch.dtype:
    double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return torch.float64 if double else torch.float32


def _outputs(
    input: Meta, num_groups: int, weight: Meta | None, bias: Meta | None, eps: float, dtype: torch.dtype
) -> tuple[Buffer, ...]:
    shape = (2, input.shape[0], num_groups)
    strides = (shape[1] * num_groups, num_groups, 1)
    init = 0 if 0 in input.shape else None
    return like(input, dtype), Buffer(shape, strides, _accumulator(input, weight, bias), init, unread=True)


def _layout(meta: Meta | Buffer) -> str:
    _, channels, places = meta.shape
    sb, sc, ss = meta.strides
    if ss == 1 and (sc == places or channels == 1) and getattr(meta, "aligned", True):
        return "n16" if sb * meta.dtype.itemsize % 16 == 0 else "n"
    return "n" if 1 in (ss, sc) else "s"


def _row_problem(
    op: str, groups: int, operands: dict[str, Meta | Buffer], vectors: dict[str, Meta | None], sums: str = ""
) -> Problem:
    first = next(iter(operands.values()))
    batch, channels, places = first.shape
    given = {**operands, **{name: each for name, each in vectors.items() if each is not None}}
    return Problem(
        op,
        FrozenMap(M=batch * groups, N=channels // max(groups, 1) * places, PLACES=places),
        FrozenMap({name: str(each.dtype).removeprefix("torch.") for name, each in given.items()}),
        FrozenMap({"sums": sums} if op.endswith("backward") else {}),
        FrozenMap({name: _layout(each) for name, each in operands.items()}),
    )


def _problem(
    input: Meta, num_groups: int, weight: Meta | None, bias: Meta | None, eps: float, dtype: torch.dtype
) -> Problem:
    return _row_problem("group_norm", num_groups, {"x": input, "y": like(input, dtype)}, {"w": weight, "b": bias})


_LIVE = {"resident_row": 2.2, "looped_row": 5.0, "split_row": 5.0}
_LIVE_BACKWARD = {"resident_row": 4.0, "looped_row": 5.0, "split_row": 5.0}
# Of a co-resident row by the bytes of its widest element: what is kept, and one step of arithmetic.
_LIVE_WAITING = {2: 1.25, 4: 1.55}
_LIVE_BACKWARD_WAITING = {2: 2.2, 4: 3.1}
_TAKES = ("AHEAD", "SPLITS")


def _live(problem: Problem, live: dict[str, float], waiting: dict[int, float]) -> dict[str, float]:
    dtypes = (dtype for name, dtype in problem.dtypes.items() if name not in "wb")
    narrow = all(dtype in ("float16", "bfloat16") for dtype in dtypes)
    return {**live, "coresident_row": waiting[2 if narrow else 4]}


def _work(problem: Problem) -> Work:
    return row_work(problem, ("x",), ("y",), _live(problem, _LIVE, _LIVE_WAITING), takes=_TAKES)


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    """BLOCK_C and BLOCK_S: a whole row, or as many places as BLOCK_N allows and channels for the rest."""
    n, places = work.sizes["N"], max(1, work.sizes["PLACES"])
    channels = max(1, n // places)
    if config.variant == "resident_row":
        block_c, block_s = next_power_of_2(channels), next_power_of_2(places)
    else:
        block_n = config.params.get("BLOCK_N")
        if block_n is None:
            raise Infeasible(f"variant {config.variant!r} needs the parameter BLOCK_N")
        block_s = min(next_power_of_2(places), block_n)
        block_c = min(next_power_of_2(channels), block_n // block_s)
    if block_c * block_s > MAX_TILE:
        raise Infeasible(
            f"a tile of {block_c} x {block_s} elements passes Triton's limit of {MAX_TILE}: take looped_row"
        )
    splits = 1
    if config.variant == "split_row":
        chunks = cdiv(channels, block_c) * cdiv(places, block_s)
        splits = max(1, min(config.params.get("SPLITS", 1), chunks))
    found = {"BLOCK_C": block_c, "BLOCK_S": block_s, "BLOCK_M": 1, "BLOCK_N": block_c * block_s, "SPLITS": splits}
    if config.variant == "coresident_row":
        found |= _shared_row(config, device, n, cdiv(channels, block_c), cdiv(places, block_s))
    return Blocks({**found, **sum_blocks(config, work)})


def _shared_row(config: Config, device: Device, n: int, down: int, across: int) -> dict[str, int]:
    """Into how many PARTS programs cut a row of ``down`` times ``across`` tiles: CUTS for the channels of a tile, of
    PER tiles each. One tile each, or about SPLITS parts."""
    if n < 2:  # a size of 1 is compiled in, and with it the waiting load leaves its loop (see ``peek``)
        raise Infeasible("coresident_row exchanges parts of a row, and a row of one element has none: take another")
    wanted, programs = config.params.get("SPLITS", 0), device.units * config.params.get("PROGRAMS_PER_UNIT", 0)
    per = cdiv(across, max(1, min(across, wanted // down))) if wanted else 1
    cuts = cdiv(across, per)
    parts = down * cuts
    if parts > MAX_PARTS:
        raise Infeasible(
            f"{parts} parts of a row of {n} elements; at most {MAX_PARTS} programs exchange what they sum: take a "
            "larger BLOCK_N, or SPLITS"
        )
    if parts > programs:
        raise Infeasible(
            f"a row of {parts} parts needs as many programs at once; PROGRAMS_PER_UNIT="
            f"{config.params.get('PROGRAMS_PER_UNIT', 0)} on {device.units} units gives {programs}"
        )
    return {"PARTS": parts, "CUTS": cuts, "PER": per, "SPLITS": next_power_of_2(parts), "PROGRAMS": programs}


def _paired(meta: Meta) -> bool:
    """Whether neighbouring places lie in one aligned word, two by two."""
    sb, sc, ss = meta.strides
    even = ss == 1 and meta.shape[2] % 2 == 0 and sc % 2 == 0 and sb % 2 == 0
    return even and meta.aligned and meta.dtype.itemsize == 2


def _waiting_plan(
    config: Config, blocks: Blocks, rows: int, sizes: tuple[int, ...], reads: Sequence[Meta], output: Buffer
) -> tuple[int, dict[str, Any], tuple[int, ...]]:
    """Grid, constexprs and the sizes ahead of the others, of programs that wait for each other."""
    parts, splits, (_, channels, places) = blocks["PARTS"], blocks["SPLITS"], sizes
    block_c, block_s = blocks["BLOCK_C"], blocks["BLOCK_S"]
    lying = [each.strides for each in reads] + [output.strides]
    spans = (block_c * abs(channel) + block_s * abs(place) for _, channel, place in lying)
    groups = min(rows, blocks["PROGRAMS"] // parts)
    walk = bool(config.params.get("SPLITS", 0))
    constexprs: dict[str, Any] = {
        "SPLITS": splits,
        "WALK": walk,
        "AHEAD": not walk and bool(config.params.get("AHEAD", 0)),
        "WIDE": any(span >= 2**31 for span in spans),
        "PAIRS": all(_paired(each) for each in reads),
        "FULL": channels % block_c == 0 and places % block_s == 0,
        "POLL_CACHE": config.options.get("poll_cache", ""),
    }
    return groups * parts, constexprs, (rows, parts, blocks["CUTS"], blocks["PER"])


def _vector(meta: Meta | None, position: int) -> tuple[Argument, int]:
    return (None, 0) if meta is None else (In(position), meta.strides[0])


def _launch(kernel: Any, grid: int, config: Config, args: Sequence[Argument], **constexprs: Any) -> Launch:
    waits = config.variant == "coresident_row"
    return Launch(kernel, (grid,), tuple(args), constexprs, config.num_warps, config.num_stages, coresident=waits)


def _plan(
    config: Config, blocks: Blocks, device: Device,
    input: Meta, num_groups: int, weight: Meta | None, bias: Meta | None, eps: float, dtype: torch.dtype,
) -> Plan:  # fmt: skip
    outputs = _outputs(input, num_groups, weight, bias, eps, dtype)
    if input.numel == 0:
        return Plan(outputs)
    batch, channels, places = input.shape
    rows, sizes = batch * num_groups, (num_groups, channels // num_groups, places)
    (w, stride_w), (b, stride_b) = _vector(weight, 2), _vector(bias, 3)
    strides = (*input.strides, *outputs[0].strides, stride_w, stride_b)
    tile = {"BLOCK_C": blocks["BLOCK_C"], "BLOCK_S": blocks["BLOCK_S"], "STAGES": config.num_stages}
    tile["COMPUTE"] = TRITON_DTYPES[outputs[1].dtype]
    given = {**tile, "WEIGHT": weight is not None, "BIAS": bias is not None}
    pointers = (In(0), Out(0), w, b, Out(1))
    if config.variant == "coresident_row":
        n = sizes[1] * places
        grid, more, counts = _waiting_plan(config, blocks, rows, sizes, (input,), outputs[0])
        args = (*pointers, Scratch(0), *counts, *sizes, n, Value(4), *strides)
        words = Buffer.flat(rows * more["SPLITS"], torch.int64, init=0)
        return Plan(outputs, (words,), (_launch(_group_norm_coresident_kernel, grid, config, args, **given, **more),))
    if config.variant != "split_row":
        whole = config.variant == "resident_row"
        args = (*pointers, *sizes, Value(4), *strides)
        return Plan(outputs, (), (_launch(_group_norm_kernel, rows, config, args, WHOLE=whole, **given),))
    splits = blocks["SPLITS"]
    args = (*pointers, Scratch(0), *sizes, Value(4), *strides)
    launches = (
        _launch(
            _group_norm_partial_kernel, rows * splits, config, (In(0), Scratch(0), *sizes, *input.strides),
            SPLITS=splits, **tile,
        ),
        _launch(
            _group_norm_combine_kernel, rows * splits, config, args,
            SPLITS=splits, BLOCK_SPLITS=next_power_of_2(splits), **given,
        ),
    )  # fmt: skip
    return Plan(outputs, (Buffer.flat(rows * splits * 3, outputs[1].dtype),), launches)


@dataclass(frozen=True)
class _BackwardCall:
    """The canonical arguments of the backward op."""

    grad_output: Any
    input: Any
    num_groups: int
    weight: Any
    statistics: Any
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @property
    def sums(self) -> bool:
        return self.weight_dtype is not None or self.bias_dtype is not None

    @property
    def accumulator(self) -> torch.dtype:
        return _accumulator(self.input, self.grad_output, self.weight, self.statistics)


def _backward_outputs(*args: Any) -> tuple[Buffer, ...]:
    call = _BackwardCall(*args)
    init = 0 if 0 in call.input.shape else None
    sums = (
        Buffer.flat(0 if dtype is None else call.input.shape[1], dtype or call.input.dtype, init)
        for dtype in (call.weight_dtype, call.bias_dtype)
    )
    return (like(call.input), *sums)


def _backward_problem(*args: Any) -> Problem:
    call = _BackwardCall(*args)
    operands: dict[str, Meta | Buffer] = {"dx": like(call.input), "dy": call.grad_output, "x": call.input}
    sums = [name for name, dtype in (("w", call.weight_dtype), ("b", call.bias_dtype)) if dtype is not None]
    return _row_problem("group_norm_backward", call.num_groups, operands, {"w": call.weight}, "".join(sums))


def _backward_work(problem: Problem) -> Work:
    live, sums = _live(problem, _LIVE_BACKWARD, _LIVE_BACKWARD_WAITING), len(str(problem.flags["sums"]))
    return row_work(problem, ("dy", "x"), ("dx",), live, sums=sums, takes=_TAKES)


def _backward_plan(config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    call, outputs = _BackwardCall(*args), _backward_outputs(*args)
    x, groups, compute = call.input, call.num_groups, call.accumulator
    if x.numel == 0:
        return Plan(outputs)
    batch, channels, places = x.shape
    cuts = blocks.get("CUTS", 1)
    rows, sizes, stride_sums = batch * groups, (groups, channels // groups, places), batch * cuts * channels
    w, stride_w = _vector(call.weight, 3)
    each, sb, sg = call.statistics.strides
    strides = (*call.grad_output.strides, *x.strides)
    after = (each, sb, sg)
    tile = {"BLOCK_C": blocks["BLOCK_C"], "BLOCK_S": blocks["BLOCK_S"], "COMPUTE": TRITON_DTYPES[compute]}
    both = (In(0), In(1), Out(0), w, In(4), Scratch(0), *sizes, stride_sums, *strides, *outputs[0].strides, stride_w)
    launches: list[Launch] = []
    scratch = [Buffer.flat(2 * stride_sums, compute)]
    if config.variant == "coresident_row":
        n = sizes[1] * places
        grid, more, counts = _waiting_plan(config, blocks, rows, sizes, (x, call.grad_output), outputs[0])
        args = (*both[:6], Scratch(1), *counts, *sizes, n, *both[9:], *after)
        flags: dict[str, Any] = {"WEIGHT": call.weight is not None, "SUMS": call.sums, **more}
        flags["STAGES"] = config.num_stages
        launches.append(_launch(_group_norm_backward_coresident_kernel, grid, config, args, **flags, **tile))
        scratch.append(Buffer.flat(rows * more["SPLITS"], torch.int64, init=0))
    elif config.variant == "resident_row":
        flags = {"WEIGHT": call.weight is not None, "SUMS": call.sums}
        launches.append(_launch(_group_norm_backward_kernel, rows, config, (*both, *after), **flags, **tile))
    else:
        tile["STAGES"], splits = config.num_stages, blocks["SPLITS"]
        first = (In(0), In(1), In(4), Scratch(0), *sizes, stride_sums, *strides, *after)
        grid = rows * cdiv(sizes[1], blocks["BLOCK_C"])
        launches.append(_launch(_group_norm_sums_kernel, grid, config, first, **tile))
        flags = {
            "WEIGHT": call.weight is not None,
            "SPLITS": splits,
            "BLOCK_SUMS": min(next_power_of_2(sizes[1]), blocks["BLOCK_N"]),
        }
        launches.append(_launch(_group_norm_apply_kernel, rows * splits, config, (*both, *after), **flags, **tile))
    if call.sums:
        launches.append(_sum_launch(call, blocks, batch * cuts, channels))
    return Plan(outputs, tuple(scratch), tuple(launches))


def _sum_launch(call: _BackwardCall, blocks: Blocks, batch: int, channels: int) -> Launch:
    """Adds up samples, or parts of them. Where only one of the two sums is wanted, it alone is read."""
    wanted = (call.weight_dtype is not None, call.bias_dtype is not None)
    totals = [Out(1 + number) for number, each in enumerate(wanted) if each]
    first = Scratch(0, 0 if wanted[0] else batch * channels)
    second = totals[1] if len(totals) > 1 else None
    args = (first, totals[0], second, batch, channels, batch * channels, 1, 1)
    tile = {"BLOCK_M": blocks["SUM_BLOCK_M"], "BLOCK_N": blocks["SUM_BLOCK_N"]}
    grid = len(totals) * cdiv(channels, tile["BLOCK_N"])
    return Launch(column_sums_kernel, (grid,), args, tile, blocks["SUM_WARPS"])


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0], groups, -1)


def reference(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Group norm in plain torch, with mean and rstd of each group."""
    accumulator = _accumulator(input, weight, bias)
    if input.numel() == 0:
        return input.to(dtype), torch.zeros(2, input.shape[0], num_groups, dtype=accumulator, device=input.device)
    x = _grouped(input.to(accumulator), num_groups)
    mean = x.mean(-1, keepdim=True)
    c = x - mean
    rstd = (c.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (c * rstd).reshape(input.shape)
    y = y if weight is None else y * weight.to(accumulator)[:, None]
    y = y if bias is None else y + bias.to(accumulator)[:, None]
    mean = torch.where(rstd.isnan(), rstd, mean)
    return y.to(dtype), torch.stack([mean, rstd]).squeeze(-1)


def _terms(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """As of layer norm: a difference of x and the mean, each rounded as such."""
    y, statistics = reference(input, num_groups, None, None, eps, torch.float64)
    if input.numel() == 0:
        return y, statistics
    x, (mean, rstd) = _grouped(input, num_groups), statistics.unsqueeze(-1)
    size = ((x.abs() + x.abs().mean(-1, keepdim=True)) * rstd).reshape(input.shape) + y.abs()
    size = size if weight is None else size * weight.abs()[:, None]
    size = size if bias is None else size + bias.abs()[:, None]
    apart = rstd * (1 + mean.abs() * rstd / math.sqrt(x.shape[-1]))
    return size, torch.stack([x.abs().mean(-1, keepdim=True), apart]).squeeze(-1)


def _backward_parts(call: _BackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, u, h of the input's shape, and rstd for each row, in the accumulator's dtype."""
    accumulator, shape = call.accumulator, call.input.shape
    mean, rstd = call.statistics.to(accumulator).unsqueeze(-1)
    h = ((_grouped(call.input.to(accumulator), call.num_groups) - mean) * rstd).reshape(shape)
    dy = call.grad_output.to(accumulator)
    return dy, dy if call.weight is None else dy * call.weight.to(accumulator)[:, None], h, rstd


def backward_reference(*args: Any) -> tuple[Tensor, ...]:
    """Gradient of group norm in plain torch."""
    call = _BackwardCall(*args)
    dtypes = (call.weight_dtype, call.bias_dtype)
    if call.input.numel() == 0:
        empty = (torch.zeros(0 if d is None else call.input.shape[1], dtype=d or call.input.dtype) for d in dtypes)
        return (torch.zeros_like(call.input), *(each.to(call.input.device) for each in empty))
    dy, u, h, rstd = _backward_parts(call)
    rows, both = _grouped(u, call.num_groups), _grouped(u * h, call.num_groups).mean(-1, keepdim=True)
    dx = (rows - rows.mean(-1, keepdim=True) - _grouped(h, call.num_groups) * both) * rstd
    sums = (
        dy.new_empty(0, dtype=call.input.dtype) if dtype is None else each.sum((0, 2)).to(dtype)
        for each, dtype in zip((dy * h, dy), dtypes, strict=True)
    )
    return (dx.reshape(call.input.shape).to(call.input.dtype), *sums)


def _backward_terms(*args: Any) -> tuple[Tensor, ...]:
    call = _BackwardCall(*args)
    if call.input.numel() == 0:
        return backward_reference(*args)
    dy, u, h, rstd = (each.abs() for each in _backward_parts(call))
    rows, both = _grouped(u, call.num_groups), _grouped(u * h, call.num_groups).mean(-1, keepdim=True)
    size = (rows + rows.mean(-1, keepdim=True) + _grouped(h, call.num_groups) * both) * rstd
    sums = ((dy * h).sum((0, 2)), dy.sum((0, 2)))
    wanted = (call.weight_dtype, call.bias_dtype)
    return (
        size.reshape(call.input.shape),
        *(dy.new_empty(0) if d is None else each for each, d in zip(sums, wanted, strict=True)),
    )


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", groups: int = 0, weight: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """``sizes`` are (B, C, S); of two, (B, N), the second is cut into 8 channels where 8 divides it. ``groups`` is 1 or
    2 by default, ``weight`` another dtype or ``none``. Triton's interpreter passes eps as float32: a power of 2."""
    if len(sizes) == 2:
        cut = 8 if sizes[1] and sizes[1] % 8 == 0 else 1
        sizes = (sizes[0], cut, sizes[1] // cut)
    groups = groups or (2 if sizes[1] % 2 == 0 else 1)
    x = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
    if style == "wide":
        x = x * 8 + 1000
    if style == "nonfinite":
        x = torch.where(x > 2.5, math.nan, torch.where(x < -2.5, -math.inf, x))
    w = b = None
    if weight != "none":
        kind = getattr(torch, weight) if weight else dtype
        w, b = (torch.rand(sizes[1], generator=generator, device=device).to(kind) + 0.5 for _ in range(2))
    return x.to(dtype), groups, w, b, 2**-17, dtype


def _backward_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", groups: int = 0, weight: str = "", bias: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    args = _inputs(sizes, dtype, device=device, generator=generator, style=style, groups=groups, weight=weight)
    x, groups, w, *_ = args
    dy = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    accumulator = _accumulator(x, w)
    if torch.device(device).type == "meta":
        statistics = torch.empty(2, x.shape[0], groups, dtype=accumulator, device=device)
    else:
        exact = [arg.double() if isinstance(arg, Tensor) else arg for arg in args[:5]]
        statistics = reference(*exact, torch.float64)[1].to(accumulator)  # type: ignore[arg-type, call-arg]
    weight_dtype = None if w is None else w.dtype
    return dy, x, groups, w, statistics, weight_dtype, weight_dtype if bias else None


CASES = (
    Case((1, 1, 1)), Case((0, 4, 5)), Case((2, 4, 0)), Case((2, 6, 5), {"groups": 3}), Case((3, 4, 1), {"groups": 4}),
    Case((2, 6, 35), {"groups": 2, "weight": "float32"}), Case((2, 10, 33), {"groups": 1, "weight": "none"}),
    Case((1, 3, 700), {"groups": 3}), Case((2, 8, 130)), Case((2, 4, 1030)),
)  # fmt: skip
_BACKWARD_CASES = (*CASES, Case((2, 6, 40), {"groups": 3, "bias": False}))
TUNE_CASES = tuple(
    Case(sizes, {"groups": 32})
    for sizes in ((8, 320, 4096), (8, 1280, 256), (2, 512, 65536), (32, 256, 3136), (1, 128, 262144))
)
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _eager(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)


def _backward_eager(*args: Any) -> Any:
    call = _BackwardCall(*args)
    batch, channels, places = call.input.shape
    # torch keeps them in the input's dtype, in float32 only where the weight's is another.
    same = call.weight is None or call.weight.dtype == call.input.dtype
    mean, rstd = call.statistics.to(call.input.dtype) if same else call.statistics
    wanted = [True, call.weight_dtype is not None, call.bias_dtype is not None]
    return torch.ops.aten.native_group_norm_backward(
        call.grad_output, call.input, mean, rstd, call.weight, batch, channels, places, call.num_groups, wanted
    )


def _save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    input, num_groups, weight, bias, *_ = args
    dtypes = (each.dtype if each is not None and each.requires_grad else None for each in (weight, bias))
    return (input, num_groups, weight, outputs[1], *dtypes)


def _backward_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return (torch.zeros_like(saved[0]) if grads[0] is None else grads[0], *saved)


def _gradients(saved: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dx, *sums = outputs
    return (dx, *(None if dtype is None else each for each, dtype in zip(sums, saved[-2:], strict=True)))


_COMMON: dict[str, Any] = {"fit": _fit, "tune_cases": TUNE_CASES, "dtypes": _DTYPES}

OPS = (
    Op(
        "group_norm",
        "(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> (Tensor, Tensor)",
        signature=group_norm,
        result=_result,
        saved=1,
        problem=_problem,
        work=_work,
        outputs=_outputs,
        plan=_plan,
        reference=reference,
        terms=_terms,
        eager=_eager,
        inputs=_inputs,
        cases=CASES,
        values=(4,),
        backward=Backward("group_norm_backward", _save, _backward_arguments, (0, 2, 3), _gradients),
        **_COMMON,
    ),
    Op(
        "group_norm_backward",
        "(Tensor grad_output, Tensor input, int num_groups, Tensor? weight, Tensor statistics, "
        "ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
        problem=_backward_problem,
        work=_backward_work,
        outputs=_backward_outputs,
        plan=_backward_plan,
        reference=backward_reference,
        terms=_backward_terms,
        eager=_backward_eager,
        inputs=_backward_inputs,
        cases=_BACKWARD_CASES,
        **_COMMON,
    ),
)
