"""``portkern bench``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from portkern.cli._output import emit, say
from portkern.cli._parameters import (
    Shape,
    common,
    default_dtype,
    default_shape,
    dtype_option,
    dtypes_of,
    find_device,
    find_ops,
    make_args,
    ops_argument,
    set_option,
    shape_option,
    words,
)
from portkern.errors import BadArgument, UnsupportedDtype

if TYPE_CHECKING:
    import torch

    from portkern.benchmark import Case
    from portkern.op import Op
    from portkern.peer import Peer
    from portkern.runtime import Runtime
    from portkern.target import Device

SEED = 0


def _number(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """NaN passes every range, and nothing is ever slower than that."""
    if value != value:
        raise BadArgument(f"{param.opts[0]} is nan; it takes a percentage from 0 to 1000")
    return value


@click.command(short_help="Time ops on a GPU against torch and other libraries.")
@ops_argument
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto or cuda:N.")
@shape_option
@dtype_option
@set_option
@click.option(
    "--against", multiple=True, default=("torch,compile",), show_default=True, callback=words, metavar="PEER",
    help="Who to compare with, as torch,compile,liger,flag_gems,quack, if installed.",
)  # fmt: skip
@click.option("--compile/--no-compile", "compiled", default=True, help="Leave compile out of --against.")
@click.option(
    "--baseline", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="What --json printed before: exit with 1 if slower now.",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(0, 1000), default=5.0, show_default=True, callback=_number, metavar="PERCENT",
    help="How much slower than --baseline may be.",
)  # fmt: skip
@click.option("--host", is_flag=True, help="What a call costs the host instead, step by step.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Interleaved runs.")
@common
def command(
    ops: tuple[str, ...],
    device: str,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    settings: dict[str, Any],
    against: tuple[str, ...],
    compiled: bool,
    baseline: Path | None,
    tolerance: float,
    host: bool,
    rounds: int,
    as_json: bool,
) -> int:
    """Time ops against other implementations and a plain copy, on a GPU.

    Times are medians with a cold cache, GB/s the least bytes an op moves over its time, MiB what a call allocates at
    its peak, with its derivative. Shapes and dtype are by default those that `tune` measures, in bfloat16. With --host
    calls are tiny and follow each other, and the host is timed: ours, torch's, and the steps of ours.

    Exits with 1 if no peer of --against ran, or if a problem of --baseline got slower by more than --tolerance and the
    measured spread, over a copy's time.
    """
    from portkern import toolchain
    from portkern.benchmark import present_device
    from portkern.peer import chosen
    from portkern.runtime import current

    if host and baseline:
        raise BadArgument("--baseline compares times on the GPU, and --host measures the host: leave one of them out")
    if baseline and not baseline.is_file():  # before a GPU is asked for, as a wrong name is
        raise BadArgument(f"--baseline {baseline}: No such file; name what `bench --json` printed before")
    wanted = find_ops(ops)
    peers, notes = chosen([name for name in against if compiled or name != "compile"])
    runtime = current()
    part = present_device(runtime) if device == "auto" or not runtime.devices else find_device(device)
    if not part.present:
        raise BadArgument(f"--device {device} is not here, and bench measures; take auto or cuda:N")
    toolchain.require_triton()
    if host:
        from portkern.cli._host import measure

        emit("bench.host", *measure(wanted, shapes, dtypes, settings, part), as_json)
        return 0
    cases = _all_cases(wanted, shapes, dtypes, settings, bool(ops))
    return _measure(runtime, cases, part, _Against(peers, notes, baseline, tolerance / 100), rounds, as_json)


class _Against(NamedTuple):
    """What to compare with: peers, a note for each that is not installed, and an earlier run."""

    peers: list[Peer]
    notes: list[str]
    baseline: Path | None
    tolerance: float


def _measure(
    runtime: Runtime, cases: list[Case], device: Device, against: _Against, rounds: int, as_json: bool
) -> int:  # fmt: skip
    """Measure and print; gives the exit code."""
    from tqdm import tqdm

    from portkern import toolchain
    from portkern.baseline import compare, load
    from portkern.benchmark import bench
    from portkern.cli._bench_table import compared, measured
    from portkern.timing import copy_ceiling

    peers, baseline = against.peers, against.baseline
    before = load(baseline, device) if baseline else []  # a wrong file is an error before anything is timed
    for note in against.notes:
        say(f"note: {note}")
    ceiling = copy_ceiling(device)
    measuring = bench(runtime, cases, device, against=peers, runs=rounds, ceiling_gbps=ceiling)
    found = list(tqdm(measuring, total=len(cases), desc="bench", unit=" problems", disable=None))
    data: dict[str, Any] = {
        "device": device.to_json(),
        "ceiling_gbps": ceiling,
        "rounds": rounds,
        "versions": toolchain.provenance(),
        "peers": {peer.name: peer.version for peer in peers},
        "notes": against.notes,
        "measurements": found,
    }
    text, failed = measured(found, [peer.name for peer in peers], device, ceiling), False
    if baseline:
        report = compare(baseline, before, found, against.tolerance)
        data["baseline"] = report
        text, failed = f"{text}\n\n{compared(report)}", bool(report.slower)
    emit("bench", data, text, as_json)
    if peers and not any(each.peer_us for each in found):
        say(f"none of {', '.join(peer.name for peer in peers)} ran: see the notes")
        failed = True
    return int(failed)


def _all_cases(
    ops: list[Op], shapes: tuple[Shape, ...], dtypes: tuple[str, ...], settings: dict[str, Any], named: bool
) -> list[Case]:
    unknown = [dtype for dtype in dtypes if not any(dtype in op.dtypes for op in ops)]
    if unknown:
        raise UnsupportedDtype(f"no op takes dtype {' or '.join(map(repr, unknown))}; see portkern ops")
    return [case for op in ops for case in _cases(op, shapes, dtypes, settings, named)]


def _cases(
    op: Op, shapes: tuple[Shape, ...], dtypes: tuple[str, ...], settings: dict[str, Any], named: bool
) -> list[Case]:
    from portkern.benchmark import Case

    if named:
        dtypes_of(op, dtypes)
    wanted = [dtype for dtype in dtypes or (default_dtype(op),) if dtype in op.dtypes]
    proposed = [(case.sizes, dict(case.options)) for case in op.tune_cases] or [(default_shape(op), {})]
    asked: list[tuple[Shape, dict[str, Any]]] = [(shape, {}) for shape in shapes]
    found = []
    for dtype in wanted:
        for shape, options in asked or proposed:
            arguments = {**options, **settings}
            make_args(op, shape, dtype, settings=arguments)  # a wrong shape is an error before anything is timed
            label = f"{op.name} {'x'.join(map(str, shape)) or 'scalar'} {dtype}"
            found.append(Case(op, label, partial(_real_args, op, shape, dtype, arguments)))
    return found


def _real_args(op: Op, shape: Shape, dtype: str, settings: dict[str, Any], where: torch.device) -> tuple[Any, ...]:
    import torch

    generator = torch.Generator(where).manual_seed(SEED)
    made: tuple[Any, ...] = op.inputs(
        shape, getattr(torch, dtype), device=where, generator=generator, style="normal", **settings
    )
    return made
