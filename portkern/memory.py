"""Memory that shows what a kernel did to it: poisoned, guarded, and kept as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portkern.plan import Buffer
from portkern.testing import GUARD, poison


class Guarded:
    """An allocator for ``execute``: poisoned buffers between guard bands."""

    def __init__(self) -> None:
        self._bands: list[torch.Tensor] = []

    def __call__(self, buffer: Buffer, device: torch.device) -> torch.Tensor:
        sizes = zip(buffer.shape, buffer.strides, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
        extent = 0 if 0 in buffer.shape else extent
        whole = torch.empty(extent + 2 * GUARD, dtype=buffer.dtype, device=device)
        poison(whole)
        self._bands += (whole[:GUARD], whole[GUARD + extent :])
        tensor = whole.as_strided(buffer.shape, buffer.strides, GUARD)
        return tensor if buffer.init is None else tensor.zero_()

    def broken(self) -> bool:
        """Whether anything was written outside the buffers."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for band in self._bands:
            by_dtype.setdefault(band.dtype, []).append(band)
        bands = (torch.cat(of_dtype) for of_dtype in by_dtype.values())  # one answer of the GPU for all of a dtype
        return any(not same_bits(band, poison(band.clone())) for band in bands)


class Kept:
    """Arguments and a copy of their memory, strides and aliases included."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.args = tuple(args)
        storages = {
            arg.untyped_storage().data_ptr(): arg.untyped_storage() for arg in args if isinstance(arg, torch.Tensor)
        }
        self._copies = [(storage, storage.clone()) for storage in storages.values()]

    def restore(self) -> None:
        """Give the arguments their first values again."""
        for storage, copy in self._copies:
            storage.copy_(copy)

    def altered(self) -> bool:
        """Whether any argument has other bits than at first."""
        return any(not same_bits(_bytes(storage), _bytes(copy)) for storage, copy in self._copies)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of memory: a NaN equals itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
