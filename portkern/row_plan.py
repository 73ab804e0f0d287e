"""Plans of row kernels: how each variant of ``portkern.row_reduction`` becomes launches.

A kernel is given what its parameters name. Positional: ``<name>_ptr`` and ``stride_<name>0`` to ``2`` and ``n`` of
each operand, the sizes ``M0``, ``M1``, ``M2``, ``N``, the op's extras, and scratch: ``partial_ptr``, ``word_ptr``,
``sums0_ptr`` and ``sums1_ptr``. What a call leaves out is None, and its strides 0. Constexprs: the op's own, WIDE,
BLOCK_M, BLOCK_N, EARLY, PARTS, and by variant PERSISTENT, STAGES, REREAD, LAG, SPLITS, BLOCK_SPLITS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from portkern.config import Blocks, Config
from portkern.integers import cdiv, next_power_of_2
from portkern.layout import Rows, needs_wide_offsets
from portkern.plan import Argument, Buffer, In, Launch, Out, Plan, Scratch
from portkern.record import FrozenMap

REREAD_PARTS = 8  # of a row that is read again: with shared vectors, whole ones take more registers than two rows may


@dataclass(frozen=True)
class RowKernels:
    """The kernels of one op, by role: those of the variants that its Work names.

    whole        packed_rows, resident_row and cached_row; constexprs PERSISTENT, STAGES, REREAD
    looped       looped_row; constexpr STAGES. None: as split_row, with one part
    partial      split_row, first launch: ``partial_ptr``; SPLITS, STAGES. None: parts need nothing of each other
    combine      split_row, second launch; SPLITS, BLOCK_SPLITS, STAGES. Its grid is that of ``partial``; where the
                 op may sum over rows, groups of programs, each of which takes BLOCK_N columns of its group's tiles
    coresident   coresident_row; SPLITS, POLL_CACHE; ``word_ptr``: zeroed int64 words, (rows, SPLITS). LAG: sum the next
                 row before waiting for this one; REREAD: load this one again instead of keeping it meanwhile
    partials     numbers that each row of a part hands from ``partial`` to ``combine``
    sums         adds up what the programs of the launches before summed over their rows; see ``Sums``
    """

    whole: Any = None
    looped: Any = None
    partial: Any = None
    combine: Any = None
    coresident: Any = None
    partials: int = 0
    sums: Any = None


@dataclass(frozen=True)
class Sums:
    """Sums over all rows, one number a column: where each goes, and its stride. One or two of them.

    Each program keeps its own over the rows that it takes, in the accumulator's dtype, and writes them once: to
    ``sums0_ptr`` and ``sums1_ptr``, (programs, N) each. A last launch adds these up. So nothing depends on the order in
    which programs run, and there are as many addends as programs, whatever the number of rows. One program's sums are
    the totals: it writes them as such, and there is no last launch.
    """

    totals: tuple[tuple[Out, int], ...] = ()


@dataclass(frozen=True)
class _Walk:
    """What every variant needs to know of one plan."""

    kernels: RowKernels
    config: Config
    blocks: Blocks
    rows: Rows
    operands: Mapping[str, In | Out]
    extras: Mapping[str, Argument]
    constexprs: Mapping[str, Any]
    sums: Sums = field(default_factory=Sums)

    @property
    def tiles(self) -> int:
        """BLOCK_M rows each; no tile crosses the innermost row dim."""
        m0, m1, m2 = self.rows.sizes
        return m0 * m1 * cdiv(m2, self.blocks["BLOCK_M"])

    @property
    def splits(self) -> int:
        return self.blocks["SPLITS"]

    @property
    def summing(self) -> int:
        """Programs of one launch that each sum over rows of their own, in every column."""
        if not self.sums.totals:
            return 0
        programs, tiles = max(1, self.blocks["PROGRAMS"]), self.tiles
        if self.config.variant == "coresident_row":
            return self.groups
        if self.config.variant in ("looped_row", "split_row"):
            programs //= self.columns
        return max(1, min(programs, tiles))

    @property
    def addends(self) -> int:
        """Programs of all launches that do so; 0 where nothing is left to add up."""
        programs = len(self.rows.offsets) * self.summing
        return 0 if programs == 1 and all(stride == 1 for _, stride in self.sums.totals) else programs

    @property
    def groups(self) -> int:
        """Groups of programs that share one row at a time, where they wait for each other."""
        return min(self.rows.m, self.blocks["PROGRAMS"] // self.splits)

    @property
    def columns(self) -> int:
        return cdiv(self.rows.n, self.blocks["BLOCK_N"])

    def launch(self, kernel: Any, grid: int, index: int, coresident: bool = False, **more: Any) -> Launch:
        """Launch number ``index`` of ``kernel``, with those of the constexprs that it takes."""
        constexprs = {**self.constexprs, **more, "STAGES": self.config.num_stages}
        return self._launch(kernel, grid, self._arguments(index), constexprs, self.config.num_warps, coresident)

    def launch_sums(self) -> list[Launch]:
        """The last launch of an op that sums over rows."""
        rows, n, blocks = self.addends, self.rows.n, self.blocks
        if not rows:
            return []
        arguments: dict[str, Argument] = {"sums_ptr": self._sums, "ROWS": rows, "N": n, "stride_sums": rows * n}
        for number, (total, stride) in enumerate(self.sums.totals):
            arguments |= {f"total{number}_ptr": total, f"stride_total{number}": stride}
        grid = len(self.sums.totals) * cdiv(n, blocks["SUM_BLOCK_N"])
        tile = {"BLOCK_M": blocks["SUM_BLOCK_M"], "BLOCK_N": blocks["SUM_BLOCK_N"]}
        return [self._launch(self.kernels.sums, grid, arguments, tile, blocks["SUM_WARPS"])]

    def _launch(
        self, kernel: Any, grid: int, arguments: Mapping[str, Argument], constexprs: Mapping[str, Any],
        num_warps: int, coresident: bool = False,
    ) -> Launch:  # fmt: skip
        names = kernel.arg_names
        return Launch(
            kernel=kernel,
            grid=(grid,),
            args=tuple(_given(arguments, name) for name in names if name not in constexprs),
            constexprs={name: constexprs[name] for name in names if name in constexprs},
            num_warps=num_warps,
            num_stages=self.config.num_stages,
            coresident=coresident,
        )

    def _arguments(self, index: int) -> dict[str, Argument]:
        m0, m1, m2 = self.rows.sizes
        given: dict[str, Argument] = {**self.extras, "M0": m0, "M1": m1, "M2": m2, "N": self.rows.n}
        for operand, (name, base) in enumerate(self.operands.items()):
            offset = self.rows.offsets[index][operand]
            given[f"{name}_ptr"] = dataclasses.replace(base, offset=base.offset + offset) if offset else base
            for axis, stride in zip("012n", self.rows.strides[operand], strict=True):
                given[f"stride_{name}{axis}"] = stride
        given["partial_ptr"] = Scratch(0)
        given["word_ptr"] = Scratch(0, index * self.rows.m * self.splits)  # a launch finds its own words zeroed
        for number, (total, _) in enumerate(self.sums.totals):
            place = number * self.addends + index * self.summing
            sums = dataclasses.replace(self._sums, offset=place * self.rows.n)
            given[f"sums{number}_ptr"] = sums if self.addends else total
        return given

    @property
    def _sums(self) -> Scratch:
        return Scratch(0 if self.config.variant in WHOLE else 1)


def _given(arguments: Mapping[str, Argument], name: str) -> Argument:
    if name not in arguments and not name.endswith("_ptr"):
        assert name.startswith("stride_"), f"no value for the kernel's parameter {name!r}"
        return 0
    return arguments.get(name)


def row_plan(
    kernels: RowKernels,
    config: Config,
    blocks: Blocks,
    rows: Rows,
    operands: Mapping[str, In | Out],
    outputs: Sequence[Buffer],
    *,
    compute: torch.dtype,
    extras: Mapping[str, Argument] | None = None,
    sums: Sums | None = None,
    of_nothing: bool = False,
    **constexprs: Any,
) -> Plan:
    """The plan of an op over rows.

    ``operands`` are named as the kernels name them, in the order of ``rows``; ``extras`` are further arguments by
    their parameters. ``compute`` is the dtype of what parts of a row hand over and of ``sums``; ``constexprs`` are
    the op's own. Where there is no element nothing is launched: an output that is then defined says ``init=0``, or
    ``of_nothing`` launches for rows of no element too.
    """
    if rows.m == 0 or rows.n == 0 and not of_nothing:
        return Plan(tuple(outputs))
    reread = config.variant == "cached_row"
    walk = _Walk(
        kernels,
        config,
        blocks,
        rows,
        operands,
        FrozenMap(extras),
        constexprs={
            **constexprs,
            "WIDE": needs_wide_offsets(rows, blocks["BLOCK_M"]),
            "BLOCK_M": blocks["BLOCK_M"],
            "BLOCK_N": blocks["BLOCK_N"],
            "SPLITS": blocks["SPLITS"],
            "EARLY": bool(config.params.get("EARLY", 0)),
            "POLL_CACHE": config.options.get("poll_cache", ""),
            "LAG": bool(config.params.get("LAG", 0)),
            "REREAD": bool(config.params.get("REREAD", 0)),
            "PARTS": min(config.params.get("PARTS", REREAD_PARTS if reread else 1), blocks["BLOCK_N"]),
            "BLOCK_SPLITS": next_power_of_2(blocks["SPLITS"]),
        },
        sums=sums or Sums(),
    )
    build = _BUILDERS[config.variant]
    launches = [launch for index in range(len(rows.offsets)) for launch in build(walk, index)]
    return Plan(tuple(outputs), _scratch(walk, compute), (*launches, *walk.launch_sums()))


def _whole(walk: _Walk, index: int) -> list[Launch]:
    programs = walk.summing or walk.blocks["PROGRAMS"]
    persistent = 0 < programs < walk.tiles
    grid = programs if persistent else walk.tiles
    reread = walk.config.variant == "cached_row"
    return [walk.launch(walk.kernels.whole, grid, index, PERSISTENT=persistent, REREAD=reread)]


def _looped(walk: _Walk, index: int) -> list[Launch]:
    if walk.kernels.looped is None:
        return _split(walk, index)
    return [walk.launch(walk.kernels.looped, walk.tiles, index)]


def _split(walk: _Walk, index: int) -> list[Launch]:
    grid = second = walk.tiles * walk.splits
    if walk.kernels.sums is not None:
        second = (walk.summing or walk.tiles) * walk.columns
    first = [] if walk.kernels.partial is None else [walk.launch(walk.kernels.partial, grid, index)]
    return [*first, walk.launch(walk.kernels.combine, second, index)]


def _coresident(walk: _Walk, index: int) -> list[Launch]:
    return [walk.launch(walk.kernels.coresident, walk.groups * walk.splits, index, coresident=True)]


WHOLE = ("packed_rows", "resident_row", "cached_row")
_BUILDERS: Mapping[str, Callable[[_Walk, int], list[Launch]]] = {
    **dict.fromkeys(WHOLE, _whole),
    "looped_row": _looped,
    "split_row": _split,
    "coresident_row": _coresident,
}


def _scratch(walk: _Walk, compute: torch.dtype) -> tuple[Buffer, ...]:
    """Exchange between parts of a row, then what programs sum over rows."""
    buffers: list[Buffer] = []
    if walk.config.variant == "coresident_row":
        words = len(walk.rows.offsets) * walk.rows.m * walk.splits
        buffers.append(Buffer.flat(words, torch.int64, init=0))
    elif walk.config.variant not in WHOLE and (walk.config.variant == "split_row" or walk.kernels.looped is None):
        rows = walk.tiles * walk.blocks["BLOCK_M"]
        buffers.append(Buffer.flat(rows * walk.splits * walk.kernels.partials, compute))
    if walk.addends:
        buffers.append(Buffer.flat(len(walk.sums.totals) * walk.addends * walk.rows.n, compute))
    return tuple(buffers)
