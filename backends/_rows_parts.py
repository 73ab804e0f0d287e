"""What a plugin states for rows in parts, which take few registers, and for rows whose programs lag.

Kept whole, a row waits for its sums beside what it is multiplied by, or with what was computed of it before, and few
programs fit on a unit. In parts, only the row waits, as it was read.
A program that lags sums its next row before it waits for this one, so that the exchange takes place while it loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from portkern.config import Config
from portkern.integers import next_power_of_2
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device

NARROW_BYTES = 2  # of an element
OPTIONAL = frozenset({"EARLY", "LAG", "PAIRS", "PARTS"})  # parameters that not all kernels have
# Of kernels that Triton 3.6 compiled under the caps that the tables name: registers of addresses, masks and one part
# with its vectors, then for each element of a lane.
PART_REGISTERS = 22.0
KEPT_REGISTERS = 0.5
REREAD_REGISTERS = 0.25  # of a row that is read again
# Of the model's time: what was worked out from compiled code comes before what the model guesses, which errs by more
# than this.
STATED = 0.8


class Stated(NamedTuple):
    """A config for rows of more than ``beyond`` and up to ``longest`` elements of ``element_bytes``, of an op that
    reads ``operands`` of them and takes more than ``above`` and up to ``live`` registers for each element of a lane in
    a whole row; ``shared``: one whose rows share vectors (weights)."""

    beyond: int
    longest: int
    variant: str
    params: FrozenMap[int]
    num_warps: int
    options: FrozenMap[Any] = FrozenMap()
    above: float = 0.0
    live: float = 10.0
    element_bytes: int = NARROW_BYTES
    operands: int = 1
    shared: bool = True

    def suits(self, work: Work) -> bool:
        """Whether kernels of ``work`` take the parameters, and its rows are such ones."""
        wanted = OPTIONAL.intersection(self.params)
        numel, live = max(1, work.sizes["M"] * work.sizes["N"]), work.live.get("resident_row", 0.0)
        return (
            wanted <= set(work.takes)
            and self.shared == ("EARLY" in work.takes)
            and self.variant in work.variants
            and self.beyond < next_power_of_2(work.sizes["N"]) <= self.longest
            and self.above < live <= self.live
            and self.element_bytes == work.element_bytes
            and self.operands == round(work.reads / (numel * work.element_bytes))
        )


def stated(entries: tuple[Stated, ...], device: Device, work: Work) -> Iterator[Config]:
    """The configs that fit the length of ``work``, the most promising first; none where a lane cannot read 16 bytes of
    each operand at once, or where rows are too few to fill the device. A call takes the first, the tuner all."""
    if set(work.layout.values()) != {"n16"} or work.sizes["N"] % 16 or work.sizes["M"] < device.units:
        return
    for entry in entries:
        if entry.suits(work):
            yield Config(entry.variant, entry.params, entry.num_warps, options=entry.options)


def part_registers(work: Work, config: Config, elements: float) -> float | None:
    """Registers of a program that works its columns off in parts; None where it takes them whole."""
    if config.params.get("PARTS", 1) == 1 or "PARTS" not in work.takes:
        return None
    each = REREAD_REGISTERS if config.variant == "cached_row" else KEPT_REGISTERS * work.element_bytes / NARROW_BYTES
    return PART_REGISTERS + each * (1 + config.params.get("LAG", 0)) * elements
