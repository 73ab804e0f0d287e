"""Rows of norms by kernels, with stated configs: parts, pairs, full tiles, rows read again; and groups of one part."""

from __future__ import annotations

from typing import Any

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
def test_gradient_of_rows_read_in_pairs(name: str, lag: int, reread: int) -> None:
    """16-bit numbers as words of two: all that is read has to be, in whole words, from aligned addresses on."""
    last = {"SUM_BLOCK_M": 16, "SUM_BLOCK_N": 64, "SUM_WARPS": 4}
    params = {"BLOCK_N": 1024, "PROGRAMS_PER_UNIT": 1, "LAG": lag, "REREAD": reread, **last}
    config = Config("coresident_row", params, 4)  # type: ignore[arg-type]
    _in_pairs(name, config, (True, 1024, torch.float16, {}), (True, 1000, torch.bfloat16, {"add": True}))
    _in_pairs(name, config, (True, 1000, torch.bfloat16, {"weight": "none"}), (False, 1001, torch.bfloat16, {}))
    _in_pairs(name, config, (False, 1024, torch.float32, {}), (False, 1024, torch.bfloat16, {"weight": "float32"}))
    _in_pairs(name, config, (True, 1024, torch.bfloat16, {"style": "wide"}))


@pytest.mark.parametrize(
    ("variant", "params"),
    [
        ("packed_rows", {"BLOCK_M": 4, "EARLY": 1}), ("resident_row", {"PARTS": 4}), ("resident_row", {}),
        ("coresident_row", {"BLOCK_N": 256, "LAG": 1}), ("coresident_row", {"BLOCK_N": 256, "PARTS": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", NORMS)
def test_rows_read_in_pairs(name: str, variant: str, params: dict[str, int]) -> None:
    """Rows that fill their tiles alone, as words of two, several to a tile too."""
    programs = int(variant == "coresident_row")
    config = Config(variant, {"PROGRAMS_PER_UNIT": programs, "PAIRS": 1, **params}, 2)  # type: ignore[arg-type]
    _in_pairs(name, config, (True, 256, torch.bfloat16, {"style": "wide"}), (True, 256, torch.float16, {}))
    _in_pairs(name, config, (False, 250, torch.bfloat16, {}), (False, 256, torch.bfloat16, {"weight": "float32"}))
    _in_pairs(name, config, (True, 256, torch.bfloat16, {"weight": "none"}), (False, 256, torch.float32, {}))
    if "PARTS" in params:  # a part of one column has no pair
        _in_pairs(name, config, (False, params["PARTS"], torch.float16, {}))


def _in_pairs(name: str, config: Config, *given: tuple[bool, int, torch.dtype, dict[str, Any]]) -> None:
    """Each of ``given``: whether pairs are read, columns, dtype, and what the op's inputs take."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    for paired, columns, dtype, options in given:
        args = op.inputs((5, columns), dtype, generator=generator(columns), **options)
        situation = dispatch.situate(current(), op, metas_of(args), device)
        blocks, refusal = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None, refusal
        plan = situation.plan(Choice(config, blocks, "test", "test"))
        assert plan.launches[0].constexprs["PAIRS"] is paired, (columns, dtype, options)
        verdict = judge(op, args, run_config(current(), op, args, device, config))
        assert verdict.right, f"{columns} {dtype} {options} {verdict.reason}"


@pytest.mark.parametrize(("variant", "launches"), [("packed_rows", 1), ("resident_row", 1), ("split_row", 2)])
@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
def test_sums_of_one_program_are_the_totals(name: str, variant: str, launches: int) -> None:
    """What one program sums over all rows goes where the op's outputs are, with no launch that adds up one addend."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    params = {"BLOCK_M": 4, "BLOCK_N": 64, "SPLITS": 2, "PROGRAMS_PER_UNIT": 1}
    sums = {"SUM_BLOCK_M": 16, "SUM_BLOCK_N": 64, "SUM_WARPS": 4}
    config = Config(variant, {**params, **sums}, 2)  # type: ignore[arg-type]
    for dtype, options in (
        (torch.bfloat16, {}),
        (torch.float32, {"bias": False}),
        (torch.float16, {"weight": "float32"}),
    ):
        for rows in (1, 9):
            args = op.inputs((rows, 100), dtype, generator=generator(rows), **options)
            situation = dispatch.situate(current(), op, metas_of(args), device)
            blocks, refusal = fits(op, situation.work, device, situation.backend, config)
            assert blocks is not None, refusal
            plan = situation.plan(Choice(config, blocks, "test", "test"))
            assert len(plan.launches) == (launches if rows == 1 else launches + 1)
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{rows} {dtype} {options} {verdict.reason}"
