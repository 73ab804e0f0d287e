"""``portkern compile``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from portkern.cli._output import emit, one_line, say, size, table
from portkern.cli._parameters import (
    Shape,
    common,
    default_dtype,
    default_shape,
    dtype_option,
    find_device,
    make_args,
    plan_args,
    set_option,
    shape_option,
    words,
)

if TYPE_CHECKING:
    from portkern.compilation import Compilation, Emulation
    from portkern.op import Op
    from portkern.refusals import Refusals
    from portkern.target import Device
from portkern.errors import UnknownName


@click.command(short_help="Compile for targets, present or not.")
@click.argument("op")
@click.option(
    "--device", "devices", multiple=True, callback=words, metavar="DEVICE",
    help="Architectures, slugs or cuda:N, with commas; every plugin's target by default.",
)  # fmt: skip
@shape_option
@dtype_option
@click.option("--variant", metavar="NAME", help="A variant, or all; the default's by default.")
@click.option("--emulate", is_flag=True, help="Also execute the code on the CPU, where a plugin can, and count.")
@set_option
@common
def command(
    op: str,
    devices: tuple[str, ...],
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    variant: str | None,
    emulate: bool,
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """Compile OP for targets, present or not: registers, spills, shared memory, occupancy, refused candidates.

    With --emulate also what the code does, counted, never timed. Exits with 1 if a default spills, does not compile,
    or computes wrong numbers.
    """
    from portkern.compilation import compile_op
    from portkern.plugins import targets
    from portkern.refusals import refusals
    from portkern.registry import get
    from portkern.runtime import current
    from portkern.toolchain import require_triton

    require_triton()
    runtime, found = current(), get(op)
    plan_args(found, None, shapes, dtypes, settings)  # a mistake in them is named before one in a device
    names = devices or tuple(target.arch for target in targets(runtime.plugins))
    parts = [find_device(name) for name in names]
    asked = [(args, device) for device in parts for args in plan_args(found, device, shapes, dtypes, settings)]
    results = [result for args, device in asked for result in compile_op(runtime, found, args, device, variant)]
    refused = [each for args, device in asked for each in refusals(runtime, found, args, device)]
    counted = _emulated(found, parts, shapes, dtypes, variant, settings) if emulate else []
    text = "\n\n".join(filter(None, (_text(results), _refused(refused), _counted(counted))))
    emit("compile", [*results, *counted] if emulate else results, text, as_json)
    for result in results:
        if result.error:
            say(f"error: {one_line(result.error)}")
    return int(any(result.failed for result in results) or any(each.wrong for each in counted))


def _emulated(
    op: Op, parts: list[Device], shapes: tuple[Shape, ...], dtypes: tuple[str, ...], variant: str | None, settings: Any
) -> list[Emulation]:
    from portkern.compilation import emulate_op
    from portkern.emulator import NAME
    from portkern.runtime import current

    runtime = current()
    found = [device for device in parts if NAME in runtime.backend(device.target).executors()]
    if not found:
        raise UnknownName(
            f"no plugin emulates {', '.join(device.target.arch for device in parts)}: leave --emulate out"
        )
    inputs = [
        make_args(op, shape, dtype, "cpu", settings)
        for shape in shapes or (default_shape(op),)
        for dtype in dtypes or (default_dtype(op),)
    ]
    return [each for device in found for args in inputs for each in emulate_op(runtime, op, args, device, variant)]


def _refused(refused: list[Refusals]) -> str:
    if not refused:
        return ""
    rows = [(each.target, each.problem, f"{each.count} of {each.candidates}", each.reason) for each in refused]
    return table(("target", "problem", "candidates refused", "for example"), rows, ("for example",))


def _counted(counted: list[Emulation]) -> str:
    if not counted:
        return ""
    headers = (
        "target", "variant", "kernel", "programs", "instructions", "vector", "matrix", "shared", "global", "requested",
        "touched", "bank conflicts", "parted", "lanes used",
    )  # fmt: skip
    rows = [
        (
            each.target, each.variant, launch.kernel, launch.programs, f"{launch.instructions:,}",
            *(f"{launch.by_class.get(kind, 0):,}" for kind in ("vector", "matrix", "shared", "global")),
            size(launch.bytes_requested), size(launch.bytes_touched), f"{launch.shared_conflicts:,}", launch.parted,
            f"{launch.lane_use:.0%}",
        )
        for each in counted
        for launch in each.launches
    ]  # fmt: skip
    text = table(headers, rows) + "\nExecuted by an emulator: counts of what the code does, never a time."
    wrong = [(each.target, each.variant, each.wrong) for each in counted if each.wrong]
    return text + ("\n\n" + table(("target", "variant", "WRONG"), wrong, ("WRONG",)) if wrong else "")


def _text(results: list[Compilation]) -> str:
    headers = (
        "target", "problem", "variant", "kernel", "warps", "registers", "spills", "shared", "occupancy",
        "matrix", "compile s", "config",
    )  # fmt: skip
    text = table(headers, [row for result in results for row in _rows(result)])
    refused = [(each.target, each.problem, each.variant, each.refused) for each in results if each.refused]
    if refused:
        text += "\n\n" + table(("target", "problem", "refused", "reason"), refused, ("reason",))
    notes = dict.fromkeys(f"{each.target}: {each.note}" for each in results if each.note)
    return "\n".join([text, *(["", *notes] if notes else [])])


def _rows(result: Compilation) -> Iterator[tuple[Any, ...]]:
    head = (result.target, result.problem, result.variant)
    if result.error:
        yield (*head, "does not compile", *[""] * 7, str(result.config))
    for launch in result.launches:
        needs = launch.resources
        yield (
            *head, launch.kernel, launch.num_warps, needs.registers, needs.spills, size(needs.shared_bytes),
            f"{needs.occupancy:.0%}", needs.matrix_instruction, f"{launch.compile_s:.2f}", str(result.config),
        )  # fmt: skip
    if result.config and not result.error and not result.launches:
        yield (*head, "nothing to launch", *[""] * 7, str(result.config))
