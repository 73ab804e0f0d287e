"""torch.compile of what ``torch`` runs eagerly, for its very shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portkern.op import Op
from portkern.peer import Call, Peer


def _prepare(op: Op, args: Sequence[Any]) -> Call:
    torch.compiler.reset()  # else the ninth shape would not be compiled for itself
    function = torch.compile(op.eager or op.reference, dynamic=False)
    return lambda: function(*args)


PEER = Peer("compile", "torch", "torch", _prepare)
