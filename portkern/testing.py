"""Tools for judging an op: layouts with guard bands, a poisoning allocator, an error budget.

``verify``, ``tune`` and the test suite use these, and authors of ops may in their own tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portkern.errors import PluginError
from portkern.op import Op
from portkern.plan import metas_of

OCTAVES = 40  # below the largest element that the budget tells apart
LANES = 4096  # that look for a maximum each, so that few of them meet at one address
GUARD = 64  # elements of NaN before and after every operand


def _storage(numel: int, like: torch.Tensor) -> torch.Tensor:
    """Memory of ``numel`` elements inside NaN guard bands (the largest value, for integers)."""
    whole = torch.empty(numel + 2 * GUARD, dtype=like.dtype, device=like.device)
    return poison(whole)[GUARD : GUARD + numel]


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` with NaN (the largest value, for integers; True) in place."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return _storage(x.numel(), x).view(x.shape).copy_(x)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Strides in the reverse order of the dims."""
    if x.dim() == 0:
        return _contiguous(x)
    memory = _storage(x.numel(), x).view(x.shape[::-1])
    return memory.permute(*reversed(range(x.dim()))).copy_(x)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dim of a larger tensor, whose other elements are NaN."""
    if x.dim() == 0:
        return _contiguous(x)
    memory = _storage(2 * x.numel(), x).view(*x.shape[:-1], 2 * x.shape[-1])
    return memory[..., ::2].copy_(x)


def _offset(x: torch.Tensor) -> torch.Tensor:
    """A base address that is no multiple of 16 bytes."""
    return _storage(x.numel() + 1, x)[1:].view(x.shape).copy_(x)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Rows of a wider tensor: the row stride passes the row's length by an odd number."""
    if x.dim() == 0:
        return _contiguous(x)
    wide = x.shape[-1] + 3
    memory = _storage(math.prod(x.shape[:-1]) * wide, x).view(*x.shape[:-1], wide)
    return memory[..., : x.shape[-1]].copy_(x)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    """Stride 0 along the first dim: its first slice, repeated."""
    if x.dim() == 0 or x.shape[0] == 0:
        return _contiguous(x)
    return _contiguous(x[:1]).expand(x.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "sliced": _sliced,
    "offset": _offset,
    "padded": _padded,
    "expanded": _expanded,
}


def lay_out(args: Sequence[Any], layout: str) -> tuple[Any, ...]:
    """``args`` with every tensor copied into ``layout``, guard bands of NaN around it."""
    change = LAYOUTS[layout]
    return tuple(change(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def upcast(args: Sequence[Any]) -> tuple[Any, ...]:
    """``args`` for the exact reference: floating tensors and dtypes become float64."""

    def exact(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and arg.dtype.is_floating_point:
            return arg.double()
        if isinstance(arg, torch.dtype) and arg.is_floating_point:
            return torch.float64
        return arg

    return tuple(exact(arg) for arg in args)


@dataclass(frozen=True)
class Verdict:
    """How an output compares. ``ratio`` is the largest error in units of the budget: at most 1 is
    right. ``reason`` says what is wrong, else it is empty."""

    ratio: float
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason


def judge(op: Op, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Verdict:
    """Compare ``outputs`` of ``op`` on ``args`` with the fp64 reference: see ``Expected``."""
    return Expected(op, args).verdict(outputs)


class Expected:
    """What ``op`` should give for ``args``, with an error budget for each element. Made once, it judges many outputs.

    The budget of each element is twice the sum of: the largest error against fp64 that the reference in the dtypes
    of the call makes in elements up to about this one's size; one rounding of this element to the output's dtype;
    four roundings of the terms that it is made of (``op.terms``) to the accumulator's dtype; and what GPU exponentials
    flush to zero. Non-finite values, shape, dtype, strides and the number of outputs must agree exactly.
    """

    def __init__(self, op: Op, args: Sequence[Any]) -> None:
        exact = _tuple(op.exact(*args) if op.exact else op.reference(*upcast(args)))
        same = _tuple(op.reference(*args))
        terms = _tuple(op.terms(*upcast(args))) if op.terms else exact
        self._declared = [(each.shape, each.strides, each.dtype) for each in op.outputs(*metas_of(args))]
        # What an op alters in place follows its outputs, and has the dtype that it has.
        dtypes = [*(dtype for _, _, dtype in self._declared), *(each.dtype for each in same[len(self._declared) :])]
        narrow = _accumulates_in_float32(args, dtypes)
        self._elements = [_Element(*each, narrow) for each in zip(exact, same, terms, dtypes, strict=False)]

    def verdict(self, outputs: Sequence[torch.Tensor]) -> Verdict:
        """How ``outputs`` compare."""
        if len(outputs) != len(self._elements):
            return Verdict(math.inf, f"{len(outputs)} outputs, expected {len(self._elements)}")
        for position, (output, declared) in enumerate(zip(outputs, self._declared, strict=False)):
            if (tuple(output.shape), output.stride(), output.dtype) != declared:
                found = f"shape {tuple(output.shape)}, strides {output.stride()}, {output.dtype}"
                return Verdict(math.inf, f"output {position} has {found}; outputs() declares {declared}")
        worst = Verdict(0.0)
        for position, (output, element) in enumerate(zip(outputs, self._elements, strict=True)):
            verdict = element.verdict(output)
            if not verdict.right and len(outputs) > 1:
                verdict = Verdict(verdict.ratio, f"output {position}: {verdict.reason}")
            if not verdict.right:
                return verdict
            worst = max(worst, verdict, key=lambda each: each.ratio)
        return worst


def _accumulates_in_float32(args: Sequence[Any], outputs: Sequence[torch.dtype]) -> bool:
    """Whether any floating operand is narrower than float64, so that no better arithmetic is promised."""
    operands = (*(arg.dtype for arg in args if isinstance(arg, torch.Tensor)), *outputs)
    return any(each.is_floating_point and each != torch.float64 for each in operands)


class _Element:
    """One output as it should be: in fp64, as its dtype rounds that, and the budget of each value."""

    def __init__(
        self, exact: torch.Tensor, same: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype, narrow: bool
    ) -> None:
        self._exact, self._dtype = exact, dtype
        if not dtype.is_floating_point or exact.numel() == 0:
            return
        self._exact = exact = exact.double()
        self._finite = exact.to(dtype).isfinite()  # what overflows the dtype may be infinite
        self._all_finite = bool(self._finite.all())
        same, self._zero = same.to(dtype).double(), torch.zeros((), dtype=torch.float64, device=exact.device)
        if same.shape != exact.shape:
            raise PluginError(f"the reference gives {tuple(same.shape)}, and {tuple(exact.shape)} in fp64")
        theirs = torch.where(self._finite & same.isfinite(), (same - exact).abs(), self._zero)
        size = torch.where(self._finite, exact.abs(), self._zero)
        terms = torch.where(self._finite & terms.isfinite(), terms.abs(), size)
        self._budget = _budget(size, terms, theirs, dtype, narrow)

    def verdict(self, output: torch.Tensor) -> Verdict:
        exact = self._exact
        if output.shape != exact.shape:
            return Verdict(math.inf, f"shape {tuple(output.shape)}, expected {tuple(exact.shape)}")
        if not output.dtype.is_floating_point:
            wrong = int((output != exact).sum())
            return Verdict(math.inf, f"{wrong} of {output.numel()} values differ") if wrong else Verdict(0.0)
        if output.numel() == 0:
            return Verdict(0.0)
        if self._all_finite:  # as nearly always: a third of the passes over memory
            worst = float((output - exact).abs_().div_(self._budget).max())
            if worst <= 1:
                return Verdict(worst)
        got, rounded = output.double(), exact.to(self._dtype).double()
        agree = torch.where(self._finite, got.isfinite(), (got == rounded) | (got.isnan() & rounded.isnan()))
        if not bool(agree.all()):
            index = _first(~agree)
            return Verdict(
                math.inf,
                f"{int((~agree).sum())} of {output.numel()} values: at {index} it is "
                f"{float(got[index])}, expected {float(rounded[index])}",
            )
        error = torch.where(self._finite, (got - exact).abs(), self._zero)
        ratio = error / self._budget
        worst = float(ratio.max())
        if worst <= 1:
            return Verdict(worst)
        index = _first(ratio == ratio.max())
        return Verdict(
            worst,
            f"error {float(error[index]):.3g} at {index} is {worst:.3g} times the budget "
            f"{float(self._budget[index]):.3g} (got {float(got[index]):.9g}, exact {float(exact[index]):.9g})",
        )


def _budget(
    size: torch.Tensor, terms: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, narrow: bool
) -> torch.Tensor:
    """See ``judge``. All but ``dtype`` are fp64 tensors of the output's shape."""
    info, accumulator = torch.finfo(dtype), torch.finfo(torch.float32 if narrow else torch.float64)
    # In fp64 the reference is no more exact than the output, so its error cannot be seen: more roundings are allowed.
    roundings = 4 if narrow else 16
    flushed = max(info.smallest_normal * info.eps, accumulator.smallest_normal)
    scale = torch.maximum(size, terms)
    rounding = size * info.eps / 2 + scale * accumulator.eps / 2 * roundings
    return 2 * (_error_by_size(theirs, scale) + rounding + flushed)


def _error_by_size(error: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """For each element the largest ``error`` among elements of its own power of two in ``scale`` and below. One
    maximum over everything would let large elements excuse small ones that are plainly wrong."""
    power = torch.frexp(scale).exponent
    top = int(power.max())
    power = torch.where(scale > 0, power, top - OCTAVES).clamp(min=top - OCTAVES) - (top - OCTAVES)
    power = power.long()
    lanes = (_in_lanes(power), _in_lanes(error))
    largest = error.new_zeros(OCTAVES + 1, LANES).scatter_reduce_(0, *lanes, "amax").max(1).values
    return largest.cummax(0).values[power]


def _in_lanes(values: torch.Tensor) -> torch.Tensor:
    """``values`` in rows of LANES, the last one filled up with zeros."""
    return torch.nn.functional.pad(values.flatten(), (0, -values.numel() % LANES)).view(-1, LANES)


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in mask.nonzero()[0])


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)
