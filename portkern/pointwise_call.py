"""A call of an elementwise function: which tensor, number or switch each parameter is, and what comes out.

Canonical arguments of an op: its tensors (None where a number stands in its place), a number for each of them, its
scalars, its switches, the dtype that is computed in and, for a derivative, the places of the gradients that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from portkern.broadcast import Grid, contiguous, elementwise_layout, expanded, grid_of
from portkern.errors import BadArgument
from portkern.layout import VECTOR_BYTES
from portkern.plan import Buffer, In, Meta, Out
from portkern.sizes import kept

MAX_VALUES = 4  # numbers that the kernel takes
MAX_SWITCHES = 2
INPUT, VALUE = range(2)  # what an argument of the scalar function is


@dataclass(frozen=True)
class Expression:
    """A scalar function and what it is called with.

    ``parameters`` are those of ``function``, a Triton function of scalars, in order; each is one of
    ``operands`` (tensors), ``scalars`` (numbers that change per call) or ``switches`` (compiled in, the last).
    ``function`` gives ``gradients`` results of which some may be wanted, or, if that is 0, a single
    one; ``result`` is its dtype, where that is not what is computed in. ``parts``: without its last
    operands, the first one is cut along its last dim into that many.
    """

    name: str
    function: Any
    parameters: tuple[str, ...]
    operands: tuple[str, ...]
    scalars: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    gradients: int = 0
    parts: int = 1
    result: torch.dtype | None = None

    @property
    def schema(self) -> str:
        """The torch.library schema of the canonical arguments."""
        given = [
            *(f"Tensor? {name}" for name in self.operands),
            *(f"Scalar {name}_number" for name in self.operands),
            *(f"Scalar {name}" for name in self.scalars),
            *(f"int {name}" for name in self.switches),
            "ScalarType dtype",
            *(["int[] wanted"] if self.gradients else []),
        ]
        return f"({', '.join(given)}) -> {'Tensor[]' if self.gradients else 'Tensor'}"

    @property
    def values(self) -> tuple[int, ...]:
        """Positions of the canonical arguments that are part of no key."""
        count = len(self.operands)
        return tuple(range(count, 2 * count + len(self.scalars)))


@dataclass(frozen=True)
class Operand:
    """A tensor of a call, or a part of one."""

    argument: In | Out
    meta: Meta


@dataclass(frozen=True)
class Call:
    """One call of an expression, planned as far as no config is needed."""

    expression: Expression
    order: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]  # positions of the values, in the order of the kernel's slots
    switches: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    buffers: tuple[Buffer, ...]
    wanted: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def grid(self) -> Grid:
        seen = [expanded(each.meta, self.shape) for each in (*self.outputs, *self.inputs)]
        return grid_of(self.shape, seen)


def call_of(expression: Expression, *args: Any) -> Call:
    """What the canonical ``args`` of ``expression``, with Metas for tensors, come to.

    Raises BadArgument for more numbers than the kernel takes, Mismatch for shapes that do not broadcast.
    """
    count = len(expression.operands)
    tensors, rest = args[:count], args[2 * count + len(expression.scalars) :]
    switches, (dtype, *wanted) = rest[: len(expression.switches)], rest[len(expression.switches) :]
    inputs = _cut(expression, tensors)
    places = {id(each): place for place, each in enumerate(found for found in inputs if found is not None)}
    order: list[tuple[int, int]] = []
    numbers: list[int] = []
    for name in expression.parameters:
        if name in expression.switches:
            continue
        at = expression.operands.index(name) if name in expression.operands else None
        operand = inputs[at] if at is not None else None
        if operand is not None:
            order.append((INPUT, places[id(operand)]))
        else:
            order.append((VALUE, len(numbers)))
            numbers.append(count + (at if at is not None else count + expression.scalars.index(name)))
    if len(numbers) > MAX_VALUES:
        raise BadArgument(
            f"{expression.name}(): {len(numbers)} numbers, and the kernel takes {MAX_VALUES}: give some as tensors"
        )
    present = tuple(each for each in inputs if each is not None)
    shape, strides = elementwise_layout(expression.name, [each.meta for each in present])
    chosen = tuple(wanted[0]) if wanted else (0,)
    result = expression.result or dtype
    outputs, buffers = _results(expression, tensors, shape, strides, result, len(chosen))
    return Call(
        expression, tuple(order), tuple(numbers), tuple(int(each) for each in switches), present, outputs, buffers,
        chosen, dtype, shape,
    )  # fmt: skip


# A problem and its plan ask for the same call.
known_call_of: Callable[..., Call] = kept(maxsize=64)(call_of)


def packed(expression: Expression, tensors: tuple[Any, ...]) -> bool:
    """Whether the last operands are parts of one tensor."""
    return expression.parts > 1 and all(each is None for each in tensors[1 - expression.parts :])


def _cut(expression: Expression, tensors: tuple[Any, ...]) -> tuple[Operand | None, ...]:
    """The operands; those of a packed tensor are parts of it."""
    if not packed(expression, tensors):
        return tuple(None if meta is None else Operand(In(position), meta) for position, meta in enumerate(tensors))
    first = len(tensors) - expression.parts
    whole = tensors[first]
    size = whole.shape[-1] // expression.parts
    parts = tuple(
        Operand(In(first, part * size * whole.strides[-1]), _part(whole, part, size))
        for part in range(expression.parts)
    )
    return (*(Operand(In(position), meta) for position, meta in enumerate(tensors[:first])), *parts)


def _part(whole: Meta | Buffer, part: int, size: int) -> Meta:
    start = part * size * whole.strides[-1] * whole.dtype.itemsize
    aligned = getattr(whole, "aligned", True) and start % VECTOR_BYTES == 0
    return Meta((*whole.shape[:-1], size), whole.strides, whole.dtype, aligned)


def _results(
    expression: Expression, tensors: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...],
    dtype: torch.dtype, count: int,
) -> tuple[tuple[Operand, ...], tuple[Buffer, ...]]:  # fmt: skip
    """What is written, and the buffers that it lies in: the gradient of a packed tensor is one."""
    if expression.gradients and packed(expression, tensors):
        wide = (*shape[:-1], shape[-1] * expression.parts)
        whole = Buffer(wide, contiguous(wide), dtype)
        size = shape[-1]
        return tuple(Operand(Out(0, part * size), _part(whole, part, size)) for part in range(expression.parts)), (
            whole,
        )
    buffer = Buffer(shape, strides, dtype)
    return tuple(Operand(Out(position), buffer.meta) for position in range(count)), (buffer,) * count
