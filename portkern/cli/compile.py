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
    find_op,
    make_args,
    set_option,
    shape_option,
    words,
)

if TYPE_CHECKING:
    from portkern.compilation import Compilation


@click.command(short_help="Compile for targets, present or not.")
@click.argument("op")
@click.option(
    "--device", "devices", multiple=True, callback=words, metavar="DEVICE",
    help="Architectures, slugs or cuda:N, with commas; every plugin's target by default.",
)  # fmt: skip
@shape_option
@dtype_option
@click.option("--variant", metavar="NAME", help="A variant, or all; the default's by default.")
@set_option
@common
def command(
    op: str,
    devices: tuple[str, ...],
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    variant: str | None,
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """Compile OP for targets, present or not: registers, spills, shared memory, occupancy.

    Exits with 1 if a default spills or does not compile.
    """
    from portkern.compilation import compile_op
    from portkern.plugins import targets
    from portkern.runtime import current
    from portkern.toolchain import require_triton

    require_triton()
    runtime, found = current(), find_op(op)
    inputs = [
        make_args(found, shape, dtype, settings=settings)
        for shape in shapes or (default_shape(found),)
        for dtype in dtypes or (default_dtype(found),)
    ]
    names = devices or tuple(target.arch for target in targets(runtime.plugins))
    parts = [find_device(name) for name in names]
    results = [
        result for device in parts for args in inputs for result in compile_op(runtime, found, args, device, variant)
    ]
    emit("compile", results, _text(results), as_json)
    for result in results:
        if result.error:
            say(f"error: {one_line(result.error)}")
    return int(any(result.failed for result in results))


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
