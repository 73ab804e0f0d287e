"""An op over rows from outside the package: y = x / sqrt(sum(x * x) + eps), summed over one dim.

x, y: (M0, M1, M2, N), reduced over N, of any strides. A tile holds BLOCK_M whole rows, or a program walks its rows
twice. eps is a number given per call, so it is part of no key.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from portkern.arguments import FLOATS, check_dim, check_dtype, check_number, check_tensor
from portkern.config import Blocks, Config
from portkern.kernels._rows import at, block_offsets, blocks_in, load, number, store, tile_origin
from portkern.layout import readable, rows_of
from portkern.op import Case, Op
from portkern.plan import Buffer, In, Meta, Out, Plan, Value, like
from portkern.problem import Problem, Work
from portkern.row_plan import RowKernels, row_plan
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device


@triton.jit
def _normalise(
    x, y, i0, i1, i2, offs_m, mask_m, N, eps,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = block_offsets(0, BLOCK_N, WIDE)
    value = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], 0.0).to(COMPUTE)  # [M, N]
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) + number(eps, COMPUTE))
    store(at(y, i0, i1, i2), value * scale, offs_m, offs_n, mask_m, offs_n < N, y[3], y[4])


@triton.jit(do_not_specialize=["eps"])
def _whole_kernel(
    x_ptr, y_ptr, M0, M1, M2, N, eps: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row. Grid: one program a tile, or PERSISTENT ones that fetch STAGES - 1 tiles ahead."""
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
            _normalise(x, y, i0, i1, i2, offs_m, offs_m < M2 - i2, N, eps, COMPUTE, WIDE, BLOCK_N)
    else:
        i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
        _normalise(x, y, i0, i1, i2, offs_m, offs_m < M2 - i2, N, eps, COMPUTE, WIDE, BLOCK_N)


@triton.jit(do_not_specialize=["eps"])
def _looped_kernel(
    x_ptr, y_ptr, M0, M1, M2, N, eps: tl.float64,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2, stride_yn,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row. Grid: one program per BLOCK_M rows."""
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2, stride_yn)
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    squares = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for block in tl.range(0, blocks_in(N, BLOCK_N), num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        value = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], 0.0).to(COMPUTE)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) + number(eps, COMPUTE))
    for block in tl.range(0, blocks_in(N, BLOCK_N), num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        value = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], 0.0).to(COMPUTE)
        store(at(y, i0, i1, i2), value * scale, offs_m, offs_n, mask_m, offs_n < N, y[3], y[4])


_KERNELS = RowKernels(whole=_whole_kernel, looped=_looped_kernel)
# 32-bit registers that each variant keeps for an element; the variants that there are.
_LIVE = {"packed_rows": 1.4, "resident_row": 1.4, "looped_row": 2.8}


def l2_normalize(input: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> tuple[Any, ...]:
    """Each row of ``input`` along ``dim``, over its length."""
    op = "l2_normalize"
    check_dtype(op, "input", check_tensor(op, "input", input).dtype, FLOATS)
    index = check_dim(op, dim, input.dim())
    return readable(input, input, index), index, check_number(op, "eps", eps)


def _outputs(input: Meta, dim: int, eps: float | None) -> tuple[Buffer, ...]:
    return (like(input, input.dtype),)


def _problem(input: Meta, dim: int, eps: float | None) -> Problem:
    return row_problem("example::l2_normalize", dim, {"x": input, "y": like(input, input.dtype)}, first="y")


def _work(problem: Problem) -> Work:
    return row_work(problem, reads=("x",), writes=("y",), live=_LIVE)


def _plan(config: Config, blocks: Blocks, device: Device, input: Meta, dim: int, eps: float | None) -> Plan:
    output, double = like(input, input.dtype), input.dtype == torch.float64
    return row_plan(
        _KERNELS, config, blocks, rows_of((output, input), dim), {"y": Out(0), "x": In(0)}, (output,),
        extras={"eps": Value(2)},
        compute=torch.float64 if double else torch.float32,
        COMPUTE=tl.float64 if double else tl.float32,
    )  # fmt: skip


def _reference(input: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    x = input if input.dtype == torch.float64 else input.float()
    return (x / torch.sqrt(x.square().sum(dim, keepdim=True) + eps)).to(input.dtype)


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: Any = None, style: str = "normal",
    dim: int = -1,
) -> tuple[Any, ...]:  # fmt: skip
    x = torch.randn(sizes, generator=generator, device=device) * (1 if style == "normal" else 30)
    return x.to(dtype), check_dim("l2_normalize", dim, len(sizes)), 1e-6


OPS = (
    Op(
        "example::l2_normalize",
        "(Tensor input, int dim, float eps) -> Tensor",
        signature=l2_normalize,
        problem=_problem,
        work=_work,
        outputs=_outputs,
        fit=fit_rows,
        plan=_plan,
        reference=_reference,
        inputs=_inputs,
        cases=tuple(
            Case(sizes, {"dim": dim})
            for sizes, dim in (
                ((1,), 0),
                ((0, 5), -1),
                ((5, 0), -1),
                ((3, 129, 4), 1),
                ((2, 1000), -1),
                ((3, 4097), -1),
            )
        ),
        tune_cases=(Case((4096, 4096)), Case((4096, 32768))),
        values=(2,),
    ),
)
