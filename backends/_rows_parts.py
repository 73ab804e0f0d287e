"""What a plugin states for ops over rows in parts, which take few registers.

Kept whole, a row waits for its sums beside what it is multiplied by, or with what was computed of it before, and few
programs fit on a unit. In parts, only the row waits, as it was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from portkern.backends._shared import next_power_of_2
from portkern.config import Config
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

NARROW_BYTES = 2  # of an element
# Of kernels that Triton 3.6 compiled under the caps that the tables name: registers of addresses, masks and one part
# with its vectors, then for each element of a lane.
PART_REGISTERS = 22.0
KEPT_REGISTERS = 0.5
REREAD_REGISTERS = 0.25  # of a row that is read again
# Of the model's time: what was worked out from compiled code comes before what the model guesses, which errs by more
# than this.
STATED = 0.8


class Stated(NamedTuple):
    """A config for rows of more than ``beyond`` and up to ``longest`` elements, of ``element_bytes``.

    For ops that take more than ``above`` and up to ``live`` registers for each element of a lane in a whole row;
    ``shared``: for those whose rows share vectors (weights).
    """

    beyond: int
    longest: int
    variant: str
    params: FrozenMap[int]
    num_warps: int
    options: FrozenMap[Any] = FrozenMap()
    above: float = 0.0
    live: float = 10.0
    shared: bool = True
    element_bytes: int = NARROW_BYTES


def stated(entries: tuple[Stated, ...], device: Device, work: Work) -> Iterator[Config]:
    """The configs that fit the length of ``work``, the most promising first; none where a lane cannot read 16 bytes of
    each operand at once, or where rows are too few to fill the device. A call takes the first, the tuner all."""
    width, live = next_power_of_2(work.sizes["N"]), work.live.get("resident_row", 0.0)
    vectors = set(work.layout.values()) == {"n16"} and work.sizes["N"] % 16 == 0
    if "PARTS" not in work.takes or not vectors or work.sizes["M"] < device.units:
        return
    kind = ("EARLY" in work.takes, work.element_bytes)
    for entry in entries:
        fits = entry.beyond < width <= entry.longest and entry.above < live <= entry.live
        if fits and kind == (entry.shared, entry.element_bytes) and entry.variant in work.variants:
            yield Config(entry.variant, entry.params, entry.num_warps, options=entry.options)


def part_registers(work: Work, config: Config, elements: float) -> float | None:
    """Registers of a program that works its columns off in parts; None where it takes them whole."""
    if config.params.get("PARTS", 1) == 1 or "PARTS" not in work.takes:
        return None
    each = REREAD_REGISTERS if config.variant == "cached_row" else KEPT_REGISTERS * work.element_bytes / NARROW_BYTES
    return PART_REGISTERS + each * elements
