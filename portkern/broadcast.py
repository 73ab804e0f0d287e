"""Operands of different shapes and strides seen as one grid of elements: broadcasting, torch's output strides,
dims that merge, and the two dims that a tile covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from portkern.errors import Mismatch
from portkern.layout import VECTOR_BYTES
from portkern.plan import Buffer, Meta

Strides = tuple[int, ...]


def broadcast_shape(op: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The common shape of ``shapes``. Raises Mismatch."""
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes):  # torch takes 20 us to say so
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        shown = " and ".join(str(tuple(shape)) for shape in shapes)
        raise Mismatch(
            f"{op}(): shapes {shown} do not broadcast: from the last dim on, sizes must be equal or 1"
        ) from error


def expanded(meta: Meta, shape: Sequence[int]) -> Strides:
    """The strides of ``meta`` seen in ``shape``: 0 along dims in which it is repeated."""
    missing = len(shape) - len(meta.shape)
    own = zip(meta.shape, meta.strides, shape[missing:], strict=True)
    return (0,) * missing + tuple(0 if size == 1 and whole != 1 else stride for size, stride, whole in own)


def elementwise_layout(op: str, operands: Sequence[Meta]) -> tuple[tuple[int, ...], Strides]:
    """The shape and strides that torch gives the result of an elementwise function of ``operands``. Raises Mismatch.

    Operands that all lie alike pass that on. Else dims are ordered as in the first operand that tells them apart, and
    lie densely: torch's TensorIterator, whose comparison is no total order, so the sort is its own too.
    """
    shape = broadcast_shape(op, [operand.shape for operand in operands])
    if all(operand.shape == shape for operand in operands):
        if all(_dense(shape, operand.strides, reversed(range(len(shape)))) for operand in operands):
            return shape, contiguous(shape)
        first = operands[0].strides
        if all(operand.strides == first for operand in operands[1:]):
            if _dense(shape, first, sorted(range(len(shape)), key=lambda dim: first[dim])):
                return shape, first
    seen = [expanded(operand, shape) for operand in operands]
    order = list(reversed(range(len(shape))))  # innermost first
    for start in range(1, len(order)):
        at = start
        for before in reversed(range(start)):
            comparison = _compare(shape, seen, order[before], order[at])
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    return shape, _packed(shape, order)


def contiguous(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor."""
    return _packed(shape, reversed(range(len(shape))))


def _packed(shape: Sequence[int], order: Iterable[int]) -> Strides:
    """Strides without gaps, the dims of ``order`` from the innermost on."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step = step * (shape[dim] if shape[dim] > 1 else 1)
    return tuple(strides)


def _dense(shape: Sequence[int], strides: Strides, order: Iterable[int]) -> bool:
    """Whether the dims lie without gaps, those of ``order`` from the innermost on."""
    step = 1
    for dim in order:
        if shape[dim] != 1:
            if strides[dim] != step:
                return False
            step = step * shape[dim]
    return True


def _compare(shape: Sequence[int], operands: Sequence[Strides], inner: int, outer: int) -> int:
    for strides in operands:
        if strides[inner] == 0 or strides[outer] == 0:
            continue
        if strides[inner] != strides[outer]:
            return -1 if strides[inner] < strides[outer] else 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of elements: M rows of N columns, which tiles cover, in ``outer`` further dims, the innermost first.

    ``strides`` gives (s_m, s_n, *s_outer) in elements for each operand.
    """

    m: int
    n: int
    outer: tuple[int, ...]
    strides: tuple[Strides, ...]

    @property
    def numel(self) -> int:
        return self.m * self.n * math.prod(self.outer)


def grid_of(shape: Sequence[int], operands: Sequence[Strides]) -> Grid:
    """See ``operands`` in ``shape`` as a grid. Columns run along the innermost dim of the first, the output."""
    dims = [(size, tuple(strides[axis] for strides in operands)) for axis, size in enumerate(shape) if size != 1]
    dims.sort(key=lambda entry: entry[1], reverse=True)
    merged: list[tuple[int, Strides]] = []
    for size, strides in dims:
        if merged and all(a == b * size for a, b in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    unit = (1, (0,) * len(operands))
    n, columns = merged.pop() if merged else unit
    m, rows = merged.pop(_row_dim(merged, columns)) if merged else unit
    outer = merged[::-1]
    return Grid(
        m,
        n,
        tuple(size for size, _ in outer),
        tuple((rows[i], columns[i], *(strides[i] for _, strides in outer)) for i in range(len(operands))),
    )


def _row_dim(dims: Sequence[tuple[int, Strides]], columns: Strides) -> int:
    """The dim that tiles cover besides columns: one along which an operand is contiguous that is not so along columns,
    so that it is read in whole sectors too; else the innermost."""
    for axis in reversed(range(len(dims))):
        if any(row == 1 and column > 1 for row, column in zip(dims[axis][1], columns, strict=True)):
            return axis
    return len(dims) - 1


def grid_layout(meta: Meta | Buffer, grid: Grid, operand: int, offset: int = 0) -> str:
    """The layout class of one operand of a grid.

    ``n``: neighbours along columns are neighbours in memory; ``r``: one element is repeated along them; ``m``:
    neighbouring rows are neighbours; ``s``: none of these. ``16`` follows where base, ``offset`` (in elements) and all
    other strides are multiples of 16 bytes, so that the widest loads are possible.
    """
    row, column, *outer = grid.strides[operand]
    if column == 1 or grid.n == 1:
        kind, others = "n", (row, *outer)
    elif column == 0:
        kind, others = "r", (row, *outer)
    elif row == 1:
        kind, others = "m", (column, *outer)
    else:
        return "s"
    aligned = getattr(meta, "aligned", True) and all(
        step * meta.dtype.itemsize % VECTOR_BYTES == 0 for step in (*others, offset)
    )
    return f"{kind}16" if aligned and kind != "r" else kind
