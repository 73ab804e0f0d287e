"""The tuner for GPUs that are not here: candidates are compiled and ranked, not timed."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

from portkern.backend import Resources
from portkern.dispatch import reference_device, situate
from portkern.explanation import explain
from portkern.plan import Launch, metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.tuner import compiling, tune
from portkern.tuner.compiling import against, compile_config
from tests.tuning import empty_home

__all__ = ["empty_home"]  # a fixture


def test_an_absent_architecture_is_predicted_and_dispatch_uses_it(home):
    report = tune("softmax", device="gfx942", shapes=["64x512"], dtypes=["fp16"], budget="5m")
    assert [line.op for line in report.lines] == ["softmax", "softmax_backward"]
    for line in report.lines:
        assert (line.status, line.winner_us) == ("predicted", None)
        assert "in the model" in line.why or "the model puts none" in line.why
        assert "registers at occupancy" in line.why
    recorded = [fact for fact in current().database.facts("gfx942") if fact.outcome == "predicted"]
    assert all(fact.time_us is None and fact.score is not None for fact in recorded)
    device = reference_device(current(), "gfx942")
    x = torch.empty(64, 512, dtype=torch.float16, device="meta")
    told = explain("softmax", x, device=device)
    assert told.layer == "predicted"
    assert told.config == str(report.lines[0].winner)
    again = tune("softmax", device="gfx942", shapes=["64x512"], dtypes=["fp16"], budget="5m")
    assert [line.status for line in again.lines] == ["known", "known"]


def test_an_op_with_candidates_of_its_own_compiles(home, monkeypatch):
    runtime = current()
    op, device = all_ops()["cross_entropy_backward_rescale"], reference_device(runtime, "sm90")
    args = metas_of(op.inputs((64, 512), torch.bfloat16, device="meta"))
    (config, *_) = op.candidates(device, situate(runtime, op, args, device).work)
    packed = base64.b64encode(pickle.dumps(args)).decode()
    built: list[Any] = []
    monkeypatch.setattr(compiling, "build_launcher", built.append)
    found = compile_config(device.to_json(), op.name, packed, config.to_json(), present=False)
    assert found["reason"] == "" and found["resources"] and not built
    compile_config(device.to_json(), op.name, packed, config.to_json(), present=True)
    assert [kernel.metadata.num_warps for kernel in built] == [config.num_warps]


def test_what_compiles_badly_is_refused_with_the_limit(home):
    device = reference_device(current(), "sm90")

    def kernel() -> None: ...

    kernel.fn = kernel
    launch = Launch(kernel, (10_000,), (), {}, 4, coresident=True)
    good = Resources(registers=32, spills=0, shared_bytes=0, occupancy=1.0, programs_per_unit=8)
    spills = Resources(registers=255, spills=64, shared_bytes=0, occupancy=0.1, programs_per_unit=1)
    large = Resources(registers=32, spills=0, shared_bytes=10**6, occupancy=0.1, programs_per_unit=1)
    none = Resources(registers=32, spills=0, shared_bytes=0, occupancy=0.0, programs_per_unit=0)
    assert "spills 64 bytes" in against(launch, spills, device)
    assert against(Launch(kernel, (8,), (), {}, 4), spills, device, spilling=True) == ""
    assert f"over the {device.shared_bytes:,}" in against(launch, large, device)
    assert "not one program" in against(launch, none, device)
    assert f"{8 * device.units} run at once" in against(launch, good, device)
    assert against(Launch(kernel, (10_000,), (), {}, 4), good, device) == ""
