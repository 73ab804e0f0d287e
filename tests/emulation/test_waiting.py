"""Programs that share the rows of a norm's gradient and wait for each other, in every mode, executed for gfx942."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.emulator import Settings
from portkern.executors.emulate import execute
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.record import FrozenMap
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import judge
from tests.spine import generator

NORMS = ("layer_norm_backward", "rms_norm_backward")
MODES = [(1, 0), (1, 1), (0, 1)]
CPU = torch.device("cpu")
FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"


def run(name: str, args: tuple[Any, ...], lag: int, reread: int, seed: int | None = None) -> tuple[torch.Tensor, ...]:
    """On 8 units: two groups of four programs, each of which owns up to 256 columns."""
    op = all_ops()[name]
    device = dataclasses.replace(dispatch.reference_device(current(), "gfx942"), units=8)
    situation = dispatch.situate(current(), op, metas_of(args), device)
    blocks = {"BLOCK_N": 256, "SUM_BLOCK_M": 2, "SUM_BLOCK_N": 64, "SUM_WARPS": 1}
    params = {**blocks, "PROGRAMS_PER_UNIT": 1, "LAG": lag, "REREAD": reread}
    config = Config("coresident_row", FrozenMap(params), 1, options=FrozenMap(poll_cache=".cv"))
    fitting, refusal = fits(op, situation.work, device, situation.backend, config)
    assert fitting is not None, refusal
    plan = situation.plan(Choice(config, fitting, "test", "test"))
    assert plan.launches[0].grid == (8,) if args[2].shape[0] > 1 else (4,)
    options = situation.backend.launch_options(config)
    return execute(plan, args, CPU, options, backend=situation.backend, settings=Settings(seed=seed))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_waiting_programs(name: str, mode: tuple[int, int]) -> None:
    """1 to 3 rows a group, so that the row that is summed ahead is there or not;
    columns that end within a part or with the last one."""
    dtypes, sizes = (torch.bfloat16, torch.float32), (1, 2, 3, 5, 6)
    turn = NORMS.index(name) + MODES.index(mode)
    for number, rows in enumerate(sizes):
        for dtype in dtypes if FULL else (dtypes[(turn + number) % 2],):
            options = {"add": number % 2 == 1, "weight": "none" if number == 4 else ""}
            columns = 1024 if rows in (2, 5) else 1000 if rows == 3 else 900  # bfloat16 in words of two, but for 900
            args = all_ops()[name].inputs((rows, columns), dtype, generator=generator(rows), **options)
            verdict = judge(all_ops()[name], args, run(name, args, *mode))
            assert verdict.right, f"{rows} rows, {dtype}: {verdict.reason}"


@pytest.mark.parametrize("name", NORMS)
def test_modes_and_orders_give_the_same_bits(name: str) -> None:
    """What waits for what is no part of the result, nor is the order in which programs advance."""
    for columns in (900, 1000):  # one number at a time, and two
        args = all_ops()[name].inputs((5, columns), torch.bfloat16, generator=generator(7))
        wanted = run(name, args, 0, 0)
        for mode, seed in ((MODES[0], None), (MODES[1], None), (MODES[0], 3)):
            for got, want in zip(run(name, args, *mode, seed), wanted, strict=True):
                assert torch.equal(got, want), f"{mode} {seed}"
