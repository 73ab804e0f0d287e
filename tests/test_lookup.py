"""The layers of the lookup, in their order, on stored facts; nothing runs."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.explanation import explain_canonical
from portkern.fact import Fact
from portkern.kernel_hash import kernel_hash
from portkern.lookup import Choice
from portkern.plan import metas_of
from portkern.problem import Problem
from portkern.records import distance
from portkern.registry import get
from portkern.runtime import Runtime, using
from portkern.toolchain import triton_series
from portkern.tuning_db import Database, DatabaseWarning

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


def at_limit(at: dispatch.Situation, limit: str) -> dispatch.Situation:
    device = dataclasses.replace(at.device, extra=type(at.device.extra)(power_limit_mw=limit))
    return dataclasses.replace(at, device=device)


def test_a_faster_fact_at_another_power_limit_hides_nothing(runtime: Runtime) -> None:
    here = at_limit(situation(runtime), "500000")
    slow = FAST.replace(num_warps=4)
    runtime.database.record(
        [
            fact(here, time_us=5.0, provenance={"power_limit_mw": "700000"}),
            fact(here, slow, time_us=9.0, provenance={"power_limit_mw": 500000}),
        ]
    )
    found = answer(runtime, here)
    assert (found.layer, found.config) == ("exact", slow)
    elsewhere = answer(runtime, at_limit(here, "300000"))
    assert (elsewhere.layer, elsewhere.config) == ("sibling exact", FAST)
    assert "700 W" in elsewhere.reason and "300 W" in elsewhere.reason
    shown = explain_canonical("softmax", _args(4096, 8192), here.device)
    assert [each.config for each in shown.near] == [str(slow), str(FAST)]
    assert shown.near[0].differs == () and "700 W" in shown.near[1].differs[0] and "500 W" in shown.near[1].differs[0]


def test_a_default_is_no_rival_at_another_power_limit(runtime: Runtime) -> None:
    """At 500 W the candidate lost to its default; the slower default of 300 W makes it no winner."""
    here = at_limit(situation(runtime), "500000")
    default = FAST.replace(num_warps=4)
    runtime.database.record(
        [
            fact(here, default, role="default", time_us=9.95, provenance={"power_limit_mw": "500000"}),
            fact(here, FAST, time_us=9.9, provenance={"power_limit_mw": "500000"}),
            fact(here, default, role="default", time_us=20.0, provenance={"power_limit_mw": "300000"}),
        ]
    )
    assert answer(runtime, here).config == default


@pytest.mark.parametrize("limit", ["x" * 50, "9" * 5000, "", "-1"])
def test_odd_power_limit_of_a_stored_fact_is_only_text(runtime: Runtime, limit: str) -> None:
    here = at_limit(situation(runtime), "500000")
    runtime.database.record([fact(here, provenance={"power_limit_mw": limit}, toolchain="9" * 5000)])
    assert "500 W" in answer(runtime, here).reason


def test_order_among_equally_near_facts(runtime: Runtime) -> None:
    """Added from the last to the first: each new one takes over, whatever its content hash."""
    at = situation(runtime)
    steps: list[dict[str, Any]] = [
        {"kernel_hash": "other", "toolchain": "3.1"},
        {"kernel_hash": "older", "toolchain": "3.1", "time_us": 9.0},
        {"kernel_hash": "other"},
        {"kernel_hash": "older", "time_us": 9.0},
        {"toolchain": "3.1", "time_us": 50.0},
        {"toolchain": "3.1", "time_us": 40.0, "config": FAST.replace(num_warps=4)},
        {"toolchain": "3.4", "time_us": 60.0},
        {"toolchain": "3.10", "time_us": 70.0},
    ]
    for number, changes in enumerate(steps):
        config = changes.pop("config", FAST).replace(num_stages=number + 1)
        runtime.database.record([fact(at, config, **changes)])
        found = answer(runtime, at)
        assert found.layer == "exact stale" and found.config == config, changes


def test_siblings_layer_by_layer(runtime: Runtime) -> None:
    """An exact record of any sibling comes before a near one of another; this device's own limits first."""
    at = at_limit(situation(runtime), "500000")
    near = dataclasses.replace(at.problem, sizes=type(at.problem.sizes)(M=4096, N=16384))
    other_limit = {"power_limit_mw": "300000"}
    steps = [
        ("sibling near", "nvidia_a", fact(at, device="nvidia_a", problem=near)),
        ("sibling near", at.device.slug, fact(at, problem=near, provenance=other_limit)),
        ("sibling exact stale", "nvidia_z", fact(at, device="nvidia_z", toolchain="3.1")),
        ("sibling exact", "nvidia_y", fact(at, device="nvidia_y")),
        ("sibling exact", "nvidia_b", fact(at, device="nvidia_b")),
        ("sibling exact", at.device.slug, fact(at, provenance=other_limit)),
    ]
    runtime.database.record([fact(at, device="amd_a", arch="gfx942")])  # of another architecture: no sibling
    for layer, slug, new in steps:
        runtime.database.record([new])
        found = answer(runtime, at)
        assert (found.layer, found.fact and found.fact.device) == (layer, slug)
        assert ("300 W" if slug == at.device.slug else slug) in found.reason


def test_a_call_waits_for_no_locked_file_and_writes_nothing(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = situation(runtime)
    runtime.database.record([fact(at), fact(at, device="nvidia_h100"), fact(at, device="sm80", arch="sm80")])
    database = Database(home=tmp_path / "home", shipped=tmp_path / "none")
    fresh = Runtime(plugins=runtime.plugins, database=database)
    broken, damaged = tmp_path / "home/nvidia_broken.sqlite3", tmp_path / "home/sm80.sqlite3"
    broken.write_bytes(b"garbage" * 100)
    with closing(sqlite3.connect(damaged)) as db, db:
        db.execute("UPDATE facts SET json = '{'")
    before = {each: each.read_bytes() for each in sorted(tmp_path.glob("home/*"))}
    others = [sqlite3.connect(tmp_path / f"home/{slug}.sqlite3") for slug in (at.device.slug, "nvidia_h100")]
    try:
        for other in others:
            other.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        with (
            pytest.warns(DatabaseWarning, match="bad rows"),
            pytest.warns(DatabaseWarning, match="was locked by other"),
        ):
            assert answer(fresh, at).layer == "default"
        assert time.monotonic() - start < 3.0
        epoch = database.epoch(at.device.slug)
    finally:
        for other in others:
            other.close()
    assert {each: each.read_bytes() for each in sorted(tmp_path.glob("home/*"))} == before
    assert answer(fresh, at).layer == "default"  # the file rests
    monkeypatch.setattr("portkern.tuning_db.database.time.monotonic", lambda: start + 1e6)
    assert database.epoch(at.device.slug) > epoch  # so that cached plans look again
    assert answer(fresh, at).layer == "exact"


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


def test_every_arch_has_a_default_for_every_case(runtime: Runtime) -> None:
    """Looked up for all; explained, which traces the plan and asks every candidate, for one of each target."""
    op = get("softmax")
    for turn, arch in enumerate(("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950")):
        device, cases = dispatch.reference_device(runtime, arch), (*op.cases, *op.tune_cases)
        for number, case in enumerate(cases):
            for dtype in op.dtypes:
                args = op.inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options)
                situation = dispatch.situate(runtime, op, metas_of(args), device)
                choice = dispatch.resolve(runtime, situation)
                assert choice.layer == "default"
                assert bool(situation.plan(choice).launches) == bool(args[0].numel())
                if (number, dtype) == (turn % len(cases), op.dtypes[turn % len(op.dtypes)]):
                    shown = explain_canonical("softmax", args, device)
                    assert shown.layer == "default" and not shown.near


def test_explain_on_cpu_says_reference(runtime: Runtime) -> None:
    shown = portkern.explain("softmax", torch.randn(2, 3))
    assert shown.layer == "reference" and "TRITON_INTERPRET=1" in shown.reason
    assert "reference" in str(shown)


def test_distance() -> None:
    def problem(**sizes: int) -> Problem:
        return Problem("a", sizes, {})  # type: ignore[arg-type]

    assert distance(problem(M=4, N=8), problem(M=4, N=8)) == 0
    assert distance(problem(M=4, N=8), problem(M=16, N=4)) == 2
    assert distance(problem(M=0, N=8), problem(M=0, N=8)) == 0
    assert distance(problem(M=0, N=8), problem(M=4, N=8)) == float("inf")
    assert distance(problem(M=4), problem(N=4)) == float("inf")
    assert distance(problem(M=4), problem(M=10**400)) == distance(problem(M=10**400), problem(M=4)) == float("inf")
    assert distance(problem(M=3), problem(M=6)) == 1 == distance(problem(M=6), problem(M=3))


def _args(*sizes: int) -> tuple[Any, ...]:
    return get("softmax").inputs(sizes, torch.bfloat16, device="meta")
