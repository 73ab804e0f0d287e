"""``torch.func.vmap`` of ops: one call that covers the mapped dim where the op says how, else slice by slice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portkern.op import Op, unpack

InDims = Sequence[Any]  # for each canonical argument the place of its mapped dim, None for one that has none


class SlicewiseWarning(UserWarning):
    """A mapped dim costs a call for each index."""


@dataclass(frozen=True)
class Folded:
    """One call that covers the mapped dim: its canonical arguments, what makes of each of its outputs the op's, and
    where the mapped dim then is: in all outputs, or in each."""

    args: tuple[Any, ...]
    out_dims: int | tuple[int, ...] = 0
    view: Callable[[torch.Tensor], torch.Tensor] | None = None


def rule(op: Callable[[], Op], call: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The batching rule of ``op``, as ``torch.library.register_vmap`` takes one; ``call`` calls it."""

    def batched(info: Any, in_dims: InDims, *args: Any) -> tuple[Any, Any]:
        now = op()
        folded = None if now.vmap is None else now.vmap(in_dims, *args)
        if folded is None:
            return _slice_by_slice(now, call, info.batch_size, in_dims, args)
        view = folded.view or _same
        found = call(now.name, *folded.args)
        if isinstance(found, torch.Tensor):
            return view(found), folded.out_dims
        return type(found)(map(view, found)), folded.out_dims

    return batched


def leading(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """``tensor`` with its mapped dim first, then dims of size 1 up to ``rank`` beside it."""
    moved = tensor.movedim(dim, 0)
    return moved[(slice(None),) + (None,) * (rank - moved.dim() + 1)]


def stacked(in_dims: InDims, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """``tensors``, which come first among the arguments, with the mapped dim first; one without it is repeated."""
    places = list(zip(tensors, in_dims, strict=False))
    size = next(tensor.size(dim) for tensor, dim in places if tensor is not None and dim is not None)
    return tuple(
        tensor if tensor is None else tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in places
    )


def fold_elementwise(in_dims: InDims, *args: Any) -> Folded:
    """The rule of a function of operands that broadcast."""
    tensors = {place: arg for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    rank = max(tensor.dim() - (in_dims[place] is not None) for place, tensor in tensors.items())
    moved = {
        place: leading(each, in_dims[place], rank) for place, each in tensors.items() if in_dims[place] is not None
    }
    return Folded(tuple(moved.get(place, arg) for place, arg in enumerate(args)))


def _slice_by_slice(
    op: Op, call: Callable[..., Any], size: int, in_dims: InDims, args: Sequence[Any]
) -> tuple[Any, Any]:
    if size == 0:
        raise ValueError(f"vmap over {op.name}: a mapped dim of size 0 has no slice to learn the result's shape from")
    warnings.warn(
        f"vmap calls {op.name} once for each of {size} slices, since it has no rule for these arguments: give it a "
        "batch dim of its own instead, if it takes one",
        SlicewiseWarning,
        stacklevel=2,
    )
    calls = [call(op.name, *(_slice(arg, dim, index) for arg, dim in zip(args, in_dims, strict=True)))
             for index in range(size)]  # fmt: skip
    if isinstance(calls[0], torch.Tensor):
        return torch.stack(calls), 0
    return type(calls[0])(torch.stack(each) for each in zip(*map(unpack, calls), strict=True)), 0


def _slice(arg: Any, dim: Any, index: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_slice(each, place, index) for each, place in zip(arg, dim, strict=True)]
    return arg if dim is None else arg.select(dim, index)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
