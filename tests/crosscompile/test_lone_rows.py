"""Long rows that share no vectors, compiled for sm90: what is stated for them keeps words, and enough of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.executors.compile import compile_plan
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current

# Programs of a unit that wait with a whole row, or with a part of it and the next one.
WAITING = {
    ("masked_softmax", "bfloat16", 8_192): 6, ("masked_softmax", "bfloat16", 32_768): 2,
    ("masked_softmax", "bfloat16", 131_072): 8, ("masked_softmax", "float32", 32_768): 1,
    ("quantize_fp8_rows", "bfloat16", 4_096): 16, ("quantize_fp8_rows", "float16", 8_192): 4,
    ("quantize_fp8_rows", "bfloat16", 32_768): 2, ("quantize_fp8_rows", "bfloat16", 131_072): 7,
    ("quantize_fp8_rows", "float32", 32_768): 2,
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "columns"), WAITING)
def test_rows_in_parts(name: str, dtype: str, columns: int) -> None:
    """The default takes parts, one or more, of which none changes lanes by way of shared memory, without a spill."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    options: dict[str, Any] = {"NATIVE": 1} if name == "quantize_fp8_rows" else {}
    args = metas_of(op.inputs((4096, columns), getattr(torch, dtype), device="meta", **options))
    situation = dispatch.situate(current(), op, args, device)
    config = situation.backend.default(device, situation.work)
    blocks, refusal = fits(op, situation.work, device, situation.backend, config)
    assert "PARTS" in config.params and blocks is not None, refusal
    plan, given = situation.plan(Choice(config, blocks, "test", "")), situation.backend.launch_options(config)
    (launch,) = compile_plan(plan, args, situation.backend, device, given)
    needs = launch.resources
    assert needs.programs_per_unit >= WAITING[name, dtype, columns], f"[{config}] {needs}"
    assert needs.spills == 0, f"[{config}] {needs}"
    assert needs.shared_bytes <= 4 * config.num_warps, f"[{config}] {needs}"  # a number of each warp
