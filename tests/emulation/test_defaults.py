"""What is shipped for gfx942, op by op: defaults and candidates compile, fit, and use what the hardware has."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
import torch
import triton

from portkern import dispatch
from portkern.config import Config
from portkern.executors.binding import bind, keywords
from portkern.executors.emulate import compile_for
from portkern.executors.launch import allocate, at
from portkern.lookup import Choice, fits
from portkern.op import Op
from portkern.refusals import refusals
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.target import Device
from portkern.variants import variant_defaults

LDS = 65_536
OPS = sorted(name for name in all_ops() if "::" not in name)
OLDEST = triton.__version__.startswith("3.6.")
FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"
CANDIDATES = 10**6 if FULL else 4  # of each op
# A call of each kind of work whose layout allows 128-bit loads; others get their first case for tuning, cut down.
SIZES = {"row_reduction": (64, 4096), "gemm": (512, 512, 512)}


def device() -> Device:
    return dispatch.reference_device(current(), "gfx942")


def situation_of(op: Op, dtype: str) -> dispatch.Situation:
    metas = op.inputs((op.tune_cases or op.cases)[0].sizes, getattr(torch, dtype), device="meta")
    kind = op.work(op.problem(*dispatch.input_key(op, metas))).kind
    whole = (op.tune_cases or op.cases)[0].sizes
    sizes = SIZES.get(kind, ())
    sizes = sizes if len(sizes) == len(whole) else tuple(min(each, 4096) for each in whole)
    args = op.inputs(sizes, getattr(torch, dtype), device="cpu")
    return dispatch.situate(current(), op, dispatch.input_key(op, args), device())


def compiled(situation: dispatch.Situation, config: Config) -> list[tuple[str, Any, Any]]:
    """Kernel's name, what it needs and its assembly, for each launch, compiled for tensors as a launch would."""
    backend = situation.backend
    blocks, refusal = fits(situation.op, situation.work, situation.device, backend, config)
    assert blocks is not None, refusal
    plan = situation.plan(Choice(config, blocks, "test", "test"))
    metas = [each for each in situation.args]
    cpu = torch.device("cpu")
    args = [
        torch.empty_strided(each.shape, each.strides, dtype=each.dtype) if hasattr(each, "strides") else each
        for each in metas
    ]
    outputs, scratch = ([allocate(each, cpu) for each in buffers] for buffers in (plan.outputs, plan.scratch))
    found = []
    for launch in plan.launches:
        values = bind(launch, args, outputs, scratch, at)
        words = keywords(launch, backend.launch_options(config))
        made = compile_for(backend, launch.kernel, values, launch.grid, words)
        needs = backend.resources(situation.device, made, launch.num_warps)
        found.append((launch.kernel.fn.__name__, needs, made.asm["amdgcn"]))
    return found


def pairs() -> list[tuple[str, str]]:
    """Each op with a dtype: the oldest Triton takes the other one of each; all in a full sweep."""
    found = []
    for number, name in enumerate(OPS):
        both = [each for each in ("bfloat16", "float32") if each in all_ops()[name].dtypes]
        found += [(name, each) for each in (both if FULL else both[(number + OLDEST) % len(both) :][:1])]
    return found


@pytest.mark.parametrize(("name", "dtype"), pairs())
def test_defaults(name: str, dtype: str) -> None:
    """No spill, LDS within the limit, matrix instructions for a dot, 128-bit loads where the layout allows."""
    situation = situation_of(all_ops()[name], dtype)
    every = list(variant_defaults(situation))
    assert any(found.choice for found in every)
    for found in every:
        if found.choice is None:
            assert found.reason
            continue
        launches = compiled(situation, found.choice.config)
        for kernel, needs, _ in launches:
            what = f"{name} {dtype} {found.variant} {kernel}: {needs}"
            assert needs.spills == 0, what
            assert needs.shared_bytes <= LDS, what
        if situation.work.kind in ("gemm", "attention"):  # a second launch, if any, adds up
            assert launches[0][1].matrix_instruction.startswith("v_mfma"), f"{name} {dtype} {found.variant}"
        loads = [len(re.findall(r"_load_dwordx4", text)) for _, _, text in launches]
        if situation.work.kind in SIZES:
            assert any(loads), f"{name} {dtype} {found.variant} has no 128-bit load"


@pytest.mark.parametrize("name", OPS if FULL else OPS[OLDEST::2])
def test_candidates(name: str) -> None:
    """What is admitted compiles and fits; what spills is for the tuner to drop, and is far from all. The versions of
    Triton take turns."""
    op = all_ops()[name]
    situation = situation_of(op, "bfloat16" if "bfloat16" in op.dtypes else op.dtypes[0])
    candidates = list(dispatch.candidates(situation))
    admitted = [
        config for config in candidates
        if fits(op, situation.work, situation.device, situation.backend, config)[0] is not None
    ]  # fmt: skip
    refused = refusals(current(), op, situation.args, device())
    assert sum(each.count for each in refused) == len(candidates) - len(admitted)
    assert all(each.reason and each.candidates == len(candidates) for each in refused)
    assert admitted
    drawn = random.Random(name).sample(admitted, min(CANDIDATES, len(admitted)))
    spilling = 0
    for config in drawn:
        needs = [each for _, each, _ in compiled(situation, config)]
        assert all(each.shared_bytes <= LDS for each in needs), f"{config}: {needs}"
        spilling += any(each.spills for each in needs)
    assert spilling <= len(drawn) // 2, f"{spilling} of {len(drawn)} candidates spill"
