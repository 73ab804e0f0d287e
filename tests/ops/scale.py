"""An op defined outside the package: y = x * factor. Its kind is one that no plugin knows.

x, y: any shape, contiguous; factor is a number given per call, so it is part of no key.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from portkern.config import Blocks, Config
from portkern.errors import BadArgument
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan, Value
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.target import Device


@triton.jit(do_not_specialize=["factor"])
def _scale_kernel(x_ptr, y_ptr, factor: tl.float32, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N)
    tl.store(y_ptr + offs_n, (x.to(tl.float32) * factor).to(y_ptr.dtype.element_ty), mask=offs_n < N)


def scale(input: torch.Tensor, factor: float) -> tuple[Any, ...]:
    """``input * factor``."""
    return input.contiguous(), float(factor)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _outputs(input: Meta, factor: float | None) -> tuple[Buffer, ...]:
    return (Buffer(input.shape, input.strides, input.dtype),)


def _problem(input: Meta, factor: float | None) -> Problem:
    if input.strides != contiguous(input.shape):
        raise BadArgument(f"input has strides {input.strides}; the kernel reads contiguous memory: call .contiguous()")
    dtype = str(input.dtype).removeprefix("torch.")
    return Problem("example::scale", FrozenMap(N=input.numel), FrozenMap(x=dtype))


def _work(problem: Problem) -> Work:
    n = problem.sizes["N"]
    return Work(
        kind="example_pointwise",
        sizes=problem.sizes,
        dtypes=problem.dtypes,
        layout=FrozenMap(x="n16"),
        live=FrozenMap(blocks=1.0),
        reads=4 * n,
        writes=4 * n,
        variants=("blocks",),
    )


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    return Blocks(BLOCK_N=config.params["BLOCK_N"])


def _plan(config: Config, blocks: Blocks, device: Device, input: Meta, factor: float | None) -> Plan:
    n, block = input.numel, blocks["BLOCK_N"]
    args = (In(0), Out(0), Value(1), n)
    launch = Launch(_scale_kernel, (-(-n // block),), args, {"BLOCK_N": block}, config.num_warps)
    return Plan(_outputs(input, factor), launches=(launch,) if n else ())


def _reference(input: torch.Tensor, factor: float) -> torch.Tensor:
    return input * factor


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: Any = None, style: str = "normal"
) -> tuple[Any, ...]:
    return torch.randn(sizes, generator=generator, device=device).to(dtype), 3.0


def _candidates(device: Device, work: Work) -> tuple[Config, ...]:
    return tuple(Config("blocks", FrozenMap(BLOCK_N=block), num_warps=4) for block in (1024, 2048, 256))


OPS = (
    Op(
        "example::scale",
        "(Tensor input, float factor) -> Tensor",
        signature=scale,
        problem=_problem,
        work=_work,
        outputs=_outputs,
        fit=_fit,
        plan=_plan,
        reference=_reference,
        inputs=_inputs,
        cases=tuple(Case(sizes) for sizes in ((), (1,), (0,), (7, 33), (5000,))),
        tune_cases=(Case((4096, 1024)),),
        candidates=_candidates,
        values=(1,),
        # d(x * factor)/dx applied to a gradient is the same op.
        backward=Backward(
            "example::scale",
            save=lambda args, outputs: (args[1],),
            arguments=lambda saved, grads: (grads[0].contiguous(), saved[0]),
            inputs=(0,),
        ),
    ),
)
