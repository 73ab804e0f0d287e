"""How many instructions the compiler gives each element of a row that one tile holds.

A tensor that no load anchors (of ones, of counts) is laid out by Triton 3.6 so that each lane computes the elements of
many: cross_entropy took 750 PTX instructions an element where it smoothed, var_mean 635, and both gave right numbers.
"""

from __future__ import annotations

import re

import pytest
import torch

from portkern import dispatch
from portkern.errors import Infeasible
from portkern.executors.binding import bind
from portkern.executors.compile import _pointer, compile_launch, standing_in
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current

COLUMNS, MOST = 8192, 60  # instructions an element; the most seen is 37
OPS = {
    "softmax": {}, "softmax_backward": {}, "log_softmax": {}, "logsumexp": {}, "layer_norm": {}, "rms_norm": {},
    "layer_norm_backward": {}, "cross_entropy": {}, "cross_entropy smooth": {"smoothing": 0.1}, "masked_softmax": {},
    "sum": {}, "mean": {}, "var_mean": {}, "amax": {}, "argmax": {},
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_rows_of_one_tile_take_few_instructions(name: str) -> None:
    op, runtime = all_ops()[name.split()[0]], current()
    device = dispatch.reference_device(runtime, "sm90")
    args = metas_of(op.inputs((COLUMNS, COLUMNS), torch.bfloat16, device="meta", **OPS[name]))
    situation = dispatch.situate(runtime, op, args, device)
    try:
        config = situation.backend.default(device, situation.work, "resident_row")
    except Infeasible as error:
        pytest.fail(str(error))
    blocks, refusal = fits(op, situation.work, device, situation.backend, config)
    assert blocks is not None, refusal
    plan = situation.plan(Choice(config, blocks, "test", ""))
    options, counted = situation.backend.launch_options(config), 0
    with standing_in(situation.backend):
        for launch in plan.launches:
            if launch.constexprs.get("BLOCK_N") != COLUMNS:
                continue  # it only adds up what the rows gave
            given = bind(launch, args, plan.outputs, plan.scratch, _pointer)
            compiled = compile_launch(launch.kernel, given, launch.grid, situation.backend, options, launch)
            lines = re.findall(r"^\s+(?:@%p\d+ )?[a-z][\w.]* .*;$", compiled.asm["ptx"], re.MULTILINE)
            each = len(lines) / (COLUMNS / (32 * launch.num_warps))
            counted += 1
            assert each < MOST, f"{situation.problem} [{config}]: {each:.0f} instructions an element"
    assert counted
