"""Rows that the nearest cache keeps instead of registers: read again, so that a second row fits on a unit."""

from __future__ import annotations

from typing import Any, NamedTuple

from portkern.config import Config
from portkern.integers import next_power_of_2
from portkern.problem import Work
from portkern.record import FrozenMap

CACHED_BYTES = 2  # widest element of a row that is read again: of wider ones too little fits the cache
LEAN = 0.7  # registers for each element of a lane where a row is read again: of an op that reads nothing else


class Cached(NamedTuple):
    """One whole row of more than ``beyond`` and up to ``longest`` elements, kept by the nearest cache and read again,
    by an op that takes up to ``live`` registers for each element of a lane."""

    beyond: int
    longest: int
    num_warps: int
    options: FrozenMap[Any]
    live: float = LEAN


def cached_configs(entries: tuple[Cached, ...], work: Work) -> list[Config]:
    """What ``entries`` say for rows that are better read again than kept, the default first; none for other rows."""
    width, live = next_power_of_2(work.sizes["N"]), work.live.get("cached_row")
    if work.element_bytes > CACHED_BYTES or live is None:
        return []
    fitting = (entry for entry in entries if entry.beyond < width <= entry.longest and live <= entry.live)
    params = FrozenMap[int](PROGRAMS_PER_UNIT=0)
    return [Config("cached_row", params, entry.num_warps, options=entry.options) for entry in fitting]
