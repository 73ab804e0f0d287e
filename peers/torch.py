"""torch eager: the op's ``eager``, which is torch's own fused function, or its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from portkern.op import Op
from portkern.peer import Call, Peer


def _prepare(op: Op, args: Sequence[Any]) -> Call:
    function = op.eager or op.reference
    return lambda: function(*args)


PEER = Peer("torch", "torch", "torch", _prepare)
