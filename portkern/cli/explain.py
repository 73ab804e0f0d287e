"""``portkern explain``."""

from __future__ import annotations

from typing import Any

import click

from portkern.cli._output import emit
from portkern.cli._parameters import (
    Shape,
    common,
    dtype_option,
    find_device,
    plan_args,
    set_option,
    shape_option,
    words,
)


@click.command(short_help="What dispatch would run, and why.")
@click.argument("op")
@shape_option
@dtype_option
@click.option(
    "--device", "devices", multiple=True, callback=words, metavar="DEVICE",
    help="auto (default), cuda:N, an architecture or a slug; several with commas.",
)  # fmt: skip
@set_option
@common
def command(
    op: str,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    devices: tuple[str, ...],
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """What dispatch would run for OP, and why: layer, config, nearest records, refusals."""
    from portkern.explanation import explain_canonical
    from portkern.registry import get

    found = get(op)
    plan_args(found, None, shapes, dtypes, settings)  # a mistake in them is named before a GPU that is not here
    parts = [find_device(name) for name in devices or ("auto",)]
    answers = [
        explain_canonical(op, args, device)
        for device in parts
        for args in plan_args(found, device, shapes, dtypes, settings)
    ]
    text = "\n\n\n".join(map(str, answers))
    emit("explain", [answer.to_json() for answer in answers], text, as_json)
