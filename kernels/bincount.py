"""bincount: how often each value occurs in a 1-d tensor of integers from 0 on, or the sum of the weights there.

    y[b] = number of i with x[i] = b        y[b] = sum of w[i] over these i

Counts are integer atomics, into COPIES of the bins so that few bins are no queue; a second launch adds the copies up.
Weights are added as integers too, so that the result does not depend on the order: with 2^e above every |w| and K bits,
w = (hi + lo 2^-K) 2^(e - K) with hi, lo of 64 bits. K leaves room for as many weights as there are, 29 for 2^31: what
is lost of a weight is below 2^-2K of the largest. Non-finite weights set flags of their bin.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern import library
from portkern.arguments import INTEGERS, check_dtype, check_int, check_tensor
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, Mismatch
from portkern.kernels.reductions import LARGEST_SIZE
from portkern.op import Case, Op, Result
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan, Scratch
from portkern.pointwise_plan import pointwise_work
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.target import Device

MAX_BINS = 2**60 - 1  # elements of a tensor of 64-bit counts: torch's bytes are a signed 64-bit number
MAX_COPIES, COPIED_BINS = 64, 1 << 16  # copies of the bins, and bins in all of them
FINISH_BLOCK = 256  # bins of one program of the second launch


@triton.jit
def _power_of_2(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _exponent(largest):
    """e with |w| < 2^e for every weight, from the bits of the largest finite one: -1022 to 1024."""
    bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
    return ((bits >> 52) & 0x7FF) - 1022


@triton.jit
def _count_kernel(
    x_ptr, w_ptr, largest_ptr, count_ptr, low_ptr, flag_ptr, N, BINS, stride_x, stride_w,
    WEIGHTED: tl.constexpr, BITS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First launch. Grid: one program per BLOCK elements."""
    offs = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs * stride_x, mask=mask, other=0).to(tl.int64)
    mask = mask & (x >= 0) & (x < BINS)
    at = tl.cast(tl.program_id(0) % COPIES, tl.int64) * BINS + x
    if WEIGHTED:
        w = tl.load(w_ptr + offs * stride_w, mask=mask, other=0.0).to(tl.float64)
        finite = tl.abs(w) < float("inf")
        e = _exponent(tl.load(largest_ptr))
        # In two steps: 2^-1024 and 2^1024 are no normal numbers of 64 bits.
        scaled = tl.where(finite, w, 0.0) * _power_of_2(-(e // 2)) * _power_of_2(e // 2 - e + BITS)
        high = tl.floor(scaled)
        low = tl.floor((scaled - high) * _power_of_2(e * 0 + BITS))
        tl.atomic_add(count_ptr + at, high.to(tl.int64), mask=mask)
        tl.atomic_add(low_ptr + at, low.to(tl.int64), mask=mask)
        flag = tl.where(w != w, 1, tl.where(w > 0, 2, 4))
        tl.atomic_or(flag_ptr + x, flag, mask=mask & ~finite)
    else:
        tl.atomic_add(count_ptr + at, tl.full([BLOCK], 1, tl.int64), mask=mask)


@triton.jit
def _finish_kernel(
    count_ptr, low_ptr, flag_ptr, largest_ptr, y_ptr, BINS,
    WEIGHTED: tl.constexpr, BITS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Second launch. Grid: one program per BLOCK bins."""
    offs = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < BINS
    count, low = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for copy in range(COPIES):
        count += tl.load(count_ptr + tl.cast(copy, tl.int64) * BINS + offs, mask=mask, other=0)
        if WEIGHTED:
            low += tl.load(low_ptr + tl.cast(copy, tl.int64) * BINS + offs, mask=mask, other=0)
    if WEIGHTED:
        e = _exponent(tl.load(largest_ptr))
        y = count.to(tl.float64) + low.to(tl.float64) * _power_of_2(e * 0 - BITS)
        y = y * _power_of_2(e // 2 - BITS) * _power_of_2(e - e // 2)
        flag = tl.load(flag_ptr + offs, mask=mask, other=0)
        y = tl.where(flag == 2, float("inf"), tl.where(flag == 4, -float("inf"), y))
        y = tl.where((flag == 1) | (flag == 3) | (flag >= 5), float("nan"), y)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(y_ptr + offs, count, mask=mask)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """How often each value occurs in ``input``, or the sum of its ``weights``, as ``torch.bincount``.

    Args:
        input: 1-d, of integers from 0 on, any stride.
        weights: one for each element, of any real type.
        minlength: the least number of bins, which are 2^60 - 1 at most.

    Returns a tensor of max(input) + 1 bins, or ``minlength``: int64 counts, always exact; with weights float32 where
    they are float32, else float64. The result does not depend on the order of summation: the same bits every time.
    The number of bins is asked of the device, which waits, as in torch. It has no gradient.
    Raises Mismatch (a RuntimeError), BadType (a TypeError), UnsupportedDtype.
    """
    check_dtype("bincount", "input", check_tensor("bincount", "input", input).dtype, INTEGERS)
    if (minlength := check_int("bincount", "minlength", minlength)) < 0:
        raise Mismatch(f"bincount(): minlength is {minlength}; it must be an integer from 0 on")
    if input.dim() != 1:
        raise Mismatch(f"bincount(): input has shape {tuple(input.shape)}; it takes one dim of integers from 0 on")
    if weights is not None:
        check_tensor("bincount", "weights", weights)
    if minlength > MAX_BINS:
        raise Mismatch(f"bincount(): minlength is {minlength}; a tensor has at most 2^60 - 1 bins: give less")
    if input.numel() == 0:  # whatever the weights, as in torch
        return Result(torch.zeros(minlength, dtype=torch.int64, device=input.device))
    if weights is not None:
        if weights.shape != input.shape or weights.dtype.is_complex:
            raise Mismatch(
                f"bincount(): weights have shape {tuple(weights.shape)} and {weights.dtype}, input "
                f"{tuple(input.shape)}; give one real weight for each element"
            )
    least, most = (int(each) for each in torch.stack(input.aminmax()).tolist())  # waits for the device
    if least < 0:
        raise Mismatch(f"bincount(): input has {least}; it takes one dim of integers from 0 on")
    if most >= MAX_BINS:
        raise Mismatch(
            f"bincount(): input has {most}; a tensor has at most 2^60 - 1 bins: give smaller values, such as the "
            "inverse of torch.unique(input, return_inverse=True)"
        )
    bins = max(most + 1, minlength)
    if weights is None:
        return input, None, None, bins
    weights = weights.detach() if weights.dtype == torch.float32 else weights.detach().double()
    finite = torch.where(weights.isfinite(), weights, 0.0)
    return input, weights, library.call("absmax", finite, []), bins


def _outputs(input: Meta, weights: Meta | None, largest: Meta | None, bins: int) -> tuple[Buffer, ...]:
    return (Buffer.flat(bins, torch.int64 if weights is None else weights.dtype),)


def _problem(input: Meta, weights: Meta | None, largest: Meta | None, bins: int) -> Problem:
    named = {"x0": input, **({"x1": weights} if weights else {})}
    layout = {name: "n16" if meta.strides[0] == 1 and meta.aligned else "s" for name, meta in named.items()}
    return Problem(
        op="bincount",
        sizes=FrozenMap(N=input.shape[0], M=1, OUTER=1, BINS=bins),
        dtypes=FrozenMap({name: str(meta.dtype).removeprefix("torch.") for name, meta in named.items()}),
        layout=FrozenMap(layout),
    )


def _work(problem: Problem) -> Work:
    sizes = FrozenMap({name: size for name, size in problem.sizes.items() if name != "BINS"})
    work = pointwise_work(8.0, dataclasses.replace(problem, sizes=sizes))
    return dataclasses.replace(work, sizes=problem.sizes, writes=8 * problem.sizes["BINS"])


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    if "BLOCK" not in config.params:
        raise Infeasible(f"variant {config.variant!r} needs the parameter BLOCK")
    return Blocks(BLOCK=config.params["BLOCK"])


def _bits(n: int) -> int:
    """K: 64 bits less a sign, a rounding up and a spare one, and room for the sum of n weights."""
    return 61 - max(n, 1).bit_length()


def _plan(
    config: Config, blocks: Blocks, device: Device, input: Meta, weights: Meta | None, largest: Meta | None, bins: int
) -> Plan:  # fmt: skip
    outputs = _outputs(input, weights, largest, bins)
    if bins == 0:
        return Plan(outputs)
    n, block = input.shape[0], blocks["BLOCK"]
    programs = -(-n // block)
    copies = max(1, min(MAX_COPIES, COPIED_BINS // bins, programs))
    bits = _bits(n)
    weighted = weights is not None
    scratch = [Buffer.flat(copies * bins, torch.int64, init=0)]
    if weighted:
        scratch += [Buffer.flat(copies * bins, torch.int64, init=0), Buffer.flat(bins, torch.int32, init=0)]
    states = (Scratch(0), Scratch(1) if weighted else None, Scratch(2) if weighted else None)
    common = {"WEIGHTED": weighted, "BITS": bits, "COPIES": copies}
    given = (In(0), In(1) if weighted else None, In(2) if weighted else None)
    count = Launch(
        _count_kernel, (programs,), (*given, *states, n, bins, input.strides[0], weights.strides[0] if weights else 1),
        {**common, "BLOCK": block}, config.num_warps, config.num_stages,
    )  # fmt: skip
    finish = Launch(
        _finish_kernel, (-(-bins // FINISH_BLOCK),), (*states, given[2], Out(0), bins),
        {**common, "BLOCK": FINISH_BLOCK}, 4,
    )  # fmt: skip
    return Plan(outputs, tuple(scratch), (count, finish))


def reference(input: Tensor, weights: Tensor | None, largest: Tensor | None, bins: int) -> Tensor:
    """The counts or sums in plain torch."""
    if input.device.type == "meta":
        return torch.empty(bins, dtype=torch.int64 if weights is None else weights.dtype, device="meta")
    found: Tensor = torch.bincount(input, weights if weights is None else weights.double(), minlength=bins)
    return found if weights is None else found.to(weights.dtype)


def _exact(input: Tensor, weights: Tensor | None, largest: Tensor | None, bins: int) -> Tensor:
    """The sums to 2^-100 of the largest weight: of multiples of four coarser and finer steps, each of which are so few
    bits that no addition rounds, and of what is left. Plain sums would be off by a rounding for each addend."""
    if weights is None or not weights.isfinite().any():
        return reference(input, weights, largest, bins)
    finite = weights.isfinite()
    rest = torch.where(finite, weights, 0.0).double()
    exponent, bits = math.frexp(float(rest.abs().max()))[1], 52 - weights.numel().bit_length()
    sums = [torch.bincount(input, torch.where(finite, 0.0, weights.double()), minlength=bins)]
    for level in range(1, 5):
        step = math.ldexp(1.0, max(exponent - bits * level, -1000))
        part = (rest / step).round() * step
        sums.append(torch.bincount(input, part, minlength=bins))
        rest = rest - part
    total = torch.bincount(input, rest, minlength=bins)
    for each in reversed(sums):
        total = total + each
    return total


def _eager(input: Tensor, weights: Tensor | None, largest: Tensor | None, bins: int) -> Tensor:
    return torch.bincount(input, weights, minlength=bins)


def _terms(input: Tensor, weights: Tensor | None, largest: Tensor | None, bins: int) -> Tensor:
    """Sums of sizes, and what each weight loses, which is of the largest one of all bins and not of its own."""
    counts = reference(input, None, None, bins)
    if weights is None or largest is None:
        return counts
    lost = largest.double() * 2.0 ** (53 - 2 * _bits(input.numel()))  # in units of a rounding
    return reference(input, weights.abs().nan_to_num(0.0, 0.0, 0.0), None, bins) + counts * lost


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", bins: int = 37, weighted: bool = True, kind: str = "int64",
) -> tuple[Any, ...]:  # fmt: skip
    """``sizes``: the number of elements; ``dtype``: of the weights."""
    x = torch.randint(0, bins, sizes, generator=generator, device=device).to(getattr(torch, kind))
    if not weighted:
        return x, None, None, bins
    w = torch.randn(sizes, generator=generator, device=device).to(dtype)
    if style != "normal":  # over 20 powers of ten
        w = w * 10.0 ** (torch.rand(sizes, generator=generator, device=device) * 20 - 10).to(dtype)
    if style == "nonfinite" and w.numel() > 20 and w.device.type != "meta":
        w[3], w[5], w[11] = math.inf, -math.inf, math.nan
    size = torch.where(w.isfinite(), w.abs(), 0.0)
    largest = size.amax() if w.numel() else size.new_zeros(())
    return x, w, largest, bins


CASES = (
    *(Case(sizes) for sizes in ((1,), (7,), (500,), (3000,))),
    *(Case(sizes, {"weighted": False, "kind": kind}) for sizes, kind in (((1,), "int64"), ((999,), "uint8"))),
    Case((3000,), {"weighted": False, "bins": 3}), Case((700,), {"bins": 900, "kind": "int32"}),
)  # fmt: skip
OPS = (
    Op(
        "bincount",
        "(Tensor input, Tensor? weights, Tensor? largest, SymInt bins) -> Tensor",
        signature=bincount,
        reads_values=True, problem=_problem, work=_work, outputs=_outputs, fit=_fit, plan=_plan, reference=reference,
        exact=_exact, eager=_eager, terms=_terms, inputs=_inputs, cases=CASES, dtypes=("float32", "float64"),
        tune_cases=(Case((1 << 24,), {"bins": 1000}), Case((1 << 24,), {"bins": 1000, "weighted": False})),
    ),
    LARGEST_SIZE,
)  # fmt: skip
