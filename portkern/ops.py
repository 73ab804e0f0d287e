"""Importing this module registers every op with torch: ``torch.export.load`` needs that."""

from __future__ import annotations

from portkern.op import Op
from portkern.registry import all_ops


def public() -> dict[str, Op]:
    """The ops with a public function, by name."""
    return {name: op for name, op in all_ops().items() if op.signature is not None}


all_ops()
