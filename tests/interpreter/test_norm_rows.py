"""Rows of norms by kernels, with stated configs: parts, pairs, full tiles, rows read again; and groups of one part."""

from __future__ import annotations

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import judge
from tests.spine import generator, run_config

NORMS = ("layer_norm", "rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("params", [{"BLOCK_N": 1024}, {"BLOCK_N": 1024, "AHEAD": 1}, {"BLOCK_N": 256, "SPLITS": 1}])
@pytest.mark.parametrize("name", ["group_norm", "group_norm_backward"])
def test_groups_of_one_part(name: str, params: dict[str, int], dtype: torch.dtype) -> None:
    """What programs that share a group do, where each waits for itself alone: kept, ahead of its turn, and walked, of
    a mean far from zero, in words of two and one by one."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    for number, places in enumerate((200, 199)):
        given = {"PROGRAMS_PER_UNIT": 1, "SUM_BLOCK_M": 2, "SUM_BLOCK_N": 8, "SUM_WARPS": 1, **params}
        config = Config("coresident_row", given, num_warps=4)  # type: ignore[arg-type]
        sizes = (2, 4, places) if "SPLITS" not in params else (2, 2, 4 * places)
        args = op.inputs(sizes, dtype, generator=generator(number), style="wide", groups=1 if sizes[1] == 4 else 2)
        verdict = judge(op, args, run_config(current(), op, args, device, config))
        assert verdict.right, verdict.reason


@pytest.mark.parametrize("columns", [1, 1024, 1025, 20_000])
def test_rows_that_are_read_again(columns: int) -> None:
    """Whole, and in parts: with a mean far from zero, an infinity in one row and a NaN in another."""
    op = all_ops()["layer_norm"]
    args = list(op.inputs((4, columns), torch.bfloat16, generator=generator(columns)))
    args[0] = args[0] + 300
    args[0][1, columns // 2], args[0][2, 0] = torch.inf, torch.nan
    with portkern.pin("layer_norm", Config("cached_row", {"PROGRAMS_PER_UNIT": 0}, 4)):
        outputs = dispatch.run(op, args)
    verdict = judge(op, args, outputs)
    assert verdict.right, verdict.reason


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("name", [*NORMS, "add_layer_norm", "add_rms_norm"])
def test_rows_in_parts(name: str, parts: int, early: int) -> None:
    """With weights before and after the sums: a mean far from zero, an infinity, a NaN, parts that are cut or empty."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    dtype = torch.float16 if name.startswith("add") else torch.bfloat16  # whose sum Triton's interpreter cuts off
    for columns, variant in ((16, "packed_rows"), (130, "packed_rows"), (1040, "resident_row")):
        args = list(op.inputs((5, columns), dtype, generator=generator(columns)))
        args[0] = args[0] + 300
        args[0][1, columns // 2], args[0][2, 0] = torch.inf, torch.nan
        rows = {"BLOCK_M": 4} if variant == "packed_rows" else {}
        params = {**rows, "PROGRAMS_PER_UNIT": 0, "PARTS": parts, "EARLY": early}
        verdict = judge(op, args, run_config(current(), op, args, device, Config(variant, params, 4)))
        assert verdict.right, f"{columns} {verdict.reason}"


@pytest.mark.parametrize("columns", [256, 255, 128])
@pytest.mark.parametrize("name", [*NORMS, "add_layer_norm", "layer_norm_backward", "rms_norm_backward"])
def test_rows_that_fill_their_tiles(name: str, columns: int) -> None:
    """Without column masks where a row is as wide as its tiles, and only there."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    args = op.inputs((5, columns), torch.float32, generator=generator(columns))
    last = {"SUM_BLOCK_M": 16, "SUM_BLOCK_N": 64, "SUM_WARPS": 4} if name.endswith("backward") else {}
    waiting = {"LAG": 1, "REREAD": 0} if last else {"PARTS": 2}
    for config in (
        Config("packed_rows", {"BLOCK_M": 2, "PROGRAMS_PER_UNIT": 1, **last}, 1),
        Config("resident_row", {"PROGRAMS_PER_UNIT": 1, **last}, 1),
        Config("coresident_row", {"BLOCK_N": columns + columns % 2, "PROGRAMS_PER_UNIT": 1, **waiting, **last}, 1),
    ):
        situation = dispatch.situate(current(), op, metas_of(args), device)
        blocks, refusal = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None, refusal
        plan = situation.plan(Choice(config, blocks, "test", "test"))
        assert plan.launches[0].constexprs["FULL"] is (columns != 255)
        verdict = judge(op, args, run_config(current(), op, args, device, config))
        assert verdict.right, f"{config} {verdict.reason}"


@pytest.mark.parametrize(("lag", "reread"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
def test_rows_read_in_pairs(name: str, lag: int, reread: int) -> None:
    """bfloat16 as words of two: all that is read has to be, in whole words, from aligned addresses on."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    last = {"SUM_BLOCK_M": 16, "SUM_BLOCK_N": 64, "SUM_WARPS": 4}
    params = {"BLOCK_N": 1024, "PROGRAMS_PER_UNIT": 1, "LAG": lag, "REREAD": reread, **last}
    config = Config("coresident_row", params, 4)  # type: ignore[arg-type]
    for paired, columns, dtype, given in (
        (True, 1024, torch.bfloat16, {"style": "wide"}), (True, 1000, torch.bfloat16, {"add": True}),
        (True, 1000, torch.bfloat16, {"weight": "none"}), (False, 1001, torch.bfloat16, {}),
        (False, 1024, torch.float16, {}), (False, 1024, torch.bfloat16, {"weight": "float32"}),
    ):  # fmt: skip
        args = op.inputs((5, columns), dtype, generator=generator(columns), **given)
        situation = dispatch.situate(current(), op, metas_of(args), device)
        blocks, refusal = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None, refusal
        plan = situation.plan(Choice(config, blocks, "test", "test"))
        assert plan.launches[0].constexprs["PAIRS"] is paired, given
        verdict = judge(op, args, run_config(current(), op, args, device, config))
        assert verdict.right, f"{columns} {dtype} {given} {verdict.reason}"
