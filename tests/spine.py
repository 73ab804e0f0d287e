"""What the op tests share: every op, variant and dtype, planned for a device and run on a tensor's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from portkern import dispatch
from portkern.backend import Resources
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.executors.launch import execute
from portkern.library import altered_by
from portkern.lookup import Choice, fits
from portkern.memory import Guarded, Kept
from portkern.op import Op
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import Runtime
from portkern.target import Device
from portkern.variants import run_fitting

# Ops of the kind row_reduction whose results have no columns: tests/*/test_reductions.py runs them.
REDUCTIONS = ("amax", "argmax", "mean", "sum", "var_mean")


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    made = torch.Generator(device)
    made.manual_seed(seed)
    return made


def ops_of_kind(kind: str) -> list[str]:
    """The built-in ops whose work is of ``kind``, by what their first case says."""
    found = []
    for name, op in sorted(all_ops().items()):
        args = metas_of(op.inputs(op.cases[0].sizes, torch.float32, device="meta", **op.cases[0].options))
        if "::" not in name and op.work(op.problem(*args)).kind == kind:
            found.append(name)
    return found


def variants(runtime: Runtime, op: Op, args: Sequence[Any], device: Device) -> Iterator[tuple[Config, str]]:
    """The default config of each variant that ``device`` admits for this call."""
    situation = dispatch.situate(runtime, op, metas_of(args), device)
    for variant in situation.work.variants:
        try:
            config = situation.backend.default(device, situation.work, variant)
        except Infeasible:
            continue
        if fits(op, situation.work, device, situation.backend, config)[0] is not None:
            yield config, variant


def run_config(
    runtime: Runtime, op: Op, args: Sequence[Any], device: Device, config: Config
) -> tuple[torch.Tensor, ...]:
    """Run ``op`` with ``config``, planned for ``device``, where the tensors are, into poisoned memory.

    Fails where a kernel writes beside its outputs and scratch, or alters what its schema does not say.
    """
    situation = dispatch.situate(runtime, op, metas_of(args), device)
    blocks, refusal = fits(op, situation.work, device, situation.backend, config)
    assert blocks is not None, refusal
    where = dispatch.common_device(op, args)
    inputs, memory = Kept(args), Guarded()
    outputs = run_fitting(
        situation,
        Choice(config, blocks, "test", "test"),
        lambda plan, options: execute(plan, args, where, options, allocate=memory),
    )
    assert not memory.broken(), f"{op.name} [{config}] wrote outside its outputs and scratch"
    assert altered_by(op) or not inputs.altered(), f"{op.name} [{config}] altered its inputs"
    return outputs


def told(situation: dispatch.Situation, config: Config, needs: Resources) -> bool:
    """Whether 32 bytes of stack are what it cost to tell the assembler how many waiting programs have to fit on a unit:
    less than a launch that the driver refuses."""
    limit = situation.backend.launch_options(config).get("maxnreg")
    return config.variant in situation.work.waiting and needs.spills <= 32 and needs.registers == limit
