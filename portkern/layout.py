"""Strides made simple for op authors: row views of any tensor, and layout classes for keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from portkern.plan import Buffer, Meta, like
from portkern.sizes import kept

ROW_DIMS = 3  # how many row dims a row kernel reads; more are reached by one launch for each index
MAX_LAUNCHES = 64  # of one call, for dims beyond those; a copy costs less than more of them
NARROW = 2**31 - 2**20  # offsets in a tile below this stay below 2**31 in its padding too
VECTOR_BYTES = 16  # the widest load of one lane


@dataclass(frozen=True, slots=True)
class Rows:
    """Several operands of one shape seen as rows: three row dims and the reduced dim.

    ``sizes`` are (M0, M1, M2), unit dims first, so that their divisions specialise away;
    ``strides`` gives (s0, s1, s2, sn) in elements for each operand; ``offsets`` gives, for each
    launch that is needed, every operand's start in elements.
    """

    sizes: tuple[int, int, int]
    n: int
    strides: tuple[tuple[int, int, int, int], ...]
    offsets: tuple[tuple[int, ...], ...]

    @property
    def m(self) -> int:
        """Rows in one launch."""
        return self.sizes[0] * self.sizes[1] * self.sizes[2]


def rows_of(operands: Sequence[Meta | Buffer], dim: int) -> Rows:
    """See ``operands`` (equal shapes, any strides) as rows along ``dim``.

    Row dims are ordered by the strides of the first operand (pass the output first), then merged
    where every operand allows it. What is left over three is reached by separate launches.
    """
    return _rows(operands[0].shape, tuple(operand.strides for operand in operands), dim)


@kept(maxsize=64)  # a problem and its plan ask for the same rows
def _rows(shape: tuple[int, ...], all_strides: tuple[tuple[int, ...], ...], dim: int) -> Rows:
    count = len(all_strides)
    if not shape:
        return Rows((1, 1, 1), 1, ((0, 0, 0, 1),) * count, ((0,) * count,))
    inner, outer = _collapse(shape, all_strides, dim)
    padded = [(1, (0,) * count)] * (ROW_DIMS - len(inner)) + inner
    offsets = tuple(
        tuple(sum(index * strides[i] for index, (_, strides) in zip(indices, outer, strict=True)) for i in range(count))
        for indices in itertools.product(*(range(size) for size, _ in outer))
    )
    return Rows(
        sizes=(padded[0][0], padded[1][0], padded[2][0]),
        n=shape[dim],
        strides=tuple(
            (padded[0][1][i], padded[1][1][i], padded[2][1][i], strides[dim]) for i, strides in enumerate(all_strides)
        ),
        offsets=offsets,
    )


_Dims = list[tuple[int, tuple[int, ...]]]  # sizes, with the stride of every operand


def _collapse(shape: Sequence[int], all_strides: Sequence[Sequence[int]], dim: int) -> tuple[_Dims, _Dims]:
    """The row dims that one launch covers, at most three, and those left over."""
    dims = [
        (shape[axis], tuple(strides[axis] for strides in all_strides))
        for axis in range(len(shape))
        if axis != dim and shape[axis] != 1
    ]
    dims.sort(key=lambda entry: entry[1], reverse=True)
    inner: _Dims = []
    for size, strides in dims:
        if inner and all(a == b * size for a, b in zip(inner[-1][1], strides, strict=True)):
            inner[-1] = (inner[-1][0] * size, strides)
        else:
            inner.append((size, strides))
    outer: _Dims = []
    while len(inner) > ROW_DIMS:
        outer.append(inner.pop(min(range(len(inner) - 1), key=lambda axis: inner[axis][0])))
    return inner, outer


def readable(tensor: torch.Tensor, beside: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor``, or a copy of it in the memory format of ``beside`` where the two, seen as rows along ``dim``, have
    so many dims that do not merge that MAX_LAUNCHES launches would not reach them."""
    if tensor.dim() <= ROW_DIMS + 1:
        return tensor
    metas = [Meta(tuple(each.shape), each.stride(), each.dtype) for each in (beside, tensor)]
    _, outer = _collapse(metas[0].shape, [like(metas[0]).strides, *(meta.strides for meta in metas)], dim)
    if math.prod(size for size, _ in outer) <= MAX_LAUNCHES:
        return tensor
    return torch.empty_like(beside, dtype=tensor.dtype).copy_(tensor)


def near(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """``tensor``, or a contiguous copy where its elements along the dims from ``dim`` on lie so far apart that 32 bits
    do not hold their offsets: for operands that kernels read with no more. Such a stride spans gigabytes, so that of
    one row there is nothing to lose by a copy, and a kernel with wider offsets would cost every other call."""
    reach = sum(
        (size - 1) * abs(stride) for size, stride in zip(tensor.shape[dim:], tensor.stride()[dim:], strict=True)
    )
    return tensor.contiguous() if reach >= NARROW else tensor


def row_layout(meta: Meta | Buffer, rows: Rows, operand: int) -> str:
    """The layout class of one operand of a row view.

    ``n``: neighbours along the reduced dim are neighbours in memory; ``m``: neighbouring rows are;
    ``s``: neither. ``16`` follows where base, offsets and all other strides are multiples of 16
    bytes, so that the widest loads are possible.
    """
    s0, s1, s2, sn = rows.strides[operand]
    if sn == 1 or rows.n == 1:
        kind, others = "n", (s0, s1, s2)
    elif s2 == 1:
        kind, others = "m", (s0, s1, sn)
    else:
        return "s"
    starts = (offsets[operand] for offsets in rows.offsets)
    aligned = getattr(meta, "aligned", True) and all(
        step * meta.dtype.itemsize % VECTOR_BYTES == 0 for step in (*others, *starts)
    )
    return f"{kind}16" if aligned else kind


def read_at_once(meta: Meta | Buffer, rows: Rows, operand: int) -> int:
    """Neighbours along the reduced dim that one lane reads at once: those in VECTOR_BYTES, or 1 where compiled code
    does not see that they are aligned. Triton notes of a number whether it is a multiple of 16."""
    *steps, _ = rows.strides[operand]
    if row_layout(meta, rows, operand) != "n16" or any(step % 16 for step in steps):
        return 1
    return VECTOR_BYTES // meta.dtype.itemsize


def in_pairs(
    rows: Rows, block: int, read: Sequence[tuple[int, Meta | Buffer]], vectors: Iterable[Meta | None] = ()
) -> bool:
    """Whether operands, named by their place among those of ``rows``, and vectors along them are of one 16-bit type
    and lie so that tiles of ``block`` columns can be read in words of two."""
    (dtype, *others) = {each.dtype for _, each in read} | {each.dtype for each in vectors if each is not None}
    if others or dtype not in (torch.float16, torch.bfloat16) or rows.n % 2 or block < 2:
        return False
    if any(row_layout(each, rows, number) != "n16" for number, each in read):
        return False
    return all(each is None or (each.strides[0] == 1 and each.aligned) for each in vectors)


def needs_wide_offsets(rows: Rows, block_m: int) -> bool:
    """Whether an offset inside one tile can pass 31 bits, for any operand."""
    return any((rows.n - 1) * abs(sn) + block_m * abs(s2) >= 2**31 - 1 for _, _, s2, sn in rows.strides)
