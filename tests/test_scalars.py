"""Numbers that reach a kernel: where the op computes in float64, none is narrowed to float32 on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.lookup import Choice, fits
from portkern.op import Op
from portkern.plan import Launch, Value, metas_of
from portkern.plugins import parse_arch
from portkern.registry import all_ops
from portkern.runtime import current

OPS = sorted(name for name, op in all_ops().items() if "::" not in name and "float64" in op.dtypes)


def numbers(launch: Launch, args: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """The name and the annotated type of each parameter of the kernel that a float is given to."""
    for parameter, given in zip(launch.kernel.params, launch.args, strict=False):
        value = args[given.position] if isinstance(given, Value) else given
        if isinstance(value, float):
            yield parameter.name, parameter.annotation


def launches(op: Op) -> Iterator[tuple[Launch, tuple[Any, ...]]]:
    device = current().backend(parse_arch(current().plugins, "sm90")).reference_device()
    for case in op.cases:
        args = metas_of(op.inputs(case.sizes, torch.float64, device="meta", **case.options))
        situation = dispatch.situate(current(), op, args, device)
        for config in dispatch.candidates(situation):
            blocks, _ = fits(op, situation.work, device, situation.backend, config)
            if blocks is None:
                continue
            for launch in situation.plan(Choice(config, blocks, "test", "test")).launches:
                yield launch, args


@pytest.mark.parametrize("name", OPS)
def test_no_number_is_narrowed(name: str) -> None:
    found = list(launches(all_ops()[name]))
    narrowed = {
        f"{launch.kernel.__name__}: {parameter}"
        for launch, args in found
        for parameter, annotation in numbers(launch, args)
        if annotation != "fp64"
    }
    assert found and not narrowed, f"{name}: float32 for Triton, unless annotated tl.float64: {sorted(narrowed)}"
