"""sum, mean, var_mean, amax and argmax over any dims.

    sum_n x      sum_n x / N      (sum_n (x - mean)^2 / (N - correction), mean)      max_n x      the first n of max_n x

The public functions bring the reduced dims to the end and make them one, as a view where strides allow it and as a
copy where they do not; the kernels reduce rows x: (..., N) of any strides. A tile is BLOCK_M rows by BLOCK_N columns.
It holds whole rows (packed and resident rows), or a program walks a row (looped rows), or a row is cut into SPLITS
parts, whose states a second launch merges in a fixed order (split rows). Each column of a tile keeps a state of its
own, up to three numbers, so that errors stay those of short sums. NaN is the maximum, the first one is its place, which
argmax looks for in the first group of neighbours that has the maximum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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
    check_bool,
    check_dim,
    check_dtype,
    check_number,
    check_one_dim,
    check_tensor,
)
from portkern.batching import Folded, InDims, stacked
from portkern.broadcast import contiguous
from portkern.config import Blocks, Config
from portkern.errors import BadArgument, BadDim, BadType, Mismatch, UnsupportedDtype
from portkern.integers import cdiv, next_power_of_2
from portkern.kernels._rows import block_offsets, blocks_in, cast, part_of, row_base, tile_origin
from portkern.layout import Rows, needs_wide_offsets, read_at_once, row_layout, rows_of
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan, Scratch
from portkern.pointwise_arguments import canonical
from portkern.pointwise_op import pointwise
from portkern.pointwise_plan import triton_dtype
from portkern.pointwise_reference import values_of
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.row_reduction import fit_rows, row_work
from portkern.target import Device

SUM, MEAN, VAR_MEAN, AMAX, ARGMAX, ABSMAX = range(6)
_FAR: tl.constexpr = tl.constexpr(4611686018427387904)  # the place of a maximum that is still to be found


@triton.jit
def _far(DTYPE: tl.constexpr):
    """A place beyond all others: those of one tile may be 32 bits wide."""
    if DTYPE == tl.int64:
        return _FAR
    else:
        return 2147483647


@triton.jit
def _lowest(COMPUTE: tl.constexpr):
    if COMPUTE == tl.int64:
        return -9223372036854775808
    elif COMPUTE == tl.int32:
        return -2147483648
    else:
        return -float("inf")


@triton.jit
def _filler(DTYPE: tl.constexpr):
    """What stands for columns beyond a row: no value of the type is lower."""
    if DTYPE.is_floating():
        return -float("inf")
    elif DTYPE.is_int_unsigned():
        return 0
    else:
        return -(2 ** (DTYPE.primitive_bitwidth - 1))


@triton.jit
def _filled_load(x_base, offs_m, offs_n, mask_m, N, stride_xm, stride_xn, COMPUTE: tl.constexpr):
    other: tl.constexpr = _filler(x_base.dtype.element_ty)
    mask = mask_m[:, None] & (offs_n < N)
    return tl.load(x_base + (offs_m[:, None] * stride_xm + offs_n * stride_xn), mask=mask, other=other).to(COMPUTE)


@triton.jit
def _key(x):
    """x as an integer of the same order, both zeros equal and NaN, whichever, above all."""
    if x.dtype == tl.float64:
        size = tl.minimum(tl.abs(x).to(tl.int64, bitcast=True), 0x7FF0000000000001)  # that of infinity, and 1
        return tl.where(x < 0, -size, size)
    elif x.dtype == tl.float32:
        size = tl.minimum(tl.abs(x).to(tl.int32, bitcast=True), 0x7F800001)
        return tl.where(x < 0, -size, size)
    else:
        return x


@triton.jit
def _greatest(x, GROUP: tl.constexpr):
    """The maximum of each GROUP neighbours in a row, NaN where there is one."""
    for _ in tl.static_range(GROUP.bit_length() - 1):
        left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        x = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _first_maximum(
    greatest, starts, x_base, offs_m, mask_m, N, stride_xm, stride_xn, COMPUTE: tl.constexpr, GROUP: tl.constexpr
):
    """(key of the maximum, its first place) of each row, given the maxima of its groups and where those start.

    The place lies in the first group that has the maximum, which is read again: a place for each element took 579
    instructions for the 32 elements of a lane in rows of 8192 bfloat16, this takes 177.
    """
    keys = _key(greatest)
    best = tl.max(keys, axis=1, keep_dims=True)
    place = tl.min(tl.where(keys == best, starts, _far(starts.dtype)), axis=1, keep_dims=True)
    if GROUP > 1:
        offs_n = place + tl.arange(0, GROUP)[None, :]
        keys = _key(_filled_load(x_base, offs_m, offs_n, mask_m, N, stride_xm, stride_xn, COMPUTE))
        place = tl.min(tl.where(keys == best, offs_n, _far(offs_n.dtype)), axis=1, keep_dims=True)
    return best, place


@triton.jit
def _fresh(KIND: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The state of nothing: (sum,), (count, mean, squares), (maximum,) or (maximum, its place, which is to be set)."""
    zero = tl.zeros([ROWS, COLUMNS], COMPUTE)
    if KIND >= 3:
        return tl.full([ROWS, COLUMNS], _lowest(COMPUTE), COMPUTE), zero, zero
    else:
        return zero, zero, zero


@triton.jit
def _folded(a, b, c, x, mask, share, KIND: tl.constexpr):
    """The state with x taken in where mask is set; of any kind but argmax.

    share: 1 / the number of blocks so far, this one included: as many has each element of a state taken in while its
    mask was set. With a division an element, one took 27 instructions, not 16.
    """
    if KIND == 5:
        x = tl.abs(x)
    if KIND <= 1:
        return a + tl.where(mask, x, 0), b, c
    elif KIND == 2:
        away = tl.where(mask, x - b, 0.0)
        mean = b + away * share
        return a + tl.where(mask, 1.0, 0.0), mean, c + away * tl.where(mask, x - mean, 0.0)
    else:
        return tl.where(mask & ((x > a) | (x != x)), x, a), b, c


@triton.jit
def _merged(a, b, c, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """One state for each row of states."""
    if KIND <= 1:
        return tl.sum(a, axis=1, keep_dims=True), b, c
    elif KIND == 2:
        count = tl.sum(a, axis=1, keep_dims=True)
        mean = tl.sum(a * b, axis=1, keep_dims=True) / tl.where(count > 0, count, 1.0)
        away = tl.where(a > 0, b - mean, 0.0)
        return count, mean, tl.sum(c + a * away * away, axis=1, keep_dims=True)
    elif KIND == 4:  # of keys, see ``_key``
        best = tl.max(a, axis=1, keep_dims=True)
        return best, tl.min(tl.where(a == best, b, _far(b.dtype)), axis=1, keep_dims=True), c
    else:
        best = tl.max(tl.where(a != a, _lowest(COMPUTE), a), axis=1, keep_dims=True)
        if COMPUTE == tl.float32 or COMPUTE == tl.float64:
            nan = tl.max((a != a).to(tl.int32), axis=1, keep_dims=True) > 0
            best = tl.where(nan, float("nan"), best)
        return best, b, c


@triton.jit
def _state(x, mask, N, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """The state of rows that lie in one tile, of any kind but argmax, without those of its elements: a tensor of
    counts, say, has no load to take its layout from, and cost hundreds of instructions an element."""
    if KIND == 5:
        x = tl.abs(x)
    if KIND <= 1:
        total = tl.sum(tl.where(mask, x, 0), axis=1, keep_dims=True)
        return total, total, total
    elif KIND == 2:
        count = tl.cast(N, COMPUTE)
        mean = tl.sum(tl.where(mask, x, 0.0), axis=1, keep_dims=True) / count
        away = tl.where(mask, x - mean, 0.0)
        return tl.zeros(mean.shape, COMPUTE) + count, mean, tl.sum(away * away, axis=1, keep_dims=True)
    else:
        x = tl.where(mask, x, _lowest(COMPUTE))
        return _merged(x, x, x, KIND, COMPUTE)


@triton.jit
def _put(y_base, z_base, a, b, c, N, correction, offs_m, mask_m, stride_y, KIND: tl.constexpr):
    """Stores what the states of whole rows come to."""
    at, mask = offs_m[:, None] * stride_y, mask_m[:, None]
    if KIND == 0:
        tl.store(y_base + at, a.to(y_base.dtype.element_ty), mask=mask)
    elif KIND == 1:
        tl.store(y_base + at, (a / tl.cast(N, a.dtype)).to(y_base.dtype.element_ty), mask=mask)
    elif KIND == 2:
        left = tl.maximum(tl.cast(N, tl.float64) - tl.full([], correction, tl.float64), 0.0)
        # Of nothing both are NaN; with no freedom left, the variance is 0 / 0 or infinite.
        nothing = tl.where(a > 0, 0.0, float("nan"))
        tl.store(y_base + at, (c / left.to(c.dtype) + nothing).to(y_base.dtype.element_ty), mask=mask)
        # A row with an infinity has neither, whatever place that had in it.
        b = tl.where(c != c, float("nan"), b)
        tl.store(z_base + at, (b + nothing).to(z_base.dtype.element_ty), mask=mask)
    elif KIND == 3 or KIND == 5:
        tl.store(y_base + at, a.to(y_base.dtype.element_ty), mask=mask)
    else:
        tl.store(y_base + at, b, mask=mask)


@triton.jit
def _walked(
    x_base, first, last, offs_m, mask_m, N, stride_xm, stride_xn,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The state of each row over its column blocks first to last."""
    a, b, c = _fresh(KIND, COMPUTE, BLOCK_M, BLOCK_N)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        x = tl.load(x_base + (offs_m[:, None] * stride_xm + offs_n[None, :] * stride_xn), mask=mask)
        share = b
        if KIND == 2:
            share = 1.0 / tl.cast(block - first + 1, COMPUTE)
        a, b, c = _folded(a, b, c, x.to(COMPUTE), mask, share, KIND)
    return _merged(a, b, c, KIND, COMPUTE)


@triton.jit
def _walked_place(
    x_base, first, last, offs_m, mask_m, N, stride_xm, stride_xn,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(maximum as a key, its first place) of each row over its column blocks first to last."""
    a = tl.full([BLOCK_M, BLOCK_N // GROUP], _lowest(COMPUTE), COMPUTE)
    # Of a place, the number of its block is kept, in 32 bits.
    b = (tl.zeros([BLOCK_M, BLOCK_N // GROUP], tl.int32) + first).to(tl.int32)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        x = _filled_load(x_base, offs_m, offs_n[None, :], mask_m, N, stride_xm, stride_xn, COMPUTE)
        x = _greatest(x, GROUP)
        better = (x > a) | ((x != x) & (a == a))
        a, b = tl.where(better, x, a), tl.where(better, tl.cast(block, tl.int32), b)
    starts = b.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP
    return _first_maximum(a, starts, x_base, offs_m, mask_m, N, stride_xm, stride_xn, COMPUTE, GROUP)


@triton.jit(do_not_specialize=["correction"])
def _reduce_kernel(
    x_ptr, y_ptr, z_ptr, correction: tl.float64, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row (WHOLE) and looped_row. Grid: one program per BLOCK_M rows."""
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    x_base = row_base(x_ptr, i0, i1, i2, stride_x0, stride_x1, stride_x2)
    if KIND == 4:
        if WHOLE:
            offs_n = block_offsets(0, BLOCK_N, WIDE)
            x = _filled_load(x_base, offs_m, offs_n[None, :], mask_m, N, stride_x2, stride_xn, COMPUTE)
            starts = block_offsets(0, BLOCK_N // GROUP, WIDE)[None, :] * GROUP
            a, b = _first_maximum(
                _greatest(x, GROUP), starts, x_base, offs_m, mask_m, N, stride_x2, stride_xn, COMPUTE, GROUP
            )
        else:
            a, b = _walked_place(
                x_base, 0, blocks_in(N, BLOCK_N), offs_m, mask_m, N, stride_x2, stride_xn,
                COMPUTE, WIDE, STAGES, GROUP, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        c = a
    elif WHOLE:
        offs_n = block_offsets(0, BLOCK_N, WIDE)
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        x = tl.load(x_base + (offs_m[:, None] * stride_x2 + offs_n[None, :] * stride_xn), mask=mask).to(COMPUTE)
        a, b, c = _state(x, mask, N, KIND, COMPUTE)
    else:
        blocks = blocks_in(N, BLOCK_N)
        a, b, c = _walked(
            x_base, 0, blocks, offs_m, mask_m, N, stride_x2, stride_xn, KIND, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N
        )
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    z_base = y_base if KIND != 2 else row_base(z_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    _put(y_base, z_base, a, b, c, N, correction, offs_m, mask_m, stride_y2, KIND)


@triton.jit
def _part_kernel(
    x_ptr, a_ptr, b_ptr, c_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """split_row, first launch: states to scratch, (tiles, BLOCK_M, SPLITS). Grid: SPLITS programs per BLOCK_M rows."""
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    x_base = row_base(x_ptr, i0, i1, i2, stride_x0, stride_x1, stride_x2)
    if KIND == 4:
        a, b = _walked_place(
            x_base, first, last, offs_m, offs_m < M2 - i2, N, stride_x2, stride_xn,
            COMPUTE, WIDE, STAGES, GROUP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        a, b, c = _walked(
            x_base, first, last, offs_m, offs_m < M2 - i2, N, stride_x2, stride_xn,
            KIND, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    at = (tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]) * SPLITS + part
    tl.store(a_ptr + at, a)
    if KIND == 2:
        tl.store(b_ptr + at, b)
        tl.store(c_ptr + at, c)
    elif KIND == 4:
        tl.store(b_ptr + at, b)


@triton.jit(do_not_specialize=["correction"])
def _merge_kernel(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, correction: tl.float64, M0, M1, M2, N, stride_y0, stride_y1, stride_y2,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: one program per BLOCK_M rows."""
    tile = tl.program_id(0)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_s = block_offsets(0, BLOCK_M, WIDE), tl.arange(0, BLOCK_SPLITS)[None, :]
    at = (tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]) * SPLITS + offs_s
    a, b, c = _fresh(KIND, COMPUTE, BLOCK_M, BLOCK_SPLITS)
    mask = (offs_s < SPLITS) & (tl.arange(0, BLOCK_M)[:, None] >= 0)
    a = tl.where(mask, tl.load(a_ptr + at, mask=mask), a)
    if KIND == 4:
        b = tl.load(b_ptr + at, mask=mask, other=_FAR)
    if KIND == 2:
        b = tl.where(mask, tl.load(b_ptr + at, mask=mask), b)
        c = tl.where(mask, tl.load(c_ptr + at, mask=mask), c)
    a, b, c = _merged(a, b, c, KIND, COMPUTE)
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    z_base = y_base if KIND != 2 else row_base(z_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    _put(y_base, z_base, a, b, c, N, correction, offs_m, offs_m < M2 - i2, stride_y2, KIND)


@triton.jit
def _converted(
    x_base, first, last, offs_m, mask_m, N, stride_xm, stride_xn,
    KIND: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``_walked`` of x converted to AS."""
    a, b, c = _fresh(KIND, COMPUTE, BLOCK_M, BLOCK_N)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        x = tl.load(x_base + (offs_m[:, None] * stride_xm + offs_n[None, :] * stride_xn), mask=mask)
        a, b, c = _folded(a, b, c, cast(x, AS).to(COMPUTE), mask, b, KIND)
    return _merged(a, b, c, KIND, COMPUTE)


@triton.jit(do_not_specialize=["correction"])
def _converted_kernel(
    x_ptr, y_ptr, z_ptr, correction: tl.float64, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2,
    KIND: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``_reduce_kernel`` for sums of x as AS, which holds less than x and than COMPUTE."""
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m, blocks = offs_m < M2 - i2, blocks_in(N, BLOCK_N)
    x_base = row_base(x_ptr, i0, i1, i2, stride_x0, stride_x1, stride_x2)
    a, b, c = _converted(
        x_base, 0, blocks, offs_m, mask_m, N, stride_x2, stride_xn, KIND, AS, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N
    )
    y_base = row_base(y_ptr, i0, i1, i2, stride_y0, stride_y1, stride_y2)
    _put(y_base, y_base, a, b, c, N, correction, offs_m, mask_m, stride_y2, KIND)


@triton.jit
def _converted_part_kernel(
    x_ptr, a_ptr, b_ptr, c_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    KIND: tl.constexpr, AS: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``_part_kernel`` for the same sums."""
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    x_base = row_base(x_ptr, i0, i1, i2, stride_x0, stride_x1, stride_x2)
    a, b, c = _converted(
        x_base, first, last, offs_m, offs_m < M2 - i2, N, stride_x2, stride_xn,
        KIND, AS, COMPUTE, WIDE, STAGES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    at = (tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]) * SPLITS + part
    tl.store(a_ptr + at, a)


# ---- the public functions -----------------------------------------------------------------------------------------


def sum(
    input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> tuple[Any, ...]:
    """Sum over ``dim``, as ``torch.sum``.

    Args:
        input: any real type, shape and strides.
        dim: a dim or several; all by default.
        keepdim: whether reduced dims stay, of size 1.
        dtype: the type of the result, to which each value is converted first, as by torch on a GPU: 1e30 is infinite
            in float16. Without it that of ``input`` (float32 where autocast is on, for a 16-bit ``input`` on a GPU),
            and int64 for integers.

    16-bit values are summed in float32. The order of summation is fixed.
    Raises BadDim (an IndexError), Mismatch (a RuntimeError), BadType (a TypeError), UnsupportedDtype.
    """
    result = dtype or (autocast_to_float32(input) if _checked("sum", input).is_floating_point() else torch.int64)
    return *rows_to_reduce("sum", input, dim, keepdim), check_dtype("sum", "dtype", result, (*FLOATS, *INTEGERS))


def mean(
    input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> tuple[Any, ...]:
    """Mean over ``dim``, as ``torch.mean``. Args, result and errors are those of ``sum``; integers need a ``dtype``."""
    result = dtype or _checked("mean", input).dtype
    check_dtype("mean", "dtype", result, FLOATS, "give a floating dtype=")
    return *rows_to_reduce("mean", input, dim, keepdim), result


def var_mean(
    input: Tensor, dim: int | Sequence[int] | bool | None = None, unbiased: bool | None = None, keepdim: bool = False,
    *, correction: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Variance and mean over ``dim``, as ``torch.var_mean``.

    Args:
        input: floating, any shape and strides.
        dim, keepdim: as for ``sum``. A bool in the place of ``dim`` is ``unbiased``.
        unbiased: True is a correction of 1, False of 0; not beside ``correction``.
        correction: what is taken from the count that squares are divided by; 1 without it.

    Returns (variance, mean); both are NaN where the input has an infinity, which of torch's is true of the variance.
    The mean of values whose sum passes the accumulator's range may be infinite, as ``mean``'s is and torch's here is
    not; the variance of such values is infinite in both.
    Errors are those of ``sum``.
    """
    check_dtype("var_mean", "input", _checked("var_mean", input).dtype, FLOATS)
    if isinstance(dim, bool) and unbiased is None:  # torch's overload without dims
        dim, unbiased = None, dim
    if unbiased is not None:
        if correction is not None:
            raise BadType("var_mean(): unbiased and correction are both given: give correction alone")
        correction = float(check_bool("var_mean", "unbiased", unbiased))
    taken = 1.0 if correction is None else check_number("var_mean", "correction", correction)
    return *rows_to_reduce("var_mean", input, dim, keepdim), taken


def amax(input: Tensor, dim: int | Sequence[int] | None = (), keepdim: bool = False) -> tuple[Any, ...]:
    """Maximum over ``dim``, as ``torch.amax``: NaN where there is one.

    The gradient is shared by equal maxima, and NaN where the maximum is.

    Args, result and errors are those of ``sum``; a reduced dim may not be empty.
    """
    _checked("amax", input)
    error = BadDim if isinstance(dim, int) or dim else Mismatch  # torch has a RuntimeError for a maximum of nothing
    return _filled("amax", rows_to_reduce("amax", input, dim, keepdim), error)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Any, ...]:
    """Place of the maximum along ``dim``, or in the flattened ``input``, as ``torch.argmax``.

    It is the first of equal ones, and the first NaN where there is one. Returns an int64 tensor. Args and errors are
    otherwise those of ``amax``.
    """
    if _checked("argmax", input).dtype == torch.bool:
        raise UnsupportedDtype("argmax(): not implemented for bool; convert to uint8 first")
    dims = None if dim is None else (check_one_dim("argmax", dim, input.dim()),)
    return _filled("argmax", rows_to_reduce("argmax", input.detach(), dims, keepdim))


def _checked(op: str, input: Tensor) -> Tensor:
    check_dtype(op, "input", check_tensor(op, "input", input).dtype, (*FLOATS, *INTEGERS, torch.bool))
    return input


def rows_to_reduce(op: str, input: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> tuple[Tensor, list[int]]:
    """``input`` with the reduced dims last, as one, and the shape of the result."""
    check_bool(op, "keepdim", keepdim)
    rank = input.dim()
    given = dim if isinstance(dim, (tuple, list)) else () if dim is None else (dim,)
    dims = [check_dim(op, each, rank) for each in given] or list(range(rank))
    if len(set(dims)) < len(dims):
        raise Mismatch(f"{op}(): dim {max(dims, key=dims.count)} appears multiple times in dim={tuple(given)}")
    if rank == 0:
        return input.reshape(1), []
    kept = [axis for axis in range(rank) if axis not in dims]
    shape = [1 if axis in dims else size for axis, size in enumerate(input.shape) if keepdim or axis not in dims]
    length = 1
    for axis in dims:  # a loop, which torch.compile traces
        length = length * input.shape[axis]
    x = input.permute(*kept, *sorted(dims)).reshape([*(input.shape[axis] for axis in kept), length])
    return x, shape


def _filled(op: str, args: tuple[Tensor, list[int]], error: type[BadArgument] = BadDim) -> tuple[Tensor, list[int]]:
    if args[0].shape[-1] == 0:
        raise error(f"{op}(): a reduced dim is empty, and nothing has no maximum; give dims of 1 element and more")
    return args


# ---- plans --------------------------------------------------------------------------------------------------------


def _dtype_of(kind: int, x: Meta, rest: Sequence[Any]) -> torch.dtype:
    """Of the result."""
    if kind == ABSMAX:
        return torch.float64 if x.dtype == torch.float64 else torch.float32
    found: torch.dtype = rest[0] if kind <= MEAN else torch.int64 if kind == ARGMAX else x.dtype
    return found


def _outputs(kind: int, x: Meta, shape: Sequence[int], *rest: Any) -> tuple[Buffer, ...]:
    buffer = Buffer(tuple(shape), contiguous(shape), _dtype_of(kind, x, rest))
    return (buffer, buffer) if kind == VAR_MEAN else (buffer,)


def _seen(x: Meta) -> tuple[Meta, Rows]:
    """The result seen beside ``x``, repeated along the reduced dim, and both as rows."""
    y = Meta(x.shape, (*contiguous(x.shape[:-1]), 0), x.dtype)
    return y, rows_of((y, x), len(x.shape) - 1)


def _problem(kind: int, name: str, x: Meta, shape: Sequence[int], *rest: Any) -> Problem:
    _, rows = _seen(x)
    sizes = {"M": rows.m, "N": rows.n}
    if rows.sizes[2] != rows.m:
        sizes["INNER"] = rows.sizes[2]
    dtypes = {"x": x.dtype, "y": _dtype_of(kind, x, rest)}
    return Problem(
        op=name,
        sizes=FrozenMap(sizes),
        dtypes=FrozenMap({key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}),
        layout=FrozenMap(x=row_layout(x, rows, 1)),
    )


_LIVE = {
    SUM: (1.4, 2.0), MEAN: (1.4, 2.0), VAR_MEAN: (3.0, 5.0), AMAX: (1.6, 4.0), ARGMAX: (1.6, 4.0), ABSMAX: (1.6, 4.0)
}  # fmt: skip


def _work(kind: int, problem: Problem) -> Work:
    whole, walked = _LIVE[kind]
    live = {"packed_rows": whole, "resident_row": whole, "looped_row": walked, "split_row": walked}
    work = row_work(problem, reads=("x",), writes=(), live=live)
    results = problem.sizes["M"] * getattr(torch, problem.dtypes["y"]).itemsize
    double = problem.dtypes["x"] in ("int64", "float64") or problem.dtypes["y"] in ("int64", "float64")
    if double and work.compute_bytes == 4:
        work = dataclasses.replace(work, live=FrozenMap({name: 2 * each for name, each in work.live.items()}))
    return dataclasses.replace(work, writes=results * (2 if kind == VAR_MEAN else 1))


def compute_dtype(kind: int, x: torch.dtype, y: torch.dtype) -> torch.dtype:
    """What is computed in: float32 for 16-bit floats, the result's type for sums, the wide integers for others."""
    base = y if kind <= MEAN else x
    if base.is_floating_point:
        return torch.float64 if base == torch.float64 else torch.float32
    return torch.int64 if base == torch.int64 or kind == SUM else torch.int32


def key_dtype(compute: torch.dtype) -> torch.dtype:
    """Of the integers that stand for values of a type, see ``_key``."""
    return {torch.float32: torch.int32, torch.float64: torch.int64}.get(compute, compute)


def _plan(kind: int, config: Config, blocks: Blocks, device: Device, x: Meta, shape: Sequence[int], *rest: Any) -> Plan:
    outputs, (_, rows) = _outputs(kind, x, shape, *rest), _seen(x)
    if rows.m == 0:
        return Plan(outputs)
    compute = compute_dtype(kind, x.dtype, outputs[0].dtype)
    correction = rest[0] if kind == VAR_MEAN else 0.0
    tiles = rows.sizes[0] * rows.sizes[1] * cdiv(rows.sizes[2], blocks["BLOCK_M"])
    splits = blocks["SPLITS"]
    constexprs = {
        "KIND": kind, "COMPUTE": triton_dtype(compute), "WIDE": needs_wide_offsets(rows, blocks["BLOCK_M"]),
        "BLOCK_M": blocks["BLOCK_M"],
    }  # fmt: skip
    group = min(read_at_once(x, rows, 1), blocks["BLOCK_N"]) if kind == ARGMAX else 1
    stages = {"STAGES": config.num_stages, "GROUP": group, "BLOCK_N": blocks["BLOCK_N"]}
    state_type = key_dtype(compute) if kind == ARGMAX else compute
    launches, scratch = [], ()
    for y_offset, x_offset in rows.offsets:
        made = partial(Launch, num_warps=config.num_warps, num_stages=config.num_stages)
        sizes, (y_strides, x_strides) = (*rows.sizes, rows.n), rows.strides
        results = (Out(0, y_offset), Out(1, y_offset) if kind == VAR_MEAN else None, correction)
        if config.variant != "split_row":
            whole = {"WHOLE": config.variant != "looped_row"}
            args = (In(0, x_offset), *results, *sizes, *x_strides, *y_strides[:3])
            launches.append(made(_reduce_kernel, (tiles,), args, {**constexprs, **stages, **whole}))
            continue
        state = tiles * blocks["BLOCK_M"] * splits
        numbers = {VAR_MEAN: 3, ARGMAX: 2}.get(kind, 1)
        scratch = tuple(
            Buffer.flat(state, torch.int64 if kind == ARGMAX and place == 1 else state_type) for place in range(numbers)
        )
        states = tuple(Scratch(place) if place < numbers else None for place in range(3))
        parts = {"SPLITS": splits}
        args = (In(0, x_offset), *states, *sizes, *x_strides)
        launches.append(made(_part_kernel, (tiles * splits,), args, {**constexprs, **stages, **parts}))
        args = (*states, *results, *sizes, *y_strides[:3])
        parts |= {"BLOCK_SPLITS": next_power_of_2(splits), "COMPUTE": triton_dtype(state_type)}
        launches.append(made(_merge_kernel, (tiles,), args, {**constexprs, **parts}))
    return Plan(outputs, scratch, tuple(launches))


def _sum_plan(
    kind: int, config: Config, blocks: Blocks, device: Device, x: Meta, shape: Sequence[int], dtype: torch.dtype
) -> Plan:
    """``_plan``, with other kernels where ``dtype`` is not what is summed in, and x has values that it has not."""
    plan = _plan(kind, config, blocks, device, x, shape, dtype)
    if x.dtype == dtype or dtype not in (torch.float16, torch.bfloat16):
        return plan
    launches = []
    for launch in plan.launches:
        if launch.kernel is not _merge_kernel:
            kernel = _converted_kernel if launch.kernel is _reduce_kernel else _converted_part_kernel
            given = {**launch.constexprs, "AS": triton_dtype(dtype)}
            constexprs = {name: each for name, each in given.items() if name in kernel.arg_names}
            launch = dataclasses.replace(launch, kernel=kernel, constexprs=constexprs)
        launches.append(launch)
    return dataclasses.replace(plan, launches=tuple(launches))


# ---- gradients ----------------------------------------------------------------------------------------------------


@triton.jit
def _var_mean_slope(grad_var, grad_mean, x, mean, twice: float, once: float):
    return grad_var * (x - mean) * twice + grad_mean * once


@triton.jit
def _amax_slope(share, x, maximum):
    return tl.where(x == maximum, share, tl.where(maximum == maximum, 0.0, maximum))  # NaN, as in torch


_SLOPE_CASES = (*(Case(sizes) for sizes in ((7,), (0, 5), (3, 33), (4099,))), Case((5, 130), {"other": "column"}))
_SLOPES = (
    pointwise(
        "var_mean_backward", public=False, examples={"twice": 0.02, "once": 0.01}, cases=_SLOPE_CASES,
        # The small factor first: in float16 the others overflow together.
        reference=lambda grad_var, grad_mean, x, mean, twice, once: ((x - mean) * twice * grad_var + grad_mean * once),
        terms=lambda grad_var, grad_mean, x, mean, twice, once: (
            (grad_var * twice).abs() * (x.abs() + mean.abs()) + (grad_mean * once).abs()
        ),
        # As torch's autograd: numbers meet the gradients first, which are columns.
        eager=lambda grad_var, grad_mean, x, mean, twice, once: (x - mean) * (grad_var * twice) + grad_mean * once,
    )(_var_mean_slope),
    pointwise(
        "amax_backward", public=False, cases=_SLOPE_CASES,
        reference=lambda share, x, maximum: torch.where(
            x == maximum, share, torch.where(maximum.isnan(), maximum, torch.zeros((), dtype=maximum.dtype))
        ),
        eager=lambda share, x, maximum: (x == maximum) * share,  # as torch's autograd
    )(_amax_slope),
)  # fmt: skip


def _kept(each: Tensor, x: Tensor) -> Tensor:
    """A result, or its gradient, as a column beside ``x``."""
    return each.reshape(*x.shape[:-1], 1)


def _sum_gradient(mean: bool, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    shape, dtype = saved
    grad = grads[0] / shape[-1] if mean and shape[-1] else grads[0]
    return (grad.to(dtype).reshape(*shape[:-1], 1).expand(shape),)


def _var_mean_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    x, mean, correction = saved
    count = x.shape[-1]
    left = count - correction  # below 0, where the variance is infinite, too: as torch's over a dim
    twice, once = 2 / left if left else 1.0, 1 / count if count else math.inf  # of nothing there is no gradient
    # An infinite factor would make NaN of the zeros that stand for a variance that nothing used.
    grad_var = grads[0] if left else torch.where(grads[0] == 0, 0.0, grads[0] * math.inf)
    given = (_kept(grad_var, x), _kept(grads[1], x), x, _kept(mean, x), twice, once)
    return canonical(_SLOPES[0].ops[0].plan.args[0], given)  # type: ignore[attr-defined]


def _amax_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    x, maximum = saved
    count = (x == _kept(maximum, x)).sum(-1, keepdim=True)
    given = (_kept(grads[0], x) / count, x, _kept(maximum, x))
    return canonical(_SLOPES[1].ops[0].plan.args[0], given)  # type: ignore[attr-defined]


# ---- references, cases, declarations ------------------------------------------------------------------------------


def _reference(kind: int, x: Tensor, shape: Sequence[int], *rest: Any) -> Any:
    if kind <= MEAN:
        # torch's mean converts first on a GPU, and on the CPU with some types only.
        return (torch.sum if kind == SUM else torch.mean)(x.to(rest[0]), -1).to(rest[0]).reshape(tuple(shape))
    if kind == VAR_MEAN:
        if x.numel() == 0:
            return (x.new_full(tuple(shape), math.nan),) * 2
        left = max(x.shape[-1] - rest[0], 0)
        var = torch.var(x, -1, correction=0) * (x.shape[-1] / left if left else math.inf)
        infinite = x.isinf().any(-1)  # where it stands decides what torch's mean is
        mean = torch.where(infinite, math.nan, x.mean(-1))
        return tuple(each.reshape(tuple(shape)).to(x.dtype) for each in (var, mean))
    found = torch.argmax(x, -1) if kind == ARGMAX else torch.amax(x.abs() if kind == ABSMAX else x, -1)
    return found.reshape(tuple(shape))


def _var_mean_eager(x: Tensor, shape: Sequence[int], correction: float) -> Any:
    return tuple(each.reshape(tuple(shape)) for each in torch.var_mean(x, -1, correction=correction))


def _exact(kind: int, x: Tensor, shape: Sequence[int], *rest: Any) -> Any:
    """In fp64, of the input as the result's dtype holds it."""
    if kind <= MEAN and rest[0].is_floating_point:
        return _reference(kind, x.to(rest[0]).double(), shape, torch.float64)
    return _reference(kind, x if kind == ARGMAX or not x.is_floating_point() else x.double(), shape, *rest)


def _terms(kind: int, x: Tensor, shape: Sequence[int], *rest: Any) -> Any:
    """Sums of sizes; of a variance, of squares; of a maximum, itself."""
    if kind >= AMAX:
        return _reference(kind, x, shape, *rest)
    if kind != VAR_MEAN and rest[0].is_floating_point:
        x = x.to(rest[0])
    total = x.double().abs().sum(-1) / (x.shape[-1] if kind != SUM else 1)
    if kind != VAR_MEAN:
        return total.reshape(tuple(shape))
    return (x.double().square().mean(-1)).reshape(tuple(shape)), total.reshape(tuple(shape))


def _inputs(
    kind: int, sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", dim: Any = -1, source: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    kind_of_source = getattr(torch, source) if source else dtype
    x = values_of(sizes, kind_of_source if kind_of_source.is_floating_point else dtype, device, generator, style)
    if kind_of_source.is_floating_point and source:
        x = _with_large(x, dtype)
    elif source:
        x = torch.randint(0, 2 if source == "bool" else 100, sizes, generator=generator, device=device)
        x = x.to(kind_of_source)
    elif style == "wide" and x.numel() and x.device.type != "meta":
        x = (x.clamp(-100, 100) + 30).to(dtype)  # a mean far from 0
    x, shape = rows_to_reduce("reduction", x, dim, False)
    if kind <= MEAN:
        return x, shape, dtype if kind_of_source.is_floating_point or kind == MEAN else torch.int64
    return (x, shape, 1.0) if kind == VAR_MEAN else (x, shape)


def _with_large(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x of 2 dims with values that are infinite as ``dtype``, if x can hold such: two in the first row, which cancel
    unless they are converted, and one in the second."""
    large = 4 * torch.finfo(dtype).max
    if large <= torch.finfo(x.dtype).max and x.device.type != "meta":
        x[0, 3], x[0, 7], x[1, 5] = large, -large, large
    return x


def _cases(kind: int) -> tuple[Case, ...]:
    sizes: tuple[tuple[tuple[int, ...], Any], ...] = (
        ((), None), ((7,), None), ((3, 1), -1), ((0, 5), -1), ((5, 7), 0), ((4, 33), -1), ((4, 33), None),
        ((2, 3, 130), (0, 2)), ((3, 129, 4), 1), ((65, 2, 3), 0), ((2, 1008), -1), ((3, 4097), -1),
        ((2, 5, 3, 17), (1, 2)),
    )  # fmt: skip
    if kind <= MEAN:
        sizes = (*sizes, ((5, 0), -1))
    sources = ("int64", "uint8", "bool")[: 3 if kind in (SUM, AMAX) else 2 if kind == ARGMAX else 0]
    if kind <= MEAN:
        sources = (*sources, "float64", "float32", "float16")  # some are wider than the result, others narrower
    return (*(Case(each, {"dim": dim}) for each, dim in sizes), *(Case((3, 130), {"source": each}) for each in sources))


def _fold(in_dims: InDims, input: Tensor, shape: Sequence[int], *rest: Any) -> Folded:
    """A mapped dim holds more rows."""
    (x,) = stacked(in_dims, input)
    return Folded((x, [x.size(0), *shape], *rest))


def _op(name: str, kind: int, signature: Any, schema: str, backward: Backward | None) -> Op:
    plan = _sum_plan if kind <= MEAN else _plan
    return Op(
        name, schema, signature=signature, problem=partial(_problem, kind, name), work=partial(_work, kind),
        outputs=partial(_outputs, kind), fit=fit_rows, plan=partial(plan, kind), reference=partial(_reference, kind),
        exact=partial(_exact, kind), terms=partial(_terms, kind), inputs=partial(_inputs, kind), cases=_cases(kind),
        eager=_var_mean_eager if kind == VAR_MEAN else None,
        tune_cases=tuple(Case(sizes) for sizes in ((8192, 8192), (32768, 256), (1, 67108864))), backward=backward,
        vmap=_fold, dtypes=("float32", "float16", "bfloat16", "float64"),
    )  # fmt: skip


def _shape_and_dtype(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0].shape, args[0].dtype


# Also an op of the files that call it, so that it is there when one of them is loaded alone.
LARGEST_SIZE = _op("absmax", ABSMAX, None, "(Tensor input, SymInt[] shape) -> Tensor", None)
OPS = (
    _op(
        "sum", SUM, sum, "(Tensor input, SymInt[] shape, ScalarType dtype) -> Tensor",
        Backward("", _shape_and_dtype, partial(_sum_gradient, False), (0,)),
    ),
    _op(
        "mean", MEAN, mean, "(Tensor input, SymInt[] shape, ScalarType dtype) -> Tensor",
        Backward("", _shape_and_dtype, partial(_sum_gradient, True), (0,)),
    ),
    _op(
        "var_mean", VAR_MEAN, var_mean, "(Tensor input, SymInt[] shape, float correction) -> (Tensor, Tensor)",
        Backward(
            "var_mean_backward", lambda args, outputs: (args[0], outputs[1], args[2]), _var_mean_arguments, (0,)
        ),
    ),
    _op(
        "amax", AMAX, amax, "(Tensor input, SymInt[] shape) -> Tensor",
        Backward("amax_backward", lambda args, outputs: (args[0], outputs[0]), _amax_arguments, (0,)),
    ),
    LARGEST_SIZE,
    _op("argmax", ARGMAX, argmax, "(Tensor input, SymInt[] shape) -> Tensor", None),
    *_SLOPES[0].ops,
    *_SLOPES[1].ops,
)  # fmt: skip
