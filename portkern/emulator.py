"""What a plugin's emulator looks like to portkern: machine code, typed arguments and memory in, counters out.

A Backend offers one under the name ``emulate`` among its ``executors()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from portkern.record import FrozenMap, Record, frozen_map

NAME = "emulate"


@dataclass(frozen=True)
class Span:
    """Memory that a kernel may touch, and no more: ``data`` is a numpy array of bytes, written in place.

    ``alignment`` is the address of its first byte modulo 256, which the emulated address keeps.
    """

    name: str
    data: Any
    alignment: int = 0


@dataclass(frozen=True)
class Address:
    """A pointer argument: ``offset`` bytes into span ``span``; a null pointer where ``span`` is None."""

    span: int | None
    offset: int = 0


@dataclass(frozen=True)
class Settings:
    """How to run. ``seed`` draws the order in which warps advance (None: in step); ``budget`` bounds the steps of
    groups of warps; ``count`` asks for the dear counters; ``registers`` also checks reads of registers that nothing
    wrote; ``upper`` puts the buffers where the highest bits of addresses are ones, if the target has such."""

    seed: int | None = 0
    budget: int = 20_000_000
    count: bool = False
    registers: bool = False
    upper: bool = False


@dataclass(frozen=True)
class Counters(Record):
    """What one launch did, never a time.

    ``instructions`` counts each once for every warp, ``by_class`` and ``by_instruction`` divide them; ``matrix`` counts
    matrix instructions; ``bytes_requested`` adds up what lanes asked of global memory; ``parted`` counts warps at
    branches where the warps of a group went different ways. With ``Settings.count`` also: ``bytes_touched``, distinct
    bytes of the buffers; ``shared_conflicts``, cycles lost to bank conflicts; ``lane_use``, the share of enabled lanes
    in vector instructions.
    """

    kernel: str
    programs: int
    warps: int
    instructions: int
    by_class: FrozenMap[int]
    by_instruction: FrozenMap[int]
    matrix: int
    bytes_requested: int
    bytes_touched: int
    shared_conflicts: int
    parted: int
    lane_use: float

    _nested: ClassVar = {}

    def __post_init__(self) -> None:
        for name in ("by_class", "by_instruction"):
            self._set(**{name: frozen_map(self, name, getattr(self, name), (int,))})


class Emulator(ABC):
    """Executes machine code of one target on the CPU."""

    @abstractmethod
    def prepare(self, compiled: Any, settings: Settings = Settings()) -> Any:  # noqa: B008 - frozen
        """A Triton ``CompiledKernel`` made ready to run.

        Raises EmulationError for code of another target, UnmodelledInstruction.
        """

    @abstractmethod
    def launch(
        self,
        kernel: Any,
        grid: Sequence[int],
        spans: Sequence[Span],
        arguments: Sequence[tuple[str, Any]],
        settings: Settings,
    ) -> Counters:
        """Run ``kernel``, from ``prepare``, on all programs of ``grid`` (three counts above 0).

        ``arguments`` are (Triton's name of the type, value), with an Address for each pointer. Raises EmulationError
        and its kinds, naming kernel, instruction, line, program, warp, lane and address.
        """
