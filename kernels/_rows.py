"""What Triton kernels over rows share: tile origins, masked loads and stores, parts of rows, words between programs,
and sums over rows.

A row operand is a base pointer with four strides (s0, s1, s2, sn); see ``portkern.layout.Rows``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64,
}  # fmt: skip
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def blocks_in(n, BLOCK: tl.constexpr):
    """n / BLOCK rounded up, for n from 1. Adding BLOCK - 1 first would pass 31 bits where n nearly does."""
    return (n - 1) // BLOCK + 1


@triton.jit
def tile_origin(tile, M0, M1, M2, BLOCK_M: tl.constexpr):
    """The coordinates of a tile's first row. Unit dims fold to 0 and leave no division."""
    blocks = blocks_in(M2, BLOCK_M)
    i0 = tile // (blocks * M1) % M0
    i1 = tile // blocks % M1
    i2 = (tile - (i0 * M1 + i1) * blocks) * BLOCK_M
    return i0, i1, i2


@triton.jit
def row_base(ptr, i0, i1, i2, stride_0, stride_1, stride_2):
    offset = tl.cast(i0, tl.int64) * stride_0 + tl.cast(i1, tl.int64) * stride_1 + tl.cast(i2, tl.int64) * stride_2
    return ptr + offset


@triton.jit
def block_offsets(block, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        return tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        return block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def load(base, offs_m, offs_n, mask_m, mask_n, stride_m, stride_n, other):
    offsets = offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
    return tl.load(base + offsets, mask=mask_m[:, None] & mask_n[None, :], other=other)


@triton.jit
def load_masked(ptrs, mask, other, AS: tl.constexpr, COMPUTE: tl.constexpr, EVICTION: tl.constexpr):
    """What ptrs hold, as type AS, and then as AS or COMPUTE."""
    if ptrs.dtype.scalar.element_ty == AS:
        return tl.load(ptrs, mask=mask, other=other, eviction_policy=EVICTION)
    else:
        # Not every type can hold `other`.
        x = tl.load(ptrs, mask=mask, eviction_policy=EVICTION)
        return tl.where(mask, cast(x, AS).to(COMPUTE), other)


@triton.jit
def number(x, COMPUTE: tl.constexpr):
    """A number of the call, which the kernel types tl.float64: the interpreter's tl.cast would go by way of float32."""
    return tl.full([], x, tl.float64).to(COMPUTE)


@triton.jit
def cast(x, AS: tl.constexpr):
    """x as AS; to 16 bits by way of float32, as torch does. (The interpreter keeps bfloat16 as integers of 16 bits, and
    takes others of these for it.)"""
    if AS.primitive_bitwidth == 16:
        if x.dtype.primitive_bitwidth == 16 and x.dtype.is_floating():
            return x.to(AS)
        else:
            return x.to(tl.float32).to(AS)
    else:
        return x.to(AS)


@triton.jit
def store(base, value, offs_m, offs_n, mask_m, mask_n, stride_m, stride_n):
    offsets = offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
    tl.store(base + offsets, cast(value, base.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def exp(x):
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(x * LOG2_E)


@triton.jit
def lowest(COMPUTE: tl.constexpr):
    """The lowest finite number starts a running maximum: with -inf, a part that is all -inf would give inf - inf."""
    if COMPUTE == tl.float64:
        return -1.7976931348623157e308
    else:
        return -3.4028234663852886e38


@triton.jit
def opaque(x, zero):
    """x, by a detour through a run-time 0 that the compiler cannot see through.

    What waits for a reduction is then the 16-bit x and not its upcast: for 32768 columns and 16 warps the gradient
    takes 97 registers, not 128 and a spill; with 8192 columns a program, 64, not 97, and 18 % less time.
    """
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)).to(x.dtype, bitcast=True)
    return x


@triton.jit
def numbers(x, AS: tl.constexpr, COMPUTE: tl.constexpr):
    """x as COMPUTE, where int32 stands for two numbers of the 16-bit type AS (see ``pairs_at``). That is one
    instruction for each number; what is loaded as bfloat16 takes two for each second one, and 16 bits take a register
    each that a loop carries."""
    if x.dtype == tl.int32:
        if AS == tl.float16:
            low = x.to(tl.int16).to(tl.float16, bitcast=True).to(COMPUTE)
            high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(COMPUTE)
        else:
            low = (x << 16).to(tl.float32, bitcast=True).to(COMPUTE)
            high = (x & -65536).to(tl.float32, bitcast=True).to(COMPUTE)
        return tl.join(low, high).reshape(x.shape[0], 2 * x.shape[1])
    else:
        return x.to(COMPUTE)


@triton.jit
def pairs_at(ptr, PAIRS: tl.constexpr):
    """Where 16-bit numbers lie, as int32 of two each: an even number of them, from an address of whole words on."""
    if PAIRS:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr


@triton.jit
def kept(x, zero):
    """``opaque``, of words of two too."""
    if x.dtype == tl.int32:
        return x ^ tl.cast(zero, tl.int32)
    else:
        return opaque(x, zero)


@triton.jit
def load_logits(base, offs_m, block, mask_m, N, stride_m, stride_n, AS: tl.constexpr, WIDE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns, -inf outside of the row. PAIRS: of 16-bit numbers, as words of two."""
    if PAIRS:
        offs_n = block_offsets(block, BLOCK // 2, WIDE)
        outside: tl.constexpr = -0x3FF0400 if AS == tl.float16 else -0x7F0080  # two of -inf
        words = pairs_at(base, PAIRS)
        return load(words, offs_m, offs_n, mask_m, offs_n < N // 2, stride_m // 2, stride_n, outside)
    else:
        offs_n = block_offsets(block, BLOCK, WIDE)
        return load(base, offs_m, offs_n, mask_m, offs_n < N, stride_m, stride_n, -float("inf"))


@triton.jit
def part_of(program, blocks, SPLITS: tl.constexpr):
    """The tile and the column blocks, first to last, of one of its SPLITS parts. A part may be empty."""
    part = program % SPLITS
    per_part = blocks_in(blocks, SPLITS)
    first = tl.minimum(part * per_part, blocks)
    return program // SPLITS, part, first, tl.minimum(first + per_part, blocks)


@triton.jit
def publish(word_ptr, high, low):
    """Write two float32 as one 64-bit word. The pair is never 0, so that the word is its own flag."""
    high = high.to(tl.int32, bitcast=True).to(tl.int64)
    low = low.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(word_ptr, (high << 32) | low, sem="relaxed")


@triton.jit
def peek(word_ptr, N, SPLITS: tl.constexpr, POLL_CACHE: tl.constexpr):
    """The words of all parts as they are now: 0 where there is none yet."""
    # Addresses as integers, and a cache modifier from the target: where buffers have instructions of their own, Triton
    # forgets `volatile` on a load that it knows to lie within one; the load leaves the loop, and the wait never ends.
    addresses = word_ptr.to(tl.int64) + 8 * tl.arange(0, SPLITS) + tl.cast(N < 0, tl.int64)  # never so, yet unfoldable
    return tl.load(addresses.to(tl.pointer_type(tl.int64)), volatile=True, cache_modifier=POLL_CACHE)


@triton.jit
def await_words(words, word_ptr, N, SPLITS: tl.constexpr, POLL_CACHE: tl.constexpr):
    """Wait until none of ``words``, which ``peek`` gave, is missing. They fit one warp, so that every warp polls by
    itself, with no barrier."""
    while tl.min(tl.where(words == 0, 0, 1), axis=0) == 0:
        words = peek(word_ptr, N, SPLITS, POLL_CACHE)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = words.to(tl.int32).to(tl.float32, bitcast=True)
    return high, low


@triton.jit
def collect(word_ptr, N, SPLITS: tl.constexpr, POLL_CACHE: tl.constexpr):
    """Wait for the words of all parts."""
    return await_words(peek(word_ptr, N, SPLITS, POLL_CACHE), word_ptr, N, SPLITS, POLL_CACHE)


@triton.jit
def publish_any(word_ptr, high, low):
    """``publish`` of any pair: a low half of +0 is written as -0, so that the word is never 0."""
    bits = low.to(tl.int32, bitcast=True)
    publish(word_ptr, high, tl.where(bits == 0, -2147483648, bits).to(tl.float32, bitcast=True))


@triton.jit
def at(operand, i0, i1, i2):
    """Where the row (i0, i1, i2) of ``operand`` (pointer, s0, s1, s2, sn) begins."""
    return row_base(operand[0], i0, i1, i2, operand[1], operand[2], operand[3])


@triton.jit
def column_sums_kernel(
    sums_ptr, total0_ptr, total1_ptr, ROWS, N, stride_sums, stride_total0, stride_total1,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up what each program summed over its own rows. sums: (1 or 2, ROWS, N), stride_sums apart.

    Grid: one program for BLOCK_N columns of each sum.
    """
    blocks = blocks_in(N, BLOCK_N)
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    offs_n = block_offsets(block, BLOCK_N, True)
    base = sums_ptr + tl.cast(which, tl.int64) * stride_sums
    total = tl.zeros([BLOCK_M, BLOCK_N], sums_ptr.dtype.element_ty)
    for first in tl.range(0, ROWS, BLOCK_M):
        offs_m = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        total += load(base, offs_m, offs_n, offs_m < ROWS, offs_n < N, N, 1, 0.0)
    column = tl.sum(total, axis=0)
    if total1_ptr is None:
        tl.store(total0_ptr + offs_n * stride_total0, cast(column, total0_ptr.dtype.element_ty), mask=offs_n < N)
    else:
        if which == 0:
            tl.store(total0_ptr + offs_n * stride_total0, cast(column, total0_ptr.dtype.element_ty), mask=offs_n < N)
        else:
            tl.store(total1_ptr + offs_n * stride_total1, cast(column, total1_ptr.dtype.element_ty), mask=offs_n < N)
