"""Quantised rows in words and parts: the bits of the reference, by software and by a target's own instruction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from portkern import dispatch
from portkern.config import Config
from portkern.registry import all_ops
from portkern.runtime import current
from tests.spine import generator, run_config

FORMATS = {"fp8e4nv": (torch.float8_e4m3fn, 0x7F), "fp8e4b8": (torch.float8_e4m3fnuz, 0x80)}


@pytest.fixture
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses what a rounded mantissa carries into the exponent; torch rounds right."""
    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(target) not in FORMATS or str(source) != "fp32":
            return convert(values, source, target, mode)
        kind, nan = FORMATS[str(target)]
        codes = torch.from_numpy(np.ascontiguousarray(values)).to(kind)
        return torch.where(codes.float().isnan(), nan, codes.view(torch.uint8)).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def rows(dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Ties, zeros of both signs, what is not finite, and scales too small and too large for a plain product."""
    x = torch.randn(9, columns, generator=generator(1)) * 3
    x[1], x[1, 3] = 0, -0.0
    x[2] *= 1e-30
    x[3] *= 1e30
    x[4, 7], x[5, 9], x[6, 5] = math.inf, -math.inf, math.nan
    x[7] = torch.randint(-8, 8, (columns,), generator=generator(2)) / 4
    x[7, ::5] = -0.0
    x[8] *= 2.0 ** torch.randint(-14, 1, (columns,), generator=generator(3))
    return x.to(dtype)


@pytest.mark.usefixtures("_rounding")
@pytest.mark.parametrize("native", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("variant", "params"),
    [
        ("packed_rows", {"BLOCK_M": 2, "PROGRAMS_PER_UNIT": 0}), ("resident_row", {"PROGRAMS_PER_UNIT": 0, "PARTS": 4}),
        ("cached_row", {"PROGRAMS_PER_UNIT": 0, "PARTS": 4}), ("looped_row", {"BLOCK_M": 1, "BLOCK_N": 128}),
        ("coresident_row", {"PROGRAMS_PER_UNIT": 1, "PARTS": 2, "BLOCK_N": 512}),
    ],
)  # fmt: skip
def test_bits(variant: str, params: dict[str, int], dtype: torch.dtype, native: int) -> None:
    op, device = all_ops()["quantize_fp8_rows"], dispatch.reference_device(current(), "sm90")
    for columns, fnuz in ((400, 1), (271, 0)) if native else ((512, 0),):
        args = (rows(dtype, columns), fnuz, native)
        codes, scale = run_config(current(), op, args, device, Config(variant, params, 4))  # type: ignore[arg-type]
        wanted_codes, wanted_scale = op.reference(*args)
        torch.testing.assert_close(scale, wanted_scale, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(codes, wanted_codes), f"{columns} columns: {(codes != wanted_codes).nonzero()[:4].tolist()}"
