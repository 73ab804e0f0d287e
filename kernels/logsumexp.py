"""Logarithm of the sum of exponentials over dims, and its gradient.

    y = m + log(sum(exp(x - m))), m the maximum of x clipped to finite numbers        dx = dy * exp(x - y)

x, dx: (M0, M1, M2, N), reduced over N; y, dy: one number a row. A NaN makes its row NaN; else a +inf makes it +inf,
and a row of only -inf, or of nothing, is -inf, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, INTEGERS, autocast_to_float32, check_bool, check_dim, check_dtype, check_tensor
from portkern.batching import Folded, InDims, stacked
from portkern.config import Blocks, Config
from portkern.errors import Mismatch
from portkern.kernels._rows import (
    TRITON_DTYPES,
    at,
    block_offsets,
    blocks_in,
    cast,
    exp,
    load,
    lowest,
    part_of,
    store,
    tile_origin,
)
from portkern.layout import read_at_once, readable, rows_of
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Meta, Out, Plan, like
from portkern.problem import Problem, Work
from portkern.row_plan import RowKernels, row_plan
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device


@triton.jit
def _finite(x, COMPUTE: tl.constexpr):
    """x within the finite numbers: what is subtracted from an infinity shall not be one."""
    return tl.minimum(tl.maximum(x, lowest(COMPUTE)), -lowest(COMPUTE))


@triton.jit
def _store_rows(y, value, i0, i1, i2, offs_m, mask_m):
    ptrs = at(y, i0, i1, i2) + offs_m[:, None] * y[3]
    tl.store(ptrs, cast(value, y[0].dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def _sums(
    x, i0, i1, i2, first, last, offs_m, mask_m, N,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(max, sum of exponentials relative to it) of the column blocks first to last, [BLOCK_M, 1] each."""
    # Kept for each GROUP neighbours, which one lane reads: a reduction of the block would stall the loads at a barrier,
    # and a state for each element takes two exponentials, not little more than one.
    maximum = tl.full([BLOCK_M, BLOCK_N // GROUP], lowest(COMPUTE), COMPUTE)
    total = tl.zeros([BLOCK_M, BLOCK_N // GROUP], COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        value = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], -float("inf")).to(COMPUTE)
        value = tl.reshape(value, [BLOCK_M, BLOCK_N // GROUP, GROUP])
        new_maximum = _finite(tl.maximum(maximum, tl.max(value, axis=2)), COMPUTE)
        total = total * exp(maximum - new_maximum) + tl.sum(exp(value - new_maximum[:, :, None]), axis=2)
        maximum = new_maximum
    row_maximum = tl.max(maximum, axis=1, keep_dims=True)
    return row_maximum, tl.sum(total * exp(maximum - row_maximum), axis=1, keep_dims=True)


@triton.jit
def _tile(
    tile, x, y, M0, M1, M2, N, COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m, offs_n = block_offsets(0, BLOCK_M, WIDE), block_offsets(0, BLOCK_N, WIDE)
    mask_m = offs_m < M2 - i2
    value = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], -float("inf")).to(COMPUTE)
    maximum = _finite(tl.max(value, axis=1, keep_dims=True), COMPUTE)
    total = tl.sum(exp(value - maximum), axis=1, keep_dims=True)
    _store_rows(y, maximum + tl.log(total), i0, i1, i2, offs_m, mask_m)


@triton.jit
def _logsumexp_kernel(
    x_ptr, y_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """packed_rows, resident_row. Grid: one program a tile, or PERSISTENT ones that fetch STAGES - 1 tiles ahead."""
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2)
    if PERSISTENT:
        tiles = M0 * M1 * blocks_in(M2, BLOCK_M)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _tile(tile, x, y, M0, M1, M2, N, COMPUTE, WIDE, BLOCK_M, BLOCK_N)
    else:
        _tile(tl.program_id(0), x, y, M0, M1, M2, N, COMPUTE, WIDE, BLOCK_M, BLOCK_N)


@triton.jit
def _logsumexp_looped_kernel(
    x_ptr, y_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row. Grid: one program per BLOCK_M rows. The row is read once."""
    x, y = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn), (y_ptr, stride_y0, stride_y1, stride_y2)
    i0, i1, i2 = tile_origin(tl.program_id(0), M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    maximum, total = _sums(
        x, i0, i1, i2, 0, blocks_in(N, BLOCK_N), offs_m, mask_m, N, COMPUTE, WIDE, STAGES, GROUP, BLOCK_M, BLOCK_N
    )
    _store_rows(y, maximum + tl.log(total), i0, i1, i2, offs_m, mask_m)


@triton.jit
def _logsumexp_partial_kernel(
    x_ptr, partial_ptr, M0, M1, M2, N, stride_x0, stride_x1, stride_x2, stride_xn,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """split_row, first launch. Grid: tiles * SPLITS. partial: (tiles, 2, BLOCK_M, SPLITS), COMPUTE."""
    x = (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn)
    tile, part, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    maximum, total = _sums(
        x, i0, i1, i2, first, last, offs_m, offs_m < M2 - i2, N, COMPUTE, WIDE, STAGES, GROUP, BLOCK_M, BLOCK_N
    )
    ptrs = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS) + part
    ptrs += tl.arange(0, BLOCK_M)[:, None] * SPLITS
    tl.store(ptrs, maximum)
    tl.store(ptrs + BLOCK_M * SPLITS, total)


@triton.jit
def _logsumexp_combine_kernel(
    y_ptr, partial_ptr, M0, M1, M2, stride_y0, stride_y1, stride_y2,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """split_row, second launch. Grid: tiles * SPLITS, of which the first part of each tile works."""
    if tl.program_id(0) % SPLITS == 0:
        tile = tl.program_id(0) // SPLITS
        i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
        offs_m, offs_s = block_offsets(0, BLOCK_M, WIDE), tl.arange(0, BLOCK_SPLITS)[None, :]
        ptrs = partial_ptr + tl.cast(tile, tl.int64) * (2 * BLOCK_M * SPLITS)
        ptrs += tl.arange(0, BLOCK_M)[:, None] * SPLITS + offs_s
        maximums = tl.load(ptrs, mask=offs_s < SPLITS, other=lowest(COMPUTE))
        totals = tl.load(ptrs + BLOCK_M * SPLITS, mask=offs_s < SPLITS, other=0.0)
        maximum = tl.max(maximums, axis=1, keep_dims=True)
        total = tl.sum(totals * exp(maximums - maximum), axis=1, keep_dims=True)
        y = (y_ptr, stride_y0, stride_y1, stride_y2)
        _store_rows(y, maximum + tl.log(total), i0, i1, i2, offs_m, offs_m < M2 - i2)


@triton.jit
def _logsumexp_backward_kernel(
    dy_ptr, x_ptr, y_ptr, dx_ptr, M0, M1, M2, N, stride_dy0, stride_dy1, stride_dy2,
    stride_x0, stride_x1, stride_x2, stride_xn, stride_y0, stride_y1, stride_y2,
    stride_dx0, stride_dx1, stride_dx2, stride_dxn,
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """looped_row, split_row. Grid: tiles * SPLITS."""
    x, dx = (
        (x_ptr, stride_x0, stride_x1, stride_x2, stride_xn),
        (dx_ptr, stride_dx0, stride_dx1, stride_dx2, stride_dxn),
    )
    tile, _, first, last = part_of(tl.program_id(0), blocks_in(N, BLOCK_N), SPLITS)
    i0, i1, i2 = tile_origin(tile, M0, M1, M2, BLOCK_M)
    offs_m = block_offsets(0, BLOCK_M, WIDE)
    mask_m = offs_m < M2 - i2
    y, dy = (y_ptr, stride_y0, stride_y1, stride_y2), (dy_ptr, stride_dy0, stride_dy1, stride_dy2)
    row_y = tl.load(at(y, i0, i1, i2) + offs_m[:, None] * y[3], mask=mask_m[:, None], other=0.0).to(COMPUTE)
    row_dy = tl.load(at(dy, i0, i1, i2) + offs_m[:, None] * dy[3], mask=mask_m[:, None], other=0.0).to(COMPUTE)
    for block in tl.range(first, last, num_stages=STAGES):
        offs_n = block_offsets(block, BLOCK_N, WIDE)
        value = load(at(x, i0, i1, i2), offs_m, offs_n, mask_m, offs_n < N, x[3], x[4], 0.0).to(COMPUTE)
        result = exp(value - row_y) * row_dy
        store(at(dx, i0, i1, i2), result, offs_m, offs_n, mask_m, offs_n < N, dx[3], dx[4])


def logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> tuple[Any, ...]:
    """Logarithm of the sum of exponentials over ``dim``, as ``torch.logsumexp``.

    Args:
        input: any shape and strides; float16, bfloat16, float32, float64, or an integer type, which is converted to
            torch's default dtype.
        dim: the dim or dims that are summed; an empty sequence is all of them.
        keepdim: whether they stay, of size 1.

    Returns a tensor of ``input``'s dtype (float32 where autocast is on, for a 16-bit ``input`` on a GPU). The sum over
    nothing, and of -inf only, is -inf; with a +inf it is +inf; with a NaN, NaN.

    Raises BadDim (an IndexError), Mismatch (a RuntimeError) for a dim named twice, BadType (a TypeError),
    UnsupportedDtype (a NotImplementedError).
    """
    op = "logsumexp"
    check_dtype(op, "input", check_tensor(op, "input", input).dtype, (*FLOATS, *INTEGERS, torch.bool))
    check_bool(op, "keepdim", keepdim)
    dims = _dims(input, dim)
    x = input if input.dtype.is_floating_point else input.to(torch.get_default_dtype())
    index = dims[0] if len(dims) == 1 else 0
    if len(dims) > 1:
        x = x.movedim(dims, tuple(range(len(dims)))).flatten(0, len(dims) - 1)
    elif not dims:
        x = x.reshape(-1)
    return readable(x, x, index), index, _accumulator(x.dtype)


def _dims(input: Tensor, dim: Any) -> tuple[int, ...]:
    """The dims as sorted indices; a 0-d tensor has none."""
    given = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    found = sorted(check_dim("logsumexp", each, input.dim()) for each in given or range(input.dim()))
    if len(set(found)) < len(found):
        raise Mismatch(f"logsumexp(): dim is {dim}, in which a dim appears multiple times")
    return tuple(found) if input.dim() else ()


def _result(outputs: Sequence[Tensor], input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    # The gradient reads the sum as it was computed: rounded to 16 bits it was 1.3 budgets off.
    result = outputs[0].to(autocast_to_float32(input) if input.is_floating_point() else torch.get_default_dtype())
    for each in _dims(input, dim) if keepdim else ():
        result = result.unsqueeze(each)
    return result


def _spread(meta: Meta | Buffer, dim: int, n: int) -> Meta:
    """One number a row as an operand of the input's shape."""
    shape = (*meta.shape[:dim], n, *meta.shape[dim:])
    return Meta(shape, (*meta.strides[:dim], 0, *meta.strides[dim:]), meta.dtype)


def _outputs(input: Meta, dim: int, dtype: torch.dtype) -> tuple[Buffer, ...]:
    shape, strides = list(input.shape), list(input.strides)
    del shape[dim], strides[dim]
    return (like(Meta(tuple(shape), tuple(strides), dtype)),)


def _problem(input: Meta, dim: int, dtype: torch.dtype) -> Problem:
    (y,) = _outputs(input, dim, dtype)
    spread = _spread(y, dim, input.shape[dim])
    return row_problem("logsumexp", dim, {"x": input}, first="x", others=(spread,), vectors={"y": spread})


# 32-bit registers per element, fitted on compiled kernels.
_LIVE = {"packed_rows": 1.6, "resident_row": 1.6, "looped_row": 3.0, "split_row": 3.0}
_LIVE_BACKWARD = {"looped_row": 2.5, "split_row": 2.5}
_KERNELS = RowKernels(
    whole=_logsumexp_kernel, looped=_logsumexp_looped_kernel, partial=_logsumexp_partial_kernel,
    combine=_logsumexp_combine_kernel, coresident=None, partials=2,
)  # fmt: skip
_BACKWARD = RowKernels(
    whole=None, looped=_logsumexp_backward_kernel, partial=None, combine=_logsumexp_backward_kernel, coresident=None,
    partials=0,
)  # fmt: skip


def _work(problem: Problem) -> Work:
    return row_work(problem, ("x",), (), _LIVE)


def _accumulator(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _plan(config: Config, blocks: Blocks, device: Device, input: Meta, dim: int, dtype: torch.dtype) -> Plan:
    outputs = _outputs(input, dim, dtype)
    rows = rows_of((input, _spread(outputs[0], dim, input.shape[dim])), dim)
    compute = _accumulator(dtype, input.dtype)
    return row_plan(
        _KERNELS, config, blocks, rows, {"x": In(0), "y": Out(0)}, outputs, compute=compute, of_nothing=True,
        COMPUTE=TRITON_DTYPES[compute], GROUP=min(read_at_once(input, rows, 0), blocks["BLOCK_N"]),
    )  # fmt: skip


def _backward_outputs(grad_output: Meta, input: Meta, output: Meta, dim: int) -> tuple[Buffer, ...]:
    return (like(input),)


def _backward_problem(grad_output: Meta, input: Meta, output: Meta, dim: int) -> Problem:
    n = input.shape[dim]
    others = (_spread(grad_output, dim, n), _spread(output, dim, n))
    operands: dict[str, Meta | Buffer] = {"dx": like(input), "x": input}
    return row_problem("logsumexp_backward", dim, operands, first="dx", others=others, vectors={"y": output})


def _backward_work(problem: Problem) -> Work:
    return row_work(problem, ("x",), ("dx",), _LIVE_BACKWARD)


def _backward_plan(
    config: Config, blocks: Blocks, device: Device, grad_output: Meta, input: Meta, output: Meta, dim: int
) -> Plan:
    outputs, n = _backward_outputs(grad_output, input, output, dim), input.shape[dim]
    rows = rows_of((outputs[0], input, _spread(grad_output, dim, n), _spread(output, dim, n)), dim)
    compute = _accumulator(input.dtype, output.dtype)
    operands: dict[str, In | Out] = {"dx": Out(0), "x": In(1), "dy": In(0), "y": In(2)}
    return row_plan(_BACKWARD, config, blocks, rows, operands, outputs, compute=compute, COMPUTE=TRITON_DTYPES[compute])


def reference(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Log of the sum of exponentials in plain torch."""
    return torch.logsumexp(input.to(_accumulator(dtype, input.dtype)), dim).to(dtype)


def backward_reference(grad_output: Tensor, input: Tensor, output: Tensor, dim: int) -> Tensor:
    """Its gradient in plain torch."""
    accumulator = _accumulator(input.dtype, output.dtype)
    y, dy = (each.to(accumulator) for each in (output, grad_output))
    y, dy = (y.unsqueeze(dim), dy.unsqueeze(dim)) if input.dim() else (y, dy)
    return (dy * torch.exp(input.to(accumulator) - y)).to(input.dtype)


def _backward_eager(grad_output: Tensor, input: Tensor, output: Tensor, dim: int) -> Tensor:
    """By torch's softmax: ``exp(input - output)`` would take one more pass, and round the exponent to the dtype."""
    dy = grad_output.to(input.dtype)
    return torch.softmax(input, dim).mul_(dy.unsqueeze(dim) if input.dim() else dy)


def _terms(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The maximum, and the logarithm of a sum that is at least 1, whose exponents are rounded."""
    y = torch.logsumexp(input, dim)
    finite = input.nan_to_num(0.0, 0.0, 0.0).abs()
    return 1 + y.abs() + (finite.amax(dim) if input.shape[dim:] and finite.numel() else 0.0)


def _backward_terms(grad_output: Tensor, input: Tensor, output: Tensor, dim: int) -> Tensor:
    """dx times the exponent's argument, which is rounded before the exponential."""
    y, dy = (each.unsqueeze(dim) if input.dim() else each for each in (output, grad_output))
    argument = (input.abs() + y.abs()).nan_to_num(0.0, 0.0, 0.0)
    return dy.abs() * torch.exp(input - y) * (1 + argument)


def _values(
    sizes: tuple[int, ...], dtype: torch.dtype, device: Any, generator: torch.Generator | None, style: str
) -> Tensor:
    x = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
    if style != "normal":
        x = torch.where(x * 40 < -60, -math.inf, x * 40)
    if style == "nonfinite":
        x = torch.where(x > 100, math.nan, torch.where(x > 90, math.inf, x))
    return x.to(dtype)


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", dim: int = -1,
) -> tuple[Any, ...]:  # fmt: skip
    return _values(sizes, dtype, device, generator, style), check_dim("logsumexp", dim, len(sizes)), _accumulator(dtype)


def _backward_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", dim: int = -1,
) -> tuple[Any, ...]:  # fmt: skip
    x, index, _ = _inputs(sizes, dtype, device=device, generator=generator, style=style, dim=dim)
    y = torch.logsumexp(x.to(_accumulator(dtype)), index)
    dy = torch.randn(y.shape, generator=generator, device=device, dtype=torch.float32).to(y.dtype)
    return dy, x, y, index


CASES = tuple(
    Case(sizes, {"dim": dim})
    for sizes, dim in (
        ((1,), 0), ((3, 1), -1), ((0, 5), -1), ((5, 0), -1), ((5, 7), 0), ((4, 33), -1), ((2, 3, 130), -1),
        ((3, 129, 4), 1), ((2, 1008), -1), ((3, 4097), -1),
    )
)  # fmt: skip
TUNE_CASES = tuple(
    Case(sizes) for sizes in ((4096, 1024), (8192, 8192), (4096, 32768), (4096, 131072), (32768, 256), (1, 1048576))
)
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0], outputs[0], args[1]


def _backward_arguments(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return grads[0], *saved


def _fold(in_dims: InDims, input: Tensor, dim: int, dtype: torch.dtype) -> Folded:
    """A mapped dim holds more rows."""
    (x,) = stacked(in_dims, input)
    return Folded((readable(x, x, dim + 1), dim + 1, dtype))


def _fold_backward(in_dims: InDims, grad_output: Tensor, input: Tensor, output: Tensor, dim: int) -> Folded:
    grad, x, y = stacked(in_dims, grad_output, input, output)
    return Folded((grad, readable(x, x, dim + 1), y, dim + 1))


_COMMON: dict[str, Any] = {"fit": fit_rows, "tune_cases": TUNE_CASES, "dtypes": _DTYPES, "cases": CASES}

OPS = (
    Op(
        "logsumexp",
        "(Tensor input, int dim, ScalarType dtype) -> Tensor",
        signature=logsumexp,
        result=_result,
        problem=_problem,
        work=_work,
        outputs=_outputs,
        plan=_plan,
        reference=reference,
        terms=_terms,
        eager=lambda input, dim, dtype: torch.logsumexp(input, dim),
        inputs=_inputs,
        vmap=_fold,
        backward=Backward("logsumexp_backward", _save, _backward_arguments, inputs=(0,)),
        **_COMMON,
    ),
    Op(
        "logsumexp_backward",
        "(Tensor grad_output, Tensor input, Tensor output, int dim) -> Tensor",
        problem=_backward_problem,
        work=_backward_work,
        outputs=_backward_outputs,
        plan=_backward_plan,
        reference=backward_reference,
        terms=_backward_terms,
        eager=_backward_eager,
        inputs=_backward_inputs,
        vmap=_fold_backward,
        **_COMMON,
    ),
)
