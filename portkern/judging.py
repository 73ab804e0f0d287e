"""``examine``: the whole verdict on one run of an op: its results, its inputs, the memory around."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from portkern.library import altered_by
from portkern.memory import Guarded, Kept
from portkern.op import Op
from portkern.testing import Expected, Verdict


def expect(op: Op, inputs: Kept) -> Expected:
    """What ``op`` should give for ``inputs``, which have their first values, and how it should alter them."""
    altered = altered_by(op)
    return Expected(_functional(op, altered) if altered else op, inputs.args)


def examine(
    op: Op, inputs: Kept, outputs: Sequence[torch.Tensor], memory: Guarded | None = None,
    expected: Callable[[], Expected] | None = None,
) -> Verdict:  # fmt: skip
    """Judge ``outputs`` and what ``op`` alters in place, and look for stray writes.

    Gives ``inputs`` their first values again if they were altered. ``expected`` gives what ``expect`` does, for callers
    who judge many outputs.
    """
    expected = expected or partial(expect, op, inputs)
    if memory is not None and memory.broken():
        return Verdict(math.inf, "it wrote outside its outputs and scratch")
    altered = altered_by(op)
    if not altered:
        if inputs.altered():
            inputs.restore()
            return Verdict(math.inf, "it altered its inputs, which its schema does not say")
        return expected().verdict(outputs)
    after = [inputs.args[position].clone() for position in altered]
    inputs.restore()
    return expected().verdict([*outputs, *after])


def _functional(op: Op, altered: Sequence[int]) -> Op:
    """``op`` with a reference that leaves its arguments alone and gives the altered ones as well."""

    def reference(*args: Any) -> tuple[torch.Tensor, ...]:
        own = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
        found = op.reference(*own)
        outputs = (found,) if isinstance(found, torch.Tensor) else tuple(found or ())
        return (*outputs, *(own[position] for position in altered))

    return dataclasses.replace(op, reference=reference)
