"""``portkern verify``."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portkern.cli._output import emit, jsonable, prints_to_stderr, say, table
from portkern.cli._parameters import OPS_FILES, common, dtype_option, find_ops, ops_argument
from portkern.errors import BadArgument

if TYPE_CHECKING:
    from portkern.verification import Report


@click.command(short_help="Check every op on a device against fp64.")
@ops_argument
@click.option(
    "--device", default="auto", show_default=True, metavar="DEVICE",
    help="auto, cuda:N, cpu (the reference route), interpreter, or an architecture that a plugin emulates.",
)  # fmt: skip
@click.option("--as", "translate", metavar="ARCH", help="Run the code for ARCH, translated by the GPU's driver.")
@dtype_option
@click.option("--jobs", type=click.IntRange(1), help="Child processes at once.")
@click.option("--budget", metavar="TIME", help="90s, 5m or 1h, after which it ends and names what is left.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write results, device facts, versions and records as one JSON file to send.",
)  # fmt: skip
@common
@click.pass_context
def command(
    ctx: click.Context,
    ops: tuple[str, ...],
    device: str,
    translate: str | None,
    dtypes: tuple[str, ...],
    jobs: int | None,
    budget: str | None,
    report: Path | None,
    as_json: bool,
) -> int:
    """Run every op, variant and dtype on a device and judge the results against fp64.

    Inputs are wide-ranged, non-finite, odd, empty and strided. Run this first on a new card; exits
    with 1 if anything is wrong, or nothing ran, or the budget ended first.
    """
    from portkern.verification import bundle, verify

    if report is not None:
        _try_to_write(report)
    names = [op.name for op in find_ops(ops)]
    files = ctx.meta.get(OPS_FILES, [])
    with prints_to_stderr(), _bar() as progress:
        found = verify(
            names, device=device, translate=translate, dtypes=dtypes or None, jobs=jobs, budget=budget,
            ops_files=files, progress=progress,
        )  # fmt: skip
    emit("verify", found, _text(found), as_json)
    for note in found.notes:
        say(f"note: {note}")
    if report is not None:
        answer = {"schema": "portkern.report/1", "data": jsonable(bundle(found))}
        report.write_text(json.dumps(answer, indent=1, allow_nan=False) + "\n")
        say(f"report written to {report}")
    return int(bool(found.failures or found.left) or not found.cases)


def _try_to_write(file: Path) -> None:
    """Raises BadArgument, before hours of work, where ``file`` cannot be written."""
    existed = os.path.lexists(file)
    try:
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise BadArgument(f"--report {file}: {error.strerror}; name another, in a folder that can be written") from None


@contextmanager
def _bar() -> Iterator[Callable[[int, str], None]]:
    """Progress on stderr: cases done, and where it is."""
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(unit=" cases", desc="verify", disable=None) as bar:

        def progress(count: int, place: str) -> None:
            with lock:
                bar.update(count)
                bar.set_postfix_str(place, refresh=False)

        yield progress


def _text(report: Report) -> str:
    headers = ("op", "dtype", "variant", "cases", "refused", "worst error", "failed")
    rows = [
        (row.op, row.dtype, row.variant, row.cases, row.refused or "", _worst(row), row.failures or "")
        for row in report.rows
    ]
    parts = [table(headers, rows)]
    failed = [(row.label, row.first_failure) for row in report.rows if row.failures]
    if failed:
        parts.append(table(("failed", "first failure"), failed, ("first failure",)))
    refused = [(row.label, row.why) for row in report.rows if row.refused and not row.cases]
    if refused:
        parts.append(table(("never ran", "because"), refused, ("because",)))
    verdict = f"All {report.cases} cases are right"
    if not report.cases:
        verdict = "NO case ran, and nothing is shown"
    if report.failures:
        verdict = f"{report.failures} of {report.cases} cases FAILED"
    if report.left:
        parts.append(f"The budget ended before {len(report.left)} ops and dtypes: {', '.join(report.left)}")
    parts.append(
        f"{verdict} ({report.device}, {report.seconds:.0f} s). {report.statement}\n"
        "Errors are in units of the budget: twice the reference's own error plus one rounding."
    )
    return "\n\n".join(parts)


def _worst(row: Any) -> str:
    return f"{row.worst:.2f}" if row.cases > row.failures else ""
