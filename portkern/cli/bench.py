"""``portkern bench``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from portkern.cli._output import emit, table
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
)
from portkern.errors import BadArgument, UnsupportedDtype

if TYPE_CHECKING:
    import torch

    from portkern.benchmark import Case, Measurement
    from portkern.op import Op
    from portkern.target import Device

SEED = 0


@click.command(short_help="Time ops on a GPU against torch.")
@ops_argument
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto or cuda:N.")
@shape_option
@dtype_option
@set_option
@click.option("--compile/--no-compile", "compiled", default=True, help="Compare with torch.compile.")
@click.option("--host", is_flag=True, help="What a call costs the host instead, step by step.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Interleaved runs.")
@common
def command(
    ops: tuple[str, ...],
    device: str,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    settings: dict[str, Any],
    compiled: bool,
    host: bool,
    rounds: int,
    as_json: bool,
) -> None:
    """Time ops against torch eager, torch.compile and a plain copy, on a GPU.

    Times are medians with a cold cache, GB/s the least bytes an op moves over its time. Shapes and
    dtype are by default those that `tune` measures, in bfloat16. With --host calls are tiny and follow each other,
    and the host is timed: ours, torch's, and the steps of ours.
    """
    from tqdm import tqdm

    from portkern import toolchain
    from portkern.benchmark import bench, present_device
    from portkern.runtime import current
    from portkern.timing import copy_ceiling

    runtime = current()
    part = present_device(runtime) if device == "auto" or not runtime.devices else find_device(device)
    if not part.present:
        raise BadArgument(f"--device {device} is not here, and bench measures; take auto or cuda:N")
    toolchain.require_triton()
    if host:
        from portkern.cli._host import measure

        emit("bench.host", *measure(find_ops(ops), shapes, dtypes, settings, part), as_json)
        return
    cases = _all_cases(find_ops(ops), shapes, dtypes, settings, bool(ops))
    ceiling = copy_ceiling(part)
    measuring = bench(runtime, cases, part, compiled=compiled, runs=rounds, ceiling_gbps=ceiling)
    found = list(tqdm(measuring, total=len(cases), desc="bench", unit=" problems", disable=None))
    data = {
        "device": part.to_json(),
        "ceiling_gbps": ceiling,
        "rounds": rounds,
        "versions": toolchain.provenance(),
        "measurements": found,
    }
    emit("bench", data, _text(found, part, ceiling), as_json)


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


def _text(found: list[Measurement], device: Device, ceiling: float) -> str:
    headers = (
        "problem", "us", "+-", "torch us", "compile us", "copy us", "GB/s", "of ceiling", "TFLOP/s", "copies",
        "over torch", "over compile", "layer", "config", "note",
    )  # fmt: skip
    rows = [
        (each.problem, _number(each.time_us, ".1f"), _number(each.spread_us, ".1f"), _number(each.torch_us, ".1f"),
         _number(each.compile_us, ".1f"), _number(each.copy_us, ".1f"), _number(each.gbps, ".0f"),
         _number(each.of_ceiling, ".2f"), _number(each.tflops, ".0f"), _number(each.copies, ".2f"),
         _number(each.over_torch, ".2f", "x"), _number(each.over_compile, ".2f", "x"),
         each.layer, each.config, each.note)
        for each in found
    ]  # fmt: skip
    lines = [table(headers, rows, ("note",)), "", f"{device.name}: copy ceiling {ceiling:.0f} GB/s"]
    return "\n".join([*lines, *_means(found)])


def _means(found: list[Measurement]) -> list[str]:
    """The geometric means of each op and dtype."""
    from portkern.benchmark import geometric_mean

    groups: dict[str, list[Measurement]] = {}
    for each in found:
        words = each.problem.split()
        groups.setdefault(f"{each.op} {words[2] if len(words) > 2 else ''}".strip(), []).append(each)
    lines = []
    for name, group in groups.items():
        torch_mean = geometric_mean(each.over_torch for each in group)
        compile_mean = geometric_mean(each.over_compile for each in group)
        means = [f"{_number(torch_mean, '.2f', 'x')} torch"] if torch_mean else []
        means += [f"{_number(compile_mean, '.2f', 'x')} torch.compile"] if compile_mean else []
        if means:
            lines.append(f"{name}: geometric mean {', '.join(means)} over {len(group)} problems")
    return lines


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
