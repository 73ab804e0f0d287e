"""How commands answer: tables or JSON on stdout, one-line remarks on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import click

TEXT_WIDTH = 76  # of a column of prose


def emit(command: str, data: Any, text: str, as_json: bool) -> None:
    """Print a result: ``text``, or ``data`` as ``{"schema": "portkern.<command>/1", ...}``."""
    if as_json:
        answer = {"schema": f"portkern.{command}/1", "data": jsonable(data)}
        text = json.dumps(answer, indent=2, allow_nan=False)
    click.echo(text)


def prints_to_stderr() -> AbstractContextManager[Any]:
    """For code of ops, which may print: stdout is for the answer, which may be JSON."""
    return contextlib.redirect_stdout(sys.stderr)


def jsonable(value: Any) -> Any:
    """``value`` as JSON types; a number that is not finite becomes null."""
    from portkern.record import plain

    return _finite(plain(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], prose: Sequence[str] = ()) -> str:
    """A table; columns named in ``prose`` are wrapped, and columns without content left out."""
    from tabulate import tabulate

    found = [["" if cell is None else cell for cell in row] for row in rows]
    keep = [i for i in range(len(headers)) if not found or any(row[i] != "" for row in found)]
    widths = [TEXT_WIDTH if headers[i] in prose else None for i in keep]
    return tabulate(
        [[row[i] for i in keep] for row in found],
        [headers[i] for i in keep],
        maxcolwidths=widths if found else None,
        disable_numparse=True,
        colalign=[_alignment([row[i] for row in found]) for i in keep] if found else None,
    )


def _alignment(cells: Sequence[Any]) -> str:
    def number(cell: Any) -> bool:
        return isinstance(cell, (int, float)) or str(cell).replace(".", "").rstrip("%x").isdigit()

    return "right" if all(cell == "" or number(cell) for cell in cells) else "left"


def one_line(message: Any) -> str:
    """``message`` without line ends."""
    return " ".join(str(message).split())


def say(message: str) -> None:
    """One line on stderr."""
    click.echo(f"portkern: {message}", err=True)


def size(count: float) -> str:
    """Bytes for a reader: ``227 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count == int(count) else f"{count:.1f} {unit}"
