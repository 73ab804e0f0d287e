"""Arguments without data, made without the second that torch takes to load its rules for the meta device.

The first product or random number there imports ``torch._dynamo`` and sympy: 1.6 of the 3.5 s of ``portkern explain``
on a 2-core machine. What inputs are mostly made of needs none of these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

META = torch.device("meta")
RANDOM = frozenset(f"aten::{name}" for name in ("rand", "randn", "randint"))
TAGS = ("pointwise", "reduction")  # of torch's functions; versions before 2.13 may lack the second
NORMALISES = "half_to_float"  # an argument of the functions that normalise along a dim, which have no tag
MAX_RANK = 5  # the small operands of more have more than 720 elements


class Dataless(TorchDispatchMode):
    """Within it random numbers, elementwise functions and reductions give on the meta device what they always give,
    sooner; all else is torch's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks: to keep a mode from being compiled it wraps it in what this is to do without."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name, found = dict(kwargs or {}), func.name().split(".")[0], None
        if name in RANDOM:
            found = _random(args, given, torch.int64 if name == "aten::randint" else None)
        elif _keeps_places(func):
            found = _by_small_operands(func, args, given)
        return func(*args, **given) if found is None else found


def _keeps_places(func: Any) -> bool:
    """Whether each dim of what ``func`` gives is one of its operands', or was reduced."""
    tagged = any(tag.name in TAGS for tag in func.tags)
    return tagged or any(each.name == NORMALISES for each in func._schema.arguments)


def _random(args: Sequence[Any], kwargs: Mapping[str, Any], usual: torch.dtype | None) -> torch.Tensor | None:
    if kwargs.get("device") != META:
        return None
    sizes = next(each for each in args if isinstance(each, (list, tuple)))
    return torch.empty(sizes, dtype=kwargs.get("dtype") or usual, device=META)


def _by_small_operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What ``func`` gives for contiguous operands, told from what it gives on the CPU for operands whose dim ``i`` has
    the size ``i + 2``."""
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    plain = all(each.device == META and each.is_contiguous() for each in operands)
    rank = max(each.dim() for each in operands)
    padded = [(1,) * (rank - each.dim()) + tuple(each.shape) for each in operands]
    shape = tuple(map(max, *padded, (1,) * rank))  # torch.broadcast_shapes loads what this is to do without
    fit = all(size in (1, whole) for sizes in padded for size, whole in zip(sizes, shape, strict=True))
    ordered = kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    if rank > MAX_RANK or not (fit and plain and ordered) or func._schema.is_mutable:
        return None
    small_args, small_kwargs = tree_map_only(torch.Tensor, lambda each: _small(each, shape), (tuple(args), {**kwargs}))
    small = func(*small_args, **small_kwargs)
    if not isinstance(small, torch.Tensor):
        return None
    sizes = [shape[size - 2] if size > 1 else 1 for size in small.shape]
    return torch.empty(sizes, dtype=small.dtype, device=META)


def _small(operand: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    missing = len(shape) - operand.dim()
    repeated = [size == 1 != shape[axis] for axis, size in enumerate(operand.shape, missing)]
    sizes = [1 if each else axis + 2 for axis, each in enumerate(repeated, missing)]
    return torch.ones(sizes, dtype=operand.dtype)  # by which a remainder may be taken
