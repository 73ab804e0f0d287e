"""How many instructions the compiler gives each element.

A tensor that no load anchors (of ones, of counts) is laid out by Triton 3.6 so that each lane computes the elements of
many: cross_entropy took 750 PTX instructions an element where it smoothed, var_mean 635, and both gave right numbers.
And an elementwise function that takes too many is bound by them, not by memory: gelu by Triton's erf took 38 machine
instructions an element, which is 1.43 of a copy's time on an H200; 17 take a copy's.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.executors.binding import bind
from portkern.executors.compile import _pointer, compile_launch, standing_in
from portkern.lookup import Choice, fits
from portkern.plan import Launch, Meta, Plan, metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.situation import Situation

COLUMNS, MOST = 8192, 60  # PTX instructions an element; the most seen is 37
OPS = {
    "softmax": {}, "softmax_backward": {}, "log_softmax": {}, "logsumexp": {}, "layer_norm": {}, "rms_norm": {},
    "layer_norm_backward": {}, "cross_entropy": {}, "cross_entropy smooth": {"smoothing": 0.1}, "masked_softmax": {},
    "sum": {}, "mean": {}, "var_mean": {}, "amax": {}, "argmax": {}, "quantize_fp8_rows": {},
}  # fmt: skip
POINTWISE, MOST_OF_TENSOR = (8192, 14336), 12  # for each tensor read or written; an erf takes 20
STREAMED: dict[str, dict[str, Any]] = {
    "add": {}, "relu": {}, "silu": {}, "sigmoid": {}, "tanh": {}, "mish": {}, "gelu": {}, "gelu tanh": {"TANH": 1},
    "gelu_backward": {}, "silu_backward": {}, "swiglu": {}, "geglu": {}, "geglu_backward": {}, "dropout": {},
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_rows_of_one_tile_take_few_instructions(name: str) -> None:
    situation, plan, config = _default(name, (COLUMNS, COLUMNS), OPS[name], "resident_row")
    # The others only add up what the rows gave.
    launches = [launch for launch in plan.launches if launch.constexprs.get("BLOCK_N") == COLUMNS]
    assert launches
    for launch in launches:
        each = _instructions(situation, plan, launch, config) / (COLUMNS / (32 * launch.num_warps))
        assert each < MOST, f"{situation.problem} [{config}]: {each:.0f} instructions an element"


@pytest.mark.parametrize("name", STREAMED)
def test_elementwise_functions_take_few_instructions(name: str) -> None:
    situation, plan, config = _default(name, POINTWISE, STREAMED[name], None)
    (launch,) = plan.launches
    each = _instructions(situation, plan, launch, config) / (launch.constexprs["BLOCK_N"] / (32 * launch.num_warps))
    tensors = sum(isinstance(arg, Meta) for arg in situation.args) + len(plan.outputs)
    assert 1 < each < MOST_OF_TENSOR * tensors, f"{situation.problem} [{config}]: {each:.0f} instructions an element"


def _default(
    name: str, shape: tuple[int, ...], options: dict[str, Any], variant: str | None
) -> tuple[Situation, Plan, Config]:
    op, runtime = all_ops()[name.split()[0]], current()
    device = dispatch.reference_device(runtime, "sm90")
    args = metas_of(op.inputs(shape, torch.bfloat16, device="meta", **options))
    situation = dispatch.situate(runtime, op, args, device)
    try:
        config = situation.backend.default(device, situation.work, variant)
    except Infeasible as error:
        pytest.fail(str(error))
    blocks, refusal = fits(op, situation.work, device, situation.backend, config)
    assert blocks is not None, refusal
    return situation, situation.plan(Choice(config, blocks, "test", "")), config


def _instructions(situation: Situation, plan: Plan, launch: Launch, config: Config) -> int:
    """PTX instructions of a program's code, an element of a lane each."""
    options = situation.backend.launch_options(config)
    with standing_in(situation.backend):
        given = bind(launch, situation.args, plan.outputs, plan.scratch, _pointer)
        compiled = compile_launch(launch.kernel, given, launch.grid, situation.backend, options, launch)
    return len(re.findall(r"^\s+(?:@%p\d+ )?[a-z][\w.]* .*;$", compiled.asm["ptx"], re.MULTILINE))
