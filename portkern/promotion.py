"""torch's type promotion, from dtypes and ranks alone, so that tracing sees through it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from portkern.arguments import FLOATS, INTEGERS
from portkern.errors import BadType, UnsupportedDtype

Number = bool | int | float
TYPES = (torch.bool, *INTEGERS, *FLOATS)  # torch has more, for which kernels would give wrong numbers


def result_dtype(
    op: str, operands: Sequence[torch.Tensor | Number], zero_dim: Sequence[torch.dtype] = ()
) -> torch.dtype:
    """The dtype that torch computes an elementwise function of ``operands`` in.

    Tensors with dims come first; 0-d ones (``zero_dim`` names further ones) and then Python numbers
    only decide where their category (bool, integer, float) is higher. Raises UnsupportedDtype, BadType.
    """
    dims: torch.dtype | None = None
    scalars: torch.dtype | None = None
    for dtype in zero_dim:
        scalars = _promoted(scalars, dtype)
    numbers: torch.dtype | None = None
    for each in operands:
        if isinstance(each, torch.Tensor):
            _check(op, each.dtype)
            if each.dim():
                dims = _promoted(dims, each.dtype)
            else:
                scalars = _promoted(scalars, each.dtype)
        else:
            numbers = _promoted(numbers, _of_number(op, each))
    found = _combined(dims, _combined(scalars, numbers))
    if found is None:
        raise BadType(f"{op}(): no operand is given; it takes at least one torch.Tensor")
    return found


def _of_number(op: str, number: Number) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, (int, torch.SymInt)):
        return torch.int64
    if isinstance(number, (float, torch.SymFloat)):
        return torch.get_default_dtype()
    raise BadType(f"{op}(): an operand is a {type(number).__name__}; it takes torch.Tensor, bool, int or float")


def _check(op: str, dtype: torch.dtype) -> None:
    if dtype not in TYPES:
        name = str(dtype).removeprefix("torch.")
        wide = "int64" if not dtype.is_floating_point and not dtype.is_complex else "float32"
        raise UnsupportedDtype(f"{op}(): {name} tensors are not implemented; convert them to {wide} first")


def _promoted(first: torch.dtype | None, second: torch.dtype) -> torch.dtype:
    return second if first is None else torch.promote_types(first, second)


def _combined(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """What two groups of operands give, of which the first decides where categories are equal."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_floating_point:
        return higher
    if higher == torch.bool or lower.is_floating_point:
        return torch.promote_types(higher, lower)
    return higher
