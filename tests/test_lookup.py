"""The layers of the lookup, in their order, on stored facts; nothing runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.explanation import explain_canonical
from portkern.fact import Fact
from portkern.kernel_hash import kernel_hash
from portkern.lookup import Choice, distance
from portkern.problem import Problem
from portkern.registry import get
from portkern.runtime import Runtime, using
from portkern.target import Device
from portkern.toolchain import triton_series
from portkern.tuning_db import Database

FAST = Config("looped_row", {"BLOCK_M": 1, "BLOCK_N": 2048}, num_warps=8, num_stages=2)  # type: ignore[arg-type]


@pytest.fixture
def runtime(tmp_path: Path) -> Any:
    made = Runtime(database=Database(home=tmp_path / "home", shipped=tmp_path / "none"))
    with using(made):
        yield made


def situation(runtime: Runtime, m: int = 4096, n: int = 8192, arch: str = "sm90") -> dispatch.Situation:
    op = get("softmax")
    args = portkern.function("softmax") and op.inputs((m, n), torch.bfloat16, device="meta")
    from portkern.plan import metas_of

    return dispatch.situate(runtime, op, metas_of(args), dispatch.reference_device(runtime, arch))


def fact(at: dispatch.Situation, config: Config = FAST, **changes: Any) -> Fact:
    values: dict[str, Any] = {
        "device": at.device.slug, "arch": at.device.target.arch, "op": at.op.name, "kernel_hash": kernel_hash(at.op),
        "toolchain": triton_series(), "problem": at.problem, "config": config, "outcome": "measured",
        "time_us": 10.0, "spread_us": 0.1, "samples": 50,
    }  # fmt: skip
    return Fact(**{**values, **changes})


def answer(runtime: Runtime, at: dispatch.Situation) -> Choice:
    return dispatch.resolve(runtime, at)


def test_without_facts_the_plugin_answers(runtime: Runtime) -> None:
    found = answer(runtime, situation(runtime))
    assert found.layer == "default" and "sm90" in found.reason


def test_layers_in_order(runtime: Runtime) -> None:
    """Facts are added from the last layer to the first: each new one takes over."""
    at = situation(runtime)
    near = dataclasses.replace(at.problem, sizes=type(at.problem.sizes)(M=4096, N=16384))
    steps = [
        ("predicted", fact(at, device="sm90", outcome="predicted", time_us=None, spread_us=None, samples=0)),
        ("sibling near stale", fact(at, device="nvidia_h100", problem=near, toolchain="3.1")),
        ("sibling near", fact(at, device="nvidia_h100", problem=near)),
        ("sibling exact stale", fact(at, device="nvidia_h100", toolchain="3.1")),
        ("sibling exact", fact(at, device="nvidia_h100")),
        ("near stale", fact(at, problem=near, kernel_hash="other")),
        ("near", fact(at, problem=near)),
        ("exact stale", fact(at, kernel_hash="other")),
        ("exact", fact(at)),
    ]
    for layer, new in steps:
        runtime.database.record([new])
        found = answer(runtime, at)
        assert found.layer == layer, f"{layer}: {found.reason}"
        assert found.config == FAST and found.reason
    with portkern.pin("softmax", FAST.replace(num_warps=4)):
        assert answer(runtime, at).layer == "pinned"


def test_another_power_limit_ranks_as_a_sibling(runtime: Runtime) -> None:
    at = situation(runtime)
    device = dataclasses.replace(at.device, extra=type(at.device.extra)(power_limit_mw="700000"))
    at = dataclasses.replace(at, device=device)
    runtime.database.record([fact(at, provenance={"power_limit_mw": "500000"})])
    assert answer(runtime, at).layer == "sibling exact"
    runtime.database.record([fact(at, provenance={"power_limit_mw": "700000"})])
    assert answer(runtime, at).layer == "exact"


def test_too_far_is_not_near(runtime: Runtime) -> None:
    at = situation(runtime)
    for n in (32768, 1024):
        runtime.database.record([fact(situation(runtime, n=n))])
    assert answer(runtime, at).layer == "default"
    shown = explain_canonical("softmax", _args(4096, 8192), at.device)
    assert [each.distance for each in shown.near] == [2.0, 3.0]
    assert any("N 32768 for 8192" in difference for difference in shown.near[0].differs)


def test_ties_go_to_the_larger_problem(runtime: Runtime) -> None:
    slow = FAST.replace(num_warps=4)
    runtime.database.record(
        [fact(situation(runtime, n=4096), config=slow), fact(situation(runtime, n=16384), config=FAST)]
    )
    assert answer(runtime, situation(runtime)).config == FAST


def test_record_for_another_size_is_fitted_or_refused(runtime: Runtime) -> None:
    """A resident row of 16,384 would not fit where its record, at 8,192, did: the next layer answers."""
    resident = Config("resident_row", {"PROGRAMS_PER_UNIT": 0}, num_warps=1)  # type: ignore[arg-type]
    runtime.database.record([fact(situation(runtime, n=4096), config=resident)])
    found = answer(runtime, situation(runtime, n=8192))
    assert found.layer == "default"
    refused = [(candidate.layer, reason) for candidate, reason in found.passed_over]
    assert refused and refused[0][0] == "near" and "register" in refused[0][1]
    served = answer(runtime, situation(runtime, n=3000))
    assert served.layer == "near" and served.blocks["BLOCK_N"] == 4096


def test_config_that_failed_to_launch_is_passed_over(runtime: Runtime) -> None:
    at = situation(runtime)
    runtime.database.record([fact(at)])
    runtime.bad[(at.device.slug, at.problem.key, FAST)] = "out of resource"
    found = answer(runtime, at)
    assert found.layer == "default" and "out of resource" in found.passed_over[0][1]


def test_pinned_config_that_cannot_run_is_an_error(runtime: Runtime) -> None:
    at = situation(runtime, arch="gfx942")
    with portkern.pin("softmax", FAST.replace(num_warps=32)), pytest.raises(Infeasible, match=r"32.*16|1024"):
        answer(runtime, at)


def test_every_arch_has_a_default_for_every_case(runtime: Runtime) -> None:
    op = get("softmax")
    for arch in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950"):
        for case in (*op.cases, *op.tune_cases):
            for dtype in op.dtypes:
                args = op.inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options)
                shown = explain_canonical("softmax", args, dispatch.reference_device(runtime, arch))
                assert shown.layer == "default" and not shown.near


def test_explain_on_cpu_says_reference(runtime: Runtime) -> None:
    shown = portkern.explain("softmax", torch.randn(2, 3))
    assert shown.layer == "reference" and "TRITON_INTERPRET=1" in shown.reason
    assert "reference" in str(shown)


def test_explain_prints_refusals_with_reasons(runtime: Runtime) -> None:
    device: Device = dispatch.reference_device(runtime, "gfx942")
    shown = explain_canonical("softmax", _args(4096, 131072), device)
    assert shown.refused and all(each.reason for each in shown.refused)
    text = str(shown)
    assert "refused candidates" in text and "gfx942" in text and "absent" in text


def test_distance() -> None:
    def problem(**sizes: int) -> Problem:
        return Problem("a", sizes, {})  # type: ignore[arg-type]

    assert distance(problem(M=4, N=8), problem(M=4, N=8)) == 0
    assert distance(problem(M=4, N=8), problem(M=16, N=4)) == 2
    assert distance(problem(M=0, N=8), problem(M=0, N=8)) == 0
    assert distance(problem(M=0, N=8), problem(M=4, N=8)) == float("inf")
    assert distance(problem(M=4), problem(N=4)) == float("inf")


def _args(*sizes: int) -> tuple[Any, ...]:
    return get("softmax").inputs(sizes, torch.bfloat16, device="meta")
