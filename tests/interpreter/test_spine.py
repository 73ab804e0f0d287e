"""What the op tests rest on: ``run_config`` fails where a kernel strays."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.record import FrozenMap
from portkern.registry import load_file
from portkern.runtime import Runtime, current, using
from tests.spine import generator, run_config


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """The other tests run every op that there is: these shall not be among them."""
    with using(Runtime()):
        yield


def run(name: str, fault: int) -> torch.Tensor:
    (op,) = (op for op in load_file("tests/ops/faulty.py") if op.name == f"faulty::{name}")
    device = dispatch.reference_device(current(), "sm90")
    args = (torch.randn(3, 50, generator=generator(1)),)
    config = Config("blocks", FrozenMap(BLOCK_N=64, FAULT=fault))
    (output,) = run_config(current(), op, args, device, config)
    assert torch.equal(output, args[0] + 1)
    return output


def test_a_right_kernel_passes() -> None:
    assert run("right", 0).shape == (3, 50)


def test_a_stray_write_fails() -> None:
    with pytest.raises(AssertionError, match="wrote outside its outputs"):
        run("stray", 2)


def test_an_altered_input_fails() -> None:
    with pytest.raises(AssertionError, match="altered its inputs"):
        run("alters", 3)


def test_threads_take_turns() -> None:
    """Triton's interpreter keeps the launch that it runs in globals: two at once gave numbers of one another."""
    x = torch.randn(8, 64, generator=generator(1))
    wanted, found = x.sum(1), []

    def work() -> None:
        found.extend(portkern.sum(x, 1) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for sums in found:
        torch.testing.assert_close(sums, wanted)
