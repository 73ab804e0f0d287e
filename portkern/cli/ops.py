"""``portkern ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from portkern.cli._output import emit, table
from portkern.cli._parameters import common, default_dtype, default_shape, find_ops, make_args, ops_argument

if TYPE_CHECKING:
    from portkern.op import Op


@click.command(short_help="The ops that portkern knows.")
@ops_argument
@common
def command(ops: tuple[str, ...], as_json: bool) -> None:
    """The ops that portkern knows, with their kind, dtypes and variants."""
    found = [_describe(op) for op in find_ops(ops)]
    rows = [
        (each["name"], each["schema"], each["kind"], " ".join(each["dtypes"]), " ".join(each["variants"]),
         each["backward"])
        for each in found
    ]  # fmt: skip
    headers = ("op", "schema", "kind", "dtypes", "variants", "backward")
    emit("ops", found, table(headers, rows, ("schema",)), as_json)


def _describe(op: Op) -> dict[str, Any]:
    from portkern.plan import metas_of

    problem = op.problem(*metas_of(make_args(op, default_shape(op), default_dtype(op))))
    work = op.work(problem)
    return {
        "name": op.name,
        "schema": op.schema,
        "public": op.signature is not None,
        "kind": work.kind,
        "dtypes": list(op.dtypes),
        "variants": list(work.variants),
        "waiting": list(work.waiting),
        "backward": ", ".join(dict.fromkeys(part.op for part in op.backwards if part.op)) or None,
    }
