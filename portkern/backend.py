"""``Backend``: what a plugin gives for one target. It decides numbers; it never learns an op's name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from portkern.config import Blocks, Config
from portkern.problem import Work
from portkern.record import Record
from portkern.target import Device, Target


@dataclass(frozen=True)
class Resources(Record):
    """What the compiler says of one kernel: never a time.

    ``registers`` are 32-bit ones per thread (lane), ``spills`` the bytes per thread that went to
    memory, ``shared_bytes`` per program, ``occupancy`` the share of the unit's warp slots that
    resident programs can fill, ``programs_per_unit`` how many of them fit at once.
    """

    registers: int
    spills: int
    shared_bytes: int
    occupancy: float
    programs_per_unit: int
    matrix_instruction: str = ""


class Backend(ABC):
    """The choices for one target. ``note`` says whose choices a neighbouring part borrows, ``verified`` in a sentence
    how it was seen that code for the target is right; ``traced`` is as ``Op.traced``, for ``default`` and
    ``refuse``: False too where these go by the text of a size, as keys of a table may."""

    target: Target
    note: str = ""
    verified: str = ""
    traced: bool = True

    @abstractmethod
    def compile_target(self) -> tuple[str, int | str, int]:
        """The arguments of Triton's ``GPUTarget``: backend, arch in Triton's form, warp size."""

    @abstractmethod
    def reference_device(self) -> Device:
        """The part to plan for when no GPU of this target is present."""

    @abstractmethod
    def default(self, device: Device, work: Work, variant: str | None = None) -> Config:
        """The config to use when nothing was measured; of ``variant`` where that is given.

        Never fails for a known kind when ``variant`` is None. Raises Infeasible for a variant that
        the device cannot hold, UnknownName for a kind that this plugin does not know.
        """

    @abstractmethod
    def candidates(self, device: Device, work: Work) -> Iterable[Config]:
        """Configs worth measuring, best first, the default among them; not yet refused."""

    @abstractmethod
    def refuse(self, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        """Why ``config`` cannot run here, for a person to read, or None. ``blocks`` is what the
        op's ``fit`` made of it."""

    @abstractmethod
    def estimate(self, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        """The model's time in microseconds: only good for ranking, never shown as a time."""

    @abstractmethod
    def launch_options(self, config: Config) -> Mapping[str, Any]:
        """Keyword options for Triton: the config's own knobs, and what must never be left to a
        default that differs between Triton's backends (floating-point contraction)."""

    @abstractmethod
    def resources(self, device: Device, compiled: Any, num_warps: int) -> Resources:
        """Registers, spills, shared memory and occupancy of a Triton ``CompiledKernel``."""

    def fp8(self) -> tuple[str, bool]:
        """torch's name of the 8-bit float with 4 exponent bits that this target computes in, and whether it converts to
        it by an instruction; where it has none, what is most common is stored, converted by software."""
        return "float8_e4m3fn", False

    def tools(self) -> Mapping[str, str]:
        """Programs that ``resources`` runs, with their paths; an empty path says that one is missing."""
        return {}

    def executors(self) -> Mapping[str, Any]:
        """Further ways to run a plan for this target, by name: ``emulate``, a portkern.emulator.Emulator."""
        return {}
