"""What adapters share: conditions that a peer sets, and tensors as it wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from portkern.errors import NotOffered

REDUCTIONS = ("none", "mean", "sum")


def need(holds: bool, what: str) -> None:
    """Raises NotOffered, naming ``what`` the peer lacks, unless the condition holds."""
    if not holds:
        raise NotOffered(f"offers no {what}")


def same_dtype(input: Tensor, dtype: torch.dtype) -> None:
    """Raises NotOffered for a call that converts. None of the peers does that in its kernel."""
    need(input.dtype == dtype, f"conversion from {input.dtype} to {dtype}")


def along_last(input: Tensor, dim: int) -> None:
    """Raises NotOffered unless ``dim`` is the last of at least one."""
    need(input.dim() > 0 and dim == input.dim() - 1, "reduction along a dim that is not the last")


def rows(tensor: Tensor) -> Tensor:
    """As a matrix: all dims but the last are one. A view of contiguous memory, and otherwise a copy made once."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def both(x: Tensor | None, gate: Tensor | None, what: str) -> tuple[Tensor, Tensor]:
    """Two operands of one shape. Raises NotOffered where one is a number, or they broadcast."""
    if x is None or gate is None or x.shape != gate.shape or x.dtype != gate.dtype:
        raise NotOffered(f"offers no {what} of operands that differ in shape or dtype")
    return x, gate


def weights(*given: Tensor | None) -> None:
    """Raises NotOffered where a weight or bias is absent."""
    need(all(each is not None for each in given), "norm without weight and bias")
