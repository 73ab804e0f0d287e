"""Calls on a real GPU amid what a process does: captured graphs, threads, other devices, forks, hooks, pins."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.errors import DeviceMismatch, Infeasible
from portkern.registry import all_ops
from portkern.runtime import Runtime, current, using
from tests.test_gpu_hot import _canonical

pytestmark = pytest.mark.gpu


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with using(current().anew()) as made:
        yield made


def test_pins_and_records_are_seen(runtime: Runtime) -> None:
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    y = portkern.softmax(x, -1)
    assert portkern.explain("softmax", x).layer != "pinned"
    op = all_ops()["softmax"]
    situation = dispatch.situate(runtime, op, dispatch.input_key(op, _canonical("softmax", x)), runtime.device(0))
    config = dispatch.resolve(runtime, situation).config
    with portkern.pin("softmax", config.replace(num_warps=64)), pytest.raises(Infeasible, match="pinned"):
        portkern.softmax(x, -1)
    torch.testing.assert_close(portkern.softmax(x, -1), y)


def test_first_call_while_capturing(runtime: Runtime) -> None:
    """What was never called before works inside a capture, or says so and leaves the capture usable."""
    x = torch.randn(37, 129, device="cuda")
    static, graph = torch.randn(37, 129, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = portkern.softmax(static, -1)
    for _ in range(2):
        static.copy_(x)
        graph.replay()
        torch.testing.assert_close(y, torch.softmax(x, -1))


def test_capture_of_forward_and_backward(runtime: Runtime) -> None:
    static = torch.randn(64, 300, device="cuda", requires_grad=True)
    grad = torch.randn(64, 300, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(portkern.softmax(static, -1), static, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = torch.autograd.grad(portkern.softmax(static, -1), static, grad)
    with torch.no_grad():
        static.copy_(torch.randn(64, 300, device="cuda"))
    graph.replay()
    leaf = static.detach().clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(torch.softmax(leaf, -1), leaf, grad)[0])


def test_16_threads_make_the_first_call_with_one_compile(runtime: Runtime) -> None:
    from triton import knobs

    compiles: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **rest: compiles.append(str(fn))
    x = torch.randn(16, 41, 80, device="cuda", dtype=torch.float16)  # each of them begins at a multiple of 16 bytes
    found: list[Any] = [None] * 16
    start = threading.Barrier(16)

    def work(index: int) -> None:
        start.wait()
        found[index] = portkern.log_softmax(x[index], 0)

    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    for index in range(16):
        torch.testing.assert_close(found[index], torch.log_softmax(x[index], 0))
    assert len(compiles) <= 1


def test_profilers_hooks_are_called(runtime: Runtime) -> None:
    from triton import knobs

    names: list[str] = []
    x = torch.randn(4, 64, device="cuda")
    for _ in range(2):
        portkern.softmax(x, -1)

    def enter(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        portkern.softmax(x, -1)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    portkern.softmax(x, -1)
    assert len(names) == 1 and "softmax" in names[0]


def test_plans_are_bounded(runtime: Runtime) -> None:
    from portkern.runtime import Recent

    runtime.calls = Recent(16)
    for n in range(1, 100):
        for _ in range(2):
            portkern.softmax(torch.randn(3, n, device="cuda"), -1)
    assert 16 <= len(runtime.calls) <= 32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device(runtime: Runtime) -> None:
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        x = torch.randn(33, 500, device="cuda:1", requires_grad=True)
        a = torch.randn(64, 64, device="cuda:1", dtype=torch.bfloat16)
        y = portkern.softmax(x, -1)
        y.backward(torch.ones_like(y))
        assert y.device == x.grad.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        torch.testing.assert_close(y, torch.softmax(x, -1))
        torch.testing.assert_close(portkern.matmul(a, a), a @ a)
        stream = torch.cuda.Stream("cuda:1")
        with torch.cuda.stream(stream):
            z = portkern.softmax(x.detach(), -1)
        stream.synchronize()
        torch.testing.assert_close(z, torch.softmax(x, -1))
    with pytest.raises(DeviceMismatch, match="cuda:0"):
        portkern.matmul(a, a.to("cuda:0"))


def test_fork_before_the_gpu_is_used() -> None:
    """In a process that imported portkern and no GPU yet."""
    import subprocess
    import sys

    code = (
        "import os, torch, portkern\nportkern.softmax(torch.randn(3, 4))\npid = os.fork()\n"
        "x = torch.randn(5, 70, device='cuda')\nok = torch.allclose(portkern.softmax(x), torch.softmax(x, -1))\n"
        "if pid == 0: os._exit(0 if ok else 1)\nprint(ok, os.waitpid(pid, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.split() == ["True", "0"], done.stderr
