"""Matrix products, and their gradients, which are matrix products of views.

    C = A B        dA = dC B^T        dB = A^T dC        each summed over the batch dims that broadcasting repeated

    C[b, m, n] = sum over (r, k) of A[b, r, m, k] B[b, r, k, n]

Operands of any strides are read in place; sums are float32, or float64 for float64. A tile is BLOCK_M by BLOCK_N
elements of C, GROUP_M tiles high groups go through all columns together. One program computes one tile and reads by
pointers (tiles), or as many programs as run at once walk all tiles and read by tensor descriptors (persistent). Either
way SPLITS programs may share the sum of a tile (split_k): each stores its part, and a second launch adds the parts. An
operand that the dot reads badly, for its order or since it cannot be read 16 bytes at a time, may be packed (PACK_A,
PACK_B): copied before, along k (1) or across it (2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, autocast_to_narrow, check_dtype, check_tensor, tf32_asked
from portkern.batching import Folded, InDims, leading
from portkern.broadcast import contiguous
from portkern.config import Blocks, Config
from portkern.errors import BadArgument, Mismatch
from portkern.gemm import fit_gemm, gemm_problem, gemm_work
from portkern.gemm_plan import GemmKernels, gemm_plan
from portkern.kernels._rows import blocks_in
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, Meta, Plan
from portkern.pointwise_kernel import multiple, step, tile_range
from portkern.problem import Problem
from portkern.product import Matrix, Product, product_of
from portkern.target import Device


@triton.jit
def _tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The row and the column of tile ``index``: down GROUP_M rows, then on to the next column."""
    group = index // (GROUP_M * tiles_n)
    inside = index % (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + inside % rows, inside // rows


@triton.jit
def _padded(x, PAD: tl.constexpr):
    """x up to a multiple of PAD."""
    if PAD == 1:
        return x
    else:
        return (x + (PAD - 1)) // PAD * PAD


@triton.jit
def _split_of(part, SPLITS: tl.constexpr):
    """The product that ``part`` belongs to, and which of its parts it is."""
    if SPLITS == 1:
        return part, 0
    else:
        return part // SPLITS, part % SPLITS


@triton.jit
def _share(split, blocks, SPLITS: tl.constexpr):
    """The blocks of k that a part sums, from the first to before the last: as many as any other part, or one more."""
    if SPLITS == 1:
        return 0, blocks
    else:
        least, rest = blocks // SPLITS, blocks % SPLITS
        return split * least + tl.minimum(split, rest), (split + 1) * least + tl.minimum(split + 1, rest)


@triton.jit
def _load(ptrs, mask_rows, mask_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile, with zeros outside; ROWS and COLUMNS say in which direction it may end early."""
    if ROWS and COLUMNS:
        return tl.load(ptrs, mask=mask_rows[:, None] & mask_columns[None, :], other=0.0)
    elif ROWS:
        return tl.load(ptrs, mask=mask_rows[:, None], other=0.0)
    elif COLUMNS:
        return tl.load(ptrs, mask=mask_columns[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _more(a, b, acc, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` with the products of two blocks. Those of a lone row of A, or column of B, are summed along k at last."""
    if a.shape[0] == 1:
        return acc + tl.trans(a).to(COMPUTE) * b.to(COMPUTE)
    elif b.shape[1] == 1:
        return acc + a.to(COMPUTE) * tl.trans(b).to(COMPUTE)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit
def _matmul_tiles_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, R0, R1, B1,
    stride_a0, stride_a1, stride_ar0, stride_ar1, stride_am, stride_ak,
    stride_b0, stride_b1, stride_br0, stride_br1, stride_bk, stride_bn,
    stride_c0, stride_c1, stride_cm, stride_cn,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EVEN_MN: tl.constexpr, EVEN_K: tl.constexpr,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    UNIT_AM: tl.constexpr, UNIT_AK: tl.constexpr, UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr, UNIT_CM: tl.constexpr,
    PAD_AM: tl.constexpr, PAD_AK: tl.constexpr, PAD_BK: tl.constexpr, PAD_BN: tl.constexpr,
    SPLITS: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """tiles, split_k. Grid: B0 * B1 * SPLITS * tiles. Unit sizes fold away: only what has two batch dims divides by B1.

    With several SPLITS C has a matrix for each of them, stride_c1 apart. What a PAD lets in are zeros.
    """
    M, N, K = multiple(M, UNIT_M), multiple(N, UNIT_N), multiple(K, UNIT_K)
    stride_am, stride_ak = multiple(stride_am, UNIT_AM), multiple(stride_ak, UNIT_AK)
    stride_bk, stride_bn = multiple(stride_bk, UNIT_BK), multiple(stride_bn, UNIT_BN)
    stride_cm = multiple(stride_cm, UNIT_CM)
    UNIT_A: tl.constexpr = UNIT_AM * UNIT_AK  # one of them is 1
    UNIT_B: tl.constexpr = UNIT_BK * UNIT_BN
    tiles_m, tiles_n = blocks_in(M, BLOCK_M), blocks_in(N, BLOCK_N)
    part, index = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    batch, split = _split_of(part, SPLITS)
    b0, b1 = batch // B1, batch % B1
    tile_m, tile_n = _tile_of(index, tiles_m, tiles_n, GROUP_M)
    offs_m, offs_n, offs_k = tile_range(BLOCK_M, WIDE), tile_range(BLOCK_N, WIDE), tile_range(BLOCK_K, WIDE)
    mask_am = offs_m < _padded(M, PAD_AM) - tile_m * BLOCK_M
    mask_bn = offs_n < _padded(N, PAD_BN) - tile_n * BLOCK_N
    a_base = a_ptr + multiple(step(b0, stride_a0) + step(b1, stride_a1), UNIT_A)
    b_base = b_ptr + multiple(step(b0, stride_b0) + step(b1, stride_b1), UNIT_B)
    a_base += step(tile_m * BLOCK_M, stride_am)
    b_base += step(tile_n * BLOCK_N, stride_bn)
    a_offsets = offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_offsets = offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    ROW: tl.constexpr = BLOCK_M == 1
    COLUMN: tl.constexpr = BLOCK_N == 1 and BLOCK_M > 1
    acc = tl.zeros([BLOCK_K if ROW else BLOCK_M, BLOCK_K if COLUMN else BLOCK_N], COMPUTE)
    for r in range(R0 * R1):
        a_ptrs = a_base + multiple(step(r // R1, stride_ar0) + step(r % R1, stride_ar1), UNIT_A) + a_offsets
        b_ptrs = b_base + multiple(step(r // R1, stride_br0) + step(r % R1, stride_br1), UNIT_B) + b_offsets
        first, last = _share(split, blocks_in(K, BLOCK_K), SPLITS)
        if SPLITS > 1:
            a_ptrs += step(first * BLOCK_K, stride_ak)
            b_ptrs += step(first * BLOCK_K, stride_bk)
        for block in range(first, last):
            mask_ak = offs_k < _padded(K, PAD_AK) - block * BLOCK_K
            mask_bk = offs_k < _padded(K, PAD_BK) - block * BLOCK_K
            a = _load(a_ptrs, mask_am, mask_ak, not EVEN_MN, not EVEN_K)  # [BLOCK_M, BLOCK_K]
            b = _load(b_ptrs, mask_bk, mask_bn, not EVEN_K, not EVEN_MN)  # [BLOCK_K, BLOCK_N]
            acc = _more(a, b, acc, COMPUTE, PRECISION)
            a_ptrs += step(BLOCK_K, stride_ak) if WIDE else BLOCK_K * stride_ak
            b_ptrs += step(BLOCK_K, stride_bk) if WIDE else BLOCK_K * stride_bk
    if ROW or COLUMN:
        acc = tl.sum(acc, axis=0 if ROW else 1, keep_dims=True)  # [BLOCK_M, BLOCK_N]
    if SPLITS == 1:
        c_base = c_ptr + multiple(step(b0, stride_c0) + step(b1, stride_c1), UNIT_CM)
    else:
        c_base = c_ptr + multiple(step(part, stride_c1), UNIT_CM)
    c_base += step(tile_m * BLOCK_M, stride_cm) + step(tile_n * BLOCK_N, stride_cn)
    c_ptrs = c_base + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    c = acc.to(c_ptr.dtype.element_ty)
    if EVEN_MN:
        tl.store(c_ptrs, c)
    else:
        mask_m, mask_n = offs_m < M - tile_m * BLOCK_M, offs_n < N - tile_n * BLOCK_N
        tl.store(c_ptrs, c, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _load_block(desc, batch, row, column, BATCHED: tl.constexpr, TURNED: tl.constexpr):
    """The block of an operand at (row, column), zeros outside; TURNED: the descriptor has columns first."""
    if TURNED:
        row, column = column, row
    if BATCHED:
        block = desc.load([batch, row, column])
        block = block.reshape(block.shape[1], block.shape[2])
    else:
        block = desc.load([row, column])
    if TURNED:
        block = block.T
    return block


@triton.jit
def _store_block(
    c, value, batch, row, column, M, N, stride_c0, stride_cm, stride_cn,
    BATCHED: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if BY_DESCRIPTOR:
        if BATCHED:
            c.store([batch, row, column], value.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N))
        else:
            c.store([row, column], value.to(c.dtype))
    else:
        offs_m, offs_n = tile_range(BLOCK_M, WIDE), tile_range(BLOCK_N, WIDE)
        base = c + step(batch, stride_c0) + step(row, stride_cm) + step(column, stride_cn)
        ptrs = base + (offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn)
        mask = (offs_m < M - row)[:, None] & (offs_n < N - column)[None, :]
        tl.store(ptrs, value.to(c.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_persistent_kernel(
    a_desc, b_desc, c, M, N, K, B, stride_c0, stride_cm, stride_cn,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr, C_BATCHED: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, C_BY_DESCRIPTOR: tl.constexpr, SLICES: tl.constexpr,
    SPLITS: tl.constexpr, FLATTEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """persistent, split_k. Grid: as many programs as run at once. ``c`` is a descriptor, or a pointer.

    With several SPLITS it has a matrix for each of them.
    """
    tiles_m, tiles_n = blocks_in(M, BLOCK_M), blocks_in(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for index in tl.range(tl.program_id(0), B * SPLITS * tiles, tl.num_programs(0), flatten=FLATTEN):
        part = index // tiles
        batch, split = _split_of(part, SPLITS)
        tile_m, tile_n = _tile_of(index - part * tiles, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
        first, last = _share(split, blocks_in(K, BLOCK_K), SPLITS)
        for block in range(first, last):
            a = _load_block(a_desc, batch, row, block * BLOCK_K, A_BATCHED, A_TURNED)
            b = _load_block(b_desc, batch, block * BLOCK_K, column, B_BATCHED, B_TURNED)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=COMPUTE)
        if SLICES == 1:
            _store_block(
                c, acc, part, row, column, M, N, stride_c0, stride_cm, stride_cn,
                C_BATCHED, C_BY_DESCRIPTOR, WIDE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            # Half a tile at a time waits in shared memory, which leaves room for one more stage.
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store_block(
                c, left, part, row, column, M, N, stride_c0, stride_cm, stride_cn,
                C_BATCHED, C_BY_DESCRIPTOR, WIDE, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip
            _store_block(
                c, right, part, row, column + BLOCK_N // 2, M, N, stride_c0, stride_cm, stride_cn,
                C_BATCHED, C_BY_DESCRIPTOR, WIDE, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip


@triton.jit
def _matmul_sum_kernel(
    parts_ptr, c_ptr, SIZE, N, B1, stride_part, stride_c0, stride_c1, stride_cm, stride_cn,
    DENSE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """split_k, the second launch: adds the parts of each of the SIZE elements of a product, the first one first.

    Grid: B0 * B1 * blocks. A part is a whole number of blocks. DENSE: so lie the elements of C, one after another.
    """
    blocks = blocks_in(SIZE, BLOCK)
    batch, start = tl.program_id(0) // blocks, step(tl.program_id(0) % blocks, BLOCK)
    offs = tl.arange(0, BLOCK)
    parts = parts_ptr + step(batch, stride_part) * SPLITS + start + offs
    acc = tl.load(parts)  # [BLOCK]
    for _ in tl.static_range(1, SPLITS):
        parts += stride_part
        acc += tl.load(parts)
    c_base = c_ptr + step(batch // B1, stride_c0) + step(batch % B1, stride_c1)
    if DENSE:
        c_ptrs = c_base + start + offs
    else:
        index = start + offs if WIDE else tl.cast(start, tl.int32) + offs
        c_ptrs = c_base + (index // N * stride_cm + index % N * stride_cn)
    if EVEN:
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty))
    else:
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=offs < SIZE - start)


@triton.jit
def _matmul_pack_kernel(
    x_ptr, y_ptr, ROWS, COLUMNS, D1, D2, D3,
    stride_x0, stride_x1, stride_x2, stride_x3, stride_xr, stride_xc, stride_y,
    UNIT_FAR: tl.constexpr, UNIT_NEAR: tl.constexpr, UNIT_PITCH: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PACK_A, PACK_B, the first launch: copies the matrices of an operand so that columns lie one after another.

    Grid: D0 * D1 * D2 * D3 * tiles. Zeros fill what lies between the end of a row and the next, less than 16 bytes.
    """
    tiles_c = blocks_in(COLUMNS, BLOCK)
    tiles = blocks_in(ROWS, BLOCK) * tiles_c
    matrix, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, column = tile // tiles_c * BLOCK, tile % tiles_c * BLOCK
    stride_xr, stride_xc = multiple(stride_xr, UNIT_FAR), multiple(stride_xc, UNIT_NEAR)
    stride_y = multiple(stride_y, UNIT_PITCH)
    inner = matrix % (D1 * D2 * D3)
    x_batch = step(matrix // (D1 * D2 * D3), stride_x0) + step(inner // (D2 * D3), stride_x1)
    x_batch += step(inner // D3 % D2, stride_x2) + step(inner % D3, stride_x3)
    x_base = x_ptr + multiple(x_batch, UNIT_FAR * UNIT_NEAR)  # one of them is 1
    x_base += step(row, stride_xr) + step(column, stride_xc)
    y_base = y_ptr + step(matrix, stride_y) * ROWS + step(row, stride_y) + column
    offs_r, offs_c = tile_range(BLOCK, WIDE), tile_range(BLOCK, WIDE)
    x_ptrs = x_base + offs_r[:, None] * stride_xr + offs_c[None, :] * stride_xc
    y_ptrs = y_base + offs_r[:, None] * stride_y + offs_c[None, :]
    mask_r, mask_c = offs_r < ROWS - row, offs_c < COLUMNS - column
    # Each of the two may take the lanes along lines of its own; in between the tile goes through shared memory.
    x = _load(x_ptrs, mask_r, mask_c, not EVEN, not EVEN)
    if EVEN:
        tl.store(y_ptrs, x)
    else:
        tl.store(y_ptrs, x, mask=mask_r[:, None] & (offs_c < stride_y - column)[None, :])


# ---- the ops ----------------------------------------------------------------------------------------------------


def matmul(input: Tensor, other: Tensor) -> tuple[Any, ...]:
    """The matrix product of ``input`` and ``other``, as ``torch.matmul``.

    Args:
        input: one dim (a row), or matrices in its last two dims; float16, bfloat16, float32, float64; any strides.
        other: one dim (a column), or matrices; of the dtype of ``input``. Batch dims broadcast.

    Returns a contiguous tensor: batch dims, then rows and columns, without those that came from a vector. Sums are
    float32; float32 operands are multiplied in float32, unless torch's own setting for fp32 matrix products
    (torch.set_float32_matmul_precision) asks for tf32. A sum of nothing is 0. In an autocast region operands take its
    dtype.

    Memory, besides the result: with the variant split_k SPLITS results in the dtype of the sums; with PACK_A or PACK_B
    a copy of the operand, which large products make of one in an order that is slow to read, or whose base or strides
    are no multiples of 16 bytes, unless the copies would take more than an eighth of the device's memory.

    Raises Mismatch (a RuntimeError) for shapes or dtypes that do not go together, BadType (a TypeError),
    UnsupportedDtype (a NotImplementedError).
    """
    input = autocast_to_narrow(check_tensor("matmul", "input", input))
    other = autocast_to_narrow(check_tensor("matmul", "other", other))
    check_dtype("matmul", "input", input.dtype, FLOATS)
    check_dtype("matmul", "other", other.dtype, FLOATS)
    if input.dtype != other.dtype:
        raise Mismatch(
            f"matmul(): expected input and other to have the same dtype, but got {input.dtype} and {other.dtype}: "
            "convert one with .to()"
        )
    if input.dim() == 0 or other.dim() == 0:
        raise Mismatch(f"matmul(): both arguments need at least 1 dim, but they have {input.dim()} and {other.dim()}")
    _output_shape(input.shape, other.shape)
    tf32 = input.dtype == torch.float32 and tf32_asked()
    return input, other, tf32


def _output_shape(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """The shape of the product. Raises Mismatch."""
    if left[-1] != right[-2 if len(right) > 1 else 0]:
        raise Mismatch(
            f"matmul(): shapes {tuple(left)} and {tuple(right)} cannot be multiplied: the last dim of input is "
            f"{left[-1]}, the rows of other are {right[-2 if len(right) > 1 else 0]}"
        )
    return (*_broadcast(left[:-2], right[:-2]), *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))


def _broadcast(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    rank = max(len(left), len(right))
    pairs = zip((*(1,) * (rank - len(left)), *left), (*(1,) * (rank - len(right)), *right), strict=True)
    found = []
    for a, b in pairs:
        if a != b and a != 1 and b != 1:
            raise Mismatch(f"matmul(): batch dims {tuple(left)} and {tuple(right)} do not broadcast: {a} against {b}")
        found.append(b if a == 1 else a)
    return tuple(found)


def _turned(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of contiguous matrices of ``shape`` that lie in columns."""
    return (*strides[:-2], 1, shape[-2])


_KERNELS = GemmKernels(
    tiles=_matmul_tiles_kernel,
    persistent=_matmul_persistent_kernel,
    sum=_matmul_sum_kernel,
    pack=_matmul_pack_kernel,
)


def _forward_buffer(input: Meta, other: Meta) -> Buffer:
    shape = _output_shape(input.shape, other.shape)
    return Buffer(shape, contiguous(shape), input.dtype, init=0 if input.shape[-1] == 0 else None)


def _forward_product(input: Meta, other: Meta) -> Product:
    left, right = Matrix.of(input), Matrix.of(other, column=True)
    shape = (*_broadcast(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    out = Matrix(shape, contiguous(shape), input.itemsize)
    return product_of(left, right, out)


def _outputs(input: Meta, other: Meta, tf32: bool) -> tuple[Buffer, ...]:
    return (_forward_buffer(input, other),)


def _problem(input: Meta, other: Meta, tf32: bool) -> Problem:
    return gemm_problem("matmul", _forward_buffer(input, other), _forward_product(input, other), **_flags(tf32))


def _plan(config: Config, blocks: Blocks, device: Device, input: Meta, other: Meta, tf32: bool) -> Plan:
    return _gemm_plan(config, blocks, _forward_product(input, other), _forward_buffer(input, other))


def _flags(tf32: bool) -> dict[str, bool]:
    return {"tf32": True} if tf32 else {}


def _gemm_plan(config: Config, blocks: Blocks, product: Product, output: Buffer) -> Plan:
    return gemm_plan(
        _KERNELS,
        config,
        blocks,
        product,
        output,
        COMPUTE=tl.float64 if output.dtype == torch.float64 else tl.float32,
        PRECISION=config.options.get("input_precision", "ieee"),
    )


def reference(input: Tensor, other: Tensor, tf32: bool) -> Tensor:
    """Matrix product in plain torch."""
    return torch.matmul(input, other)


def _terms(input: Tensor, other: Tensor, tf32: bool) -> Tensor:
    """What each element is a sum of; tf32 keeps 13 bits fewer of each factor."""
    return torch.matmul(input.abs(), other.abs()) * (2.0**13 if tf32 else 1.0)


# ---- gradients --------------------------------------------------------------------------------------------------
# matmul_backward is left @ right, summed over broadcast batch dims to ``shape``: of one dim, the product is a vector.
# ``columns`` lays the result out in columns, as the operand lies that it is the gradient of.


def _summed_matrix(left: Meta, right: Meta, shape: Sequence[int], columns: bool) -> tuple[Matrix, Buffer]:
    """The result as matrices, and as it is given back."""
    full = (left.shape[-2], right.shape[-1])
    matrix = (*shape[:-2], *full)
    strides = contiguous(matrix)
    if columns:
        strides = _turned(strides, matrix)
    nothing = left.shape[-1] == 0 or 0 in _broadcast(left.shape[:-2], right.shape[:-2])
    visible = strides if len(shape) > 1 else (1,)
    buffer = Buffer(tuple(shape), visible, left.dtype, init=0 if nothing else None)
    return Matrix(matrix, strides, left.itemsize), buffer


def _backward_outputs(left: Meta, right: Meta, shape: Sequence[int], columns: bool, tf32: bool) -> tuple[Buffer, ...]:
    return (_summed_matrix(left, right, shape, columns)[1],)


def _backward_problem(left: Meta, right: Meta, shape: Sequence[int], columns: bool, tf32: bool) -> Problem:
    out, buffer = _summed_matrix(left, right, shape, columns)
    return gemm_problem("matmul_backward", buffer, product_of(Matrix.of(left), Matrix.of(right), out), **_flags(tf32))


def _backward_plan(
    config: Config, blocks: Blocks, device: Device,
    left: Meta, right: Meta, shape: Sequence[int], columns: bool, tf32: bool,
) -> Plan:  # fmt: skip
    out, buffer = _summed_matrix(left, right, shape, columns)
    return _gemm_plan(config, blocks, product_of(Matrix.of(left), Matrix.of(right), out), buffer)


def backward_reference(left: Tensor, right: Tensor, shape: Sequence[int], columns: bool, tf32: bool) -> Tensor:
    """A gradient of the matrix product in plain torch."""
    product = torch.matmul(left, right)
    return product.sum_to_size((*shape[:-2], *product.shape[-2:])).reshape(tuple(shape))


def _backward_terms(left: Tensor, right: Tensor, shape: Sequence[int], columns: bool, tf32: bool) -> Tensor:
    return backward_reference(left.abs(), right.abs(), shape, columns, tf32) * (2.0**13 if tf32 else 1.0)


def _in_columns(tensor: Tensor) -> bool:
    """Whether the matrices of ``tensor`` lie in columns, so that its gradient should."""
    return tensor.dim() > 1 and tensor.stride(-2) == 1 and tensor.stride(-1) >= max(tensor.size(-2), 2)


def _save_for_input(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    input, other, tf32 = args
    return other, tuple(input.shape), _in_columns(input), tf32


def _save_for_other(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    input, other, tf32 = args
    return input, tuple(other.shape), _in_columns(other), tf32


def _arguments_for_input(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """dA = dC B^T."""
    other, shape, columns, tf32 = saved
    grad = _as_matrices(grads[0], rows=len(shape) > 1, columns=other.dim() > 1)
    right = (other if other.dim() > 1 else other.unsqueeze(-1)).mT
    return _summable(grad, right, shape, columns, tf32)


def _arguments_for_other(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """dB = A^T dC."""
    input, shape, columns, tf32 = saved
    grad = _as_matrices(grads[0], rows=input.dim() > 1, columns=len(shape) > 1)
    left = (input if input.dim() > 1 else input.unsqueeze(0)).mT
    return _summable(left, grad, shape, columns, tf32)


def _as_matrices(grad: Tensor, rows: bool, columns: bool) -> Tensor:
    """``grad`` with the dims that a product with a vector left out."""
    if not columns:
        grad = grad.unsqueeze(-1)
    return grad if rows else grad.unsqueeze(-2)


def _summable(left: Tensor, right: Tensor, shape: tuple[int, ...], columns: bool, tf32: bool) -> tuple[Any, ...]:
    """The arguments of matmul_backward. Operands whose summed dims do not merge are copied so that they do."""
    out = _summed_matrix(_shape_of(left), _shape_of(right), shape, columns)[0]
    try:
        product_of(Matrix.of(_shape_of(left)), Matrix.of(_shape_of(right)), out)
    except BadArgument:
        batch = _broadcast(left.shape[:-2], right.shape[:-2])
        left, right = (_together(each.expand(*batch, -1, -1), out.shape) for each in (left, right))
    return left, right, shape, columns, tf32


def _together(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A copy of ``tensor`` in which the batch dims that ``shape`` lacks or has 1 of lie together."""
    rank = tensor.dim()
    padded = (*(1,) * (rank - len(shape)), *shape)
    summed = [axis for axis in range(rank - 2) if padded[axis] == 1]
    order = [*(axis for axis in range(rank - 2) if axis not in summed), *summed, rank - 2, rank - 1]
    back = [order.index(axis) for axis in range(rank)]
    return tensor.permute(order).contiguous().permute(back)


def _shape_of(tensor: Tensor) -> Meta:
    """A Meta that asks for no pointer: under tracing there is none."""
    return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _save_for_left(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    left, right, _, _, tf32 = args
    return right, tuple(left.shape), tuple(right.shape[:-2]), _in_columns(left), tf32


def _save_for_right(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    left, right, _, _, tf32 = args
    return left, tuple(right.shape), tuple(left.shape[:-2]), _in_columns(right), tf32


def _arguments_for_left(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    right, shape, _, columns, tf32 = saved
    grad = _repeated(grads[0], _broadcast(shape[:-2], right.shape[:-2]), shape[-2], right.shape[-1])
    return _summable(grad, right.mT, shape, columns, tf32)


def _arguments_for_right(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    left, shape, _, columns, tf32 = saved
    grad = _repeated(grads[0], _broadcast(left.shape[:-2], shape[:-2]), left.shape[-2], shape[-1])
    return _summable(left.mT, grad, shape, columns, tf32)


def _repeated(grad: Tensor, batch: Sequence[int], rows: int, columns: int) -> Tensor:
    """``grad`` of a sum over batch dims, once for each of them."""
    kept = grad.shape[:-2] if grad.dim() > 1 else ()
    return grad.reshape(*kept, rows, columns).expand(*batch, rows, columns)


# ---- a mapped dim -------------------------------------------------------------------------------------------------
# That of torch.func.vmap is one more batch dim, before all others.


def _fold(in_dims: InDims, input: Tensor, other: Tensor, tf32: bool) -> Folded:
    """Many columns beside one matrix are the columns of one product."""
    left, right = in_dims[:2]
    row, column = input.dim() - (left is not None) == 1, other.dim() - (right is not None) == 1
    if column and left is None:
        return Folded((input, other.movedim(right, -1), tf32), out_dims=input.dim() - 1)
    rank = max(input.dim() - (left is not None), other.dim() - (right is not None), 2)
    found = []
    for tensor, dim, vector, axis in ((input, left, row, -2), (other, right, column, -1)):
        first = tensor if dim is None else tensor.movedim(dim, 0)
        matrices = first.unsqueeze(axis) if vector else first
        found.append(matrices if dim is None else leading(matrices, 0, rank))

    def view(product: Tensor) -> Tensor:
        product = product.squeeze(-1) if column else product
        return product.squeeze(-1 if column else -2) if row else product

    return Folded((*found, tf32), view=view)


def _fold_backward(
    in_dims: InDims, left: Tensor, right: Tensor, shape: Sequence[int], columns: bool, tf32: bool
) -> Folded:
    """The sum over the other batch dims stays one."""
    rank = max(left.dim() - (in_dims[0] is not None), right.dim() - (in_dims[1] is not None))
    a, b = (
        tensor if dim is None else leading(tensor, dim, rank)
        for tensor, dim in ((left, in_dims[0]), (right, in_dims[1]))
    )
    size, kept = (b if in_dims[0] is None else a).size(0), shape[:-2]
    wanted = (size, *(1,) * (rank - 2 - len(kept)), *kept, a.size(-2), b.size(-1))
    return Folded(_summable(a, b, wanted, columns, tf32), view=lambda gradient: gradient.reshape(size, *shape))


# ---- inputs -----------------------------------------------------------------------------------------------------


def _values(
    shape: tuple[int, ...], dtype: torch.dtype, device: Any, generator: torch.Generator | None, style: str, scale: float
) -> Tensor:
    """``wide`` brings products near the largest float16, ``nonfinite`` adds NaN and infinities."""
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if style == "nonfinite":
        # Random entries, by value: a tail of the normal distribution.
        x = torch.where(x > 3.2, math.nan, torch.where(x < -2.9, math.inf, x))
    return (x * (8.0 if style == "wide" else 1.0) * scale).to(dtype)


def _sizes(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int, int, int]:
    if len(sizes) < 3:
        raise BadArgument(f"matmul is measured at batch dims, M, N and K, as in 4096x4096x1024, not {sizes}")
    *batch, m, n, k = sizes
    return tuple(batch), m, n, k


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", order: str = "nn", shared: str = "", vector: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """Sizes are batch dims, M, N, K. ``order`` says how each operand lies (``t``: in columns), ``shared`` which has no
    batch dims, ``vector`` which has one dim (its M or N is then no size of the result)."""
    batch, m, n, k = _sizes(sizes)
    made = []
    for name, turned, (rows, columns) in zip("ab", order, ((m, k), (k, n)), strict=True):
        shape = (columns, rows) if turned == "t" else (rows, columns)
        own = () if name in shared else batch
        x = _values((*own, *shape), dtype, device, generator, style, 1.0 if name == "a" else 1 / math.sqrt(max(k, 1)))
        x = x.mT if turned == "t" else x
        made.append(x.flatten() if name in vector and (m if name == "a" else n) == 1 else x)
    return (*made, dtype == torch.float32 and tf32_asked())


def _backward_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", order: str = "nt", summed: bool = False, columns: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    left, right, tf32 = _inputs(sizes, dtype, device=device, generator=generator, style=style, order=order)
    batch, m, n, _ = _sizes(sizes)
    return left, right, [*(() if summed else batch), m, n], columns, tf32


CASES = (
    Case((1, 1, 1)),
    Case((3, 7, 64)),
    Case((33, 20, 34)),
    Case((0, 5, 3)),
    Case((5, 0, 3)),
    Case((5, 3, 0)),
    Case((0, 4, 5, 3)),
    Case((20, 24, 700)),
    Case((37, 20, 515), {"order": "tn"}),
    Case((100, 101, 99), {"order": "nt"}),
    Case((64, 64, 64), {"order": "tn"}),
    Case((40, 72, 24), {"order": "tt"}),
    Case((3, 17, 40, 33)),
    Case((2, 3, 16, 24, 40), {"shared": "b"}),
    Case((3, 16, 24, 40), {"shared": "a"}),
    Case((1, 24, 40), {"vector": "a"}),
    Case((2, 24, 1, 40), {"vector": "b", "shared": "b"}),
    Case((1, 1, 65), {"vector": "ab"}),
)
BACKWARD_CASES = (
    Case((1, 1, 1)),
    Case((33, 20, 34)),
    Case((5, 3, 0)),
    Case((20, 24, 700)),
    Case((37, 20, 515), {"order": "nn", "columns": True}),
    Case((0, 5, 3, 4), {"summed": True}),
    Case((64, 64, 64), {"order": "tn"}),
    Case((40, 72, 24), {"order": "nn", "columns": True}),
    Case((3, 17, 40, 33)),
    Case((3, 17, 40, 33), {"summed": True}),
    Case((2, 3, 16, 24, 40), {"summed": True, "order": "tn"}),
    Case((2, 3, 16, 24, 40), {"columns": True}),
)
# A square of each size, layouts, what language models multiply, few rows, batches, and sizes that fit no tile.
TUNE_CASES = (
    Case((4096, 4096, 4096)),
    Case((8192, 8192, 8192)),
    Case((4096, 4096, 4096), {"order": "nt"}),
    Case((2048, 2048, 2048)),
    Case((1024, 1024, 1024)),
    Case((512, 512, 512)),
    Case((4096, 4096, 4096), {"order": "tn"}),
    Case((4096, 4096, 4096), {"order": "tt"}),
    Case((4096, 14336, 4096), {"order": "nt"}),
    Case((4096, 4096, 14336), {"order": "nt"}),
    Case((2048, 6144, 4096), {"order": "nt"}),
    Case((16, 4096, 4096), {"order": "nt"}),
    Case((64, 14336, 4096), {"order": "nt"}),
    Case((256, 4096, 4096), {"order": "nt"}),
    Case((1, 14336, 4096), {"order": "nt"}),
    Case((8192, 1024, 512)),
    Case((512, 512, 32768)),
    Case((4095, 4095, 4095)),
    Case((1000, 999, 1001)),
    Case((64, 1024, 1024, 64), {"order": "nt"}),
    Case((64, 1024, 64, 1024)),
    Case((512, 128, 128, 128)),
    Case((8, 2048, 2048, 2048)),
    Case((16384, 8192, 1024), {"order": "nt"}),
)
BACKWARD_TUNE_CASES = (
    Case((4096, 4096, 4096)),
    Case((4096, 4096, 4096), {"order": "tn"}),
    Case((8192, 8192, 8192)),
    Case((4096, 4096, 14336), {"order": "nn"}),
    Case((14336, 4096, 4096), {"order": "tn"}),
    Case((64, 1024, 64, 1024), {"order": "tn"}),
)
_DTYPES = ("float32", "float16", "bfloat16", "float64")


_Gradient = tuple[Callable[..., tuple[Any, ...]], Callable[..., tuple[Any, ...]]]


def _backward(*of: _Gradient) -> tuple[Backward, ...]:
    """One gradient for each of the first arguments: how to save for it, and what to multiply."""
    return tuple(Backward("matmul_backward", *each, inputs=(position,)) for position, each in enumerate(of))


OPS = (
    Op(
        "matmul",
        "(Tensor input, Tensor other, bool tf32) -> Tensor",
        signature=matmul,
        settings=tf32_asked,
        problem=_problem,
        work=gemm_work,
        outputs=_outputs,
        fit=fit_gemm,
        plan=_plan,
        reference=reference,
        terms=_terms,
        inputs=_inputs,
        cases=CASES,
        tune_cases=TUNE_CASES,
        dtypes=_DTYPES,
        vmap=_fold,
        backward=_backward((_save_for_input, _arguments_for_input), (_save_for_other, _arguments_for_other)),
    ),
    Op(
        "matmul_backward",
        "(Tensor left, Tensor right, SymInt[] shape, bool columns, bool tf32) -> Tensor",
        problem=_backward_problem,
        work=gemm_work,
        outputs=_backward_outputs,
        fit=fit_gemm,
        plan=_backward_plan,
        reference=backward_reference,
        terms=_backward_terms,
        inputs=_backward_inputs,
        cases=BACKWARD_CASES,
        tune_cases=BACKWARD_TUNE_CASES,
        dtypes=_DTYPES,
        vmap=_fold_backward,
        backward=_backward((_save_for_left, _arguments_for_left), (_save_for_right, _arguments_for_right)),
    ),
)
