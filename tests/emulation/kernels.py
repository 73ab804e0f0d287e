"""Kernels of a user: softmax, layer norm, a matrix product and attention, small enough to execute many times."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, y_ptr, N, stride, BLOCK: tl.constexpr):
    """One row a program; a row is longer than one warp, so maximum and sum go through shared memory."""
    offs = tl.arange(0, BLOCK)
    row = tl.program_id(0) * stride
    x = tl.load(x_ptr + row + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row + offs, e / tl.sum(e, axis=0), mask=offs < N)


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + tl.program_id(0) * N + offs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0) * N + offs, centred * scale * w + b, mask=mask)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        b_mask = (offs_k[:, None] < K) & (offs_n[None, :] < N)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, M, N, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Causal attention of one head with an online softmax: M queries, N keys; queries from N on see all keys."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d[None, :], mask=offs_m[:, None] < M, other=0.0)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK_M, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + offs_n[:, None] * D + offs_d[None, :], mask=offs_n[:, None] < N, other=0.0)
        v = tl.load(v_ptr + offs_n[:, None] * D + offs_d[None, :], mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where((offs_n[None, :] <= offs_m[:, None]) & (offs_n[None, :] < N), s, -float("inf"))
        new = tl.maximum(highest, tl.max(s, axis=1))
        factor = tl.exp(highest - new)
        p = tl.exp(s - new[:, None])
        total = total * factor + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
        highest = new
    mask = offs_m[:, None] < M
    tl.store(o_ptr + offs_m[:, None] * D + offs_d[None, :], acc / total[:, None], mask=mask)


@triton.jit
def exotic_kernel(x_ptr, i_ptr, o_ptr, c_ptr, N, BLOCK: tl.constexpr):
    """What other ops bring: argmax, scan, atomics, integer division, 8-bit floats, erf and sine."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    i = tl.load(i_ptr + offs, mask=mask, other=1)
    tl.atomic_add(c_ptr + i % 7, 1, mask=mask)
    tl.atomic_max(c_ptr + 7 + i * 0, i, mask=mask)
    best = tl.argmax(tl.where(mask, x, -float("inf")), axis=0)
    y = tl.cumsum(tl.where(mask, x, 0.0), axis=0)
    y += tl.math.erf(x) + tl.sin(x) + tl.cos(x) + tl.sqrt(tl.abs(x)) + tl.floor(x)
    y += x.to(tl.float8e4b8).to(tl.float32) + x.to(tl.float8e5b16).to(tl.float32) + (i // 3 + i % 5).to(tl.float32)
    tl.store(o_ptr + offs, y + best, mask=mask)


@triton.jit
def descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    """A tile by tensor descriptors made on the host."""
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    y_desc.store([row, column], x_desc.load([row, column]) * 2)


@triton.jit
def persistent_kernel(x_ptr, o_ptr, N, BLOCK: tl.constexpr):
    """A loop over tiles whose step is the number of programs, along two axes."""
    offs = tl.arange(0, BLOCK)
    first = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    for tile in range(first, tl.cdiv(N, BLOCK), tl.num_programs(0) * tl.num_programs(1)):
        at = tile * BLOCK + offs
        tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < N) + tile, mask=at < N)


@triton.jit
def handshake_kernel(flag_ptr, o_ptr):
    """Program 0 waits for a word of the last program, and that one for program 0."""
    program, last = tl.program_id(0), tl.num_programs(0) - 1
    if program == last:
        tl.atomic_xchg(flag_ptr + 1, 5)
        while tl.atomic_add(flag_ptr, 0) == 0:
            pass
    if program == 0:
        while tl.atomic_add(flag_ptr + 1, 0) == 0:
            pass
        tl.atomic_xchg(flag_ptr, 7)
    tl.store(o_ptr + program, program)


@triton.jit
def unwritten_kernel(x_ptr, y_ptr):
    """Adds to a register that nothing wrote."""
    lane = tl.arange(0, 64)
    x = tl.load(x_ptr + lane)
    y = tl.inline_asm_elementwise("v_add_f32 $0, $0, $1", "=&v,v", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + lane, y)
