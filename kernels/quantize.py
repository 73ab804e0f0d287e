"""Quantisation to 8-bit floats with a scale for each row, or for the tensor.

    scale = max |x| / largest (1 where that is 0)        q = round(x / scale), to nearest, ties to even

The format is the running device's own: e4m3fn (largest 448), or e4m3fnuz (largest 240) where the architecture has only
that. Where a target has no instruction for the conversion, integers round.

Rows x, q: (M0, M1, M2, N), with one scale a row, take one launch: a tile holds whole rows (packed and resident rows),
or a program walks a row twice (looped rows). A few long rows, a large tensor with one scale, and rows along other dims
take three: the largest size, the scale, and the codes. Both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern import dispatch, library
from portkern.arguments import check_dtype, check_tensor
from portkern.broadcast import contiguous
from portkern.config import Blocks, Config
from portkern.kernels._rows import (
    at,
    block_offsets,
    blocks_in,
    collect,
    numbers,
    opaque,
    pairs_at,
    publish,
    tile_origin,
)
from portkern.kernels.reductions import LARGEST_SIZE, rows_to_reduce
from portkern.layout import Rows, in_pairs, readable, rows_of
from portkern.op import Case, Op, Result
from portkern.plan import Buffer, In, Meta, Out, Plan, like
from portkern.pointwise_arguments import canonical
from portkern.pointwise_op import pointwise
from portkern.pointwise_reference import values_of
from portkern.problem import Problem, Work
from portkern.row_plan import RowKernels, row_plan
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.runtime import current, planned_for
from portkern.target import Device

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
# A program takes whole rows, so fewer of them than a device has units leave some idle; that one unit walks so long a
# row takes about as long as two more launches, by the bytes that each moves. Estimated, not measured.
FEW_ROWS, LONG_ROW = 128, 131_072


@triton.jit
def _scale(size, largest: float):
    # A plain division is not rounded to nearest everywhere: then the codes of one tensor would differ between devices.
    return tl.where(size == 0, 1.0, tl.div_rn(size, largest))


@triton.jit
def _quotient(x, scale):
    """x / scale rounded to nearest, as a division gives it, for a third of its instructions an element.

    The reciprocal is taken once for all that share the scale; a product with it, corrected by its exact remainder, is
    the rounded quotient (Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990).
    Small scales are made larger first, so that no reciprocal overflows and no remainder is subnormal.
    """
    lift = tl.where(tl.abs(scale) < 8.673617379884035e-19, 1.2089258196146292e24, 1.0)  # 2^-60, 2^80
    divisor, x = scale * lift, x * lift
    reciprocal = tl.div_rn(1.0, divisor)
    y = x * reciprocal
    rest = tl.fma(-y, divisor, x)
    # It is a small part of x, but for an infinity or a zero, which stay, and for a quotient too small to matter.
    return tl.where(tl.abs(rest) < tl.abs(x), tl.fma(rest, reciprocal, y), y)


@triton.jit
def _code(x, scale, FNUZ: tl.constexpr = 0, NATIVE: tl.constexpr = 0):
    """The 8 bits of x / scale."""
    LARGEST: tl.constexpr = 240.0 if FNUZ else 448.0
    y = tl.maximum(_quotient(x, scale), -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    y = tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if NATIVE:
        if FNUZ:
            return y.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        BIAS: tl.constexpr = 8 if FNUZ else 7
        size = tl.abs(y)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
        # Below 2^(1 - BIAS) a step is 2^(-2 - BIAS): the last place of a sum with 2^(21 - BIAS).
        SHIFT: tl.constexpr = 8192.0 if FNUZ else 16384.0
        small = (size + SHIFT).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < (0.0078125 if FNUZ else 0.015625), small, normal)
        sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        if FNUZ:
            code = tl.where(code == 0, 0, code | sign)  # there is no -0
            return tl.where(y != y, 0x80, code).to(tl.uint8)
        else:
            return tl.where(y != y, 0x7F, code | sign).to(tl.uint8)


# ---- rows, in one launch ------------------------------------------------------------------------------------------


@triton.jit
def _part(
    x, i0, i1, i2, block, offs_m, mask_m, N,
    WIDE: tl.constexpr, PAIRS: tl.constexpr, EVICTION: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Block ``block`` of PART columns of each row, 0 outside of it. PAIRS: 16-bit numbers as int32 words of two, which
    take an instruction less for each number, and half a register where they wait."""
    WORD: tl.constexpr = 2 if PAIRS else 1
    offs_n = block_offsets(block, PART // WORD, WIDE)
    ptrs = pairs_at(at(x, i0, i1, i2), PAIRS) + (offs_m[:, None] * (x[3] // WORD) + offs_n[None, :] * x[4])
    mask = mask_m[:, None] & (offs_n < N // WORD)[None, :]
    return tl.load(ptrs, mask=mask, other=0, eviction_policy=EVICTION)


@triton.jit
def _row_parts(
    x, i0, i1, i2, first, offs_m, mask_m, N,
    WIDE: tl.constexpr, PAIRS: tl.constexpr, EVICTION: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (_part(x, i0, i1, i2, first + part, offs_m, mask_m, N, WIDE, PAIRS, EVICTION, PART),)  # type: ignore[assignment]
    return parts


@triton.jit
def _size_bits(x):
    """Twice the bits of |x|, as integers, which have the order of the sizes, and NaN above infinity: a maximum of
    floats would have to look for NaN apart. Of a word of two, of the larger one: what stands below decides nothing."""
    if x.dtype == tl.int32:
        words = x.to(tl.uint32, bitcast=True)
        return tl.maximum(words << 1, words << 17)
    else:
        return x.to(tl.float32).to(tl.uint32, bitcast=True) << 1


@triton.jit
def _part_bits(parts, PARTS: tl.constexpr):
    size_bits = _size_bits(parts[0])
    for part in tl.static_range(1, PARTS):
        size_bits = tl.maximum(size_bits, _size_bits(parts[part]))
    return size_bits


@triton.jit
def _largest(size_bits):
    """Of each row, [BLOCK_M, 1]. Of one row by way of a scalar, which fits any layout: else what was read in words
    would change lanes to meet it."""
    if size_bits.shape[0] == 1:
        return tl.full([1, 1], tl.max(size_bits), tl.uint32)
    else:
        return tl.max(size_bits, axis=1, keep_dims=True)


@triton.jit
def _size(bits, AS: tl.constexpr, PAIRS: tl.constexpr):
    """The number of which these are ``_size_bits``."""
    if PAIRS:
        return (bits >> 17).to(tl.uint16).to(AS, bitcast=True).to(tl.float32)
    else:
        return (bits >> 1).to(tl.float32, bitcast=True)


@triton.jit
def _row_scale(size, scale, i0, i1, i2, offs_m, mask_m, FNUZ: tl.constexpr):
    """The scale of each row, which is stored. size: [BLOCK_M, 1]."""
    LARGEST: tl.constexpr = 240.0 if FNUZ else 448.0
    found = _scale(size, LARGEST)
    tl.store(at(scale, i0, i1, i2) + offs_m[:, None] * scale[3], found, mask=mask_m[:, None])
    return found


@triton.jit
def _reciprocal(scale):
    """1 / scale rounded down, and what that lacks: neither is negative, so that a zero keeps its sign."""
    high = tl.div_rn(1.0, scale)
    below = (high.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    high = tl.where(tl.fma(-high, scale, 1.0) < 0, below, high)
    return high, tl.fma(-high, scale, 1.0) * high


@triton.jit
def _plain_code(x, scale, high, low, SHORT: tl.constexpr, FNUZ: tl.constexpr):
    """``_code`` by the target's instruction, in rows that ``_all_plain`` holds of. There no quotient passes the largest
    number by more than its rounding, so that nothing has to be clamped, and nothing to be lifted.

    SHORT: x was 16-bit. A product with the reciprocal in two parts is then the rounded quotient: so it was for each
    mantissa of x with each one of the largest size, of both 16-bit types and both formats.
    """
    if SHORT:
        y = tl.fma(x, high, x * low)
    else:
        y = x * high
        y = tl.fma(tl.fma(y, scale, -x), -high, y)  # of this sign, a remainder of 0 leaves a zero its own
    if FNUZ:
        return y.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
    else:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _all_plain(scale):
    """Whether all rows of a tile are finite, with a scale of 2^-60 to 2^60."""
    plain = (scale >= 8.673617379884035e-19) & (scale <= 1.152921504606847e18)
    return tl.min(plain.to(tl.int32)) == 1


@triton.jit
def _store_part(
    x, q, scale, high, low, i0, i1, i2, block, offs_m, mask_m, N, zero, AS: tl.constexpr, FNUZ: tl.constexpr,
    NATIVE: tl.constexpr, PLAIN: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    SHORT: tl.constexpr = AS.primitive_bitwidth == 16
    number = numbers(opaque(x, zero), AS, tl.float32)
    if PLAIN:
        code = _plain_code(number, scale, high, low, SHORT, FNUZ)
    else:
        code = _code(number, scale, FNUZ, NATIVE)
    # A lane shall store the codes of the 16 bytes that it read, so that none changes lanes: for that, it must not seem
    # to the compiler that more of them lie well.
    LANE: tl.constexpr = 8 if SHORT else 4
    offs_n = block_offsets(block, PART, WIDE)
    ptrs = at(q, i0, i1, i2) + (offs_m[:, None] * q[3] + (offs_n + LANE * tl.cast(zero, tl.int32))[None, :] * q[4])
    tl.store(ptrs, code, mask=mask_m[:, None] & (offs_n < N)[None, :])


@triton.jit
def _store_parts(
    parts, x, q, scale, i0, i1, i2, first, offs_m, mask_m, N, zero, FNUZ: tl.constexpr, NATIVE: tl.constexpr,
    WIDE: tl.constexpr, PAIRS: tl.constexpr, REREAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    high, low = _reciprocal(scale)
    for part in tl.static_range(PARTS):
        if REREAD:
            raw = _part(x, i0, i1, i2, first + part, offs_m, mask_m, N, WIDE, PAIRS, "evict_first", PART)
        else:
            raw = parts[part]
        _store_part(
            raw, q, scale, high, low, i0, i1, i2, first + part, offs_m, mask_m, N, zero,
            x[0].dtype.element_ty, FNUZ, NATIVE, NATIVE, WIDE, PART,
        )  # fmt: skip


@triton.jit
def _store_blocks(
    blocks, x, q, scale, i0, i1, i2, first, offs_m, mask_m, N, zero, FNUZ: tl.constexpr, NATIVE: tl.constexpr,
    PLAIN: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The blocks from ``first`` on, read again. Last block first: what was read last is still in cache."""
    high, low = _reciprocal(scale)
    for index in tl.range(0, blocks, num_stages=STAGES):
        block = first + blocks - 1 - index
        raw = _part(x, i0, i1, i2, block, offs_m, mask_m, N, WIDE, PAIRS, "", BLOCK_N)
        _store_part(
            raw, q, scale, high, low, i0, i1, i2, block, offs_m, mask_m, N, zero,
            x[0].dtype.element_ty, FNUZ, NATIVE, PLAIN, WIDE, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _store_row(
    parts, x, q, scale, i0, i1, i2, first, offs_m, mask_m, N, zero, FNUZ: tl.constexpr, NATIVE: tl.constexpr,
    WIDE: tl.constexpr, PAIRS: tl.constexpr, REREAD: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The codes of what was kept. Rows that are not plain are rare, and read again: kept for both, they took the
    registers of a second program on a unit."""
    kept = True
    if NATIVE:
        kept = _all_plain(scale)
    if kept:
        _store_parts(
            parts, x, q, scale, i0, i1, i2, first, offs_m, mask_m, N, zero,
            FNUZ, NATIVE, WIDE, PAIRS, REREAD, PARTS, PART,
        )  # fmt: skip
    else:
        blocks = PARTS + tl.cast(zero, tl.int32)  # which the compiler does not know, or it would unroll them
        _store_blocks(
            blocks, x, q, scale, i0, i1, i2, first, offs_m, mask_m, N, zero,
            FNUZ, NATIVE, False, WIDE, PAIRS, 1, PART,
        )  # fmt: skip


@triton.jit
def _rows_tile(
    tile, x, q, scale, M0, M1, M2, N, FNUZ: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr,
    FULL: tl.constexpr, PAIRS: tl.constexpr, REREAD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = BLOCK_N // PARTS
    FIRST: tl.constexpr = "evict_last" if REREAD else "evict_first" if PARTS > 1 else ""
    zero = N < 0
    if FULL:
        N = BLOCK_N  # of which the compiler sees that no column is outside
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    parts = _row_parts(x, i0, i1, i2, 0, offs_m, mask_m, N, WIDE, PAIRS, FIRST, PARTS, PART)
    size = _size(_largest(_part_bits(parts, PARTS)), x[0].dtype.element_ty, PAIRS)
    row_scale = _row_scale(size, scale, i0, i1, i2, offs_m, mask_m, FNUZ)
    if REREAD:
        tl.debug_barrier()  # which keeps the compiler from merging the reads
    _store_row(
        parts, x, q, row_scale, i0, i1, i2, 0, offs_m, mask_m, N, zero,
        FNUZ, NATIVE, WIDE, PAIRS, REREAD, PARTS, PART,
    )  # fmt: skip


@triton.jit
def _rows_kernel(
    x_ptr, q_ptr, scale_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_q0, stride_q1, stride_q2, stride_qn, stride_scale0, stride_scale1, stride_scale2,
    FNUZ: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PAIRS: tl.constexpr,
    PERSISTENT: tl.constexpr, STAGES: tl.constexpr, REREAD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row, cached_row (REREAD): a tile as PARTS of its columns, one after another.

    Grid: one program a tile, or PERSISTENT ones that fetch STAGES - 1 tiles ahead. FULL: rows of BLOCK_N.
    """
    x, q = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (q_ptr, stride_q0, stride_q1, stride_q2, stride_qn)
    scale = (scale_ptr, stride_scale0, stride_scale1, stride_scale2)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _rows_tile(
                tile, x, q, scale, M0, M1, M2, N, FNUZ, NATIVE, WIDE, FULL, PAIRS, REREAD, PARTS, BLOCK_M, BLOCK_N
            )
    else:
        _rows_tile(
            tl.program_id(0), x, q, scale, M0, M1, M2, N,
            FNUZ, NATIVE, WIDE, FULL, PAIRS, REREAD, PARTS, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _rows_looped_kernel(
    x_ptr, q_ptr, scale_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_q0, stride_q1, stride_q2, stride_qn, stride_scale0, stride_scale1, stride_scale2,
    FNUZ: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row. Grid: one program per BLOCK_M rows."""
    x, q = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (q_ptr, stride_q0, stride_q1, stride_q2, stride_qn)
    scale = (scale_ptr, stride_scale0, stride_scale1, stride_scale2)
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m, blocks = block_offsets(0, BLOCK_M, WIDE), blocks_in(N, BLOCK_N)
    mask_m = offs_m < M2 - i2
    # Kept per element: a reduction per block would stall the loads at a barrier.
    size_bits = tl.zeros([BLOCK_M, BLOCK_N // 2 if PAIRS else BLOCK_N], tl.uint32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        raw = _part(x, i0, i1, i2, block, offs_m, mask_m, N, WIDE, PAIRS, "", BLOCK_N)
        size_bits = tl.maximum(size_bits, _size_bits(raw))
    size = _size(_largest(size_bits), x_ptr.dtype.element_ty, PAIRS)
    row_scale = _row_scale(size, scale, i0, i1, i2, offs_m, mask_m, FNUZ)
    plain = False
    if NATIVE:
        plain = _all_plain(row_scale)
    if plain:
        _store_blocks(
            blocks, x, q, row_scale, i0, i1, i2, 0, offs_m, mask_m, N, N < 0,
            FNUZ, NATIVE, NATIVE, WIDE, PAIRS, STAGES, BLOCK_N,
        )  # fmt: skip
    else:
        _store_blocks(
            blocks, x, q, row_scale, i0, i1, i2, 0, offs_m, mask_m, N, N < 0,
            FNUZ, NATIVE, False, WIDE, PAIRS, STAGES, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _rows_coresident_kernel(
    x_ptr, q_ptr, scale_ptr, word_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    stride_q0, stride_q1, stride_q2, stride_qn, stride_scale0, stride_scale1, stride_scale2,
    FNUZ: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PAIRS: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr,
):  # fmt: skip
    """coresident_row. Grid: a multiple of SPLITS programs, all running at once. word: (rows, SPLITS) int64 zeros.

    SPLITS is a power of 2, at most one warp wide, and SPLITS * BLOCK_N >= N. A program takes its BLOCK_N columns as
    PARTS tiles, one after another. FULL: rows of SPLITS * BLOCK_N.
    """
    x, q = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (q_ptr, stride_q0, stride_q1, stride_q2, stride_qn)
    scale = (scale_ptr, stride_scale0, stride_scale1, stride_scale2)
    AS: tl.constexpr = x_ptr.dtype.element_ty
    PART: tl.constexpr = BLOCK_N // PARTS
    width = N
    if FULL:
        width = SPLITS * BLOCK_N  # of which the compiler sees that no column is outside
    split = tl.program_id(0) % SPLITS
    first = split * PARTS
    offs_m = block_offsets(0, 1, WIDE)
    mask_m = offs_m < 1
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    i0, i1, i2 = tile_origin(tl.program_id(0) // SPLITS, M0, M1, M2, 1)
    parts = _row_parts(x, i0, i1, i2, first, offs_m, mask_m, width, WIDE, PAIRS, "", PARTS, PART)
    for row in tl.range(tl.program_id(0) // SPLITS, rows, groups):
        here, here0, here1, here2 = parts, i0, i1, i2
        words = word_ptr + tl.cast(row, tl.int64) * SPLITS
        size = _size(tl.max(_part_bits(here, PARTS)), AS, PAIRS)
        publish(words + split, tl.full((), 1.0, tl.float32), size)
        # The next row loads while this one waits.
        i0, i1, i2 = tile_origin(row + groups, M0, M1, M2, 1)
        mask_next = offs_m < rows - groups - row
        parts = _row_parts(x, i0, i1, i2, first, offs_m, mask_next, width, WIDE, PAIRS, "", PARTS, PART)
        _, sizes = collect(words, N, SPLITS, POLL_CACHE)
        largest = tl.max(sizes.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
        row_scale = _row_scale(
            tl.full([1, 1], largest, tl.float32), scale, here0, here1, here2, offs_m, offs_m + split < 1, FNUZ
        )
        _store_row(
            here, x, q, row_scale, here0, here1, here2, first, offs_m, mask_m, width, N < 0,
            FNUZ, NATIVE, WIDE, PAIRS, False, PARTS, PART,
        )  # fmt: skip


# ---- the public function ------------------------------------------------------------------------------------------


def quantize_fp8(input: Tensor, dim: int | Sequence[int] | None = -1) -> Any:
    """``input`` as 8-bit floats, and the scales that it is to be multiplied by.

    Args:
        input: float16, bfloat16 or float32, any shape and strides.
        dim: the dim or dims that share a scale: the last for one a row, None for one a tensor.

    Returns (quantised, scale): ``float8_e4m3fn``, or ``float8_e4m3fnuz`` where the device has only that, in ``input``'s
    shape; and float32 of ``input``'s shape with size 1 along ``dim``. A NaN or an infinity makes all that shares its
    scale NaN or 0. Where the largest size is below 3.1e-43, but not 0, the scale rounds to 0, and zeros become NaN. It
    has no gradient.
    Raises BadDim (an IndexError), BadType (a TypeError), UnsupportedDtype (a NotImplementedError).
    """
    check_tensor("quantize_fp8", "input", input)
    check_dtype("quantize_fp8", "input", input.dtype, (torch.float16, torch.bfloat16, torch.float32))
    x = input.detach()
    name, native = device_format(str(x.device))
    kind: torch.dtype = getattr(torch, name)
    rows, shape = rows_to_reduce("quantize_fp8", x, dim, True)
    if x.numel() == 0:
        return Result((x.to(kind), torch.ones(shape, dtype=torch.float32, device=x.device)))
    fnuz = int(kind == torch.float8_e4m3fnuz)
    if _in_one_launch(x, rows, dim):
        rows = readable(rows, rows, rows.dim() - 1)
        codes, scale = library.call("quantize_fp8_rows", rows, fnuz, int(native))
        return Result((codes.view(kind).view(x.shape), scale.view(shape)))
    size = library.call("absmax", rows, shape)
    scale = library.call("fp8_scale", *canonical(_SCALE, (size, LARGEST[kind])))
    codes = library.call("quantize_fp8", *canonical(_CODE, (x, scale, fnuz, native)))
    return Result((codes.view(kind), scale))


def _in_one_launch(x: Tensor, rows: Tensor, dim: int | Sequence[int] | None) -> bool:
    """Whether ``rows``, which ``dim`` makes of ``x``, are its last dims as they lie, and enough to share out.

    Of shapes and strides alone, so that a trace holds for every device.
    """
    rank, length = x.dim(), rows.shape[-1]
    kept = rows.dim() - 1
    given = dim if isinstance(dim, (tuple, list)) else () if dim is None else (dim,)
    for axis in given:
        if rank and axis % rank < kept:
            return False
    for axis in range(kept, rank - 1):  # merged as a view, not as a copy
        if x.stride(axis) != x.stride(axis + 1) * x.shape[axis + 1]:
            return False
    # Parts of a row would have to wait for its scale, so few long rows are left to launches that share them out.
    return bool(length <= LONG_ROW or x.numel() >= FEW_ROWS * length)


def device_format(device: str) -> tuple[str, bool]:
    """The 8-bit format of ``device``, as its plugin says, and whether it has an instruction for it; the most common one
    for tensors that are on no GPU, unless they stand for some on one (``planning_for``)."""
    where, runtime = torch.device(device), current()
    planned = planned_for() if where.type == "meta" else None
    if planned is not None:
        return runtime.backend(planned.target).fp8()
    if where.type == "meta" or where.type == "cpu" and not dispatch.interpreting():
        return "float8_e4m3fn", False
    name, native = runtime.backend(dispatch.target_device(runtime, where).target).fp8()
    return name, native and where.type != "cpu"


# What the device is does not change while a trace lives.
device_format._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _code_reference(x: Tensor, scale: Tensor, fnuz: int, native: int) -> Tensor:
    kind = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    if x.device.type == "meta":
        return torch.empty(torch.broadcast_shapes(x.shape, scale.shape), dtype=torch.uint8, device=x.device)
    y = (x.float() / scale.float()).clamp(-LARGEST[kind], LARGEST[kind]).to(kind).view(torch.uint8)
    nan = y.view(kind).isnan()
    return torch.where(nan, 0x80 if fnuz else 0x7F, y)


def _inputs(make: Callable[..., tuple[Any, ...]], sizes: Any, dtype: Any, *, device: Any = "cpu", **given: Any) -> Any:
    """Arguments as ``quantize_fp8`` gives them on ``device``: in the device's own format, unless one is named, which it
    then may have no instruction for."""
    given_to = torch.empty(0, device=device).device  # which names one of several
    name, native = device_format(str(given_to))
    own = int(name.endswith("fnuz"))
    switches = {"FNUZ": own, "NATIVE": int(native and given.get("FNUZ", own) == own)}
    return make(sizes, dtype, device=device, **{**switches, **given})


def _code_eager(x: Tensor, scale: Tensor, fnuz: int, native: int) -> Tensor:
    """As one writes it. The scale is float32 and has dims, as the public function gives it: so the quotient is float32,
    which a bfloat16 one, rounded twice, would not be."""
    kind = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    scale = scale.float() if scale.dim() else scale.float().reshape((1,) * x.dim())
    return (x / scale).clamp_(-LARGEST[kind], LARGEST[kind]).to(kind).view(torch.uint8)


# ---- plans of rows ------------------------------------------------------------------------------------------------


def _scale_buffer(x: Meta) -> Buffer:
    shape = (*x.shape[:-1], 1) if x.shape else ()
    return Buffer(shape, contiguous(shape), torch.float32)


def _outputs(x: Meta, fnuz: int, native: int) -> tuple[Buffer, ...]:
    return like(x, torch.uint8), _scale_buffer(x)


def _spread(x: Meta) -> Meta:
    """The scale beside ``x``, repeated along the row."""
    found = _scale_buffer(x)
    return Meta(x.shape, (*found.strides[:-1], 0) if x.shape else (), found.dtype)


def _last(x: Meta) -> int:
    return max(len(x.shape) - 1, 0)


def _problem(x: Meta, fnuz: int, native: int) -> Problem:
    operands: dict[str, Meta | Buffer] = {"q": like(x, torch.uint8), "x": x}
    return row_problem(
        "quantize_fp8_rows", _last(x), operands, first="q", others=(_spread(x),), FNUZ=fnuz, NATIVE=native
    )


# 32-bit registers per element, fitted on compiled kernels.
_LIVE = {"packed_rows": 2.0, "resident_row": 2.0, "cached_row": 1.1, "looped_row": 3.0, "coresident_row": 2.4}
_KERNELS = RowKernels(whole=_rows_kernel, looped=_rows_looped_kernel, coresident=_rows_coresident_kernel)


def _work(problem: Problem) -> Work:
    return row_work(problem, ("x",), ("q",), _LIVE, takes=("PARTS",))


def _plan(config: Config, blocks: Blocks, device: Device, x: Meta, fnuz: int, native: int) -> Plan:
    outputs = _outputs(x, fnuz, native)
    rows = rows_of((outputs[0], x, _spread(x)), _last(x))
    operands: dict[str, In | Out] = {"q": Out(0), "x": In(0), "scale": Out(1)}
    return row_plan(
        _KERNELS, config, blocks, rows, operands, outputs, compute=torch.float32, of_nothing=True, FNUZ=fnuz,
        NATIVE=native, FULL=rows.n == blocks["SPLITS"] * blocks["BLOCK_N"], PAIRS=_paired(x, rows, config, blocks),
    )  # fmt: skip


def _paired(x: Meta, rows: Rows, config: Config, blocks: Blocks) -> bool:
    """Whether tiles are one row, or parts of one, of 16-bit numbers of which a lane reads eight at once."""
    alone = blocks["BLOCK_M"] == 1 and blocks["BLOCK_N"] >= 16 * config.params.get("PARTS", 8)
    return alone and in_pairs(rows, blocks["BLOCK_N"], [(1, x)])


# ---- references, cases, declarations ------------------------------------------------------------------------------


def _reference(x: Tensor, fnuz: int, native: int) -> tuple[Tensor, Tensor]:
    largest = LARGEST[torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn]
    if x.dim() and x.shape[-1] == 0:
        size = torch.zeros((*x.shape[:-1], 1), device=x.device)
    else:
        size = x.abs().amax(-1, keepdim=True).float()
    # By a number, torch multiplies on a GPU with its reciprocal: a last place off.
    scale = torch.where(size == 0, 1.0, size / torch.full_like(size, largest))
    return _code_reference(x, scale, fnuz, native), scale


def _eager(x: Tensor, fnuz: int, native: int) -> tuple[Tensor, Tensor]:
    """As one writes it."""
    size = x.abs().amax(-1, keepdim=True).float()
    largest = LARGEST[torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn]
    scale = torch.where(size == 0, 1.0, size / torch.full_like(size, largest))
    return _code_eager(x, scale, fnuz, native), scale


def _of_rows(
    sizes: tuple[int, ...], dtype: torch.dtype, *, FNUZ: int, NATIVE: int, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal",
) -> tuple[Any, ...]:  # fmt: skip
    return values_of(sizes, dtype, device, generator, style), FNUZ, NATIVE


CASES = (
    *(Case(sizes, {"other": other}) for sizes, other in (
        ((), "scalar"), ((7,), "scalar"), ((0, 5), "column"), ((5, 33), "column"), ((5, 33), "row"),
        ((4099,), "scalar"),
    )),
    Case((3, 130), {"other": "column", "FNUZ": 1}), Case((4099,), {"other": "scalar", "FNUZ": 1}),
)  # fmt: skip
ROW_CASES = (
    *(Case(sizes) for sizes in ((), (1,), (3, 1), (0, 5), (5, 0), (2, 3, 5, 7), (4, 130), (2, 1000), (3, 4097))),
    *(Case(sizes, {"FNUZ": 1}) for sizes in ((7, 33), (3, 130), (2, 4099))),
)  # fmt: skip
_OPS = (
    *pointwise(
        "quantize_fp8", signature=quantize_fp8, reference=_code_reference, eager=_code_eager,
        result=torch.uint8, cases=CASES,
        dtypes=("float32", "float16", "bfloat16"),
        tune_cases=(Case((8192, 8192), {"other": "column"}), Case((8192, 8192), {"other": "scalar"})),
    )(_code).ops,
    *pointwise(
        "fp8_scale", public=False, dtypes=("float32",), examples={"largest": 448.0}, integers="refuse",
        reference=lambda size, largest: torch.where(size == 0, 1.0, size / torch.full_like(size, largest)),
    )(_scale).ops,
)  # fmt: skip
_CODE, _SCALE = (op.plan.args[0] for op in _OPS)  # type: ignore[attr-defined]
_QUANTIZE, *_REST = _OPS
OPS = (
    replace(_QUANTIZE, inputs=partial(_inputs, _QUANTIZE.inputs)),
    Op(
        "quantize_fp8_rows",
        "(Tensor input, int fnuz, int native) -> (Tensor, Tensor)",
        problem=_problem,
        work=_work,
        outputs=_outputs,
        fit=fit_rows,
        plan=_plan,
        reference=_reference,
        eager=_eager,
        inputs=partial(_inputs, _of_rows),
        cases=ROW_CASES,
        tune_cases=tuple(Case(sizes) for sizes in ((8192, 8192), (4096, 4096), (32768, 256), (4096, 32768))),
    ),
    *_REST,
    LARGEST_SIZE,
)
