"""Cross entropy of logits and class indices, with its gradient made while the logits are at hand.

    z    = softcap * tanh(x / softcap)      (without a cap: z = x)
    m, l = max z, log(sum over classes of exp(z - m));  lse = m + l
    loss = (1 - s) * w[t] * (l - (z[t] - m)) + s / N * sum of w * (lse - z) + z_loss * lse^2      s: label_smoothing
    dx   = (softmax(z) * ((1 - s) * w[t] + s / N * sum of w + 2 * z_loss * lse) - (1 - s) * w[t] * [t] - s / N * w)
           * (1 - (z / softcap)^2) * upstream / (for the mean: sum of w[t] over rows)

x, dx: (M0, M1, M2, N), N classes; target, loss: one a row; statistics: m and l of each row; w: (N,). Of lse, which is
rounded as m is, z_loss alone is made: of logits around 10,000 a loss would be off by 5e-4 and a gradient by 1e-4, and
those of a row of one large number, such as a masked one, by all that they are. A row whose target is ignore_index
counts nowhere; one whose target is no class is NaN, in loss and gradient, and nothing is read for it.

The forward reads logits once where a row fits a tile or its programs wait for each other, else a second time from
cache, and writes dx for an upstream gradient of 1. ``rescale`` then multiplies where that is not so, and reads nothing
where it is: the programs see for themselves. float16 would lose small gradients that way, and a second backward finds
dx given away: these recompute dx from m and l, by ``cross_entropy_backward``.
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
from portkern.errors import BadArgument, Mismatch, UnsupportedDtype
from portkern.integers import cdiv, next_power_of_2
from portkern.kernels._rows import (
    TRITON_DTYPES,
    at,
    await_words,
    block_offsets,
    blocks_in,
    cast,
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
    store,
    tile_origin,
)
from portkern.layout import in_pairs, near, readable, rows_of
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan, Scratch, like
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.row_plan import RowKernels, row_plan
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device


@triton.jit
def _capped(raw, softcap, CAPPED: tl.constexpr, COMPUTE: tl.constexpr):
    z = raw.to(COMPUTE)
    if CAPPED:
        # tanh(u) = 1 - 2 / (exp(2 u) + 1): right to an ulp of the cap, and at both infinities.
        z = (1.0 - 2.0 / (exp(z * (2.0 / softcap)) + 1.0)) * softcap
    return z


@triton.jit
def _padded(raw, mask_n, softcap, CAPPED: tl.constexpr, COMPUTE: tl.constexpr):
    """z, and -inf outside of the row, as it was loaded: only a cap makes that finite."""
    z = _capped(raw, softcap, CAPPED, COMPUTE)
    if CAPPED:
        z = tl.where(mask_n[None, :], z, -float("inf"))
    return z


@triton.jit
def _classes(w, offs_n, mask_n, WEIGHT: tl.constexpr, COMPUTE: tl.constexpr):
    """Class weights, [1, BLOCK_N], 0 outside of the row; where all are 1, that alone: a tensor of them, which no load
    gives a layout, took 700 instructions an element."""
    if WEIGHT:
        return tl.load(w[0] + offs_n[None, :] * w[1], mask=mask_n[None, :], other=0.0).to(COMPUTE)
    else:
        return tl.full([1, 1], 1.0, COMPUTE)


@triton.jit
def _weighted(z, weights, mask_n):
    """z times the weights, where a padded class counts nothing though its z is -inf."""
    return tl.where(mask_n[None, :] & (weights != 0), z * weights, 0.0)


@triton.jit
def _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index):
    """The targets of rows, [BLOCK_M, 1]. What is read at them waits for these, and so does all that the warp does next:
    loaded long before they are used, they cost a row nothing."""
    return tl.load(at(target, i0, i1, i2) + offs_m[:, None] * target[3], mask=mask_m[:, None], other=ignore_index)


@triton.jit
def _targets(
    x, t, w, i0, i1, i2, offs_m, mask_m, N, ignore_index, softcap,
    WEIGHT: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """(target, whether the row counts, whether it is a class, z of it, its weight), [BLOCK_M, 1] each."""
    t = t.to(tl.int64)
    counts = mask_m[:, None] & (t != ignore_index)
    inside = counts & (t >= 0) & (t < N)
    raw = tl.load(at(x, i0, i1, i2) + offs_m[:, None] * x[3] + t * x[4], mask=inside, other=0.0)
    weight = tl.where(inside, 1.0, 0.0).to(COMPUTE)
    if WEIGHT:
        weight = tl.load(w[0] + t * w[1], mask=inside, other=0.0).to(COMPUTE)
    return t, counts, inside, _capped(raw, softcap, CAPPED, COMPUTE), weight


@triton.jit
def _scale(total_ptr, MEAN: tl.constexpr, COMPUTE: tl.constexpr):
    """1 / the sum of the weights of all targets, for the mean."""
    scale = tl.full((), 1.0, COMPUTE)
    if MEAN:
        scale = scale / tl.load(total_ptr)
    return scale


@triton.jit
def _factors(
    maximum, log_total, total, weight, sum_w, counts, inside, scale, N, smoothing, z_loss,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Of exp(z - maximum), of the target and of the class weights in the gradient of a row."""
    hit = weight * (1.0 - smoothing)
    factor = hit
    if SMOOTH:
        factor += sum_w * (smoothing / tl.cast(N, COMPUTE))
    if Z_LOSS:
        factor += (maximum + log_total) * (2.0 * z_loss)
    # A target that is no class makes its row NaN; an ignored one, 0.
    bad = tl.where(counts & (inside == 0), float("nan"), 1.0)
    scale = tl.where(counts, scale * bad, 0.0)
    return tl.where(counts, factor * scale / total, 0.0), tl.where(counts, hit * scale, 0.0), scale


@triton.jit
def _loss(
    maximum, log_total, z_target, weight, sum_w, sum_wz, counts, inside, N, smoothing, z_loss,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """sum_wz: of w * (z - maximum)."""
    loss = weight * (log_total - (z_target - maximum)) * (1.0 - smoothing)
    if SMOOTH:
        loss += (sum_w * log_total - sum_wz) * (smoothing / tl.cast(N, COMPUTE))
    if Z_LOSS:
        lse = maximum + log_total
        loss += lse * lse * z_loss
    return tl.where(counts, tl.where(inside, loss, float("nan")), 0.0)


@triton.jit
def _gradient(
    z, maximum, factor, hit, scale, weights, N, smoothing, softcap,
    TARGET: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Of z at TARGET, or of any other z of a row."""
    value = exp(z - maximum) * factor
    if SMOOTH:
        value -= weights * (scale * (smoothing / tl.cast(N, COMPUTE)))
    if TARGET:
        value -= hit
    if CAPPED:
        value *= 1.0 - (z / softcap) * (z / softcap)
    return value


@triton.jit
def _store_gradient(dx, value, scale, i0, i1, i2, offs_m, offs_n, mask_m, mask_n):
    """What ``_gradient`` gives for each z of rows, as if none was the target: see ``_store_target``."""
    base, counts = at(dx, i0, i1, i2), scale != 0
    offsets = offs_m[:, None] * dx[3] + offs_n[None, :] * dx[4]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(base + offsets, cast(value, base.dtype.element_ty), mask=mask & counts)
    # Softmax of an ignored row may be NaN. A second store, which others skip, costs an element less than a select.
    tl.store(base + offsets, tl.zeros(value.shape, base.dtype.element_ty), mask=mask & (scale == 0))


@triton.jit
def _store_target(
    dx, t, inside, first, last, z, maximum, factor, hit, scale, weight, i0, i1, i2, offs_m, N, smoothing, softcap,
    SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the target's gradient over what ``_store_gradient`` left there, if this program stored the columns first to
    last and the target is one of them: a compare of every column with it took a tenth of all instructions.

    The barrier orders the two stores: by its definition where it is a fence as well, elsewhere because the lanes of one
    program store by way of one unit's cache, which keeps their order.
    """
    value = _gradient(z, maximum, factor, hit, scale, weight, N, smoothing, softcap, True, SMOOTH, CAPPED, COMPUTE)
    ptrs = at(dx, i0, i1, i2) + offs_m[:, None] * dx[3] + t * dx[4]
    mask = inside & (scale != 0) & (t >= first) & (t < last)
    tl.debug_barrier()
    tl.store(ptrs, cast(tl.broadcast_to(value, ptrs.shape), dx[0].dtype.element_ty), mask=mask)


@triton.jit
def _store_rows(operand, value, i0, i1, i2, offs_m, mask_m):
    ptrs = at(operand, i0, i1, i2) + offs_m[:, None] * operand[3]
    value = tl.broadcast_to(value, ptrs.shape)
    tl.store(ptrs, cast(value, operand[0].dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def _store_statistics(statistics, maximum, log_total, i0, i1, i2, offs_m, mask_m):
    """Two numbers a row, the second beside the first."""
    _store_rows(statistics, maximum, i0, i1, i2, offs_m, mask_m)
    second = (statistics[0] + 1, statistics[1], statistics[2], statistics[3])
    _store_rows(second, log_total, i0, i1, i2, offs_m, mask_m)


# ---- whole rows in one tile -------------------------------------------------------------------------------------


@triton.jit
def _part(
    base, offs_m, part, mask_m, N, stride_m, stride_n,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, EVICTION: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One part of a row that the nearest cache keeps: (columns, which of them exist, logits)."""
    offs_n = block_offsets(part, PART, WIDE)
    mask_n = offs_n < N
    ptrs = base + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
    mask = mask_m[:, None] & mask_n[None, :]
    return offs_n, mask_n, load_masked(ptrs, mask, -float("inf"), base.dtype.element_ty, COMPUTE, EVICTION)


@triton.jit
def _reread(
    x, dx, target, loss, statistics, w, scale, i0, i1, i2, offs_m, mask_m, N, ignore_index, smoothing, z_loss, softcap,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, Z_LOSS: tl.constexpr, CAPPED: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile whose row the nearest cache keeps instead of registers, so that a second row fits beside the first. The
    barriers keep the compiler from merging the reads; a maximum first leaves two exponentials an element, not three."""
    PARTS: tl.constexpr = BLOCK_N // PART
    base = at(x, i0, i1, i2)
    t = _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index)
    # Of logits as they are: a cap keeps their order, and 16-bit ones, with no number among them, are compared in pairs.
    _, _, raw = _part(base, offs_m, 0, mask_m, N, x[3], x[4], COMPUTE, WIDE, "evict_last", PART)
    largest = raw.to(COMPUTE)
    for part in tl.static_range(1, PARTS):
        _, _, raw = _part(base, offs_m, part, mask_m, N, x[3], x[4], COMPUTE, WIDE, "evict_last", PART)
        largest = tl.maximum(largest, raw.to(COMPUTE))  # leaves a NaN out, which the total finds
    maximum = _capped(tl.max(largest, axis=1, keep_dims=True), softcap, CAPPED, COMPUTE)
    maximum = tl.maximum(maximum, lowest(COMPUTE))
    t, counts, inside, z_target, weight = _targets(
        x, t, w, i0, i1, i2, offs_m, mask_m, N, ignore_index, softcap, WEIGHT, CAPPED, COMPUTE
    )
    tl.debug_barrier()
    total = tl.zeros([BLOCK_M, PART], COMPUTE)
    for part in tl.static_range(PARTS):
        _, mask_n, raw = _part(base, offs_m, part, mask_m, N, x[3], x[4], COMPUTE, WIDE, "evict_last", PART)
        total += exp(_padded(raw, mask_n, softcap, CAPPED, COMPUTE) - maximum)
    row_total = tl.sum(total, axis=1, keep_dims=True)
    log_total = tl.log(row_total)
    value = _loss(
        maximum, log_total, z_target, weight, weight, weight, counts, inside, N, smoothing, z_loss,
        False, Z_LOSS, COMPUTE,
    )  # fmt: skip
    if GRADIENT:
        factor, hit, row_scale = _factors(
            maximum, log_total, row_total, weight, weight, counts, inside, scale, N, smoothing, z_loss,
            False, Z_LOSS, COMPUTE,
        )  # fmt: skip
        tl.debug_barrier()
        for part in tl.static_range(PARTS):
            offs_n, mask_n, raw = _part(base, offs_m, part, mask_m, N, x[3], x[4], COMPUTE, WIDE, "evict_first", PART)
            z = _capped(raw, softcap, CAPPED, COMPUTE)
            result = _gradient(
                z, maximum, factor, hit, row_scale, weight, N, smoothing, softcap, False, False, CAPPED, COMPUTE
            )
            _store_gradient(dx, result, row_scale, i0, i1, i2, offs_m, offs_n, mask_m, mask_n)
        _store_target(
            dx, t, inside, 0, N, z_target, maximum, factor, hit, row_scale, weight, i0, i1, i2, offs_m, N, smoothing,
            softcap, False, CAPPED, COMPUTE,
        )  # fmt: skip
    _store_rows(loss, value, i0, i1, i2, offs_m, mask_m)
    _store_statistics(statistics, maximum, log_total, i0, i1, i2, offs_m, mask_m)


@triton.jit
def _tile(
    tile, x, dx, target, loss, statistics, w, scale, M0, M1, M2, N, ignore_index, smoothing, z_loss, softcap,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, CAPPED: tl.constexpr,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, REREAD: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_n = block_offsets(0, BLOCK_M, WIDE), block_offsets(0, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < M2 - i2, offs_n < N
    if REREAD:
        _reread(
            x, dx, target, loss, statistics, w, scale, i0, i1, i2, offs_m, mask_m, N, ignore_index, smoothing, z_loss,
            softcap, GRADIENT, WEIGHT, Z_LOSS, CAPPED, COMPUTE, WIDE, PART, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        return
    t = _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index)
    raw = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], -float("inf"))
    t, counts, inside, z_target, weight = _targets(
        x, t, w, i0, i1, i2, offs_m, mask_m, N, ignore_index, softcap, WEIGHT, CAPPED, COMPUTE
    )
    z = _padded(raw, mask_n, softcap, CAPPED, COMPUTE)
    weights, sum_w, sum_wz = _classes(w, offs_n, mask_n, WEIGHT, COMPUTE), weight, weight
    maximum = tl.maximum(tl.max(z, axis=1, keep_dims=True), lowest(COMPUTE))
    classes = N
    if SMOOTH:
        # Counted, not converted: beside these sums the LLVM of Triton 3.9 also converted bits of the exponentials'.
        classes = tl.sum(tl.where(mask_n, 1.0, 0.0).to(COMPUTE))
        sum_w = tl.sum(weights, axis=1, keep_dims=True) if WEIGHT else weights * classes
        sum_wz = tl.sum(_weighted(z - maximum, weights, mask_n), axis=1, keep_dims=True)
    row_total = tl.sum(exp(z - maximum), axis=1, keep_dims=True)
    log_total = tl.log(row_total)
    value = _loss(
        maximum, log_total, z_target, weight, sum_w, sum_wz, counts, inside, classes, smoothing, z_loss,
        SMOOTH, Z_LOSS, COMPUTE,
    )  # fmt: skip
    if GRADIENT:
        factor, hit, row_scale = _factors(
            maximum, log_total, row_total, weight, sum_w, counts, inside, scale, classes, smoothing, z_loss,
            SMOOTH, Z_LOSS, COMPUTE,
        )  # fmt: skip
        if CAPPED and raw.dtype.primitive_bitwidth == 16:  # what waits for the sums shall be the 16-bit row
            z = _capped(opaque(raw, N < 0), softcap, CAPPED, COMPUTE)
        result = _gradient(
            z, maximum, factor, hit, row_scale, weights, classes, smoothing, softcap, False, SMOOTH, CAPPED, COMPUTE
        )
        _store_gradient(dx, result, row_scale, i0, i1, i2, offs_m, offs_n, mask_m, mask_n)
        _store_target(
            dx, t, inside, 0, N, z_target, maximum, factor, hit, row_scale, weight, i0, i1, i2, offs_m, classes,
            smoothing, softcap, SMOOTH, CAPPED, COMPUTE,
        )  # fmt: skip
    _store_rows(loss, value, i0, i1, i2, offs_m, mask_m)
    _store_statistics(statistics, maximum, log_total, i0, i1, i2, offs_m, mask_m)


@triton.jit
def _whole_kernel(
    x_ptr, dx_ptr, target_ptr, loss_ptr, statistics_ptr, w_ptr, total_ptr, M0, M1, M2, N,
    ignore_index, smoothing: tl.float64, z_loss: tl.float64, softcap: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_target0, stride_target1, stride_target2, stride_loss0, stride_loss1, stride_loss2,
    stride_statistics0, stride_statistics1, stride_statistics2, stride_w,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, WEIGHT: tl.constexpr, SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    PERSISTENT: tl.constexpr, STAGES: tl.constexpr, REREAD: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row, cached_row (REREAD, without smoothing).

    Grid: one program a tile, or PERSISTENT ones that fetch STAGES - 1 tiles ahead.
    """
    smoothing, z_loss, softcap = number(smoothing, COMPUTE), number(z_loss, COMPUTE), number(softcap, COMPUTE)
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    dx = (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn)
    target = (target_ptr, stride_target0, stride_target1, stride_target2)
    loss, w = (loss_ptr, stride_loss0, stride_loss1, stride_loss2), (w_ptr, stride_w)
    statistics = (statistics_ptr, stride_statistics0, stride_statistics1, stride_statistics2)
    scale = _scale(total_ptr, MEAN and GRADIENT, COMPUTE)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _tile(
                tile, x, dx, target, loss, statistics, w, scale, M0, M1, M2, N, ignore_index, smoothing, z_loss,
                softcap, GRADIENT, WEIGHT, SMOOTH, Z_LOSS, CAPPED, COMPUTE, WIDE, REREAD, PART, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), x, dx, target, loss, statistics, w, scale, M0, M1, M2, N, ignore_index, smoothing, z_loss,
            softcap, GRADIENT, WEIGHT, SMOOTH, Z_LOSS, CAPPED, COMPUTE, WIDE, REREAD, PART, BLOCK_M, BLOCK_N,
        )  # fmt: skip


# ---- rows longer than a tile ------------------------------------------------------------------------------------


@triton.jit
def _moved(sums, weights, old, new):
    """Sums of w * (z - old) as sums of w * (z - new). Where there is no weight yet, the difference may be infinite."""
    return sums + tl.where(weights != 0, weights * (old - new), 0.0)


@triton.jit
def _statistics(
    x, w, i0, i1, i2, first, last, offs_m, mask_m, N, softcap,
    WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(max, sum of exponentials relative to it, sum of w, sum of w * (z - max)) of blocks first to last, [BLOCK_M, 1]
    each.

    Kept per element: a reduction per block would stall the loads at a barrier.
    """
    maximum = tl.full([BLOCK_M, BLOCK_N], lowest(COMPUTE), COMPUTE)
    total = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    sum_w = tl.zeros([1, BLOCK_N], COMPUTE)
    sum_wz = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        raw = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], -float("inf"))
        z = _padded(raw, mask_n, softcap, CAPPED, COMPUTE)
        new_maximum = tl.maximum(maximum, z)
        total = total * exp(maximum - new_maximum) + exp(z - new_maximum)
        if SMOOTH:
            weights = _classes(w, offs_n, mask_n, WEIGHT, COMPUTE)
            so_far = sum_w if WEIGHT else tl.cast(block - first, COMPUTE)
            sum_wz = _moved(sum_wz, so_far, maximum, new_maximum) + _weighted(z - new_maximum, weights, mask_n)
            if WEIGHT:
                sum_w += weights
        maximum = new_maximum
    row_maximum = tl.max(maximum, axis=1, keep_dims=True)
    row_total = tl.sum(total * exp(maximum - row_maximum), axis=1, keep_dims=True)
    if SMOOTH:
        if not WEIGHT:  # every block counts for a column, but for the last one beyond the row
            beyond = block_offsets(last - 1, BLOCK_N, WIDE)[None, :] >= N
            sum_w += tl.cast(last - first, COMPUTE) - tl.where(beyond & (last > first), 1.0, 0.0)
        sum_wz = _moved(sum_wz, sum_w, maximum, row_maximum)
    row_w = tl.broadcast_to(tl.sum(sum_w, axis=1, keep_dims=True), row_maximum.shape)
    return row_maximum, row_total, row_w, tl.sum(sum_wz, axis=1, keep_dims=True)


@triton.jit
def _gradient_blocks(
    x, dx, w, i0, i1, i2, first, last, maximum, t, inside, z_target, weight, factor, hit, scale, offs_m, mask_m, N,
    smoothing, softcap,
    WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Last block first: what was read last is still in cache.
    for block in tl.range(0, last - first, num_stages=STAGES):
        offs_n = block_offsets(last - 1 - block, BLOCK_N, WIDE)
        mask_n = offs_n < N
        raw = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, mask_n, x[3], x[4], -float("inf"))
        z, weights = _capped(raw, softcap, CAPPED, COMPUTE), hit
        if SMOOTH:
            weights = _classes(w, offs_n, mask_n, WEIGHT, COMPUTE)
        value = _gradient(
            z, maximum, factor, hit, scale, weights, N, smoothing, softcap, False, SMOOTH, CAPPED, COMPUTE
        )
        _store_gradient(dx, value, scale, i0, i1, i2, offs_m, offs_n, mask_m, mask_n)
    columns, end = tl.cast(first, tl.int64) * BLOCK_N, tl.cast(last, tl.int64) * BLOCK_N
    _store_target(
        dx, t, inside, columns, end, z_target, maximum, factor, hit, scale, weight, i0, i1, i2, offs_m, N, smoothing,
        softcap, SMOOTH, CAPPED, COMPUTE,
    )  # fmt: skip


@triton.jit
def _looped_kernel(
    x_ptr, dx_ptr, target_ptr, loss_ptr, statistics_ptr, w_ptr, total_ptr, M0, M1, M2, N,
    ignore_index, smoothing: tl.float64, z_loss: tl.float64, softcap: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_target0, stride_target1, stride_target2, stride_loss0, stride_loss1, stride_loss2,
    stride_statistics0, stride_statistics1, stride_statistics2, stride_w,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, WEIGHT: tl.constexpr, SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row. Grid: one program per BLOCK_M rows."""
    smoothing, z_loss, softcap = number(smoothing, COMPUTE), number(z_loss, COMPUTE), number(softcap, COMPUTE)
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    dx = (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn)
    target = (target_ptr, stride_target0, stride_target1, stride_target2)
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m, blocks, w = block_offsets(0, BLOCK_M, WIDE), blocks_in(N, BLOCK_N), (w_ptr, stride_w)
    mask_m = offs_m < M2 - i2
    maximum, total, sum_w, sum_wz = _statistics(
        x, w, i0, i1, i2, 0, blocks, offs_m, mask_m, N, softcap,
        WEIGHT, SMOOTH, CAPPED, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    log_total = tl.log(total)
    t = _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index)
    t, counts, inside, z_target, weight = _targets(
        x, t, w, i0, i1, i2, offs_m, mask_m, N, ignore_index, softcap, WEIGHT, CAPPED, COMPUTE
    )
    value = _loss(
        maximum, log_total, z_target, weight, sum_w, sum_wz, counts, inside, N, smoothing, z_loss,
        SMOOTH, Z_LOSS, COMPUTE,
    )  # fmt: skip
    _store_rows((loss_ptr, stride_loss0, stride_loss1, stride_loss2), value, i0, i1, i2, offs_m, mask_m)
    statistics = (statistics_ptr, stride_statistics0, stride_statistics1, stride_statistics2)
    _store_statistics(statistics, maximum, log_total, i0, i1, i2, offs_m, mask_m)
    if GRADIENT:
        factor, hit, scale = _factors(
            maximum, log_total, total, weight, sum_w, counts, inside, _scale(total_ptr, MEAN, COMPUTE), N, smoothing,
            z_loss, SMOOTH, Z_LOSS, COMPUTE,
        )  # fmt: skip
        _gradient_blocks(
            x, dx, w, i0, i1, i2, 0, blocks, maximum, t, inside, z_target, weight, factor, hit, scale, offs_m, mask_m,
            N, smoothing, softcap, WEIGHT, SMOOTH, CAPPED, COMPUTE, WIDE, STAGES, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _partial_kernel(
    x_ptr, w_ptr, partial_ptr, M0, M1, M2, N, softcap: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_w,
    WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """split_row, first launch. Grid: tiles * SPLITS. partial: (tiles, 4, BLOCK_M, SPLITS), COMPUTE."""
    softcap = number(softcap, COMPUTE)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    maximum, total, sum_w, sum_wz = _statistics(
        x, (w_ptr, stride_w), i0, i1, i2, first, last, offs_m, offs_m < M2 - i2, N, softcap,
        WEIGHT, SMOOTH, CAPPED, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    ptrs = partial_ptr + tl.cast(tile, tl.int64) * (4 * BLOCK_M * SPLITS) + part
    ptrs += tl.arange(0, BLOCK_M)[:, None] * SPLITS
    tl.store(ptrs, maximum)
    tl.store(ptrs + BLOCK_M * SPLITS, total)
    tl.store(ptrs + 2 * BLOCK_M * SPLITS, sum_w)
    tl.store(ptrs + 3 * BLOCK_M * SPLITS, sum_wz)


@triton.jit
def _combine_kernel(
    x_ptr, dx_ptr, target_ptr, loss_ptr, statistics_ptr, w_ptr, total_ptr, partial_ptr, M0, M1, M2, N,
    ignore_index, smoothing: tl.float64, z_loss: tl.float64, softcap: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_target0, stride_target1, stride_target2, stride_loss0, stride_loss1, stride_loss2,
    stride_statistics0, stride_statistics1, stride_statistics2, stride_w,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, WEIGHT: tl.constexpr, SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: tiles * SPLITS. BLOCK_SPLITS = next_power_of_2(SPLITS)."""
    smoothing, z_loss, softcap = number(smoothing, COMPUTE), number(z_loss, COMPUTE), number(softcap, COMPUTE)
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    dx = (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn)
    target = (target_ptr, stride_target0, stride_target1, stride_target2)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, w = block_offsets(0, BLOCK_M, WIDE), (w_ptr, stride_w)
    mask_m, offs_s = offs_m < M2 - i2, tl.arange(0, BLOCK_SPLITS)[None, :]
    ptrs = partial_ptr + tl.cast(tile, tl.int64) * (4 * BLOCK_M * SPLITS)
    ptrs += tl.arange(0, BLOCK_M)[:, None] * SPLITS + offs_s
    maximums = tl.load(ptrs, mask=offs_s < SPLITS, other=lowest(COMPUTE))
    totals = tl.load(ptrs + BLOCK_M * SPLITS, mask=offs_s < SPLITS, other=0.0)
    maximum = tl.max(maximums, axis=1, keep_dims=True)
    total = tl.sum(totals * exp(maximums - maximum), axis=1, keep_dims=True)
    log_total = tl.log(total)
    sums_w = tl.load(ptrs + 2 * BLOCK_M * SPLITS, mask=offs_s < SPLITS, other=0.0)
    sums_wz = tl.load(ptrs + 3 * BLOCK_M * SPLITS, mask=offs_s < SPLITS, other=0.0)
    sum_w = tl.sum(sums_w, axis=1, keep_dims=True)
    sum_wz = tl.sum(_moved(sums_wz, sums_w, maximums, maximum), axis=1, keep_dims=True)
    t = _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index)
    t, counts, inside, z_target, weight = _targets(
        x, t, w, i0, i1, i2, offs_m, mask_m, N, ignore_index, softcap, WEIGHT, CAPPED, COMPUTE
    )
    value = _loss(
        maximum, log_total, z_target, weight, sum_w, sum_wz, counts, inside, N, smoothing, z_loss,
        SMOOTH, Z_LOSS, COMPUTE,
    )  # fmt: skip
    # Masked, not branched over: Triton 3.6 moves what a branch reads below it, and then refuses its own code.
    mask_first = offs_m < tl.where(part == 0, M2 - i2, 0)
    _store_rows((loss_ptr, stride_loss0, stride_loss1, stride_loss2), value, i0, i1, i2, offs_m, mask_first)
    statistics = (statistics_ptr, stride_statistics0, stride_statistics1, stride_statistics2)
    _store_statistics(statistics, maximum, log_total, i0, i1, i2, offs_m, mask_first)
    if GRADIENT:
        factor, hit, scale = _factors(
            maximum, log_total, total, weight, sum_w, counts, inside, _scale(total_ptr, MEAN, COMPUTE), N, smoothing,
            z_loss, SMOOTH, Z_LOSS, COMPUTE,
        )  # fmt: skip
        _gradient_blocks(
            x, dx, w, i0, i1, i2, first, last, maximum, t, inside, z_target, weight, factor, hit, scale, offs_m,
            mask_m, N, smoothing, softcap, WEIGHT, SMOOTH, CAPPED, COMPUTE, WIDE, STAGES, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _row_of_logits(
    x, target, row, rows, M0, M1, M2, part, N, ignore_index,
    WIDE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A part of a row, -inf beyond the last row, and its class. PAIRS: as words of two."""
    i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
    offs_m = block_offsets(0, 1, WIDE)
    mask_m = offs_m < rows - row
    AS: tl.constexpr = x[0].dtype.element_ty
    raw = load_logits(at(x, i0, i1, i2), offs_m, part, mask_m, N, x[3], x[4], AS, WIDE, PAIRS, BLOCK_N)
    return raw, _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index)


@triton.jit
def _publish_statistics(
    raw, words, part, exists, mask_n, softcap, CAPPED: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr
):
    """Hand this part's maximum and sum of exponentials to the other parts of its row, if there is such a row."""
    z = _padded(numbers(raw, AS, COMPUTE), mask_n, softcap, CAPPED, COMPUTE)
    part_maximum = tl.maximum(tl.max(z), lowest(COMPUTE))
    part_total = tl.sum(exp(z - part_maximum))
    if exists:
        publish(words + part, part_total, part_maximum)


@triton.jit
def _coresident_kernel(
    x_ptr, dx_ptr, target_ptr, loss_ptr, statistics_ptr, w_ptr, total_ptr, word_ptr, M0, M1, M2, N,
    ignore_index, smoothing: tl.float64, z_loss: tl.float64, softcap: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_target0, stride_target1, stride_target2, stride_loss0, stride_loss1, stride_loss2,
    stride_statistics0, stride_statistics1, stride_statistics2, stride_w,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, WEIGHT: tl.constexpr, SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr, LAG: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """coresident_row, without smoothing. Grid: a multiple of SPLITS programs, all running at once.

    word: (rows, SPLITS) int64 zeros. SPLITS is a power of 2, at most one warp wide, and SPLITS * BLOCK_N >= N. LAG: a
    program sums its next row before it waits for the words of this one: the exchange takes place while it loads.
    """
    smoothing, z_loss, softcap = number(smoothing, COMPUTE), number(z_loss, COMPUTE), number(softcap, COMPUTE)
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    dx = (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn)
    target, w = (target_ptr, stride_target0, stride_target1, stride_target2), (w_ptr, stride_w)
    part, group = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    offs_m, offs_n = block_offsets(0, 1, WIDE), block_offsets(part, BLOCK_N, WIDE)
    mask_m, mask_n = offs_m < 1, offs_n < N
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    scale = _scale(total_ptr, MEAN and GRADIENT, COMPUTE)
    AS: tl.constexpr = x_ptr.dtype.element_ty
    raw, t = _row_of_logits(x, target, group, rows, M0, M1, M2, part, N, ignore_index, WIDE, PAIRS, BLOCK_N)
    raw1, t1 = raw, t
    if LAG:
        words = word_ptr + tl.cast(group, tl.int64) * SPLITS
        _publish_statistics(raw, words, part, True, mask_n, softcap, CAPPED, AS, COMPUTE)
        raw1, t1 = _row_of_logits(
            x, target, group + groups, rows, M0, M1, M2, part, N, ignore_index, WIDE, PAIRS, BLOCK_N
        )
    for row in tl.range(group, rows, groups):
        here0, here1, here2 = tile_origin(row, M0, M1, M2, 1)
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        raw2, t2 = raw1, t1
        if LAG:
            raw2, t2 = _row_of_logits(
                x, target, row + 2 * groups, rows, M0, M1, M2, part, N, ignore_index, WIDE, PAIRS, BLOCK_N
            )  # fmt: skip
            found = peek(words, N, SPLITS, POLL_CACHE)
            next_words = word_ptr + tl.cast(row + groups, tl.int64) * SPLITS
            _publish_statistics(raw1, next_words, part, row + groups < rows, mask_n, softcap, CAPPED, AS, COMPUTE)
        else:
            _publish_statistics(raw, words, part, True, mask_n, softcap, CAPPED, AS, COMPUTE)
            # The next row loads while this one waits.
            raw1, t1 = _row_of_logits(
                x, target, row + groups, rows, M0, M1, M2, part, N, ignore_index, WIDE, PAIRS, BLOCK_N
            )
            found = peek(words, N, SPLITS, POLL_CACHE)
        t, counts, inside, z_target, weight = _targets(
            x, t, w, here0, here1, here2, offs_m, mask_m, N, ignore_index, softcap, WEIGHT, CAPPED, COMPUTE
        )
        totals, maximums = await_words(found, words, N, SPLITS, POLL_CACHE)
        maximum = tl.max(maximums, axis=0)
        total = tl.sum(totals * exp(maximums - maximum), axis=0)
        log_total = tl.log(total)
        if GRADIENT:
            factor, hit, row_scale = _factors(
                maximum, log_total, total, weight, weight, counts, inside, scale, N, smoothing, z_loss,
                SMOOTH, Z_LOSS, COMPUTE,
            )  # fmt: skip
            if CAPPED or LAG:  # what waits for the other parts shall be the 16-bit row
                raw = kept(raw, N < 0)
            z = _capped(numbers(raw, AS, COMPUTE), softcap, CAPPED, COMPUTE)
            value = _gradient(
                z, maximum, factor, hit, row_scale, hit, N, smoothing, softcap, False, SMOOTH, CAPPED, COMPUTE
            )
            _store_gradient(dx, value, row_scale, here0, here1, here2, offs_m, offs_n, mask_m, mask_n)
            first = tl.cast(part, tl.int64) * BLOCK_N
            _store_target(
                dx, t, inside, first, first + BLOCK_N, z_target, maximum, factor, hit, row_scale, hit,
                here0, here1, here2, offs_m, N, smoothing, softcap, SMOOTH, CAPPED, COMPUTE,
            )  # fmt: skip
        row_loss = _loss(
            maximum, log_total, z_target, weight, weight, weight, counts, inside, N, smoothing, z_loss,
            SMOOTH, Z_LOSS, COMPUTE,
        )  # fmt: skip
        mask_first = offs_m < tl.where(part == 0, 1, 0)
        _store_rows(
            (loss_ptr, stride_loss0, stride_loss1, stride_loss2), row_loss, here0, here1, here2, offs_m, mask_first
        )
        statistics = (statistics_ptr, stride_statistics0, stride_statistics1, stride_statistics2)
        _store_statistics(statistics, maximum, log_total, here0, here1, here2, offs_m, mask_first)
        raw, t = raw1, t1
        if LAG:
            raw1, t1 = raw2, t2


# ---- sums over rows ---------------------------------------------------------------------------------------------


@triton.jit
def _totals_kernel(
    target_ptr, w_ptr, total_ptr, M0, M1, M2, N, ignore_index, stride_0, stride_1, stride_2, stride_w,
    WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sums of the weights of targets: each program over rows of its own, to one number."""
    total = tl.zeros([BLOCK_M], COMPUTE)
    rows = tl.cast(M0, tl.int64) * M1 * M2
    for block in tl.range(tl.program_id(0), blocks_in(rows, BLOCK_M), tl.num_programs(0)):
        offs_m = block_offsets(block, BLOCK_M, True)
        ptrs = target_ptr + offs_m // M2 // M1 * stride_0 + offs_m // M2 % M1 * stride_1 + offs_m % M2 * stride_2
        t = tl.load(ptrs, mask=offs_m < rows, other=ignore_index).to(tl.int64)
        inside = (offs_m < rows) & (t != ignore_index) & (t >= 0) & (t < N)
        if WEIGHT:
            total += tl.load(w_ptr + t * stride_w, mask=inside, other=0.0).to(COMPUTE)
        else:
            total += tl.where(inside, 1.0, 0.0)
    tl.store(total_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _reduce_kernel(value_ptr, total_ptr, result_ptr, ROWS, MEAN: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sum of ROWS numbers, a part of them for each program; for the mean over the sum of weights."""
    total = tl.zeros([BLOCK_M], value_ptr.dtype.element_ty)
    for block in tl.range(tl.program_id(0), blocks_in(ROWS, BLOCK_M), tl.num_programs(0)):
        offs_m = block_offsets(block, BLOCK_M, True)
        total += tl.load(value_ptr + offs_m, mask=offs_m < ROWS, other=0.0)
    result = tl.sum(total, axis=0)
    if MEAN:
        result = result / tl.load(total_ptr)
    tl.store(result_ptr + tl.program_id(0), cast(result, result_ptr.dtype.element_ty))


# ---- gradients --------------------------------------------------------------------------------------------------


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, target_ptr, statistics_ptr, w_ptr, total_ptr, M0, M1, M2, N,
    ignore_index, smoothing: tl.float64, z_loss: tl.float64, softcap: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    stride_target0, stride_target1, stride_target2, stride_statistics0, stride_statistics1, stride_statistics2,
    stride_dy0, stride_dy1, stride_dy2, stride_pair, stride_w,
    MEAN: tl.constexpr, WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row, split_row. Grid: tiles * SPLITS."""
    smoothing, z_loss, softcap = number(smoothing, COMPUTE), number(z_loss, COMPUTE), number(softcap, COMPUTE)
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    dx = (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn)
    target, w = (target_ptr, stride_target0, stride_target1, stride_target2), (w_ptr, stride_w)
    blocks = blocks_in(N, BLOCK_N)
    tile, part, first, last = part_of(tl.program_id(0), blocks, SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    t = _classes_of(target, i0, i1, i2, offs_m, mask_m, ignore_index)
    t, counts, inside, z_target, weight = _targets(
        x, t, w, i0, i1, i2, offs_m, mask_m, N, ignore_index, softcap, WEIGHT, CAPPED, COMPUTE
    )
    statistics = (statistics_ptr, stride_statistics0, stride_statistics1, stride_statistics2)
    dy = (dy_ptr, stride_dy0, stride_dy1, stride_dy2)
    pair = at(statistics, i0, i1, i2) + offs_m[:, None] * statistics[3]
    maximum = tl.load(pair, mask=mask_m[:, None], other=0.0)
    log_total = tl.load(pair + stride_pair, mask=mask_m[:, None], other=0.0)
    upstream = tl.load(at(dy, i0, i1, i2) + offs_m[:, None] * dy[3], mask=mask_m[:, None], other=0.0).to(COMPUTE)
    sum_w = tl.zeros([1, 1], COMPUTE)
    if SMOOTH and WEIGHT:
        row_w = tl.zeros([1, BLOCK_N], COMPUTE)
        for block in tl.range(0, blocks):
            offs_n = block_offsets(block, BLOCK_N, WIDE)
            row_w += _classes(w, offs_n, offs_n < N, WEIGHT, COMPUTE)
        sum_w = tl.sum(row_w, axis=1, keep_dims=True)
    elif SMOOTH:
        sum_w += N
    scale = upstream * _scale(total_ptr, MEAN, COMPUTE)
    factor, hit, scale = _factors(
        maximum, log_total, exp(log_total), weight, sum_w, counts, inside, scale, N, smoothing, z_loss,
        SMOOTH, Z_LOSS, COMPUTE,
    )  # fmt: skip
    _gradient_blocks(
        x, dx, w, i0, i1, i2, first, last, maximum, t, inside, z_target, weight, factor, hit, scale, offs_m, mask_m, N,
        smoothing, softcap, WEIGHT, SMOOTH, CAPPED, COMPUTE, WIDE, STAGES, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _rescale_kernel(
    x_ptr, dy_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn, stride_dy0, stride_dy1, stride_dy2,
    UNIFORM: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each row times its upstream gradient, in place; a row whose gradient is 1 is left alone. Grid: any."""
    x, dy = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (dy_ptr, stride_dy0, stride_dy1, stride_dy2)
    offs_m = block_offsets(0, 1, WIDE)
    rows = M0 * M1 * M2
    if UNIFORM:  # one gradient for all rows
        rows = tl.where(tl.load(dy_ptr) == 1, 0, rows)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        factor = tl.load(at(dy, i0, i1, i2)).to(COMPUTE)
        if factor != 1:
            for block in tl.range(0, blocks_in(N, BLOCK_N)):
                offs_n = block_offsets(block, BLOCK_N, WIDE)
                value = load(at(x, i0, i1, i2), offs_m, offs_n, offs_m < 1, offs_n < N, x[3], x[4], 0.0).to(COMPUTE)
                store(at(x, i0, i1, i2), value * factor, offs_m, offs_n, offs_m < 1, offs_n < N, x[3], x[4])


# ---- the ops ----------------------------------------------------------------------------------------------------


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> tuple[Any, ...]:
    """Cross entropy of logits and class indices, as ``torch.nn.functional.cross_entropy``.

    Args:
        input: logits, (C,), (B, C) or (B, C, ...), any strides; float16, bfloat16, float32 or float64. Never altered.
        target: classes from 0 to C - 1, ``input``'s shape without C; int64, int32 or uint8.
        weight: (C,), a weight for each class, or None. It gets no gradient. Where those of the targets that count add
            up to 0, neither the mean nor its gradient is finite; a class of weight 0 has no part in smoothing, whatever
            its logit.
        ignore_index: rows with this target count nowhere: not in the loss, the mean or the gradient.
        reduction: ``none``, ``mean`` (over the weights of the targets that count; NaN if none does) or ``sum``.
        label_smoothing: from 0 to 1, how much of a target is spread over all classes.
        z_loss: each row's loss grows by ``z_loss * logsumexp^2``, before the reduction.
        softcap: where it is not 0, logits are ``softcap * tanh(input / softcap)``.

    Returns a scalar, or ``target``'s shape for ``none``, in ``input``'s dtype (float32 where autocast is on, for a
    16-bit ``input``). A target that is neither ignored nor a class makes its row's loss and gradient NaN: on no device
    is anything read or written for it. Probabilities as a target are not taken.

    Raises BadType (a TypeError), BadArgument (a ValueError), Mismatch (a RuntimeError), UnsupportedDtype (a
    NotImplementedError).
    """
    op = "cross_entropy"
    dim = _check_shapes(op, input, target, weight)
    if reduction not in _REDUCTIONS:
        raise BadArgument(f"{op}(): reduction is {reduction!r}; it takes {', '.join(_REDUCTIONS)}")
    ignore_index = check_int(op, "ignore_index", ignore_index)
    if not -(2**63) <= ignore_index < 2**63:
        raise Mismatch(f"{op}(): ignore_index is {ignore_index:.3e}; no target holds more than 64 bits")
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
    smoothing, factor, cap = (check_number(op, name, number) for name, number in numbers.items())
    if not 0 <= smoothing <= 1:
        raise Mismatch(f"{op}(): label_smoothing is {smoothing}; it must lie between 0 and 1")
    if not 0 <= cap < math.inf or not -math.inf < factor < math.inf:  # comparisons, which torch.compile traces
        raise BadArgument(f"{op}(): softcap is {cap} and z_loss {factor}; both are finite, and softcap is 0 or more")
    # float16 would lose what backward has yet to scale up.
    gradient = input.requires_grad and torch.is_grad_enabled() and input.dtype != torch.float16
    weight = weight if weight is None else near(weight)
    return (
        readable(input, input, dim), target.contiguous(), weight, ignore_index, _REDUCTIONS.index(reduction),
        smoothing, factor, cap, gradient, autocast_to_float32(input, cpu=True),
    )  # fmt: skip


def _check_shapes(op: str, input: Tensor, target: Tensor, weight: Tensor | None) -> int:
    """Refuse tensors whose dtypes or shapes do not go together; the dim of ``input``'s classes."""
    check_dtype(op, "input", check_tensor(op, "input", input).dtype, FLOATS)
    check_tensor(op, "target", target)
    if target.dtype.is_floating_point:
        raise UnsupportedDtype(
            f"{op}(): target holds {target.dtype}; it takes class indices: use torch's for probabilities"
        )
    check_dtype(op, "target", target.dtype, (torch.int64, torch.int32, torch.uint8), "pass target.long()")
    if input.dim() == 0:
        raise Mismatch(f"{op}(): input is 0-d; expected (C,), (B, C) or (B, C, ...)")
    dim = min(1, input.dim() - 1)
    expected = (*input.shape[:dim], *input.shape[dim + 1 :])
    if tuple(target.shape) != expected:
        raise Mismatch(
            f"{op}(): target has the shape {list(target.shape)}, expected {list(expected)} beside the input's"
        )
    if input.shape[dim] == 0 and target.numel():
        raise Mismatch(f"{op}(): input has no classes along dim {dim}; expected at least 1")
    if weight is None:
        return dim
    check_dtype(op, "weight", check_tensor(op, "weight", weight).dtype, FLOATS)
    if tuple(weight.shape) != (input.shape[dim],):
        raise Mismatch(f"{op}(): weight has the shape {list(weight.shape)}, expected [{input.shape[dim]}], the classes")
    if weight.requires_grad and torch.is_grad_enabled():
        raise Mismatch(f"{op}(): weight requires grad, and there is no derivative for it: pass weight.detach()")
    return dim


_REDUCTIONS = ("none", "mean", "sum")
_NONE, _MEAN = 0, 1


@dataclass(frozen=True)
class _Call:
    """The canonical arguments, tensors or their Metas."""

    input: Any
    target: Any
    weight: Any
    ignore_index: int
    reduction: int
    smoothing: float
    z_loss: float
    softcap: float
    gradient: bool
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        return min(1, len(self.input.shape) - 1)

    @property
    def accumulator(self) -> torch.dtype:
        double = any(each is not None and each.dtype == torch.float64 for each in (self.input, self.weight))
        return torch.float64 if double else torch.float32

    @property
    def rows(self) -> int:
        return math.prod(self.target.shape)

    def spread(self, meta: Meta | Buffer) -> Meta:
        """One number a row as an operand of the input's shape."""
        strides = (*meta.strides[: self.dim], 0, *meta.strides[self.dim :])
        return Meta(self.input.shape, strides, meta.dtype)

    @property
    def flags(self) -> dict[str, Any]:
        return {"SMOOTH": self.smoothing != 0, "Z_LOSS": self.z_loss != 0, "CAPPED": self.softcap != 0}

    @property
    def extras(self) -> dict[str, Any]:
        """What kernels take beside operands. Numbers are spelt as float, so that 0 and 1 are no special case."""
        given: dict[str, Any] = {"ignore_index": self.ignore_index, "smoothing": float(self.smoothing)}
        given |= {"z_loss": float(self.z_loss), "softcap": float(self.softcap)}
        return given


def _per_row(shape: Sequence[int], dtype: torch.dtype) -> Buffer:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Buffer(tuple(shape), tuple(strides), dtype)


def _firsts(statistics: Meta | Buffer) -> Meta:
    """The first number of each row."""
    return Meta(tuple(statistics.shape[:-1]), tuple(statistics.strides[:-1]), statistics.dtype)


def _outputs(*args: Any) -> tuple[Buffer, ...]:
    """Loss, statistics (m and l of each row), the sum of weights (of the mean) and the gradient (if it is made)."""
    call = _Call(*args)
    loss = _per_row(call.target.shape, call.dtype) if call.reduction == _NONE else Buffer((), (), call.dtype)
    total = Buffer.flat(1 if call.reduction == _MEAN else 0, call.accumulator)
    gradient = like(call.input) if call.gradient else Buffer.flat(0, call.input.dtype)
    return loss, _per_row((*call.target.shape, 2), call.accumulator), total, gradient


def _problem(*args: Any) -> Problem:
    call = _Call(*args)
    operands: dict[str, Meta | Buffer] = {"x": call.input}
    if call.gradient:
        operands = {"dx": like(call.input), **operands}
    per_row = call.spread(_per_row(call.target.shape, call.accumulator))
    flags = {name.lower(): flag for name, flag in call.flags.items()}
    return row_problem(
        "cross_entropy", call.dim, operands, first=next(iter(operands)), others=(call.spread(call.target), per_row),
        vectors={"w": call.weight}, reduction=_REDUCTIONS[call.reduction], **flags,
    )  # fmt: skip


# 32-bit registers per element, fitted on compiled kernels, by whether all operands are 16-bit.
_LIVE = {
    True: {
        "packed_rows": 2.1, "resident_row": 2.1, "cached_row": 0.75, "looped_row": 3.0, "split_row": 3.0,
        "coresident_row": 2.2,
    },
    False: {
        "packed_rows": 2.3, "resident_row": 2.3, "cached_row": 0.75, "looped_row": 3.5, "split_row": 3.5,
        "coresident_row": 2.6,
    },
}  # fmt: skip

# The same of 16-bit operands without a cap: without spills, seven waiting programs of 4,096 columns fit a unit, in 72
# registers, and three rows of 32,768 that the nearest cache keeps, in 40.
_LIVE_PLAIN = {"resident_row": 1.6, "cached_row": 0.43, "coresident_row": 1.375}


def _work(problem: Problem) -> Work:
    narrow = problem.dtypes["x"] in ("float16", "bfloat16")
    live = {name: each + 2.0 * bool(problem.flags["smooth"]) for name, each in _LIVE[narrow].items()}
    if narrow and not (problem.flags["capped"] or problem.flags["smooth"]):
        live |= _LIVE_PLAIN
        if "w" in problem.dtypes:  # what sums the weights of targets would spill under the cap of seven programs
            live["coresident_row"] = _LIVE[narrow]["coresident_row"]
    if problem.flags["smooth"]:
        del live["coresident_row"]  # the word that its programs exchange has no room for more sums
        del live["cached_row"]
    return row_work(problem, ("x",), ("dx",) if "dx" in problem.dtypes else (), live, takes=("LAG", "PAIRS"), chained=1)


_FORWARD = RowKernels(
    whole=_whole_kernel,
    looped=_looped_kernel,
    partial=_partial_kernel,
    combine=_combine_kernel,
    coresident=_coresident_kernel,
    partials=4,
)


def _plan(config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    call, outputs = _Call(*args), _outputs(*args)
    mean, none = call.reduction == _MEAN, call.reduction == _NONE
    exchanged = int(call.rows > 0 and config.variant in ("split_row", "coresident_row"))
    metas: dict[str, Meta | Buffer] = {"dx": outputs[3]} if call.gradient else {}
    loss = call.spread(_per_row(call.target.shape, call.accumulator))
    metas |= {"x": call.input, "target": call.spread(call.target), "loss": loss}
    metas["statistics"] = call.spread(_firsts(outputs[1]))
    places: dict[str, Any] = {"dx": Out(3), "x": In(0), "target": In(1), "statistics": Out(1)}
    places["loss"] = Out(0) if none else Scratch(exchanged)
    extras = {**call.extras, **_weights(call, 2)} | ({"total_ptr": Out(2)} if mean else {})
    compute = TRITON_DTYPES[call.accumulator]
    rows = rows_of(list(metas.values()), call.dim)
    read = [(number, call.input) for number, name in enumerate(metas) if name == "x"]
    part = min(blocks["BLOCK_N"], 8 * config.num_warps * device.target.warp_size)  # 16 bytes of each lane
    plan = row_plan(
        _FORWARD, config, blocks, rows, {name: places[name] for name in metas}, outputs,
        compute=call.accumulator, extras=extras, GRADIENT=call.gradient, MEAN=mean, PART=part,
        WEIGHT=call.weight is not None, COMPUTE=compute,
        PAIRS=bool(config.params.get("PAIRS")) and in_pairs(rows, blocks["BLOCK_N"], read), **call.flags,
    )  # fmt: skip
    scratch, launches = list(plan.scratch), list(plan.launches)
    if not none:
        scratch.append(Buffer.flat(call.rows, call.accumulator))
    warps = max(config.num_warps, 8)
    # 64 bytes of numbers a lane: more would spill under the cap of waiting programs.
    most = 64 // call.accumulator.itemsize * warps * device.target.warp_size
    block = min(most, next_power_of_2(call.rows))
    programs = min(_PROGRAMS, cdiv(max(call.rows, 1), _MOST))
    if programs > 1 and not none:
        scratch.append(Buffer.flat(programs, call.accumulator))

    def reduce(kernel: Any, grid: int, arguments: Sequence[Any], **constexprs: Any) -> Launch:
        return Launch(kernel, (grid,), tuple(arguments), {**constexprs, "BLOCK_M": block}, warps)

    parts = Scratch(exchanged + 1)
    if mean:
        weight = (In(2), call.weight.strides[0]) if call.weight is not None else (None, 0)
        to = parts if programs > 1 else Out(2)
        each = rows_of((call.spread(call.target),), call.dim)
        if len(each.offsets) != 1:
            raise Mismatch("cross_entropy: the strides of target need more than 3 dims: pass target.contiguous()")
        sizes, steps = (each.sizes if call.rows else (0, 1, 1)), each.strides[0][:3]
        first = (In(1), weight[0], to, *sizes, each.n, call.ignore_index, *steps, weight[1])
        before = [reduce(_totals_kernel, programs, first, WEIGHT=call.weight is not None, COMPUTE=compute)]
        if programs > 1:
            before.append(reduce(_reduce_kernel, 1, (parts, None, Out(2), programs), MEAN=False))
        launches = [*before, *launches]
    if not none:
        total, losses = Out(2) if mean else None, Scratch(exchanged)
        if programs > 1:
            launches.append(reduce(_reduce_kernel, programs, (losses, None, parts, call.rows), MEAN=False))
            launches.append(reduce(_reduce_kernel, 1, (parts, total, Out(0), programs), MEAN=mean))
        else:
            launches.append(reduce(_reduce_kernel, 1, (losses, total, Out(0), call.rows), MEAN=mean))
    return Plan(outputs, tuple(scratch), tuple(launches))


_MOST, _PROGRAMS = 8_192, 64  # numbers that are worth a program of their own; programs at most


def _weights(call: _Call, position: int) -> dict[str, Any]:
    if call.weight is None:
        return {}
    return {"w_ptr": In(position), "stride_w": call.weight.strides[0]}


# ---- backward: the gradient anew, and the one at hand made right ---------------------------------------------------


def _backward_call(args: Sequence[Any]) -> tuple[Any, Any, Any, _Call]:
    """(upstream, statistics, total, call) of the canonical arguments of the backward op."""
    grad_output, statistics, total, *rest = args
    return grad_output, statistics, total, _Call(*(*rest, True, rest[0].dtype))


def _upstream(call: _Call, grad_output: Meta) -> Meta:
    """One gradient a row, or the same one for all."""
    if call.reduction == _NONE:
        return call.spread(grad_output)
    return Meta(call.input.shape, (0,) * len(call.input.shape), grad_output.dtype)


def _backward_outputs(*args: Any) -> tuple[Buffer, ...]:
    return (like(_backward_call(args)[3].input),)


def _backward_problem(*args: Any) -> Problem:
    grad_output, statistics, _, call = _backward_call(args)
    others = (call.spread(call.target), call.spread(_firsts(statistics)), _upstream(call, grad_output))
    flags = {name.lower(): flag for name, flag in call.flags.items()}
    return row_problem(
        "cross_entropy_backward", call.dim, {"dx": like(call.input), "x": call.input}, first="dx", others=others,
        vectors={"w": call.weight}, reduction=_REDUCTIONS[call.reduction], **flags,
    )  # fmt: skip


def _backward_work(problem: Problem) -> Work:
    return row_work(problem, ("x",), ("dx",), {"looped_row": 3.5, "split_row": 3.5})


_BACKWARD = RowKernels(
    whole=None, looped=_backward_kernel, partial=None, combine=_backward_kernel, coresident=None, partials=0
)


def _backward_plan(config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    grad_output, statistics, _, call = _backward_call(args)
    outputs = _backward_outputs(*args)
    metas: dict[str, Meta | Buffer] = {"dx": outputs[0], "x": call.input, "target": call.spread(call.target)}
    metas |= {"statistics": call.spread(_firsts(statistics)), "dy": _upstream(call, grad_output)}
    places: dict[str, In | Out] = {"dx": Out(0), "x": In(3), "target": In(4), "statistics": In(1), "dy": In(0)}
    mean = call.reduction == _MEAN
    return row_plan(
        _BACKWARD, config, blocks, rows_of(list(metas.values()), call.dim), places, outputs,
        compute=call.accumulator,
        extras={
            **call.extras, **_weights(call, 5), "total_ptr": In(2), "stride_pair": statistics.strides[-1],
        },
        MEAN=mean, WEIGHT=call.weight is not None, COMPUTE=TRITON_DTYPES[call.accumulator], **call.flags,
    )  # fmt: skip


def _rescale_problem(gradient: Meta, grad_output: Meta, dim: int) -> Problem:
    one = int(not grad_output.shape)
    sizes = {"M": gradient.numel // max(gradient.shape[dim], 1), "N": gradient.shape[dim], "ONE": one}
    dtypes = {"x": str(gradient.dtype).removeprefix("torch."), "dy": str(grad_output.dtype).removeprefix("torch.")}
    return Problem("cross_entropy_backward_rescale", FrozenMap(sizes), FrozenMap(dtypes))


def _rescale_work(problem: Problem) -> Work:
    """As if upstream gradients were 1: nothing but these are read."""
    read = 4 * (1 if problem.sizes["ONE"] else problem.sizes["M"])
    return Work(
        "rows_in_place", problem.sizes, problem.dtypes, FrozenMap(), FrozenMap(rows=2.0), read, 0, ("rows",)
    )  # fmt: skip


def _rescale_candidates(device: Device, work: Work) -> tuple[Config, ...]:
    shapes = ((4096, 8, 4), (4096, 4, 8), (2048, 4, 4), (8192, 8, 2), (1024, 4, 8))
    return tuple(
        Config("rows", FrozenMap(BLOCK_N=block, PROGRAMS_PER_UNIT=programs), warps) for block, warps, programs in shapes
    )


def _rescale_fit(config: Config, work: Work, device: Device) -> Blocks:
    block = min(config.params["BLOCK_N"], next_power_of_2(work.sizes["N"]))
    programs = min(device.units * config.params["PROGRAMS_PER_UNIT"], max(work.sizes["M"], 1))
    return Blocks(BLOCK_N=block, PROGRAMS=programs)


def _rescale_plan(
    config: Config, blocks: Blocks, device: Device, gradient: Meta, grad_output: Meta, dim: int
) -> Plan:  # fmt: skip
    if gradient.numel == 0:
        return Plan(())
    upstream = Meta(gradient.shape, (0,) * len(gradient.shape), grad_output.dtype)
    if grad_output.shape:
        strides = (*grad_output.strides[:dim], 0, *grad_output.strides[dim:])
        upstream = Meta(gradient.shape, strides, grad_output.dtype)
    rows = rows_of((gradient, upstream), dim)
    x, dy = rows.strides
    compute = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    wide = (rows.n - 1) * abs(x[3]) >= 2**31 - 1
    flags = {"COMPUTE": TRITON_DTYPES[compute], "UNIFORM": not any(upstream.strides)}
    launches = tuple(
        Launch(
            _rescale_kernel, (blocks["PROGRAMS"],),
            (In(0, start), In(1, begin), *rows.sizes, rows.n, *x, *dy[:3]),
            {**flags, "WIDE": wide, "BLOCK_N": blocks["BLOCK_N"]}, config.num_warps,
        )
        for start, begin in rows.offsets
    )  # fmt: skip
    return Plan((), (), launches)


def rescale_reference(gradient: Tensor, grad_output: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Each row of ``gradient`` times its upstream gradient, in place."""
    gradient.mul_(grad_output.unsqueeze(dim) if grad_output.dim() else grad_output)
    return ()


class _Gradient:
    """The gradient that the forward made, for the first backward to take: it may be altered and given away. Held apart
    from what autograd saves, which must stay as it is."""

    def __init__(self, made: Tensor | None) -> None:
        self.made = made
        self.given: Tensor | None = None

    def take(self) -> Tensor | None:
        """What was made, once."""
        made, self.made = self.made, None
        return made


def _save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    call = _Call(*args)
    _, statistics, total, gradient = outputs
    made = _Gradient(gradient.detach() if call.gradient else None)
    return (made, statistics, total, *args[:8])


def _backward_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    made, statistics, total, *args = saved
    input, reduction = args[0], args[4]
    dim = min(1, input.dim() - 1)
    upstream = grads[0]
    if upstream is None:
        upstream = torch.zeros((), dtype=input.dtype, device=input.device)
        upstream = upstream.expand(args[1].shape) if reduction == _NONE else upstream
    recorded = torch.is_grad_enabled()  # a second derivative is meant: the gradient has to know what it was made of
    made.given = None if recorded else made.take()
    if made.given is None:
        made.given = torch.ops.portkern.cross_entropy_backward.default(upstream, statistics, total, *args)
        upstream = torch.ones((), dtype=input.dtype, device=input.device)
    return made.given.detach() if recorded else made.given, upstream, dim


def _gradients(saved: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    made = saved[0]
    given, made.given = made.given, None
    return (given,)


# ---- references and inputs ----------------------------------------------------------------------------------------


def _reference_parts(call: _Call, statistics: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """z - m with classes last, statistics, loss of each row, gradient (classes last), weight of each target, all in the
    accumulator's dtype. ``scale`` is what each row's gradient is multiplied by; by default 1 over the sum of weights
    for the mean. It multiplies each term, as in the kernels: where the weights add up to 0, a row that counts is not
    finite, and an ignored one is 0."""
    accumulator = call.accumulator
    x = call.input.movedim(call.dim, -1).to(accumulator)
    z = call.softcap * torch.tanh(x / call.softcap) if call.softcap else x
    n = x.shape[-1]
    if statistics is None:
        # As in the kernels: a NaN is left out, which the sum finds, and a row of -inf has a finite maximum.
        least = torch.finfo(accumulator).min
        maximum = z.nan_to_num(least, math.inf, least).amax(-1) if n else z.new_zeros(z.shape[:-1])
        away = z - maximum.unsqueeze(-1)
        statistics = torch.stack((maximum, torch.exp(away).sum(-1).log()), -1)
    maximum, log_total = statistics.to(accumulator).unbind(-1)
    away, lse = z - maximum.unsqueeze(-1), maximum + log_total
    w = torch.ones(n, dtype=accumulator, device=x.device) if call.weight is None else call.weight.to(accumulator)
    t = call.target.long()
    counts = t != call.ignore_index
    inside = counts & (t >= 0) & (t < n)
    at = torch.where(inside, t, 0)
    hit = torch.where(inside, w[at], 0.0)
    target = torch.where(inside, away.gather(-1, at.unsqueeze(-1)).squeeze(-1), 0.0)
    s = call.smoothing
    if scale is None:
        scale = 1 / hit.sum() if call.reduction == _MEAN else hit.new_ones(())
    scale = scale.unsqueeze(-1) if scale.dim() else scale
    loss, factor = (1 - s) * hit * (log_total - target), (1 - s) * hit
    if call.z_loss:  # not 0 times a square that may overflow
        loss, factor = loss + call.z_loss * lse.square(), factor + 2 * call.z_loss * lse
    if s and n:
        loss = loss + s / n * (w.sum() * log_total - torch.where(w != 0, w * away, 0.0).sum(-1))
        factor = factor + s / n * w.sum()
    gradient = torch.exp(away) * (factor.unsqueeze(-1) * scale / log_total.exp().unsqueeze(-1))
    gradient = gradient - (w * (scale * (s / n)) if s and n else 0.0)
    own = ((1 - s) * hit).unsqueeze(-1) * scale
    gradient = gradient - torch.zeros_like(gradient).scatter_(-1, at.unsqueeze(-1), own)
    if call.softcap:
        gradient = gradient * (1 - (z / call.softcap).square())
    bad = torch.where(counts & ~inside, math.nan, 1.0).to(accumulator)
    loss = torch.where(counts, loss * bad, 0.0)
    gradient = torch.where(counts.unsqueeze(-1), gradient * bad.unsqueeze(-1), 0.0)
    return away, torch.stack((maximum, log_total), -1), loss, gradient, hit


def reference(*args: Any) -> tuple[Tensor, ...]:
    """Cross entropy in plain torch: loss, statistics, sum of weights and gradient, as the op gives them."""
    call = _Call(*args)
    _, statistics, loss, gradient, hit = _reference_parts(call)
    total = hit.sum().reshape(1)
    if call.reduction != _NONE:
        loss = loss.sum() / total[0] if call.reduction == _MEAN else loss.sum()
    made = (
        gradient.movedim(-1, call.dim).to(call.input.dtype)
        if call.gradient
        else hit.new_empty(0, dtype=call.input.dtype)
    )
    return loss.to(call.dtype), statistics, total if call.reduction == _MEAN else total[:0], made


def _sizes(call: _Call, away: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each z - m with the roundings in it, and of l and lse of a row, with 0 for what is not finite. A cap makes z
    anew, to an ulp of the cap."""
    maximum, log_total = statistics.unbind(-1)
    sizes = (away.abs() + call.softcap, 1 + log_total.abs(), (maximum + log_total).abs())
    return tuple(each.nan_to_num(0.0, 0.0, 0.0) for each in sizes)  # type: ignore[return-value]


def _terms(*args: Any) -> tuple[Tensor, ...]:
    """Loss: z - m of the target, and of all where it is smoothed. Gradient: exp(z - m) carries the rounding of its
    argument, and the target has a 1 of its own."""
    call = _Call(*args)
    away, statistics, _, gradient, hit = _reference_parts(call)
    if not away.shape[-1]:
        return reference(*args)
    far, log_total, lse = _sizes(call, away, statistics)
    w = 1.0 if call.weight is None else float(call.weight.abs().max())
    own = call.target.long().clamp(0, far.shape[-1] - 1).unsqueeze(-1)
    target = (1 - call.smoothing) * far.gather(-1, own).squeeze(-1) + call.smoothing * far.mean(-1)
    loss = (target + log_total) * w + abs(call.z_loss) * (1 + lse) ** 2
    total = hit.sum()
    if call.reduction != _NONE:
        loss = loss.sum() / total if call.reduction == _MEAN else loss.sum()
    probability = torch.exp(away) / statistics[..., 1:].exp()
    made = probability * (far + log_total.unsqueeze(-1)) + (gradient < 0)
    made = made * (w + 2 * abs(call.z_loss) * (1 + lse.unsqueeze(-1)))
    made = gradient.abs() + (made / total if call.reduction == _MEAN else made)
    made = made.movedim(-1, call.dim) if call.gradient else hit.new_empty(0)
    sizes = 1 + statistics.abs() + call.softcap
    return loss, sizes, total.reshape(1) if call.reduction == _MEAN else total.reshape(1)[:0], made


def _upstream_scale(call: _Call, grad_output: Tensor, total: Tensor) -> Tensor:
    scale = grad_output.to(call.accumulator)
    return scale / total[0] if call.reduction == _MEAN else scale


def backward_reference(*args: Any) -> Tensor:
    """The gradient in plain torch, from logits and statistics."""
    grad_output, statistics, total, call = _backward_call(args)
    _, _, _, gradient, _ = _reference_parts(call, statistics, _upstream_scale(call, grad_output, total))
    return gradient.movedim(-1, call.dim).to(call.input.dtype)


def _backward_terms(*args: Any) -> Tensor:
    """As of the forward."""
    grad_output, statistics, total, call = _backward_call(args)
    scale = _upstream_scale(call, grad_output, total)
    away, statistics, _, gradient, _ = _reference_parts(call, statistics, scale)
    far, log_total, lse = _sizes(call, away, statistics)
    w = 1.0 if call.weight is None else float(call.weight.abs().max())
    probability = torch.exp(away) / statistics[..., 1:].exp()
    made = (probability * (far + log_total.unsqueeze(-1)) + 1) * (w + 2 * abs(call.z_loss) * (1 + lse.unsqueeze(-1)))
    made = made / total[0] if call.reduction == _MEAN else made
    upstream = grad_output.abs().unsqueeze(-1) if grad_output.dim() else grad_output.abs()
    terms: Tensor = (gradient.abs() + made * upstream).movedim(-1, call.dim)
    return terms


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", reduction: str = "mean", weight: str = "none", smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float = 0.0, gradient: bool = True, stray: bool = False, zeros: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Some targets are ignored, with ``stray`` some are no classes; ``wide`` logits need their maximum subtracted. Each
    weight whose number ``zeros`` divides is 0."""
    x = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
    if style != "normal":
        x = x * 20
    if style == "nonfinite":
        x = torch.where(x < -40, -math.inf, torch.where(x > 55, math.nan, x))
    dim = min(1, len(sizes) - 1)
    rows = (*sizes[:dim], *sizes[dim + 1 :])
    target = torch.randint(0, max(sizes[dim], 1), rows, generator=generator, device=device)
    if target.numel() > 3 and target.device.type != "meta":
        flat = target.view(-1)
        flat[1::5] = -100
        if stray:
            flat[2::5] = sizes[dim] + 3
            flat[3::7] = -1
    w = None
    if weight != "none":
        w = (
            torch.rand(sizes[dim], generator=generator, device=device).to(getattr(torch, weight) if weight else dtype)
            + 0.5
        )
        if zeros:
            w[::zeros] = 0
    return x.to(dtype), target, w, -100, _REDUCTIONS.index(reduction), smoothing, z_loss, softcap, gradient, dtype


def _backward_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    args = _inputs(sizes, dtype, device=device, generator=generator, style=style, **options)
    call = _Call(*args)
    if torch.device(device).type == "meta":
        _, statistics, total, _ = _outputs(*(Meta.of(arg) if isinstance(arg, Tensor) else arg for arg in args))
        made = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in (statistics, total)]
    else:
        exact = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args[:9]]
        _, *made, _ = (each.to(call.accumulator) for each in reference(*exact, torch.float64))
    shape = call.target.shape if call.reduction == _NONE else ()
    grad_output = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return (grad_output, *made, *args[:8])


def _rescale_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", one: bool = False, rows: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    dim = min(1, len(sizes) - 1)
    shape = (*sizes[:dim], *sizes[dim + 1 :]) if rows else ()
    gradient = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)
    upstream = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return gradient, torch.ones_like(upstream) if one else upstream, dim


CASES = (
    Case((5,)), Case((0, 5)), Case((4, 1)), Case((7, 33)), Case((6, 130), {"reduction": "none", "weight": ""}),
    Case((9, 130), {"reduction": "sum", "smoothing": 0.1, "weight": "float32"}), Case((2, 5, 3, 2), {"smoothing": 0.2}),
    Case((7, 40), {"z_loss": 0.01, "softcap": 30.0}), Case((3, 1000), {"gradient": False}),
    Case((6, 40), {"stray": True, "reduction": "none"}), Case((3, 4097), {"smoothing": 0.1, "z_loss": 0.001}),
    Case((4, 33), {"weight": "float32", "zeros": 1}), Case((4, 6), {"weight": "", "zeros": 1, "smoothing": 0.1}),
    Case((9, 5), {"weight": "float32", "zeros": 2}),
    Case((6, 7), {"weight": "", "zeros": 2, "smoothing": 1.0, "reduction": "none"}),
)  # fmt: skip
_BACKWARD_CASES = tuple(case for case in CASES if case.options.get("gradient", True))
_RESCALE_CASES = (
    Case((5,)), Case((4, 33), {"one": True}), Case((4, 33)), Case((6, 130), {"rows": True}), Case((0, 4)),
    Case((2, 5, 3), {"rows": True}),
)  # fmt: skip
TUNE_CASES = tuple(Case(sizes) for sizes in ((4096, 1024), (4096, 32000), (4096, 128256), (32768, 256), (8192, 8192)))
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _eager(*args: Any) -> tuple[Tensor | None, ...]:
    """torch's loss and gradient, in the places of the op's outputs."""
    call = _Call(*args)
    if not call.gradient:
        return (_loss_of_torch(call, call.input),)
    x = call.input.detach().requires_grad_()
    loss = _loss_of_torch(call, x)
    return loss.detach(), None, None, torch.autograd.grad(loss.sum(), x)[0]


def _loss_of_torch(call: _Call, x: Tensor) -> Tensor:
    z = call.softcap * torch.tanh(x / call.softcap) if call.softcap else x
    w = None if call.weight is None else call.weight.to(x.dtype)  # torch takes no other dtype
    loss = torch.nn.functional.cross_entropy(
        z, call.target, w, None, call.ignore_index, None, _REDUCTIONS[call.reduction], call.smoothing
    )
    if not call.z_loss:
        return loss
    counts = call.target != call.ignore_index
    penalty = torch.where(counts, call.z_loss * torch.logsumexp(z, call.dim).square(), 0.0)
    if call.reduction == _NONE:
        return loss + penalty
    if call.reduction != _MEAN:
        return loss + penalty.sum()
    hit = counts if w is None else torch.where(counts, w[torch.where(counts, call.target, 0)], 0.0)
    return loss + penalty.sum() / hit.sum()


def _backward_eager(*args: Any) -> Tensor:
    """Softmax less 1 at the target, in place. torch's own two functions move as many bytes, and take the logarithms of
    probabilities, which are no argument of the op and would have to be made first."""
    grad_output, statistics, total, call = _backward_call(args)
    x, dim, w, s = call.input, call.dim, call.weight, call.smoothing
    z = call.softcap * torch.tanh(x / call.softcap) if call.softcap else x
    made = torch.softmax(z, dim)
    counts = call.target != call.ignore_index
    at = torch.where(counts, call.target, 0).long()
    hit = torch.ones_like(at, dtype=x.dtype) if w is None else w.to(x.dtype)[at]
    scale = (grad_output / total[0] if call.reduction == _MEAN else grad_output).to(x.dtype)
    scale = torch.where(counts, scale, 0.0)
    if s or call.z_loss:
        n = x.shape[dim]
        spread = torch.ones(n, dtype=x.dtype, device=x.device) if w is None else w.to(x.dtype)
        factor = (1 - s) * hit + 2 * call.z_loss * statistics.sum(-1).to(x.dtype) + s / n * spread.sum()
        made.mul_(factor.unsqueeze(dim)).sub_((s / n * spread).view(-1, *(1,) * (x.dim() - dim - 1)))
        hit = (1 - s) * hit
    else:
        hit, scale = torch.ones_like(hit), hit * scale
    made.scatter_add_(dim, at.unsqueeze(dim), -hit.unsqueeze(dim)).mul_(scale.unsqueeze(dim))
    return made.mul_(1 - (z / call.softcap).square()) if call.softcap else made


_ARGUMENTS = (
    "Tensor input, Tensor target, Tensor? weight, int ignore_index, int reduction, float label_smoothing, "
    "float z_loss, float softcap"
)

OPS = (
    Op(
        "cross_entropy",
        f"({_ARGUMENTS}, bool gradient, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
        signature=cross_entropy,
        saved=3,
        problem=_problem,
        work=_work,
        outputs=_outputs,
        fit=fit_rows,
        plan=_plan,
        reference=reference,
        terms=_terms,
        eager=_eager,
        inputs=_inputs,
        cases=CASES,
        tune_cases=TUNE_CASES,
        dtypes=_DTYPES,
        backward=Backward("cross_entropy_backward_rescale", _save, _backward_arguments, (0,), _gradients),
    ),
    Op(
        "cross_entropy_backward",
        f"(Tensor grad_output, Tensor statistics, Tensor total, {_ARGUMENTS}) -> Tensor",
        problem=_backward_problem,
        work=_backward_work,
        outputs=_backward_outputs,
        fit=fit_rows,
        plan=_backward_plan,
        reference=backward_reference,
        terms=_backward_terms,
        eager=_backward_eager,
        inputs=_backward_inputs,
        cases=_BACKWARD_CASES,
        tune_cases=TUNE_CASES,
        dtypes=_DTYPES,
    ),
    Op(
        "cross_entropy_backward_rescale",
        "(Tensor(a!) gradient, Tensor grad_output, int dim) -> ()",
        problem=_rescale_problem,
        work=_rescale_work,
        outputs=lambda *args: (),
        fit=_rescale_fit,
        plan=_rescale_plan,
        candidates=_rescale_candidates,
        reference=rescale_reference,
        inputs=_rescale_inputs,
        cases=_RESCALE_CASES,
        tune_cases=(Case((4096, 32000), {"one": True}),),
        dtypes=_DTYPES,
    ),
)
