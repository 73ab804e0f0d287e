"""Norms compiled for sm90: the configs that are stated for them fit as often as they have to."""

from __future__ import annotations

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.executors.compile import compile_plan
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from tests.spine import told


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_whose_configs_are_stated(name: str) -> None:
    """Of each length, what comes first for weights of 16 bits: no spill under its cap, and enough rows on their way."""
    op, device, found = all_ops()[name], dispatch.reference_device(current(), "sm90"), []
    for columns in (16_384, 32_768, 65_536, 131_072):
        args = metas_of(op.inputs((4096, columns), torch.bfloat16, device="meta"))
        situation = dispatch.situate(current(), op, args, device)
        config = situation.backend.default(device, situation.work)  # not dispatch's choice, which records may make
        blocks, refusal = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None, refusal
        choice, options = Choice(config, blocks, "test", ""), situation.backend.launch_options(config)
        (needs,) = (
            each.resources for each in compile_plan(situation.plan(choice), args, situation.backend, device, options)
        )
        assert choice.config in stated_of(situation), choice.config
        assert needs.spills == 0, f"{columns} [{choice.config}] {needs}"
        # Rows of 16 bits, whole or in parts, of which that many bytes are on their way to a unit: of programs that lag
        # two at a time.
        width = config.params.get("BLOCK_N", columns) * (1 + config.params.get("LAG", 0))
        found.append(2 * width * needs.programs_per_unit)
    assert min(found) >= 40_000, found


def stated_of(situation: dispatch.Situation) -> list[Config]:
    """What the candidates have that are tried in parts, or with vectors before the sums."""
    proposed = situation.backend.candidates(situation.device, situation.work)
    return [config for config in proposed if "PARTS" in config.params or "EARLY" in config.params]


@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
def test_gradients_of_norms_fill_a_unit(name: str) -> None:
    """As the model promises, all programs that are asked for run at once, those that wait and those that walk rows."""
    runtime, op = current(), all_ops()[name]
    device = dispatch.reference_device(runtime, "sm90")
    for sizes in ((4096, 32768), (4096, 131072), (32768, 256)):
        args = metas_of(op.inputs(sizes, torch.bfloat16, device="meta"))
        situation = dispatch.situate(runtime, op, args, device)
        config = situation.backend.default(device, situation.work)
        blocks, refusal = fits(op, situation.work, device, situation.backend, config)
        assert blocks is not None, refusal
        plan = situation.plan(Choice(config, blocks, "test", ""))
        first, *_ = compile_plan(plan, args, situation.backend, device, situation.backend.launch_options(config))
        needs = first.resources
        assert needs.programs_per_unit >= config.params["PROGRAMS_PER_UNIT"], f"{sizes} [{config}]: {needs}"
        assert needs.spills == 0, f"{sizes} [{config}]: {needs}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["group_norm", "group_norm_backward"])
def test_groups_that_programs_share(name: str, dtype: str) -> None:
    """The default of long groups on sm90: as many programs fit as it asks for, with 32 bytes of stack at most. Kept as
    words of two, 16-bit numbers take half a register each."""
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    for sizes in ((2, 512, 65536), (8, 512, 4096), (32, 256, 3136)):
        args = metas_of(op.inputs(sizes, getattr(torch, dtype), device="meta", groups=32))
        situation = dispatch.situate(current(), op, args, device)
        config = situation.backend.default(device, situation.work)
        blocks, reason = fits(op, situation.work, device, situation.backend, config)
        assert config.variant == "coresident_row" and blocks is not None, reason
        plan, options = situation.plan(Choice(config, blocks, "test", "")), situation.backend.launch_options(config)
        needs = compile_plan(plan, args, situation.backend, device, options)[0].resources
        what = f"{name} {sizes} [{config}] {needs}"
        assert needs.programs_per_unit >= config.params["PROGRAMS_PER_UNIT"], what
        assert needs.spills == 0 or told(situation, config, needs), what
