"""``bench`` against an earlier run of itself: what got slower, by the copy ceiling of each run's own clock.

A problem counts as slower when its time over that of a copy grew by more than the tolerance and the time that this
means is more than the spread of both measurements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from portkern.benchmark import Measurement
from portkern.errors import BadArgument
from portkern.record import Record
from portkern.target import Device

SCHEMA = "portkern.bench/1"
TOLERANCE = 0.05
# What is compared of a measurement: the first of these that both have. For of_ceiling more is faster.
COSTS = ("of_ceiling", "copies", "time_us")


@dataclass(frozen=True)
class Old:
    """What a file says of one problem; numbers as of ``Measurement``."""

    op: str
    problem: str
    time_us: float | None = None
    spread_us: float | None = None
    of_ceiling: float | None = None
    copies: float | None = None


@dataclass(frozen=True)
class Comparison(Record):
    """One problem in both runs. ``ratio`` is the new cost over the old one, in units of ``by``: ``of_ceiling``,
    ``copies`` or ``time_us``. A problem that no longer runs has no ``new_us``, and is slower."""

    op: str
    problem: str
    old_us: float
    new_us: float | None
    ratio: float | None
    by: str
    slower: bool


@dataclass(frozen=True)
class Report(Record):
    """Both runs side by side; problems that are in one of them only, or did not run before, are listed by name."""

    file: str
    tolerance: float
    compared: tuple[Comparison, ...]
    only_old: tuple[str, ...] = ()
    only_new: tuple[str, ...] = ()

    @property
    def slower(self) -> tuple[Comparison, ...]:
        """What got slower by more than the tolerance and the spread."""
        return tuple(each for each in self.compared if each.slower)


def load(file: Path, device: Device) -> list[Old]:
    """The measurements in ``file``, the JSON of ``portkern bench --json`` on a device like ``device``.

    Raises BadArgument for a file that is something else, or of another device; OSError where it cannot be read.
    """
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadArgument(f"{file} is not JSON ({error}); {_TAKES}") from None
    schema = answer.get("schema") if isinstance(answer, Mapping) else None
    if schema != SCHEMA:
        what = f"of schema {schema!r}" if schema else "JSON without a schema"
        raise BadArgument(f"{file} is {what}, not {SCHEMA}; {_TAKES}")
    try:
        slug = answer["data"]["device"]["slug"]
        measured = [_old(each) for each in answer["data"]["measurements"]]
    except (KeyError, TypeError) as error:
        raise BadArgument(f"{file} lacks what {SCHEMA} holds ({error}); {_TAKES}") from None
    if slug != device.slug:
        raise BadArgument(f"{file} was measured on {slug}, and this is {device.slug}; a baseline is for one device")
    return measured


_TAKES = "take the output of an earlier portkern bench --json"


def _old(data: Any) -> Old:
    if not isinstance(data, Mapping):
        raise TypeError(f"a measurement is {data!r}")
    found = {each.name: data.get(each.name) for each in fields(Old)}
    for name, value in found.items():
        known = isinstance(value, str) if name in ("op", "problem") else value is None or _is_number(value)
        if not known:
            raise TypeError(f"{name} is {value!r}")
    return Old(**found)  # type: ignore[arg-type]  # each was looked at


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def compare(file: Path, old: Sequence[Old], new: Iterable[Measurement], tolerance: float = TOLERANCE) -> Report:
    """Each measurement with that of the same op and problem in ``old``, the n-th with the n-th of several.

    ``tolerance`` is a fraction: 0.05 lets a problem cost 5 % more.
    """
    before: dict[tuple[str, str], list[Old]] = {}
    for each in old:
        before.setdefault((each.op, each.problem), []).append(each)
    compared, only_new = [], []
    for now in new:
        left = before.get((now.op, now.problem))
        then = left.pop(0) if left else None
        if then is None or not then.time_us:
            only_new.append(now.problem)
        else:
            compared.append(_compared(then, now, then.time_us, tolerance))
    only_old = [each.problem for left in before.values() for each in left]
    return Report(str(file), tolerance, tuple(compared), tuple(only_old), tuple(only_new))


def _compared(then: Old, now: Measurement, old_us: float, tolerance: float) -> Comparison:
    if not now.time_us:
        return Comparison(now.op, now.problem, old_us, None, None, "time_us", slower=True)
    by = next(name for name in COSTS if getattr(then, name) and getattr(now, name))
    ratio = getattr(now, by) / getattr(then, by)
    ratio = 1 / ratio if by == "of_ceiling" else ratio
    more_us = now.time_us * (1 - 1 / ratio)
    spread_us = max(then.spread_us or 0.0, now.spread_us or 0.0)
    slower = ratio > 1 + tolerance and more_us > spread_us
    return Comparison(now.op, now.problem, old_us, now.time_us, ratio, by, slower)
