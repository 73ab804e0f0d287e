"""Reductions compiled for each target: each variant at its default fits, and nothing spills."""

from __future__ import annotations

import itertools

import pytest
import torch

from portkern import dispatch
from portkern.executors.compile import compile_plan
from portkern.lookup import Choice, fits
from portkern.op import Case
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from tests.spine import REDUCTIONS, variants

ARCHS = ("sm80", "sm90", "gfx942")
CASES = (
    Case((4096, 256)), Case((4096, 8192)), Case((512, 4095)), Case((64, 512, 128), {"dim": 1}), Case((1, 67108864)),
    Case((4096, 131072)),
)  # fmt: skip
DTYPES = ("bfloat16", "float32", "float64")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_defaults_spill_nothing(name: str, arch: str) -> None:
    op, runtime, compiled = all_ops()[name], current(), 0
    device, turn = dispatch.reference_device(runtime, arch), REDUCTIONS.index(name) + ARCHS.index(arch)
    for number, (case, dtype) in enumerate(itertools.product(CASES, DTYPES)):
        if (number + turn) % 8:
            continue  # some of the matrix, others for each op and target
        args = metas_of(op.inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options))
        situation = dispatch.situate(runtime, op, args, device)
        for config, _ in list(variants(runtime, op, args, device))[number % 2 :: 2]:
            blocks, _ = fits(op, situation.work, device, situation.backend, config)
            assert blocks is not None
            plan = situation.plan(Choice(config, blocks, "test", ""))
            options = situation.backend.launch_options(config)
            for launch in compile_plan(plan, args, situation.backend, device, options):
                needs = launch.resources
                message = f"{situation.problem} [{config}] {launch.kernel}: {needs}"
                assert needs.spills == 0 and needs.shared_bytes <= device.shared_bytes, message
            compiled += 1
    assert compiled >= 2


@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_whose_places_take_more_than_32_bits(name: str) -> None:
    """Every variant that such a row has compiles, though a loop over its blocks then counts in 64 bits."""
    op, runtime, compiled = all_ops()[name], current(), set()
    device = dispatch.reference_device(runtime, "sm90")
    args = metas_of(op.inputs((1, 2**31 + 16), torch.bfloat16, device="meta"))
    situation = dispatch.situate(runtime, op, args, device)
    for config, variant in variants(runtime, op, args, device):
        blocks, _ = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None
        plan = situation.plan(Choice(config, blocks, "test", ""))
        compile_plan(plan, args, situation.backend, device, situation.backend.launch_options(config))
        compiled.add(variant)
    assert compiled == {"looped_row", "split_row"}
