"""``portkern tune``."""

from __future__ import annotations

import click

from portkern.cli._output import emit, prints_to_stderr
from portkern.cli._parameters import (
    OPS_FILES,
    Shape,
    common,
    dtype_option,
    ops_argument,
    shape_option,
)


@click.command(short_help="Find and record the best configs.")
@ops_argument
@click.option(
    "--device", default="auto", show_default=True, metavar="DEVICE",
    help="auto (GPUs here; without one, every plugin's target offline), all, cuda:N, an architecture.",
)  # fmt: skip
@shape_option
@dtype_option
@click.option("--budget", default="90s", show_default=True, metavar="TIME", help="90s, 5m or 1h.")
@common
@click.pass_context
def command(
    ctx: click.Context,
    ops: tuple[str, ...],
    device: str,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    budget: str,
    as_json: bool,
) -> int:
    """Find the best config of each op, record it, and say why it was chosen.

    Measures on the GPUs here; for an architecture that is not here, candidates are compiled,
    pruned and ranked. Run it again and it goes on where it stopped. Exits with 1 if a problem failed.
    """
    from portkern.tuner import tune

    with prints_to_stderr():
        report = tune(
            *ops,
            device=device,
            shapes=shapes or None,
            dtypes=dtypes or None,
            budget=budget,
            ops_files=ctx.meta.get(OPS_FILES, []),
            progress=not as_json,
        )
    emit("tune", report, str(report), as_json)
    return int(any(line.status == "failed" for line in report.lines))
