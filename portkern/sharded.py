"""Calls on distributed tensors: each rank computes its own part where the op's results do not depend on the others'.

An op says by ``parallel`` along which dims it does so. A tensor of fewer dims than the first one (a weight) must be
replicated, and its gradient is summed over the ranks that hold parts of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portkern.errors import BadSharding
from portkern.op import Op, Result, pack, unpack, visible
from portkern.plan import Meta


def is_distributed(args: Sequence[Any]) -> bool:
    """Whether a distributed tensor is among ``args``; one cannot exist before its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(arg, module.DTensor) for arg in args)


def call(
    op: Op,
    signature: Callable[..., tuple[Any, ...]],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """``function(*args, **kwargs)`` on the local parts, as distributed tensors. Raises BadSharding."""
    from torch.distributed.tensor import DTensor

    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    first = next(arg for arg in given if isinstance(arg, DTensor))
    if op.reads_values:
        raise BadSharding(f"{op.name} reads values of its tensors, which lie on several ranks: use .full_tensor()")
    try:
        canonical = signature(*args, **kwargs)
    except NotImplementedError as error:  # it calls ops of its own, which torch cannot distribute
        raise BadSharding(f"{op.name} cannot be distributed: {error} Use .full_tensor(), or .to_local()") from error
    if isinstance(canonical, Result):
        return canonical.value
    if op.random:
        raise BadSharding(f"{op.name} would draw other numbers on each rank: use torch's own function")
    metas = [_meta(arg) if isinstance(arg, torch.Tensor) else arg for arg in canonical]
    _check(op, given, first, () if op.parallel is None else op.parallel(*metas))
    made = [
        torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device="meta") for each in op.outputs(*metas)
    ]
    wholes = unpack(visible(op, pack(made), args, kwargs))

    def local(arg: Any) -> Any:
        return _local(arg, first) if isinstance(arg, DTensor) else arg

    parts = unpack(function(*map(local, args), **{name: local(arg) for name, arg in kwargs.items()}))
    return pack(
        [
            DTensor.from_local(
                part, first.device_mesh, first.placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            for part, whole in zip(parts, wholes, strict=True)
        ]
    )  # fmt: skip


def _meta(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _check(op: Op, given: Sequence[Any], first: Any, parallel: Sequence[int]) -> None:
    """Raise BadSharding unless every rank can compute its part alone."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for tensor in given:
        if not isinstance(tensor, DTensor):
            raise BadSharding(
                f"{op.name} got a plain tensor beside distributed ones: distribute it too, replicated or as the others"
            )
        whole = tensor.dim() < first.dim()
        wanted = [Replicate()] * len(first.placements) if whole else list(first.placements)
        if tensor.device_mesh != first.device_mesh or list(tensor.placements) != wanted:
            raise BadSharding(
                f"{op.name} got tensors placed as {list(first.placements)} and {list(tensor.placements)}, and needs "
                f"{wanted} on one mesh: use .redistribute()"
            )
    for placement in first.placements:
        if isinstance(placement, Replicate) or (
            isinstance(placement, Shard) and placement.dim % max(first.dim(), 1) in parallel
        ):
            continue
        allowed = ", ".join(map(str, parallel)) or "no dim"
        raise BadSharding(
            f"{op.name} computes along what {placement} spreads over ranks; this call can be sharded over {allowed}, "
            "or replicated: use .redistribute()"
        )


def _local(tensor: Any, first: Any) -> torch.Tensor:
    """The part of ``tensor`` here. A replicated one beside sharded ones collects its gradient from all ranks."""
    from torch.distributed.tensor import Partial, Replicate

    if tensor.dim() == first.dim():
        part: torch.Tensor = tensor.to_local()
    else:
        placements = [each if isinstance(each, Replicate) else Partial() for each in first.placements]
        part = tensor.to_local(grad_placements=placements)
    return part
