"""Quantisation to 8-bit floats with a scale for each row, or for the tensor.

    scale = max |x| / largest (1 where that is 0)        q = round(x / scale), to nearest, ties to even

The format is the running device's own: e4m3fn (largest 448), or e4m3fnuz (largest 240) where the architecture has only
that. Three launches: the largest size, the scale, and the codes. Where a target has no instruction for the conversion,
integers round.
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
from portkern.kernels.reductions import LARGEST_SIZE, rows_to_reduce
from portkern.op import Case, Result
from portkern.pointwise_arguments import canonical
from portkern.pointwise_op import pointwise
from portkern.runtime import current

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


@triton.jit
def _scale(size, largest: float):
    return tl.where(size == 0, 1.0, size / largest)


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


def quantize_fp8(input: Tensor, dim: int | Sequence[int] | None = -1) -> Any:
    """``input`` as 8-bit floats, and the scales that it is to be multiplied by.

    Args:
        input: float16, bfloat16 or float32, any shape and strides.
        dim: the dim or dims that share a scale: the last for one a row, None for one a tensor.

    Returns (quantised, scale): ``float8_e4m3fn``, or ``float8_e4m3fnuz`` where the device has only that, in ``input``'s
    shape; and float32 of ``input``'s shape with size 1 along ``dim``. A NaN or an infinity makes all that shares its
    scale NaN or 0. It has no gradient.
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
    size = library.call("absmax", rows, shape)
    scale = library.call("fp8_scale", *canonical(_SCALE, (size, LARGEST[kind])))
    fnuz = kind == torch.float8_e4m3fnuz
    codes = library.call("quantize_fp8", *canonical(_CODE, (x, scale, fnuz, native)))
    return Result((codes.view(kind), scale))


def device_format(device: str) -> tuple[str, bool]:
    """The 8-bit format of ``device``, as its plugin says, and whether it has an instruction for it; the most common one
    for tensors that are on no GPU."""
    where = torch.device(device)
    if where.type == "meta" or where.type == "cpu" and not dispatch.interpreting():
        return "float8_e4m3fn", False
    runtime = current()
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


CASES = (
    *(Case(sizes, {"other": other}) for sizes, other in (
        ((), "scalar"), ((7,), "scalar"), ((0, 5), "column"), ((5, 33), "column"), ((5, 33), "row"),
        ((4099,), "scalar"),
    )),
    Case((3, 130), {"other": "column", "FNUZ": 1}), Case((4099,), {"other": "scalar", "FNUZ": 1}),
)  # fmt: skip
_OPS = (
    *pointwise(
        "quantize_fp8", signature=quantize_fp8, reference=_code_reference, eager=_code_eager,
        result=torch.uint8, cases=CASES,
        dtypes=("float32", "float16", "bfloat16"),
        tune_cases=(Case((8192, 8192), {"other": "column"}), Case((8192, 8192), {"other": "scalar"})),
    )(_code).ops,
    *pointwise(
        "fp8_scale", public=False, dtypes=("float32",), defaults={"largest": 448.0}, integers="refuse",
        reference=lambda size, largest: torch.where(size == 0, 1.0, size / largest),
    )(_scale).ops,
)  # fmt: skip
_CODE, _SCALE = (op.plan.args[0] for op in _OPS)  # type: ignore[attr-defined]
_QUANTIZE, *_REST = _OPS
OPS = (replace(_QUANTIZE, inputs=partial(_inputs, _QUANTIZE.inputs)), *_REST, LARGEST_SIZE)
