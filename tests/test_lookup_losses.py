"""What the lookup passes over: configs that were lost, do not fit, or failed to launch; and what it says of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.explanation import explain_canonical
from portkern.lookup import Candidate
from portkern.runtime import Runtime, using
from portkern.target import Device
from portkern.tuning_db import Database
from tests.test_lookup import FAST, _args, answer, fact, situation


@pytest.fixture
def runtime(tmp_path: Path) -> Any:
    made = Runtime(database=Database(home=tmp_path / "home", shipped=tmp_path / "none"))
    with using(made):
        yield made


@pytest.mark.parametrize("outcome", ["wrong", "crashed", "timeout"])
def test_lost_config_is_handed_out_by_no_layer(runtime: Runtime, outcome: str) -> None:
    at = situation(runtime)
    near = dataclasses.replace(at.problem, sizes=type(at.problem.sizes)(M=4096, N=16384))
    default = answer(runtime, at).config
    untimed = {"time_us": None, "spread_us": None, "samples": 0}
    when = {"utc": "2026-01-02T03:04:05+00:00"}
    runtime.database.record(
        [
            fact(at, outcome=outcome, reason="off by 7", provenance=when, **untimed),
            fact(at, default, outcome=outcome, reason="off by 8", **untimed),
            fact(at),  # also measured once
            fact(at, problem=near),
            fact(at, kernel_hash="other"),
            fact(at, problem=near, toolchain="3.1"),
            fact(at, device="nvidia_h100"),
            fact(at, device="sm90", outcome="predicted", **untimed),
        ]
    )
    found = answer(runtime, at)
    assert found.config not in (FAST, default) and found.layer == "default"
    layers = {candidate.layer for candidate, _ in found.passed_over}
    assert {"near", "exact stale", "near stale", "sibling exact", "predicted", "default"} <= layers
    for candidate, reason in found.passed_over:
        assert outcome in reason and ("off by 8" if candidate.config == default else "off by 7") in reason
    assert "2026-01-02T03:04:05" in found.passed_over[0][1]
    with portkern.pin("softmax", FAST), pytest.raises(Infeasible, match="off by 7.*pin another"):
        answer(runtime, at)
    assert answer(runtime, situation(runtime, n=16384)).config == FAST  # where it was right


def test_loss_counts_for_the_kernel_and_toolchain_it_was_found_with(runtime: Runtime) -> None:
    at = situation(runtime)
    near = dataclasses.replace(at.problem, sizes=type(at.problem.sizes)(M=4096, N=16384))
    lost: dict[str, Any] = {"outcome": "wrong", "time_us": None, "spread_us": None, "samples": 0}
    runtime.database.record([fact(at, toolchain="3.1", **lost), fact(at, kernel_hash="other", **lost)])
    runtime.database.record([fact(at, problem=near, toolchain="3.1")])
    found = answer(runtime, at)  # stale itself, and lost with the very toolchain that it comes from
    assert found.layer == "default" and [each.layer for each, _ in found.passed_over] == ["near stale"]
    runtime.database.record([fact(at)])  # measured since, with the kernel and Triton of today
    assert answer(runtime, at).layer == "exact"


def test_error_lists_every_loss(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    at = situation(runtime)
    runtime.database.record(
        [fact(at, outcome="wrong", reason="off by 7", time_us=None, spread_us=None, samples=0)]
    )  # fmt: skip
    monkeypatch.setattr("portkern.lookup.default_layer", lambda *rest: [Candidate("default", FAST, "only one")])
    with pytest.raises(Infeasible, match="no config of softmax can run .*wrong.*off by 7"):
        answer(runtime, at)


@pytest.mark.parametrize("error", [KeyError("BLOCK_N"), TypeError("none"), ValueError("odd"), ZeroDivisionError()])
def test_stored_config_that_fit_chokes_on_is_passed_over(runtime: Runtime, error: Exception) -> None:
    at = situation(runtime)
    old = Config("looped_row", {"BLOCK_SIZE": 64})  # type: ignore[arg-type]

    def fit(config: Config, *rest: Any) -> Any:
        if "BLOCK_SIZE" in config.params:
            raise error
        return at.op.fit(config, *rest)

    changed = dataclasses.replace(at, op=dataclasses.replace(at.op, fit=fit))
    runtime.database.record([fact(at, old, kernel_hash="other")])
    found = answer(runtime, changed)
    assert found.layer == "default"
    (candidate, reason), *_ = found.passed_over
    assert candidate.config == old and type(error).__name__ in reason and "BLOCK_SIZE" in reason
    with portkern.pin("softmax", old), pytest.raises(Infeasible, match=type(error).__name__):
        answer(runtime, changed)


def test_bug_in_fit_of_a_default_surfaces(runtime: Runtime) -> None:
    at = situation(runtime)

    def fit(*rest: Any) -> Any:
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        answer(runtime, dataclasses.replace(at, op=dataclasses.replace(at.op, fit=fit)))


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


def test_explain_prints_refusals_with_reasons(runtime: Runtime) -> None:
    device: Device = dispatch.reference_device(runtime, "gfx942")
    shown = explain_canonical("softmax", _args(4096, 131072), device)
    assert shown.refused and all(each.reason for each in shown.refused)
    text = str(shown)
    assert "refused candidates" in text and "gfx942" in text and "absent" in text
