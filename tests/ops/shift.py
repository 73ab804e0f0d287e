"""Ops for the tuner's tests: y = x + 1 in blocks, each with a candidate that goes wrong in one way.

``FAULT`` is a tunable parameter: 0 works; the others are named below. The default is the first
candidate, of 64 elements. ``test::bump`` adds 1 to its argument in place.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from portkern.config import Blocks, Config
from portkern.errors import Infeasible
from portkern.op import Case, Op
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.target import Device

WORKS, WRONG, ABORTS, HANGS, MISFIT, SCRIBBLES, SPILLS_OUT = range(7)
FORMS = {
    "shift": (WORKS, WORKS, WORKS),
    "shift_wrong": (WORKS, WRONG),
    "shift_aborts": (WORKS, ABORTS, WORKS),
    "shift_hangs": (WORKS, HANGS),
    "shift_misfit": (MISFIT, MISFIT),
    "shift_scribbles": (WORKS, SCRIBBLES, SPILLS_OUT),
}


@triton.jit
def _shift_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr, FAULT: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    y = tl.load(x_ptr + offs_n, mask=mask).to(tl.float32) + 1
    if FAULT == 1:
        y = y + tl.where(offs_n == N - 1, 1.0, 0.0)
    if FAULT == 5:
        tl.store(x_ptr + offs_n, y.to(x_ptr.dtype.element_ty), mask=mask)
    if FAULT == 6:
        mask = offs_n < N + 1
    tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


def _problem(name: str, x: Meta) -> Problem:
    return Problem(name, FrozenMap(N=x.numel), FrozenMap(x=str(x.dtype).removeprefix("torch.")))


def _work(problem: Problem) -> Work:
    size = 4 * problem.sizes["N"]
    return Work(
        kind="test_pointwise",
        sizes=problem.sizes,
        dtypes=problem.dtypes,
        layout=FrozenMap(x="n16"),
        live=FrozenMap(blocks=1.0),
        reads=size,
        writes=size,
        variants=("blocks",),
    )


def _candidates(faults: tuple[int, ...], device: Device, work: Work) -> tuple[Config, ...]:
    return tuple(Config("blocks", FrozenMap(BLOCK_N=64 << place, FAULT=fault)) for place, fault in enumerate(faults))


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    if config.params["FAULT"] == MISFIT:
        raise Infeasible(f"BLOCK_N={config.params['BLOCK_N']} needs a device of another kind")
    return Blocks(BLOCK_N=config.params["BLOCK_N"], FAULT=config.params["FAULT"])


def _outputs(x: Meta) -> tuple[Buffer, ...]:
    return (Buffer(x.shape, x.strides, x.dtype),)


def _plan(config: Config, blocks: Blocks, device: Device, x: Meta) -> Plan:
    if blocks["FAULT"] == ABORTS:
        print("LLVM ERROR: cannot select", flush=True)
        os.abort()
    if blocks["FAULT"] == HANGS:
        time.sleep(600)
    args = (In(0), Out(0), x.numel)
    grid = (-(-x.numel // blocks["BLOCK_N"]),)
    return Plan(_outputs(x), launches=(Launch(_shift_kernel, grid, args, dict(blocks), 4),))


def _bump_plan(config: Config, blocks: Blocks, device: Device, x: Meta) -> Plan:
    grid = (-(-x.numel // blocks["BLOCK_N"]),)
    return Plan((), launches=(Launch(_shift_kernel, grid, (In(0), In(0), x.numel), dict(blocks), 4),))


def _reference(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _bump_reference(x: torch.Tensor) -> tuple[()]:
    x += 1
    return ()


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any, generator: Any, style: str = "normal"
) -> tuple[Any, ...]:
    return (torch.randn(sizes, generator=generator, device=device).to(dtype),)


def _op(name: str, faults: tuple[int, ...], **changes: Any) -> Op:
    values: dict[str, Any] = {
        "schema": "(Tensor x) -> Tensor",
        "problem": partial(_problem, name),
        "work": _work,
        "outputs": _outputs,
        "fit": _fit,
        "plan": _plan,
        "reference": _reference,
        "inputs": _inputs,
        "cases": (Case((7,)),),
        "tune_cases": (Case((100,)), Case((300,)), Case((1000,))),
        "dtypes": ("float32",),
        "candidates": partial(_candidates, faults),
    }
    return Op(name, **{**values, **changes})


OPS = (
    *(_op(f"test::{name}", faults) for name, faults in FORMS.items()),
    _op("test::shift_many", (WORKS,) * 8, dtypes=("bfloat16", "float16")),
    _op(
        "test::bump",
        (WORKS, WORKS),
        schema="(Tensor(a!) x) -> ()",
        outputs=lambda x: (),
        plan=_bump_plan,
        reference=_bump_reference,
    ),
)
