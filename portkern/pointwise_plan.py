"""The kind ``pointwise``: problems, work and plans of elementwise functions, whatever the function.

One variant, ``blocks``: a program computes a tile of BLOCK elements. Free parameters: BLOCK, and PROGRAMS_PER_UNIT (0:
one program a tile; above, that many programs a unit walk the tiles). How a tile divides into rows and columns follows
from the problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from portkern.broadcast import Grid, grid_layout
from portkern.config import Blocks, Config
from portkern.errors import Infeasible
from portkern.integers import next_power_of_2
from portkern.layout import NARROW, VECTOR_BYTES
from portkern.plan import Argument, Buffer, Launch, Meta, Plan, Value
from portkern.pointwise_call import MAX_VALUES, Expression, call_of, known_call_of
from portkern.pointwise_kernel import _integer_kernel, _pointwise_kernel
from portkern.problem import Problem, Work
from portkern.target import Device

KIND = "pointwise"
VARIANTS = ("blocks",)
MAX_GRID = 2**31 - 1  # programs of one launch


def pointwise_outputs(expression: Expression, *args: Any) -> tuple[Buffer, ...]:
    """The results of a call; sizes may be symbolic."""
    return call_of(expression, *args).buffers


def pointwise_problem(expression: Expression, *args: Any) -> Problem:
    """The Problem of a call: sizes of its grid, and the dtype and layout class of each operand."""
    call = known_call_of(expression, *args)
    grid = call.grid
    names = [f"y{i}" for i in range(len(call.outputs))] + [f"x{i}" for i in range(len(call.inputs))]
    operands = (*call.outputs, *call.inputs)
    dtypes = {name: str(each.meta.dtype).removeprefix("torch.") for name, each in zip(names, operands, strict=True)}
    layout = {name: grid_layout(each.meta, grid, i) for i, (name, each) in enumerate(zip(names, operands, strict=True))}
    return Problem(
        op=expression.name,
        sizes={"N": grid.n, "M": grid.m, "OUTER": math.prod(grid.outer)},  # type: ignore[arg-type]
        dtypes=dtypes,  # type: ignore[arg-type]
        flags=dict(zip(expression.switches, call.switches, strict=True)),  # type: ignore[arg-type]
        layout=layout,  # type: ignore[arg-type]
    )


def pointwise_work(live: float, problem: Problem) -> Work:
    """The Work of a pointwise problem. ``live``: 32-bit registers per element that the function itself keeps."""
    numel = math.prod(problem.sizes.values())
    dtypes = {name: getattr(torch, dtype) for name, dtype in problem.dtypes.items()}
    double = torch.float64 in dtypes.values()
    widths = {name: dtype.itemsize for name, dtype in dtypes.items()}
    # What is repeated along columns is read once a row.
    moved = {name: numel // max(1, problem.sizes["N"]) if problem.layout[name] == "r" else numel for name in widths}
    compute = 8 if double or torch.int64 in dtypes.values() else 4
    return Work(
        kind=KIND,
        sizes=problem.sizes,
        dtypes=problem.dtypes,
        layout=problem.layout,
        live={"blocks": (live + len(widths)) * compute / 4},  # type: ignore[arg-type]
        reads=sum(moved[name] * width for name, width in widths.items() if name.startswith("x")),
        writes=sum(moved[name] * width for name, width in widths.items() if name.startswith("y")),
        variants=VARIANTS,
        element_bytes=max(widths.values(), default=4),
        compute_bytes=compute,
    )


def fit_pointwise(config: Config, work: Work, device: Device) -> Blocks:
    """BLOCK_M, BLOCK_N and PROGRAMS (0: one a tile) of ``config``. Raises Infeasible."""
    block = config.params.get("BLOCK")
    if block is None:
        raise Infeasible(f"variant {config.variant!r} needs the parameter BLOCK")
    m, n = work.sizes["M"], work.sizes["N"]
    # Where an operand lies in rows, both sides of a tile have to be long.
    turned = any(layout.startswith("m") for layout in work.layout.values())
    most = 1 << (block.bit_length() // 2) if turned else block
    block_n = _columns(n, most)
    block_m = min(block // block_n, next_power_of_2(m))
    if turned:
        block_n = min(block // block_m, next_power_of_2(n))
    tiles = work.sizes["OUTER"] * -(-m // block_m) * -(-n // block_n)
    if tiles > MAX_GRID:
        raise Infeasible(
            f"{tiles:,} tiles of {block_m} x {block_n} pass the {MAX_GRID:,} programs of a launch: take a larger BLOCK"
        )
    programs = device.units * config.params.get("PROGRAMS_PER_UNIT", 0)
    return Blocks(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=programs if programs < tiles else 0)


def _columns(n: int, most: int) -> int:
    """Columns of a tile, at most ``most``: all of a short row, else few enough that little of the last one is idle."""
    whole = min(next_power_of_2(n), most)
    for block in (whole >> power for power in range(4)):
        if block >= 128 and -(-n // block) * block * 8 <= n * 9:
            return block
    return whole


_TRITON = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64")


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a torch dtype; one bit for a bool."""
    name = str(dtype).removeprefix("torch.")
    return getattr(tl, name) if name in _TRITON else tl.int1


def pointwise_plan(expression: Expression, config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    """The plan of a call: one launch, none where there is no element."""
    call = known_call_of(expression, *args)
    grid = call.grid
    if grid.numel == 0:
        return Plan(call.buffers)
    block_m, block_n = blocks["BLOCK_M"], blocks["BLOCK_N"]
    tiles = math.prod(grid.outer) * -(-grid.m // block_m) * -(-grid.n // block_n)
    count = len(call.outputs)
    floating = call.dtype.is_floating_point
    compute = torch.float32 if floating and call.dtype != torch.float64 else call.dtype
    compute = torch.int32 if call.dtype == torch.bool else compute  # True + True is True
    slots: list[Argument] = [Value(position) for position in call.numbers]
    slots += [0.0 if floating else 0] * (MAX_VALUES - len(slots))
    even = grid.m % block_m == 0 and grid.n % block_n == 0
    vector = max(1, VECTOR_BYTES // min(each.meta.itemsize for each in (*call.outputs, *call.inputs)))
    units = tuple(_units(each.meta, grid, i) for i, each in enumerate((*call.outputs, *call.inputs)))
    launch = Launch(
        kernel=_pointwise_kernel if floating else _integer_kernel,
        grid=(blocks["PROGRAMS"] or tiles,),
        args=(
            tuple(each.argument for each in call.inputs), tuple(each.argument for each in call.outputs), *slots,
            grid.outer, grid.m, grid.n, tiles, grid.strides[count:], grid.strides[:count],
        ),
        constexprs={
            "FUNCTION": expression.function,
            "ORDER": _flat(call.order),
            "SWITCHES": len(call.switches),
            **dict(zip(("S0", "S1"), (*call.switches, 0, 0), strict=False)),
            "SEVERAL": expression.gradients > 1,
            "WANTED": call.wanted if count == len(call.wanted) else tuple(range(count)),
            "AS": triton_dtype(call.dtype),
            "COMPUTE": triton_dtype(compute),
            "UNIT_N": 1 if even or grid.n % vector else vector,
            "UNITS": _flat(units[count:]),
            "OUT_UNITS": _flat(units[:count]),
            "VARIES": _flat([(row != 0, column != 0) for row, column, *_ in grid.strides[count:]]),
            "EVEN": even,
            "TAIL": not even and grid.m == 1 and not grid.outer and grid.n % vector != 0,
            "WIDE": _wide(grid, block_m, block_n),
            "WALKS": blocks["PROGRAMS"] > 0,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return Plan(call.buffers, launches=(launch,))


def _flat(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The groups one after another: Triton 3.6 takes no tuple out of a constexpr tuple."""
    return tuple(each for group in groups for each in group)


def _units(meta: Meta, grid: Grid, operand: int) -> tuple[int, int, int]:
    """What the strides of one operand are known to be multiples of: along rows, columns, and the outer dims."""
    vector = max(1, VECTOR_BYTES // meta.itemsize)
    row, column, *outer = grid.strides[operand]
    return (
        vector if row % vector == 0 else 1,
        vector if column % vector == 0 else 1,
        vector if all(each % vector == 0 for each in outer) else 1,
    )


def _wide(grid: Grid, block_m: int, block_n: int) -> bool:
    """Whether an offset inside a tile passes 31 bits, for any operand."""
    return any(block_m * abs(row) + block_n * abs(column) > NARROW for row, column, *_ in grid.strides)
