"""Which of the configs that a plugin would try a device cannot run, and why: counted by reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portkern import dispatch, lookup
from portkern.errors import UnknownName
from portkern.op import Op
from portkern.plan import metas_of
from portkern.record import Record
from portkern.runtime import Runtime
from portkern.target import Device


@dataclass(frozen=True)
class Refusals(Record):
    """``count`` of ``candidates`` configs are refused for one kind of ``reason``, told by the first of them."""

    op: str
    target: str
    problem: str
    candidates: int
    count: int
    reason: str


def refusals(runtime: Runtime, op: Op, args: Sequence[Any], device: Device) -> list[Refusals]:
    """The candidates of ``op`` for ``args`` that ``device`` refuses, by reasons that differ in more than numbers."""
    situation = dispatch.situate(runtime, op, metas_of(args), device)
    try:
        candidates = tuple(dispatch.candidates(situation))
    except UnknownName:  # neither the plugin nor the op has any
        return []
    reasons: dict[str, list[str]] = {}
    for config in candidates:
        blocks, reason = lookup.fits(op, situation.work, device, situation.backend, config)
        if blocks is None:
            reasons.setdefault(re.sub(r"\d[\d,.]*", "#", reason), []).append(f"[{config}] {reason}")
    total, problem = len(candidates), str(situation.problem)
    return [
        Refusals(op.name, device.target.arch, problem, total, len(found), found[0])
        for _, found in sorted(reasons.items(), key=lambda each: (-len(each[1]), each[0]))
    ]
