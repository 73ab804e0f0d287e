"""Rows of which programs sum the next before they wait for this one, in single numbers and in words of two."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import judge
from tests.spine import generator, run_config

SOFTMAX = ("softmax", "log_softmax")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [*SOFTMAX, "cross_entropy"])
def test_rows_in_words_of_two(name: str, dtype: torch.dtype) -> None:
    """Of 16 bits, in rows of whole 16 bytes: what is outside of one is -inf in both halves. Other rows as they are."""
    op, device = all_ops()[name], dataclasses.replace(dispatch.reference_device(current(), "sm90"), units=2)
    for columns in (128, 72, 66):
        for lag in (0, 1):
            given = {} if name == "cross_entropy" else {"style": "nonfinite"}
            args = op.inputs((5, columns), dtype, generator=generator(columns), **given)
            params = {"BLOCK_N": 128, "PROGRAMS_PER_UNIT": 1, "LAG": lag, "PAIRS": 1}
            config = Config("coresident_row", params, 2)  # type: ignore[arg-type]
            situation = dispatch.situate(current(), op, metas_of(args), device)
            blocks, refusal = fits(op, situation.work, device, situation.backend, config)
            assert blocks is not None, refusal
            launches = situation.plan(Choice(config, blocks, "test", "test")).launches
            (paired,) = (each.constexprs["PAIRS"] for each in launches if "PAIRS" in each.constexprs)
            assert paired is (columns != 66 and dtype != torch.float32)
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{columns} {lag} {verdict.reason}"


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", *SOFTMAX,
        "log_softmax_backward", "masked_softmax", "cross_entropy",
    ],
)  # fmt: skip
def test_rows_of_programs_that_lag(name: str) -> None:
    """On two units, groups of one program that take three rows, two, one and none; with an infinity and a NaN."""
    op, device = all_ops()[name], dataclasses.replace(dispatch.reference_device(current(), "sm90"), units=2)
    for rows, dtype in ((5, torch.float16), (3, torch.float32), (1, torch.float16)):
        args = list(op.inputs((rows, 66), dtype, generator=generator(rows)))
        if rows > 2 and not name.endswith("backward"):
            args[0][1, 33], args[0][2, 0] = torch.inf, torch.nan
        config = Config("coresident_row", {"BLOCK_N": 128, "PROGRAMS_PER_UNIT": 1, "PARTS": 2, "LAG": 1}, 2)
        verdict = judge(op, args, run_config(current(), op, args, device, config))
        assert verdict.right, f"{rows} {verdict.reason}"
