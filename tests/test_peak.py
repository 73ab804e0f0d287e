"""What ``bench`` counts as the memory of a call: which steps run, and what is no part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from portkern import library, peak
from portkern.benchmark import Case, bench
from portkern.dispatch import reference_device
from portkern.library import altered_by
from portkern.registry import all_ops, get
from portkern.runtime import current
from portkern.target import Device


def ops_with_a_derivative() -> list[str]:
    return [name for name, op in sorted(all_ops().items()) if op.differentiated and "::" not in name]


@pytest.mark.parametrize("name", ops_with_a_derivative())
def test_a_step_gives_the_gradients_that_autograd_does(name: str) -> None:
    op = get(name)
    case = next(case for case in op.cases if len(case.sizes) > 1 and 0 not in case.sizes and case.sizes[-1] > 1)
    args = op.inputs(case.sizes, torch.float32, generator=torch.Generator().manual_seed(2), **case.options)
    compared = dataclasses.replace(op, eager=None) if op.random else op  # torch draws another mask
    ours, theirs = peak.ours(op, args)(), peak.eager(compared, args)()
    wanted = [args[place] for place in op.differentiated if isinstance(args[place], torch.Tensor)]
    assert len(ours) == len(wanted) > 0 and not any(arg.requires_grad for arg in wanted)
    if name == "cross_entropy":  # torch's takes its derivative itself
        theirs = theirs[-1:]
    for got, expected, arg in zip(ours, theirs, wanted, strict=True):
        assert got.shape == arg.shape
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_outputs_for_the_derivative_have_no_gradient() -> None:
    op = dataclasses.replace(get("layer_norm"), eager=None)
    args = op.inputs((3, 40), torch.float32, generator=torch.Generator().manual_seed(2))
    for got, expected in zip(peak.eager(op, args)(), peak.eager(get("layer_norm"), args)(), strict=True):
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["argmax", "bincount", "softmax_backward"])
def test_without_a_derivative_the_call_is_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = get(name)
    args = op.inputs(op.cases[-1].sizes, torch.float32, **op.cases[-1].options)
    seen: list[Any] = []
    monkeypatch.setattr(library, "call", lambda op, *given: seen.append(given) or torch.ones(()))
    peak.ours(op, args)()
    assert len(seen) == 1 and all(a is b for a, b in zip(seen[0], args, strict=True))


def test_upstream_gradients_are_made_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    op = get("softmax")
    step = peak.ours(op, op.inputs((3, 5), torch.float32))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("made in the step")

    monkeypatch.setattr(torch, "ones_like", refuse)
    (gradient,) = step()
    assert torch.allclose(gradient, torch.zeros(3, 5), atol=1e-6)


def test_every_op_has_a_step_that_runs_again() -> None:
    for name, op in all_ops().items():
        if "::" in name:  # another test's
            continue
        case = next(case for case in op.cases if 0 not in case.sizes)
        step = peak.ours(op, op.inputs(case.sizes, torch.float32, **case.options))
        step()
        step()
        assert name in ("cross_entropy_backward_rescale",) or not altered_by(op)


def test_what_cannot_be_measured_is_a_note(tmp_path: Any) -> None:
    class Broken:
        def peak(self, call: Callable[[], Any], device: Device) -> int:
            raise torch.OutOfMemoryError("tried to\n allocate 99 GiB")

    class Clock:
        def interleaved(self, calls: Any, device: Device, **options: Any) -> Any:
            from portkern.timing import Timing

            return {name: Timing(10.0, 0.5, 30) for name in calls}

        def copy_ceiling(self, device: Device) -> float:
            return 1000.0

    op, cpu = get("softmax"), torch.device("cpu")
    case = Case(op, "small", lambda where: op.inputs((4, 8), torch.float32, device=where))
    device = reference_device(current(), "sm90")
    (found,) = bench(current(), [case], device, timer=Clock(), meter=Broken(), where=cpu)
    assert found.time_us == 10.0 and found.extra_bytes is None and found.torch_extra_bytes is None
    why = "not measured: tried to allocate 99 GiB"
    assert found.note == f"memory of portkern {why}; memory of torch {why}"


@pytest.mark.gpu
def test_the_counter_on_a_gpu() -> None:
    device, size = current().devices[0], 1 << 24
    where = torch.device(f"cuda:{device.index}")
    source = torch.zeros(size, dtype=torch.int8, device=where)
    kept: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(8 * size, dtype=torch.int8, device=where))  # once: no cost of a call
        return source.clone().clone()

    assert 2 * size <= peak.GpuMeter().peak(call, device) < 2.1 * size
