"""The kind ``row_reduction``: what its ops share on the host side.

Variants, and the free parameters that each takes:

    packed_rows      whole rows, BLOCK_M to a tile                      BLOCK_M, PROGRAMS_PER_UNIT
    resident_row     one whole row to a tile, kept in registers         PROGRAMS_PER_UNIT
    cached_row       the same, kept by the nearest cache: read again    PROGRAMS_PER_UNIT
    looped_row       a program walks its rows in chunks                 BLOCK_M, BLOCK_N
    split_row        a row cut over programs, two launches              BLOCK_M, BLOCK_N, SPLITS
    coresident_row   a row cut over programs that wait for each other   BLOCK_N, PROGRAMS_PER_UNIT

PROGRAMS_PER_UNIT 0 means one program a tile; above 0, that many programs a unit walk the tiles and
fetch ``num_stages - 1`` of them ahead.

Of ops whose ``Work.takes`` names them: PARTS, from 1, into which a program cuts the columns that it keeps, to work them
off one after another; EARLY, 1 where vectors that all rows share are read before the sums of a row, not after them;
PAIRS, 1 where 16-bit numbers are read and kept as words of two, if the kernel can and all lie so; LAG, of a
``coresident_row``, 1 where it sums the next row before it waits for this one.

AHEAD and SPLITS of a ``coresident_row`` likewise: AHEAD, 1 where the part of the next row loads while this one waits,
and SPLITS, the number of parts, not of one block each but walked in blocks before the wait and again after it. Such
kernels collect more words than a warp has lanes.

An op that also sums over rows (``Work.partials`` is not 0) takes PROGRAMS_PER_UNIT, from 1, in every variant: each
program keeps the sums of its own rows. SUM_BLOCK_M, SUM_BLOCK_N and SUM_WARPS are of the launch that adds them up.
Its ``coresident_row`` may take LAG=1, and REREAD=1, load this row again instead of keeping it while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from portkern.config import Blocks, Config
from portkern.errors import Infeasible
from portkern.integers import cdiv, next_power_of_2
from portkern.layout import row_layout, rows_of
from portkern.plan import Buffer, Meta
from portkern.problem import Problem, Work
from portkern.target import Device

KIND = "row_reduction"
WHOLE_ROWS = ("packed_rows", "resident_row", "cached_row")
VARIANTS = ("packed_rows", "resident_row", "cached_row", "looped_row", "split_row", "coresident_row")
MAX_TILE = 1 << 20  # elements in one Triton tensor
SUM_PARAMETERS = ("SUM_BLOCK_M", "SUM_BLOCK_N", "SUM_WARPS")  # of the launch that adds up sums over rows
MAX_EXCHANGE = 32  # parts of a co-resident row: one word for each lane of the narrowest warp


def row_problem(
    op: str,
    dim: int,
    operands: Mapping[str, Meta | Buffer],
    first: str,
    *,
    others: Sequence[Meta | Buffer] = (),
    vectors: Mapping[str, Meta | None] | None = None,
    **flags: Any,
) -> Problem:
    """The Problem of a reduction of ``operands`` (equal shapes) over ``dim``.

    M counts the rows of one launch, N the reduced dim; INNER, where it is not M, the innermost row
    dim, which no tile crosses. ``first`` names the operand whose strides order the rows. ``others``
    are read by rows as well, but too small to decide anything: a number for each row. Of ``vectors``,
    read or written once for all rows, only the dtypes count; None for an absent one.
    """
    names = [first, *(name for name in operands if name != first)]
    rows = rows_of([*(operands[name] for name in names), *others], dim)
    given = {**operands, **{name: vector for name, vector in (vectors or {}).items() if vector is not None}}
    sizes = {"M": rows.m, "N": rows.n}
    if rows.sizes[2] != rows.m:
        sizes["INNER"] = rows.sizes[2]
    return Problem(
        op=op,
        sizes=sizes,  # type: ignore[arg-type]
        dtypes={name: str(each.dtype).removeprefix("torch.") for name, each in given.items()},  # type: ignore[arg-type]
        flags=flags,  # type: ignore[arg-type]
        layout={name: row_layout(operands[name], rows, i) for i, name in enumerate(names)},  # type: ignore[arg-type]
    )


def row_work(
    problem: Problem, reads: tuple[str, ...], writes: tuple[str, ...], live: Mapping[str, float], *, sums: int = 0,
    takes: tuple[str, ...] = (), chained: int = 0,
) -> Work:  # fmt: skip
    """The Work of a row reduction that reads and writes each named operand once.

    ``live`` gives the 32-bit registers per element that each variant keeps when it computes in
    fp32; its keys are the variants that the algorithm has. ``sums`` counts the sums over rows that
    the op makes for each column; ``takes`` names the parameters, of those that not all kernels have,
    that its kernels take; ``chained`` counts the loads of a row that wait for the value of another.
    """
    numel = problem.sizes["M"] * problem.sizes["N"]
    widths = {name: _itemsize(problem.dtypes[name]) for name in dict.fromkeys((*reads, *writes))}
    double = "float64" in problem.dtypes.values()
    scale = 2 if double else 1
    # The word that co-resident programs exchange holds two fp32.
    variants = [name for name in VARIANTS if name in live and not (double and name == "coresident_row")]
    return Work(
        kind=KIND,
        sizes=problem.sizes,
        dtypes={name: problem.dtypes[name] for name in widths},  # type: ignore[arg-type]
        layout={name: problem.layout[name] for name in widths},  # type: ignore[arg-type]
        live={name: live[name] * scale for name in variants},  # type: ignore[arg-type]
        reads=numel * sum(widths[name] for name in reads),
        writes=numel * sum(widths[name] for name in writes),
        variants=tuple(variants),
        waiting=tuple(name for name in variants if name == "coresident_row"),
        partials=4 * scale * sums * problem.sizes["N"],
        chained=chained,
        takes=takes,
        element_bytes=max(widths.values()),
        compute_bytes=4 * scale,
    )


def fit_rows(config: Config, work: Work, device: Device) -> Blocks:
    """BLOCK_M, BLOCK_N, SPLITS and PROGRAMS (0: one a tile) of ``config`` for this problem.

    Raises Infeasible with the limit that the config passes.
    """
    n = work.sizes["N"]
    inner = next_power_of_2(work.sizes.get("INNER", work.sizes["M"]))
    block_m = min(config.params.get("BLOCK_M", 1), inner)
    programs = device.units * config.params.get("PROGRAMS_PER_UNIT", 0)
    splits = 1
    if config.variant in WHOLE_ROWS:
        block_n = next_power_of_2(n)
        if config.variant != "packed_rows":
            block_m = 1
    else:
        block_n = min(_parameter(config, "BLOCK_N"), next_power_of_2(n))
    if config.variant == "split_row":
        # A power of 2, since each number of parts is code of its own: 1,000 row lengths took 148 compiles. A part may
        # be empty, which costs next to nothing.
        splits = next_power_of_2(max(min(_parameter(config, "SPLITS"), cdiv(n, block_n)), 1))
    if config.variant == "coresident_row":
        if n < 2:  # a size of 1 is compiled in, and with it the waiting load leaves its loop (see ``peek``)
            raise Infeasible("coresident_row exchanges parts of a row, and a row of one column has none: take another")
        block_m, splits = 1, next_power_of_2(cdiv(n, block_n))
        if splits > MAX_EXCHANGE:
            raise Infeasible(
                f"{splits} parts of {block_n} columns for {n}; programs exchange with at most "
                f"{MAX_EXCHANGE}: take a BLOCK_N of {next_power_of_2(cdiv(n, MAX_EXCHANGE))}"
            )
        if splits > programs:
            raise Infeasible(
                f"a row of {splits} parts needs {splits} programs at once; PROGRAMS_PER_UNIT="
                f"{config.params.get('PROGRAMS_PER_UNIT', 0)} on {device.units} units gives {programs}"
            )
    if block_m * block_n > MAX_TILE:
        raise Infeasible(
            f"a tile of {block_m} x {block_n} elements passes Triton's limit of {MAX_TILE}: "
            "take a looped or split variant"
        )
    found = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLITS": splits, "PROGRAMS": programs}
    if work.partials and programs < 1:
        raise Infeasible(
            "each program keeps sums over its rows, so PROGRAMS_PER_UNIT=0, one program a tile, would keep too many of "
            "them: take 1 or more"
        )
    return Blocks({**found, **sum_blocks(config, work)})


def sum_blocks(config: Config, work: Work) -> dict[str, int]:
    """The parameters of the launch that adds up sums over rows; none where ``work`` has no such sums.

    Raises Infeasible for a config that lacks them.
    """
    return {name: _parameter(config, name) for name in SUM_PARAMETERS} if work.partials else {}


def _parameter(config: Config, name: str) -> int:
    value = config.params.get(name)
    if value is None:
        raise Infeasible(f"variant {config.variant!r} needs the parameter {name}")
    return value


def _itemsize(dtype: str) -> int:
    import torch

    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
