"""Ops for the tests of ``verify``: y = x + 1, each wrong in one way. FAULT names the way."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from portkern.config import Blocks, Config
from portkern.errors import BadArgument
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.target import Device

RIGHT, OFF, STRAY, ALTERS, ABORTS, HANGS, RAISES, GRADIENT = range(8)
NAMES = ("right", "off", "stray", "alters", "aborts", "hangs", "raises", "gradient")


@triton.jit
def _plus_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr, FAULT: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    y = tl.load(x_ptr + offs_n, mask=mask).to(tl.float32) + 1
    if FAULT == 1:
        y += tl.where(offs_n == N - 1, 1.0, 0.0)
    if FAULT == 3:
        tl.store(x_ptr + offs_n, y.to(x_ptr.dtype.element_ty), mask=mask)
    if FAULT == 2:
        mask = offs_n < N + 1
    tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


def _problem(name: str, x: Meta) -> Problem:
    if x.numel and x.strides != torch.empty(x.shape, device="meta").stride():
        raise BadArgument(f"{name}(): strides {x.strides}; make the input contiguous")
    return Problem(name, FrozenMap(N=x.numel), FrozenMap(x=str(x.dtype).removeprefix("torch.")))


def _work(waiting: tuple[str, ...], problem: Problem) -> Work:
    size = 4 * problem.sizes["N"]
    names = ("blocks", "large_blocks")
    return Work(
        "test_plus", problem.sizes, problem.dtypes, FrozenMap(x="n16"), FrozenMap(dict.fromkeys(names, 1.0)),
        reads=size, writes=size, variants=names, waiting=waiting,
    )  # fmt: skip


def _candidates(fault: int, device: Device, work: Work) -> tuple[Config, ...]:
    blocks = Config("blocks", FrozenMap(BLOCK_N=64, FAULT=fault))
    return blocks, Config("large_blocks", FrozenMap(BLOCK_N=256, FAULT=RIGHT))


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    return Blocks(config.params)


def _outputs(x: Meta) -> tuple[Buffer, ...]:
    return (Buffer(x.shape, x.strides, x.dtype),)


def _plan(config: Config, blocks: Blocks, device: Device, x: Meta) -> Plan:
    if blocks["FAULT"] == ABORTS:
        os.abort()
    if blocks["FAULT"] == HANGS:
        time.sleep(600)
    if blocks["FAULT"] == RAISES:
        raise RuntimeError("no such\nkernel")
    grid = (-(-x.numel // blocks["BLOCK_N"]),)
    launch = Launch(_plus_kernel, grid, (In(0), Out(0), x.numel), dict(blocks), 4)
    return Plan(_outputs(x), launches=(launch,) if x.numel else ())


def _reference(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any, generator: Any = None, style: str = "normal"
) -> tuple[Any, ...]:
    return (torch.randn(sizes, generator=generator, device=device).to(dtype),)


def _apart(values: torch.Tensor, times: int = 1) -> tuple[Any, ...]:
    return (values.repeat_interleave(2, -1)[..., ::2],)


def _op(name: str, fault: int, waiting: tuple[str, ...] = (), **changes: Any) -> Op:
    return Op(
        f"faulty::{name}",
        "(Tensor x) -> Tensor",
        problem=partial(_problem, f"faulty::{name}"),
        work=partial(_work, waiting),
        outputs=_outputs,
        fit=_fit,
        plan=_plan,
        reference=_reference,
        inputs=_inputs,
        cases=(Case((7,)), Case((3, 50)), Case((0,))),
        dtypes=("float32",),
        candidates=partial(_candidates, fault),
        **changes,
    )


OPS = (
    *(_op(name, fault) for fault, name in enumerate(NAMES) if fault != GRADIENT),
    _op("waits", RIGHT, waiting=("large_blocks",)),
    # Its derivative should be 1: that of ``right`` gives the gradient plus 1.
    _op(
        "gradient",
        RIGHT,
        backward=Backward("faulty::right", lambda args, outputs: (), lambda saved, grads: grads, (0,)),
    ),
    # Kernels are right, and what the signature makes of the arguments is one too many, or not to the kernels' liking.
    _op("many", RIGHT, signature=lambda x: (x, 3)),
    _op("particular", RIGHT, signature=_apart),
)
