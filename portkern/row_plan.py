"""Plans of row reductions: how each variant of ``portkern.row_reduction`` becomes launches.

The kernels of an op follow one calling convention. Positional: the inputs, the output, the scratch
where there is one, the sizes M0, M1, M2, N, then four strides (s0, s1, s2, sn) for each input and
for the output. Constexprs: the op's own, WIDE, BLOCK_M, BLOCK_N, and by variant PERSISTENT, STAGES,
REREAD, SPLITS, BLOCK_SPLITS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from portkern.config import Blocks, Config
from portkern.layout import Rows, needs_wide_offsets
from portkern.plan import Argument, Buffer, In, Launch, Out, Plan, Scratch
from portkern.row_reduction import cdiv, next_power_of_2


@dataclass(frozen=True)
class RowKernels:
    """The kernels of one op, by role.

    whole        packed_rows, resident_row and cached_row; constexprs PERSISTENT, STAGES, REREAD
    looped       looped_row; constexpr STAGES
    partial      split_row, first launch: no output, no output strides; SPLITS, STAGES
    combine      split_row, second launch; SPLITS, BLOCK_SPLITS, STAGES
    coresident   coresident_row; SPLITS, POLL_CACHE; scratch of zeroed int64 words, (rows, SPLITS)
    partials     numbers that each row of a part hands from ``partial`` to ``combine``
    """

    whole: Any
    looped: Any
    partial: Any
    combine: Any
    coresident: Any
    partials: int


@dataclass(frozen=True)
class _Walk:
    """What every variant needs to know of one plan."""

    kernels: RowKernels
    config: Config
    blocks: Blocks
    rows: Rows
    strides: tuple[int, ...]
    constexprs: Mapping[str, Any]

    @property
    def tiles(self) -> int:
        """BLOCK_M rows each; no tile crosses the innermost row dim."""
        m0, m1, m2 = self.rows.sizes
        return m0 * m1 * cdiv(m2, self.blocks["BLOCK_M"])

    def launch(
        self, kernel: Any, grid: int, operands: tuple[Argument, ...], coresident: bool = False, **more: Any
    ) -> Launch:
        """A launch of ``kernel``, with those of the constexprs that it takes."""
        given = {**self.constexprs, **more, "STAGES": self.config.num_stages}
        names = inspect.signature(kernel.fn).parameters
        # The first launch of a split has no output, so no strides of one.
        strides = self.strides if any(isinstance(each, Out) for each in operands) else self.strides[:-4]
        return Launch(
            kernel=kernel,
            grid=(grid,),
            args=(*operands, *self.rows.sizes, self.rows.n, *strides),
            constexprs={name: value for name, value in given.items() if name in names},
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
            coresident=coresident,
        )


def row_plan(
    kernels: RowKernels,
    config: Config,
    blocks: Blocks,
    rows: Rows,
    output: Buffer,
    *,
    compute: torch.dtype,
    **constexprs: Any,
) -> Plan:
    """The plan of a row reduction with one output.

    ``rows`` views the output first, then each input in the order of the op's arguments.
    ``compute`` is the dtype of what parts of a row hand over; ``constexprs`` are the op's own.
    """
    if rows.m * rows.n == 0:
        return Plan((output,))
    y_strides, *x_strides = rows.strides
    walk = _Walk(
        kernels,
        config,
        blocks,
        rows,
        strides=tuple(stride for strides in (*x_strides, y_strides) for stride in strides),
        constexprs={
            **constexprs,
            "WIDE": needs_wide_offsets(rows, blocks["BLOCK_M"]),
            "BLOCK_M": blocks["BLOCK_M"],
            "BLOCK_N": blocks["BLOCK_N"],
            "SPLITS": blocks["SPLITS"],
            "POLL_CACHE": config.options.get("poll_cache", ""),
            "BLOCK_SPLITS": next_power_of_2(blocks["SPLITS"]),
        },
    )
    build = _BUILDERS[config.variant]
    launches: list[Launch] = []
    for index, (y_offset, *x_offsets) in enumerate(rows.offsets):
        inputs = tuple(In(position, offset) for position, offset in enumerate(x_offsets))
        launches += build(walk, index, inputs, Out(0, y_offset))
    return Plan((output,), _scratch(walk, compute), tuple(launches))


_Builder = Callable[[_Walk, int, tuple[In, ...], Out], list[Launch]]


def _whole(walk: _Walk, index: int, inputs: tuple[In, ...], output: Out) -> list[Launch]:
    programs = walk.blocks["PROGRAMS"]
    persistent = 0 < programs < walk.tiles
    grid = programs if persistent else walk.tiles
    reread = walk.config.variant == "cached_row"
    return [walk.launch(walk.kernels.whole, grid, (*inputs, output), PERSISTENT=persistent, REREAD=reread)]


def _looped(walk: _Walk, index: int, inputs: tuple[In, ...], output: Out) -> list[Launch]:
    return [walk.launch(walk.kernels.looped, walk.tiles, (*inputs, output))]


def _split(walk: _Walk, index: int, inputs: tuple[In, ...], output: Out) -> list[Launch]:
    grid = walk.tiles * walk.blocks["SPLITS"]
    return [
        walk.launch(walk.kernels.partial, grid, (*inputs, Scratch(0))),
        walk.launch(walk.kernels.combine, grid, (*inputs, output, Scratch(0))),
    ]


def _coresident(walk: _Walk, index: int, inputs: tuple[In, ...], output: Out) -> list[Launch]:
    splits, programs = walk.blocks["SPLITS"], walk.blocks["PROGRAMS"]
    grid = min(walk.rows.m, programs // splits) * splits
    words = Scratch(0, index * walk.rows.m * splits)  # a launch finds its own words zeroed
    return [walk.launch(walk.kernels.coresident, grid, (*inputs, output, words), coresident=True)]


_BUILDERS: Mapping[str, _Builder] = {
    "packed_rows": _whole,
    "resident_row": _whole,
    "cached_row": _whole,
    "looped_row": _looped,
    "split_row": _split,
    "coresident_row": _coresident,
}


def _scratch(walk: _Walk, compute: torch.dtype) -> tuple[Buffer, ...]:
    splits = walk.blocks["SPLITS"]
    if walk.config.variant == "split_row":
        rows = walk.tiles * walk.blocks["BLOCK_M"]
        return (Buffer.flat(rows * splits * walk.kernels.partials, compute),)
    if walk.config.variant == "coresident_row":
        words = len(walk.rows.offsets) * walk.rows.m * splits
        return (Buffer.flat(words, torch.int64, init=0),)
    return ()
