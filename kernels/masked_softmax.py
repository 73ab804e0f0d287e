"""Softmax over the last dim of scaled logits of which a mask takes some away, and its gradient.

    z  = scale * x + mask, or -inf where a bool mask is False or, if causal, the column is past the row
    y  = exp(z - max(z)) / sum(exp(z - max(z)))        dx = scale * y * (dy - sum(y * dy))

x, y, dy, dx: (M0, M1, M2, N); mask: the same, with strides of 0 where it repeats. What is masked is 0 whatever x holds
there, and so is a row of which nothing is left: unlike softmax, where such a row is NaN. A NaN or +inf that is not
masked makes its row NaN. The kernels are softmax's, but for long rows whose bool mask lies as they do: those wait for
their sums as they were read, with what is masked replaced by an infinity.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, autocast_to_float32, check_bool, check_dtype, check_number, check_tensor
from portkern.batching import Folded, InDims, stacked
from portkern.config import Blocks, Config
from portkern.errors import Mismatch
from portkern.kernels._rows import (
    TRITON_DTYPES,
    at,
    block_offsets,
    collect,
    exp,
    lowest,
    number,
    numbers,
    pairs_at,
    publish,
    store,
    tile_origin,
)
from portkern.kernels.softmax import FORWARD, backward_plan, backward_work, softmax_plan
from portkern.layout import readable, row_layout, rows_of
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Meta, Out, Plan, like
from portkern.problem import Problem, Work
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device

# ---- rows and their mask in words -------------------------------------------------------------------------------


@triton.jit
def _words(
    x, mask, i0, i1, i2, block, mask_m, N, zero, AS: tl.constexpr, WIDE: tl.constexpr, EVICTION: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Block ``block`` of PART columns as it lies: int32 words of two 16-bit x, or x, and words of four of the mask.

    A lane shall read the mask of the 16 bytes of x that it reads, so that none changes lanes: for that, it must not
    seem to the compiler that more of the mask lies well.
    """
    EACH: tl.constexpr = 2 if AS.primitive_bitwidth == 16 else 1
    offs_x, offs_k = block_offsets(block, PART // EACH, WIDE), block_offsets(block, PART // 4, WIDE)
    ptrs = pairs_at(at(x, i0, i1, i2), EACH == 2) + offs_x[None, :] * x[4]
    words = tl.load(ptrs, mask=mask_m[:, None] & (offs_x < N // EACH)[None, :], other=0, eviction_policy=EVICTION)
    base = at(mask, i0, i1, i2).to(tl.pointer_type(tl.int32)) + EACH * tl.cast(zero, tl.int32)
    inside = mask_m[:, None] & (offs_k < N // 4)[None, :]
    return words, tl.load(base + offs_k[None, :] * mask[4], mask=inside, other=0, eviction_policy=EVICTION)


@triton.jit
def _masked(words, keep, scale, AS: tl.constexpr):
    """``words`` with what is masked, or outside of the row, replaced by the infinity of which the logit is -inf."""
    keep = ((keep & 0x7F7F7F7F) + 0x7F7F7F7F) | keep  # its bytes have their highest bit set where they are not 0
    if AS.primitive_bitwidth == 16:
        low = ((keep >> 7) & 1) | ((keep << 1) & 0x10000)
        high = ((keep >> 23) & 1) | ((keep >> 15) & 0x10000)
        kept = (tl.join(low, high) * 0xFFFF).reshape(words.shape[0], words.shape[1])
        infinity: tl.constexpr = 0x7F807F80 if AS == tl.bfloat16 else 0x7C007C00
        fill = tl.where(scale < 0, infinity, infinity | -0x7FFF8000)
        return (words & kept) | (fill & ~kept)
    else:
        even, odd = tl.join(keep & 0x80, keep & 0x800000), tl.join(keep & 0x8000, keep & -0x80000000)
        kept = tl.join(even, odd).reshape(words.shape[0], words.shape[1]) != 0
        return tl.where(kept, words, tl.where(scale < 0, float("inf"), -float("inf")))


@triton.jit
def _scaled(words, scale, zero, AS: tl.constexpr):
    """zero: False, which only the sum before tells: words wait for it, not numbers. It alters both halves of a word."""
    if AS.primitive_bitwidth == 16:
        return numbers(words ^ -tl.cast(zero, tl.int32), AS, tl.float32) * scale
    else:
        return words * scale


@triton.jit
def _all_words(
    x, mask, i0, i1, i2, first, mask_m, N, zero,
    AS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The words of all parts, as two tuples."""
    words, keeps = (), ()
    for part in tl.static_range(PARTS):
        word, keep = _words(x, mask, i0, i1, i2, first + part, mask_m, N, zero, AS, WIDE, "", PART)
        words += (word,)  # type: ignore[assignment]
        keeps += (keep,)  # type: ignore[assignment]
    return words, keeps


@triton.jit
def _masked_parts(words, keeps, scale, AS: tl.constexpr, PARTS: tl.constexpr):
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (_masked(words[part], keeps[part], scale, AS),)  # type: ignore[assignment]
    return parts


@triton.jit
def _statistics(parts, scale, AS: tl.constexpr, PARTS: tl.constexpr):
    """(max, sum of exponentials relative to it), the former finite or +inf."""
    largest = _scaled(parts[0], scale, False, AS)
    for part in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, _scaled(parts[part], scale, False, AS))  # leaves a NaN out, which the total finds
    maximum = tl.maximum(tl.max(largest), lowest(tl.float32))
    zero = maximum.to(tl.int32, bitcast=True) == -1  # a NaN, but as a number the compiler would know that it is none
    total = exp(_scaled(parts[0], scale, zero, AS) - maximum)
    for part in tl.static_range(1, PARTS):
        total += exp(_scaled(parts[part], scale, zero, AS) - maximum)
    return maximum, tl.sum(total)


@triton.jit
def _store_part(
    part, y, scale, maximum, inverse, i0, i1, i2, block, mask_m, N, AS: tl.constexpr, WIDE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Where the inverse is NaN, so is the row."""
    offs_n = block_offsets(block, PART, WIDE)
    result = exp(_scaled(part, scale, inverse != inverse, AS) - maximum) * inverse
    store(at(y, i0, i1, i2), result, block_offsets(0, 1, WIDE), offs_n, mask_m, offs_n < N, y[3], y[4])


@triton.jit
def _reread(
    x, mask, y, scale, i0, i1, i2, mask_m, N, zero,
    AS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One row that the nearest cache keeps instead of registers. The barriers keep the compiler from merging reads."""
    largest = tl.full([1, PART], lowest(tl.float32), tl.float32)
    for part in tl.static_range(PARTS):
        word, keep = _words(x, mask, i0, i1, i2, part, mask_m, N, zero, AS, WIDE, "evict_last", PART)
        largest = tl.maximum(largest, _scaled(_masked(word, keep, scale, AS), scale, False, AS))
    maximum = tl.max(largest)
    tl.debug_barrier()
    total = tl.zeros([1, PART], tl.float32)
    for part in tl.static_range(PARTS):
        word, keep = _words(x, mask, i0, i1, i2, part, mask_m, N, zero, AS, WIDE, "evict_last", PART)
        total += exp(_scaled(_masked(word, keep, scale, AS), scale, False, AS) - maximum)
    inverse = _inverse(tl.sum(total))
    tl.debug_barrier()
    for part in tl.static_range(PARTS):
        word, keep = _words(x, mask, i0, i1, i2, part, mask_m, N, zero, AS, WIDE, "evict_first", PART)
        _store_part(
            _masked(word, keep, scale, AS), y, scale, maximum, inverse, i0, i1, i2, part, mask_m, N, AS, WIDE, PART
        )


@triton.jit
def _inverse(total):
    """Of nothing, 0, which makes a row of which nothing is left 0."""
    return tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def _words_kernel(
    x_ptr, y_ptr, mask_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, scale: tl.float64,
    AS: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, PERSISTENT: tl.constexpr, REREAD: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """resident_row, cached_row (REREAD): a row as PARTS of its columns, one after another.

    Grid: one program a row, or PERSISTENT ones. FULL: rows of BLOCK_N. scale is neither 0 nor NaN, by which what is
    masked could not be told: infinities stand for it.
    """
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    scale = number(scale, tl.float32)
    PART: tl.constexpr = BLOCK_N // PARTS
    zero, width = N < 0, N
    if FULL:
        width = BLOCK_N  # of which the compiler sees that no column is outside
    mask_m = block_offsets(0, 1, WIDE) < 1
    rows = M0 * M1 * M2
    last = rows if PERSISTENT else tl.program_id(0) + 1
    for row in tl.range(tl.program_id(0), last, tl.num_programs(0)):
        i0, i1, i2 = tile_origin(row, M0, M1, M2, 1)
        if REREAD:
            _reread(x, mask, y, scale, i0, i1, i2, mask_m, width, zero, AS, WIDE, PARTS, PART)
        else:
            words, keeps = _all_words(x, mask, i0, i1, i2, 0, mask_m, width, zero, AS, WIDE, PARTS, PART)
            parts = _masked_parts(words, keeps, scale, AS, PARTS)
            maximum, total = _statistics(parts, scale, AS, PARTS)
            inverse = _inverse(total)
            for part in tl.static_range(PARTS):
                _store_part(parts[part], y, scale, maximum, inverse, i0, i1, i2, part, mask_m, width, AS, WIDE, PART)


@triton.jit
def _words_coresident_kernel(
    x_ptr, y_ptr, word_ptr, mask_ptr, M0, M1, M2, N,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    stride_mask0, stride_mask1, stride_mask2, stride_maskn, scale: tl.float64,
    AS: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, POLL_CACHE: tl.constexpr,
):  # fmt: skip
    """coresident_row. Grid: a multiple of SPLITS programs, all running at once. word: (rows, SPLITS) int64 zeros.

    SPLITS is a power of 2, at most one warp wide, and SPLITS * BLOCK_N >= N. A program takes its BLOCK_N columns as
    PARTS tiles, one after another. FULL: rows of SPLITS * BLOCK_N. scale: as of ``_words_kernel``.
    """
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    mask = (mask_ptr, stride_mask0, stride_mask1, stride_mask2, stride_maskn)
    scale = number(scale, tl.float32)
    PART: tl.constexpr = BLOCK_N // PARTS
    zero, width = N < 0, N
    if FULL:
        width = SPLITS * BLOCK_N  # of which the compiler sees that no column is outside
    split = tl.program_id(0) % SPLITS
    first = split * PARTS
    one = block_offsets(0, 1, WIDE)
    rows, groups = M0 * M1 * M2, tl.num_programs(0) // SPLITS
    i0, i1, i2 = tile_origin(tl.program_id(0) // SPLITS, M0, M1, M2, 1)
    words, keeps = _all_words(x, mask, i0, i1, i2, first, one < 1, width, zero, AS, WIDE, PARTS, PART)
    for row in tl.range(tl.program_id(0) // SPLITS, rows, groups):
        # Not as they arrive, but a row later: nothing waits for them meanwhile.
        parts, here0, here1, here2 = _masked_parts(words, keeps, scale, AS, PARTS), i0, i1, i2
        part_maximum, part_total = _statistics(parts, scale, AS, PARTS)
        exchange = word_ptr + tl.cast(row, tl.int64) * SPLITS
        publish(exchange + split, part_total, part_maximum)
        # The next row loads while this one waits.
        i0, i1, i2 = tile_origin(row + groups, M0, M1, M2, 1)
        mask_next = one < rows - groups - row
        words, keeps = _all_words(x, mask, i0, i1, i2, first, mask_next, width, zero, AS, WIDE, PARTS, PART)
        totals, maximums = collect(exchange, N, SPLITS, POLL_CACHE)
        maximum = tl.max(maximums, axis=0)
        inverse = _inverse(tl.sum(totals * exp(maximums - maximum), axis=0))
        for part in tl.static_range(PARTS):
            _store_part(
                parts[part], y, scale, maximum, inverse, here0, here1, here2, first + part, one < 1, width,
                AS, WIDE, PART,
            )  # fmt: skip


# ---- the ops ----------------------------------------------------------------------------------------------------


def masked_softmax(
    input: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False
) -> tuple[Any, ...]:
    """Softmax of ``scale * input`` over the last dim, of what ``mask`` and ``causal`` leave.

    Args:
        input: (..., L, N), any strides; float16, bfloat16, float32 or float64.
        mask: broadcasts to ``input``; bool, where True takes part, or a floating type, which is added after scaling
            and gets no gradient.
        scale: multiplies ``input``.
        causal: row i of the last two dims keeps columns 0 to i, counted from the top left, as torch's attention does.

    Returns a tensor of ``input``'s shape and memory format, float32 where autocast is on, for a 16-bit ``input`` on a
    GPU. What is masked is exactly 0, whatever ``input`` holds there, and so is a row of which nothing is left (where
    ``softmax`` of -inf gives NaN); their gradients are 0. A NaN or +inf that is not masked makes its whole row
    NaN, what is masked of it included.

    Raises BadType (a TypeError), Mismatch (a RuntimeError), UnsupportedDtype (a NotImplementedError).
    """
    op = "masked_softmax"
    check_dtype(op, "input", check_tensor(op, "input", input).dtype, FLOATS)
    if mask is not None:
        check_dtype(op, "mask", check_tensor(op, "mask", mask).dtype, (torch.bool, *FLOATS))
        if mask.requires_grad and torch.is_grad_enabled():
            raise Mismatch(f"{op}(): mask requires grad, and there is no derivative for it: pass mask.detach()")
        wanted, found = list(input.shape), list(mask.shape)
        tail = wanted[len(wanted) - len(found) :]
        if len(found) > len(wanted) or any(size not in (1, limit) for size, limit in zip(found, tail, strict=True)):
            raise Mismatch(f"{op}(): mask has the shape {found}, which does not broadcast to the input's {wanted}")
        mask = mask.expand(input.shape)
    if check_bool(op, "causal", causal) and input.dim() < 2:
        raise Mismatch(f"{op}(): input has {input.dim()} dims; causal=True needs rows and columns, 2 or more")
    number, dim = check_number(op, "scale", scale), max(input.dim() - 1, 0)
    mask = mask if mask is None else readable(mask, input, dim)
    return readable(input, input, dim), mask, number, causal, autocast_to_float32(input)


def _dim(meta: Any) -> int:
    return max(len(meta.shape) - 1, 0)


def _positions(meta: Meta) -> Meta:
    """What counts the rows of the last two dims, as if it were an operand. Backwards, so that these rows are the
    innermost of any layout: the one row dim whose index a kernel has in full, and that is no launch for each."""
    rank = len(meta.shape)
    return Meta(meta.shape, tuple(-int(axis == rank - 2) for axis in range(rank)), torch.int32)


def _outputs(input: Meta, mask: Meta | None, scale: float, causal: bool, dtype: torch.dtype) -> tuple[Buffer, ...]:
    return (like(input, dtype),)


def _metas(input: Meta, mask: Meta | None, causal: bool, dtype: torch.dtype) -> dict[str, Meta | Buffer]:
    found: dict[str, Meta | Buffer] = {"position": _positions(input)} if causal else {}
    found |= {"y": like(input, dtype), "x": input}
    return found if mask is None else {**found, "mask": mask}


def _problem(input: Meta, mask: Meta | None, scale: float, causal: bool, dtype: torch.dtype) -> Problem:
    metas = _metas(input, mask, causal, dtype)
    words = _in_words(input, mask, causal, dtype)
    others = [metas.pop("mask")] if mask is not None else []
    return row_problem(
        "masked_softmax", _dim(input), metas, first=next(iter(metas)), others=others, vectors={"mask": mask},
        causal=causal, words=words,
    )  # fmt: skip


LEAST_SCALE = 2.0**-126  # a float32 that is no subnormal, which a device may take for 0


def _in_words(input: Meta, mask: Meta | None, causal: bool, dtype: torch.dtype) -> bool:
    """Whether rows and a bool mask lie so that a lane reads 16 bytes of x at once and the mask of these."""
    if mask is None or mask.dtype != torch.bool or causal or torch.float64 in (input.dtype, dtype):
        return False
    metas = _metas(input, mask, causal, dtype)
    rows = rows_of(list(metas.values()), _dim(input))
    lies = all(row_layout(each, rows, index) == "n16" for index, each in enumerate(metas.values()))
    return lies and rows.n % 4 == 0 and rows.n >= 16


# 32-bit registers per element, fitted on compiled kernels. No cached_row where the mask is not read in words: of 32768
# columns, two rows on a unit leave logits that are masked too few registers, and up to 328 bytes spill.
_LIVE = {"packed_rows": 2.4, "resident_row": 2.4, "looped_row": 4.0, "split_row": 4.0, "coresident_row": 2.7}


def _work(problem: Problem) -> Work:
    words = bool(problem.flags["words"])
    live = {**_LIVE, "cached_row": 1.1} if words else _LIVE
    return row_work(problem, ("x",), ("y",), live, takes=("PARTS",) if words else ())


def _accumulator(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _plan(
    config: Config, blocks: Blocks, device: Device,
    input: Meta, mask: Meta | None, scale: float, causal: bool, dtype: torch.dtype,
) -> Plan:  # fmt: skip
    metas = _metas(input, mask, causal, dtype)
    rows = rows_of(list(metas.values()), _dim(input))
    # Of positions, kernels take the strides alone.
    places: dict[str, In | Out] = {"y": Out(0), "x": In(0), "mask": In(1), "position": In(0)}
    # A scale that is 0 in float32, or NaN, leaves none of the infinities that stand for what is masked.
    words = abs(scale) >= LEAST_SCALE and _in_words(input, mask, causal, dtype)
    kernels = _WORDS if words and _kept(config, blocks) else FORWARD
    return softmax_plan(
        kernels, False, config, blocks, rows, {name: places[name] for name in metas}, like(input, dtype),
        _accumulator(input.dtype, dtype),
        extras={"scale": float(scale), **({} if causal else {"stride_position2": None})}, MASKED=True,
        AS=TRITON_DTYPES[input.dtype], FULL=rows.n == blocks["SPLITS"] * blocks["BLOCK_N"], PAIRS=False,
    )  # fmt: skip


_WORDS = dataclasses.replace(FORWARD, whole=_words_kernel, coresident=_words_coresident_kernel)


def _kept(config: Config, blocks: Blocks) -> bool:
    """Whether a program keeps one row, or a part of it, in parts of words."""
    alone = config.variant in ("resident_row", "cached_row", "coresident_row")
    return alone and blocks["BLOCK_N"] >= 16 * config.params.get("PARTS", 8)


def _backward_outputs(grad_output: Meta, output: Meta, scale: float, input_dtype: torch.dtype) -> tuple[Buffer, ...]:
    return (like(output, input_dtype),)


def _backward_problem(grad_output: Meta, output: Meta, scale: float, input_dtype: torch.dtype) -> Problem:
    operands: dict[str, Meta | Buffer] = {"dx": like(output, input_dtype), "dy": grad_output, "y": output}
    return row_problem("masked_softmax_backward", _dim(output), operands, first="dx")


def _backward_plan(
    config: Config, blocks: Blocks, device: Device,
    grad_output: Meta, output: Meta, scale: float, input_dtype: torch.dtype,
) -> Plan:  # fmt: skip
    return backward_plan(False, config, blocks, device, grad_output, output, _dim(output), input_dtype, float(scale))


def _logits(input: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    z = input.to(_accumulator(input.dtype, dtype)) * scale
    if mask is not None:
        z = torch.where(mask, z, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    if causal:
        keep = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
        z = torch.where(keep, z, -math.inf)
    return z


def reference(input: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    """Masked softmax in plain torch."""
    z = _logits(input, mask, scale, causal, dtype)
    if z.numel() == 0:
        return z.to(dtype)
    empty = (z == -math.inf).all(-1, keepdim=True) if z.dim() else z == -math.inf
    return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, z), -1)).to(dtype)


def _eager(input: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    """As one writes it; a row of which nothing is left is NaN."""
    if mask is not None and mask.dtype != torch.bool:
        z = torch.add(mask, input, alpha=scale)
    else:
        z = input if scale == 1 else input * scale
        z = z if mask is None else torch.where(mask, z, -math.inf)
    if causal:
        z = torch.where(torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril(), z, -math.inf)
    return torch.softmax(z, -1, dtype=dtype)


def _terms(input: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype) -> Tensor:
    """y, and y times the exponent's argument, which is rounded before the exponential."""
    z = _logits(input, mask, scale, causal, dtype)
    y = reference(input, mask, scale, causal, dtype)
    if z.numel() == 0:
        return y
    size = z.nan_to_num(0.0, 0.0, 0.0).abs()
    return y * (1 + 2 * (size.amax(-1, keepdim=True) if size.dim() else size))


def backward_reference(grad_output: Tensor, output: Tensor, scale: float, input_dtype: torch.dtype) -> Tensor:
    """Its gradient in plain torch."""
    accumulator = _accumulator(output.dtype)
    y, dy = output.to(accumulator), grad_output.to(accumulator)
    total = (y * dy).sum(-1, keepdim=True) if y.dim() else y * dy
    return (y * (dy - total) * scale).to(input_dtype)


def _backward_eager(grad_output: Tensor, output: Tensor, scale: float, input_dtype: torch.dtype) -> Tensor:
    dx = torch._softmax_backward_data(grad_output, output, -1, input_dtype)
    return dx if scale == 1 else dx * scale


def _backward_terms(grad_output: Tensor, output: Tensor, scale: float, input_dtype: torch.dtype) -> Tensor:
    """y * dy, and y times a sum over the row."""
    product = (grad_output * output).abs()
    total = product.sum(-1, keepdim=True) if output.dim() else product
    return output.abs() * (grad_output.abs() + total) * abs(scale)


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", mask: str = "bool", causal: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """``mask`` is ``bool``, ``float`` or ``none``. Styles: as of softmax."""
    x = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
    if style != "normal":
        x = torch.where(x * 40 < -60, -math.inf, x * 40)
    if style == "nonfinite":
        x = torch.where(x > 100, math.nan, torch.where(x > 90, math.inf, x))
    chance = torch.rand(sizes, generator=generator, device=device)
    given = None
    if mask == "bool":
        given = chance > 0.4
    if mask == "float":
        given = torch.where(chance > 0.4, chance * 2, -math.inf).to(dtype)
    return x.to(dtype), given, 0.5, causal, dtype


def _backward_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal",
) -> tuple[Any, ...]:  # fmt: skip
    x, mask, scale, causal, _ = _inputs(sizes, dtype, device=device, generator=generator, style=style)
    dy = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return dy, reference(x, mask, scale, causal, torch.float32).to(dtype), scale, dtype


CASES = (
    Case(()), Case((1,)), Case((3, 1)), Case((0, 5)), Case((5, 0)), Case((7, 33), {"causal": True}), Case((2, 3, 5, 7)),
    Case((2, 3, 5, 5), {"mask": "none", "causal": True}), Case((4, 130), {"mask": "float"}), Case((2, 1000)),
    Case((3, 4097), {"mask": "none"}),
)  # fmt: skip
TUNE_CASES = tuple(
    Case(sizes) for sizes in ((4096, 1024), (8192, 8192), (4096, 32768), (4096, 131072), (32768, 256), (1, 1048576))
)
# Attention scores of 32 heads.
CAUSAL_CASE = Case((32, 2048, 2048), {"mask": "none", "causal": True})
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return outputs[0], args[2], args[0].dtype


def _backward_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    output, scale, input_dtype = saved
    return readable(grads[0], output, max(output.dim() - 1, 0)), output, scale, input_dtype


_COMMON: dict[str, Any] = {"fit": fit_rows, "dtypes": _DTYPES}


def _fold(
    in_dims: InDims, input: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype
) -> Folded:
    """A mapped dim holds more rows."""
    x, shown = stacked(in_dims, input, mask)
    if x.dim() == 1:  # of numbers, each of which is a row
        shown = shown if shown is None else shown.unsqueeze(1)
        return Folded((x.unsqueeze(1), shown, scale, causal, dtype), view=lambda y: y.squeeze(1))
    last = x.dim() - 1
    return Folded((readable(x, x, last), shown if shown is None else readable(shown, x, last), scale, causal, dtype))


def _fold_backward(
    in_dims: InDims, grad_output: Tensor, output: Tensor, scale: float, input_dtype: torch.dtype
) -> Folded:
    grad, y = stacked(in_dims, grad_output, output)
    if y.dim() == 1:
        return Folded((grad.unsqueeze(1), y.unsqueeze(1), scale, input_dtype), view=lambda dx: dx.squeeze(1))
    return Folded((readable(grad, y, y.dim() - 1), y, scale, input_dtype))


OPS = (
    Op(
        "masked_softmax",
        "(Tensor input, Tensor? mask, float scale, bool causal, ScalarType dtype) -> Tensor",
        signature=masked_softmax,
        problem=_problem,
        work=_work,
        outputs=_outputs,
        plan=_plan,
        reference=reference,
        terms=_terms,
        eager=_eager,
        inputs=_inputs,
        cases=CASES,
        tune_cases=(*TUNE_CASES, CAUSAL_CASE),
        vmap=_fold,
        backward=Backward("masked_softmax_backward", _save, _backward_arguments, inputs=(0,)),
        **_COMMON,
    ),
    Op(
        "masked_softmax_backward",
        "(Tensor grad_output, Tensor output, float scale, ScalarType input_dtype) -> Tensor",
        problem=_backward_problem,
        work=partial(backward_work, False),
        outputs=_backward_outputs,
        plan=_backward_plan,
        reference=backward_reference,
        terms=_backward_terms,
        eager=_backward_eager,
        inputs=_backward_inputs,
        vmap=_fold_backward,
        cases=tuple(Case(case.sizes) for case in CASES),
        tune_cases=TUNE_CASES,
        **_COMMON,
    ),
)
