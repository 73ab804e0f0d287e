"""``bench --host``: what a call costs the host, against torch, step by step, in one interleaved run.

Calls follow each other without waiting for the GPU, on an input so small that it keeps up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portkern import dispatch, hot
from portkern.executors import replay
from portkern.op import Case, Op, visible
from portkern.record import Record
from portkern.runtime import Runtime
from portkern.toolchain import triton_version

CALLS, ROUNDS = 500, 9
NEW_SHAPES = 15


@dataclass(frozen=True)
class HostCost(Record):
    """Microseconds of the host for one call of ``op``; None where there is no such call.

    ``ours`` and ``torch`` are back-to-back calls on plain tensors, ``ours_grad`` and ``torch_grad`` the forward where a
    gradient is wanted. Of ``ours``, ``watched`` asks whether someone listens to torch's dispatcher, ``allocate`` makes
    the outputs, ``launch`` is the rest of the prepared call, and ``key`` what is left: the key and its look-up.
    ``new_shape`` is the first call of a shape that needs no new compile. ``form`` says how kernels are launched.
    """

    op: str
    problem: str
    form: str
    ours: float
    torch: float
    watched: float
    allocate: float
    launch: float
    key: float
    ours_grad: float | None = None
    torch_grad: float | None = None
    new_shape: float | None = None

    @property
    def over_torch(self) -> float:
        """Our time over torch's: below 1 is better."""
        return self.ours / self.torch

    @property
    def grad_over_torch(self) -> float | None:
        """The same where a gradient is wanted."""
        return self.ours_grad / self.torch_grad if self.ours_grad and self.torch_grad else None


def host_cost(runtime: Runtime, op: Op, case: Case, dtype: torch.dtype, where: torch.device) -> HostCost:
    """Measure calls of ``op`` on the inputs of ``case``, which should be tiny."""
    args = op.inputs(case.sizes, dtype, device=where, **case.options)
    function = hot.function(op, _as_given, runtime.functions[op.name], visible)
    eager = op.eager or op.reference
    buffers = op.outputs(*dispatch.input_key(op, args))
    shown = buffers[: -op.saved or None]
    for _ in range(2):
        function(*args)
    planned = dispatch.planned(op, args)
    places = {i: i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    outputs = dispatch.run(op, args)
    hidden = op.saved if hot.are_bare(op, outputs, visible(op, outputs, args, {})) else 0
    prepared = None if planned is None else planned.replay(args, places, hidden)
    driver = replay.Driver.of_torch()
    calls: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "ours": lambda: function(*args),
        "torch": lambda: eager(*args),
        "watched": hot.watched,
        "allocate": lambda: [driver.empty(each.shape, each.strides, each.dtype) for each in shown],
    }
    if prepared is not None:
        calls["prepared"] = lambda: prepared(args)
    if op.backwards:
        wanted = [i in op.differentiated for i in range(len(args))]
        leaves = [
            arg.clone().requires_grad_() if want and isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
            for arg, want in zip(args, wanted, strict=True)
        ]
        calls |= {"ours_grad": lambda: function(*leaves), "torch_grad": lambda: eager(*leaves)}
    times = _interleaved(calls)
    bare = times.pop("nothing")
    net = {name: max(0.0, value - bare) for name, value in times.items()}
    whole = net.pop("prepared", net["ours"])
    return HostCost(
        op=op.name,
        problem=str(op.problem(*dispatch.input_key(op, args))),
        form=replay.form(triton_version()),
        launch=whole - net["allocate"],
        key=net["ours"] - whole - net["watched"],
        new_shape=_new_shape(op, case, dtype, where, function),
        **net,
    )


def _as_given(*args: Any) -> tuple[Any, ...]:
    """Canonical arguments in the place of the public ones, whose signature a prepared call does not ask either."""
    return args


def _interleaved(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The median over rounds of the mean of back-to-back calls, in microseconds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if turn:  # the first one warms up
                found[name].append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(each) for name, each in found.items()}


def _new_shape(
    op: Op, case: Case, dtype: torch.dtype, where: torch.device, function: Callable[..., Any]
) -> float | None:
    """The first call of shapes that differ in their first size alone, which a kernel takes as an argument."""
    times = []
    for size in range(3, 3 + 2 * (NEW_SHAPES + 2), 2):  # odd: neither 1 nor a multiple of 16 is the same code
        args: Sequence[Any] = op.inputs((size, *case.sizes[1:]), dtype, device=where, **case.options)
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(*args)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[2:])  # the first ones may compile
