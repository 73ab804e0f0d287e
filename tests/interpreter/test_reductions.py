"""Reductions in Triton's interpreter: every op and variant over shapes, layouts and values."""

from __future__ import annotations

import math

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import REDUCTIONS, generator, run_config, variants

DTYPES = ("float32", "float16", "bfloat16", "float64")


@pytest.mark.parametrize("name", REDUCTIONS)
def test_cases(name: str) -> None:
    """Dtype, layout, style and variant rotate; blocks are so small that a row takes several."""
    op, device, ran = all_ops()[name], dispatch.reference_device(current(), "sm90"), set()
    for number, case in enumerate(op.cases):
        dtype, style = DTYPES[number % 4], ("normal", "wide", "nonfinite")[number % 3]
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        if dtype == "bfloat16" and "float" in case.options.get("source", ""):
            dtype = "float16"  # Triton's interpreter cuts off what a conversion to bfloat16 should round
        args = op.inputs(case.sizes, getattr(torch, dtype), generator=generator(number), style=style, **case.options)
        args = lay_out(args, layout)
        every = list(variants(current(), op, args, device))
        for config, variant in (every[number % len(every)], every[(number + 1) % len(every)]):
            if "BLOCK_N" in config.params:
                block = 32 if max(case.sizes, default=1) < 500 else 1024
                config = config.replace(params={"BLOCK_N": block, "BLOCK_M": 2})
            if "SPLITS" in config.params:
                config = config.replace(params={"SPLITS": 3})
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{case} {dtype} {layout} {style} [{config}]: {verdict.reason}"
            ran.add(variant)
    assert {"packed_rows", "looped_row", "split_row"} <= ran


@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_are_converted_first(name: str, dtype: str) -> None:
    op, device, ran = all_ops()[name], dispatch.reference_device(current(), "sm90"), set()
    for number, case in enumerate(case for case in op.cases if "float" in case.options.get("source", "")):
        args = op.inputs(case.sizes, getattr(torch, dtype), generator=generator(number), **case.options)
        for config, variant in variants(current(), op, args, device):
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{case} [{config}]: {verdict.reason}"
            ran.add((variant, case))
    assert len(ran) >= 9


def test_any_dims_as_torch() -> None:
    x = torch.randn(3, 4, 5, 6, generator=generator(1)).permute(2, 0, 3, 1)
    for dims in (None, 0, -1, (0, 2), (1, 3), (3, 0, 1), (0, 1, 2, 3)):
        for keepdim in (False, True):
            for name in ("sum", "mean", "amax"):
                got, want = (
                    getattr(portkern, name)(x, dims or (), keepdim),
                    getattr(torch, name)(x, dims or (), keepdim),
                )
                assert got.shape == want.shape and got.dtype == want.dtype
                torch.testing.assert_close(got, want)
            for got, want in zip(
                portkern.var_mean(x, dims, keepdim=keepdim), torch.var_mean(x, dims, keepdim=keepdim), strict=True
            ):
                torch.testing.assert_close(got, want)


def test_first_of_equal_maxima_and_first_nan() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [math.nan, 3.0, math.nan, 2.0], [-math.inf] * 4, [2.0, math.nan, 9.0, 1.0]])
    assert portkern.argmax(x, 1).tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(portkern.amax(x, 1), torch.amax(x, 1), equal_nan=True, rtol=0, atol=0)
    long = torch.zeros(3, 5000)
    long[:, [1234, 4000]] = 7.0
    assert portkern.argmax(long, 1).tolist() == [1234] * 3 and int(portkern.argmax(long)) == 1234
    assert int(portkern.argmax(torch.tensor([2**53, 2**53 + 1]))) == 1


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "uint8", "int16", "int32", "int64"])
def test_the_first_maximum_in_any_variant(dtype: str) -> None:
    """Rows of few values, so of many equal maxima: read 16 bytes at once, ending within those, and one by one."""
    op, device, kind = all_ops()["argmax"], dispatch.reference_device(current(), "sm90"), getattr(torch, dtype)
    if kind.is_floating_point:
        nan = torch.tensor([math.nan, math.copysign(math.nan, -1)])
        sets = (
            [-math.inf],
            [-math.inf, -0.0, 0.0],
            [-0.0, 0.0, -1.0],
            [1.0, *[math.inf] * 9, *nan],
            [-2.0, -1.0],
            [*nan],
        )
    else:
        least, most = torch.iinfo(kind).min, torch.iinfo(kind).max
        sets = ([least], [least, least + 1], [0, 1], [most - 1, most], [most], [least, 0, most])
    rows = [torch.tensor(values, dtype=kind) for values in sets]
    for number, (columns, stride) in enumerate([(203, 208), (64, 64), (9, 16), (1, 16), (203, 203)]):
        picks = torch.randint(0, 60, (len(rows), stride), generator=generator(number))
        x = torch.stack([values[each % len(values)] for values, each in zip(rows, picks, strict=True)])
        x[:, columns:] = torch.tensor(math.nan if kind.is_floating_point else most, dtype=kind)  # not of the rows
        args, ran = (x[:, :columns], [len(rows)]), set()
        for config, variant in variants(current(), op, args, device):
            small = {"BLOCK_N": 32, "BLOCK_M": 2, "SPLITS": 4}
            config = config.replace(
                params={**config.params, **{key: small[key] for key in small if key in config.params}}
            )
            got = run_config(current(), op, args, device, config)[0]
            assert got.tolist() == torch.argmax(args[0], -1).tolist(), f"{columns} of {stride} [{config}]"
            ran.add(variant)
        assert {"packed_rows", "looped_row", "split_row"} <= ran


def test_sums_of_integers_are_exact() -> None:
    x = torch.tensor([2**62, 1, -3, 2**61])
    assert int(portkern.sum(x)) == int(x.sum())
    ones = torch.ones(300, dtype=torch.bool)
    assert int(portkern.sum(ones)) == 300 and portkern.sum(ones).dtype == torch.int64
    assert float(portkern.sum(torch.ones(70000, dtype=torch.float16), dtype=torch.float32)) == 70000
