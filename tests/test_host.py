"""What a call costs the host, on the CPU: the figures mean nothing there, that they are taken does."""

from __future__ import annotations

import pytest
import torch

from portkern import host
from portkern.executors.replay import Driver
from portkern.op import Case
from portkern.registry import get
from portkern.runtime import Runtime, current, using


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    driver = Driver(stream_of=lambda index: 0, empty=empty, current=lambda: 0, count=1, guard=torch.cuda.device)
    monkeypatch.setattr(Driver, "of_torch", staticmethod(lambda: driver))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "CALLS", 3)
    return current()


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "gelu", "argmax"])
def test_each_cost_is_measured(runtime: Runtime, name: str) -> None:
    op = get(name)
    with using(runtime):
        found = host.host_cost(runtime, op, Case((4, 8)), torch.float32, torch.device("cpu"))
    assert found.op == name and found.ours > 0 and found.torch > 0 and found.new_shape
    assert found.over_torch == pytest.approx(found.ours / found.torch)
    assert (found.ours_grad is not None) == bool(op.backwards) == (found.grad_over_torch is not None)


def test_integers_want_no_gradient(runtime: Runtime) -> None:
    op = get("softmax")
    case = next(case for case in op.cases if "bool" in str(case))
    found = host.host_cost(runtime, op, case, torch.float32, torch.device("cpu"))
    assert found.ours_grad and found.torch_grad
