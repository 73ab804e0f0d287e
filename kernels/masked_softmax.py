"""Softmax over the last dim of scaled logits of which a mask takes some away, and its gradient.

    z  = scale * x + mask, or -inf where a bool mask is False or, if causal, the column is past the row
    y  = exp(z - max(z)) / sum(exp(z - max(z)))        dx = scale * y * (dy - sum(y * dy))

x, y, dy, dx: (M0, M1, M2, N); mask: the same, with strides of 0 where it repeats. What is masked is 0 whatever x holds
there, and so is a row of which nothing is left: unlike softmax, where such a row is NaN. A NaN or +inf that is not
masked makes its row NaN. The kernels are softmax's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from portkern.arguments import FLOATS, autocast_to_float32, check_bool, check_dtype, check_number, check_tensor
from portkern.batching import Folded, InDims, stacked
from portkern.config import Blocks, Config
from portkern.errors import Mismatch
from portkern.kernels._rows import TRITON_DTYPES
from portkern.kernels.softmax import FORWARD, backward_plan, backward_work, softmax_plan
from portkern.layout import readable, rows_of
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Meta, Out, Plan, like
from portkern.problem import Problem, Work
from portkern.row_reduction import fit_rows, row_problem, row_work
from portkern.target import Device


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
    ``softmax`` of -inf gives NaN); their gradients are 0. A NaN or +inf that is not masked makes its row NaN.

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
    others = [metas.pop("mask")] if mask is not None else []
    return row_problem(
        "masked_softmax", _dim(input), metas, first=next(iter(metas)), others=others, vectors={"mask": mask},
        causal=causal,
    )  # fmt: skip


# 32-bit registers per element, fitted on compiled kernels. No cached_row: of 32768 columns, two rows on a unit leave
# logits that are masked too few registers, and up to 328 bytes spill.
_LIVE = {"packed_rows": 2.4, "resident_row": 2.4, "looped_row": 4.0, "split_row": 4.0, "coresident_row": 2.7}


def _work(problem: Problem) -> Work:
    return row_work(problem, ("x",), ("y",), _LIVE)


def _accumulator(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _plan(
    config: Config, blocks: Blocks, device: Device,
    input: Meta, mask: Meta | None, scale: float, causal: bool, dtype: torch.dtype,
) -> Plan:  # fmt: skip
    metas = _metas(input, mask, causal, dtype)
    # Of positions, kernels take the strides alone.
    places: dict[str, In | Out] = {"y": Out(0), "x": In(0), "mask": In(1), "position": In(0)}
    return softmax_plan(
        FORWARD, False, config, blocks, rows_of(list(metas.values()), _dim(input)),
        {name: places[name] for name in metas}, like(input, dtype), _accumulator(input.dtype, dtype),
        extras={"scale": float(scale), **({} if causal else {"stride_position2": None})}, MASKED=True,
        AS=TRITON_DTYPES[input.dtype],
    )  # fmt: skip


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
