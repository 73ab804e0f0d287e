"""Any matrix product as sizes and strides: what a call multiplies, seen without its batch dims where they merge.

    C[b, m, n] = sum over (r, k) of A[b, r, m, k] B[b, r, k, n]

``r`` is there where a broadcast batch dim is summed (a gradient) and does not merge with ``k``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from portkern.errors import BadArgument
from portkern.layout import VECTOR_BYTES
from portkern.plan import Meta
from portkern.record import FrozenMap

BATCH_DIMS = 2  # that a kernel reads; more are reached by one launch for each index
SUMMED_DIMS = 2  # that a kernel reads, besides k


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand as matrices: its shape and strides end in rows and columns, batch dims before."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    aligned: bool = True

    @staticmethod
    def of(operand: Meta, column: bool = False) -> Matrix:
        """``operand``; of one dim, as a single row, or a single ``column``."""
        shape, strides = operand.shape, operand.strides
        if len(shape) == 1:
            shape = (shape[0], 1) if column else (1, shape[0])
            strides = (strides[0], 1) if column else (1, strides[0])
        return Matrix(shape, strides, operand.itemsize, operand.aligned)

    def batch(self, rank: int) -> list[tuple[int, int]]:
        """(size, stride) of ``rank`` batch dims; the stride is 0 where the operand is repeated."""
        dims = list(zip(self.shape[:-2], self.strides[:-2], strict=True))
        padded = [(1, 0)] * (rank - len(dims)) + dims
        return [(size, stride if size != 1 else 0) for size, stride in padded]


@dataclass(frozen=True, slots=True)
class Product:
    """Three operands seen as a product: sizes, and strides in elements.

    ``a`` has the strides (b0, b1, r0, r1, m, k), ``b`` (b0, b1, r0, r1, k, n), ``c`` (b0, b1, m, n);
    ``offsets`` gives, for each launch that is needed, the starts of A, B and C. ``swapped`` says
    that A and B are the transposes of the right and the left operand, since C lies in columns.
    """

    batch: tuple[int, int]
    m: int
    n: int
    k: int
    r: tuple[int, int]
    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...]
    offsets: tuple[tuple[int, int, int], ...]
    layouts: FrozenMap[str]  # the layout classes of A, B and C
    swapped: bool = False

    @property
    def batches(self) -> int:
        """Products in one launch."""
        return self.batch[0] * self.batch[1]

    @property
    def empty(self) -> bool:
        """Whether C has no element, or is a sum of nothing."""
        return 0 in (self.m, self.n, self.k, *self.r, *self.batch) or not self.offsets


_Axis = tuple[int, tuple[int, int, int]]  # size, strides in A, B, C


def product_of(left: Matrix, right: Matrix, out: Matrix) -> Product:
    """``left @ right`` into ``out``, summed over the batch dims in which ``out`` has size 1.

    Batch dims that only one side has become rows where strides allow it, summed ones become part
    of k, and what is left is merged. Raises BadArgument where three summed dims do not merge.
    """
    if out.strides[-2] == 1 and out.strides[-1] != 1 and out.shape[-2] > 1:
        return replace(_product_of(_turned(right), _turned(left), _turned(out)), swapped=True)
    return _product_of(left, right, out)


def _turned(matrix: Matrix) -> Matrix:
    *batch, rows, columns = matrix.shape
    *strides, row, column = matrix.strides
    return Matrix((*batch, columns, rows), (*strides, column, row), matrix.itemsize, matrix.aligned)


def _product_of(left: Matrix, right: Matrix, out: Matrix) -> Product:
    (m, k), n = left.shape[-2:], right.shape[-1]
    (am, ak), (bk, bn), (cm, cn) = left.strides[-2:], right.strides[-2:], out.strides[-2:]
    rank = max(len(each.shape) for each in (left, right, out)) - 2
    kept: list[_Axis] = []
    summed: list[_Axis] = []
    batches = (each.batch(rank) for each in (left, right, out))
    for (size_a, a), (size_b, b), (size_c, c) in list(zip(*batches, strict=True))[::-1]:
        size = size_a if size_b == 1 else size_b
        if size_c == 1 and size != 1:
            if _continues((a, b), (ak, bk), k):
                ak, bk = (ak, bk) if k != 1 else (a, b)
                k *= size
            else:
                summed.append((size, (a, b, 0)))
        elif size != 1 and b == 0 and _continues((a, c), (am, cm), m):
            am, cm = (am, cm) if m != 1 else (a, c)
            m *= size
        elif size != 1:
            kept.append((size, (a, b, c)))
    kept, summed = _merged(kept), _merged(summed)
    if len(summed) > SUMMED_DIMS:
        raise BadArgument(f"{len(summed)} summed batch dims do not merge: copy the operands so that they lie together")
    inner, outer = _parted(kept)
    (b0, first), (b1, second) = _pair(inner)
    (r0, third), (r1, fourth) = _pair(summed)
    am, ak = _settled(m, k, am, ak)
    bk, bn = _settled(k, n, bk, bn)
    cm, cn = n if m == 1 else cm, 1 if n == 1 else cn
    starts = _offsets(outer)
    aligned = [
        each.aligned and all(start[i] * each.itemsize % VECTOR_BYTES == 0 for start in starts)
        for i, each in enumerate((left, right, out))
    ]
    a = (first[0], second[0], third[0], fourth[0], am, ak)
    b = (first[1], second[1], third[1], fourth[1], bk, bn)
    c = (first[2], second[2], cm, cn)
    return Product(
        batch=(b0, b1),
        m=m,
        n=n,
        k=k,
        r=(r0, r1),
        a=a,
        b=b,
        c=c,
        offsets=starts,
        layouts=FrozenMap(
            a=operand_layout("k", "m", a, left.itemsize, aligned[0]),
            b=operand_layout("n", "k", b, left.itemsize, aligned[1]),
            c=operand_layout("n", "m", c, left.itemsize, aligned[2]),
        ),
    )


def _continues(outer: Sequence[int], inner: Sequence[int], size: int) -> bool:
    """Whether a dim with the strides ``outer`` goes on where one with ``inner`` and ``size`` ends."""
    return size == 1 or all(a == b * size for a, b in zip(outer, inner, strict=True))


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """``axes``, innermost first, with those that go on where another ends merged into it."""
    found: list[_Axis] = []
    for size, strides in axes:
        if found and _continues(strides, found[-1][1], found[-1][0]):
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, strides))
    return found


def _pair(axes: Sequence[_Axis]) -> tuple[_Axis, _Axis]:
    """One or two axes, outer first; a unit one last, so that a kernel's division specialises away."""
    unit = (1, (0, 0, 0))
    return (axes[1], axes[0]) if len(axes) > 1 else (axes[0] if axes else unit, unit)


def _parted(axes: list[_Axis]) -> tuple[list[_Axis], list[_Axis]]:
    """The batch dims that a launch covers, the largest, and those of which each index takes a launch."""
    left_out = sorted(range(len(axes)), key=lambda axis: (axes[axis][0], -axis))[: max(0, len(axes) - BATCH_DIMS)]
    inner = [axis for i, axis in enumerate(axes) if i not in left_out]
    return inner, [axes[i] for i in sorted(left_out)]


def _offsets(outer: Sequence[_Axis]) -> tuple[tuple[int, int, int], ...]:
    found = []
    for indices in itertools.product(*(range(size) for size, _ in outer)):
        steps = [sum(i * axis[1][each] for i, axis in zip(indices, outer, strict=True)) for each in range(3)]
        found.append((steps[0], steps[1], steps[2]))
    return tuple(found)


def _settled(rows: int, columns: int, far: int, near: int) -> tuple[int, int]:
    """The strides of a matrix with those of its unit dims, which are never stepped, such that they hinder nothing: 1
    is as good where the other dim is not contiguous, but where it is, two of them would hide which."""
    if rows == 1 and columns == 1:
        return VECTOR_BYTES, 1
    if columns == 1 and (near != 1 or far == 1):
        near = _multiple_of_vectors(rows)
    if rows == 1 and (far != 1 or near == 1):
        far = _multiple_of_vectors(columns)
    return far, near


def _multiple_of_vectors(size: int) -> int:
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


def operand_layout(inner: str, outer: str, strides: Sequence[int], itemsize: int, aligned: bool) -> str:
    """The layout class of an operand whose last two strides are those of the dims ``outer`` and
    ``inner``, by their letters: which of them is contiguous, and ``16`` where base and all other
    strides are multiples of 16 bytes, or ``0`` where it is the same line all over; ``s`` where neither is."""
    *batch, far, near = strides
    if near == 1:
        letter, step = inner, far
    elif far == 1:
        letter, step = outer, near
    else:
        return "s"
    vectors = aligned and all(each * itemsize % VECTOR_BYTES == 0 for each in (step, *batch))
    if not vectors:
        return letter
    return f"{letter}16" if step else f"{letter}0"
