"""What the architecture plugins share: arithmetic, and a Backend that looks a kind's rules up.

A plugin states numbers; this file and one file per kind (``_rows.py``) turn them into configs. A
second kind is one more such file, and one more entry in each plugin's ``kinds``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from portkern.backend import Backend
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.problem import Work
from portkern.target import Device, Target, device_slug


@dataclass(frozen=True)
class Knob:
    """A vendor option of a Config: its legal values, and whether Triton takes it at launch.

    One that Triton does not take (``launch=False``) is for the op's plan, which makes it a
    constexpr.
    """

    values: tuple[Any, ...]
    launch: bool = True

    def takes(self, value: Any) -> bool:
        """Whether ``value`` is legal; ``True`` is no 1."""
        return any(value == legal and type(value) is type(legal) for legal in self.values)


# Of a product of float32: what a problem that permits tf32 may be given. A kernel's constexpr, in Triton's words.
PRECISION = Knob(("ieee", "tf32"), launch=False)


@dataclass(frozen=True)
class Part:
    """A reference part of one architecture, and the limits that no driver states.

    Where a GPU is present its driver's numbers replace these.
    """

    name: str
    units: int
    memory_bytes: int
    shared_bytes: int
    shared_bytes_per_unit: int
    registers_per_unit: int
    max_registers: int
    max_warps_per_unit: int
    max_programs_per_unit: int
    cache_bytes: int
    memory_gbps: float
    matrix_tflops: float
    transfers: int = 2  # per clock of the memory bus, as the driver states that clock

    def device(self, target: Target) -> Device:
        """The reference Device."""
        return Device(
            target=target,
            name=self.name,
            slug=device_slug(self.name),
            units=self.units,
            memory_bytes=self.memory_bytes,
            max_threads=1024,
            shared_bytes=self.shared_bytes,
            shared_bytes_per_unit=self.shared_bytes_per_unit,
            registers_per_unit=self.registers_per_unit,
            max_registers=self.max_registers,
            max_warps_per_unit=self.max_warps_per_unit,
            max_programs_per_unit=self.max_programs_per_unit,
            cache_bytes=self.cache_bytes,
            memory_gbps=self.memory_gbps,
            matrix_tflops=self.matrix_tflops,
            cooperative=True,
        )


def queried(properties: Any, name: str, otherwise: int = 0) -> int:
    """An integer of torch's device properties; ``otherwise`` where it is absent or 0."""
    return int(getattr(properties, name, 0) or 0) or otherwise


def queried_gbps(properties: Any, part: Part) -> float:
    """Nominal memory bandwidth: bus width times clock as the driver states them."""
    clock_khz = queried(properties, "memory_clock_rate")
    bits = queried(properties, "memory_bus_width")
    return clock_khz * part.transfers * bits / 8e6 if clock_khz and bits else part.memory_gbps


def pci_address(properties: Any) -> str:
    """``0000:3b:00.0``, or an empty string where the driver states none."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    bus, slot = int(properties.pci_bus_id), int(getattr(properties, "pci_device_id", 0))
    return f"{queried(properties, 'pci_domain_id'):04x}:{bus:02x}:{slot:02x}.0"


class Kind(ABC):
    """The rules of one kind of work; see Backend for what each method promises."""

    @abstractmethod
    def default(self, rules: CommonBackend, device: Device, work: Work, variant: str | None) -> Config: ...

    @abstractmethod
    def candidates(self, rules: CommonBackend, device: Device, work: Work) -> Iterable[Config]: ...

    @abstractmethod
    def refuse(
        self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks
    ) -> str | None: ...

    @abstractmethod
    def estimate(self, rules: CommonBackend, device: Device, work: Work, config: Config, blocks: Blocks) -> float: ...


class CommonBackend(Backend):
    """A Backend that has its vendor's rules, and its numbers per kind of work."""

    arch: ClassVar[str]  # whose choices these are; a neighbouring target borrows them
    parts: ClassVar[Mapping[str, Part]]  # by arch, the neighbours' too
    kinds: ClassVar[Mapping[str, Kind]]
    knobs: ClassVar[Mapping[str, Knob]]
    stages_in_shared: ClassVar[bool]  # whether prefetched tiles wait in shared memory
    register_margin: ClassVar[float]  # how far over a model the compiler's count may be

    def __init__(self, target: Target) -> None:
        self.target = target
        if target.arch != self.arch:
            self.note = f"{target.arch} borrows the choices of {self.arch}; limits are the device's own"
            self.verified = f"not verified; it borrows the choices of {self.arch}"

    @abstractmethod
    def programs_per_unit(self, device: Device, registers: int, shared_bytes: int, num_warps: int) -> int:
        """How many programs fit on one unit at once; 0 if not even one does."""

    @abstractmethod
    def stage_registers(self, element_bytes: int) -> float:
        """What a prefetched copy of a tile costs a lane, in registers for each of its elements."""

    def register_cap(self, device: Device, config: Config) -> int:
        """Registers that one lane may use before the compiler has to spill."""
        threads = config.num_warps * device.target.warp_size
        return min(device.max_registers, device.registers_per_unit // threads)

    def reference_device(self) -> Device:
        return self.parts[self.target.arch].device(self.target)

    def default(self, device: Device, work: Work, variant: str | None = None) -> Config:
        return self._kind(work).default(self, device, work, variant)

    def candidates(self, device: Device, work: Work) -> Iterable[Config]:
        return self._kind(work).candidates(self, device, work)

    def refuse(self, device: Device, work: Work, config: Config, blocks: Blocks) -> str | None:
        reason = (
            self.refuse_options(config.options)
            or _refuse_variant(device, work, config)
            or _refuse_threads(device, config)
        )
        if reason is None and work.kind in self.kinds:  # else the compiler decides
            reason = self.kinds[work.kind].refuse(self, device, work, config, blocks)
        return reason

    def estimate(self, device: Device, work: Work, config: Config, blocks: Blocks) -> float:
        if work.kind not in self.kinds:
            return (work.reads + work.writes) / (device.memory_gbps * 1e3)  # keeps their order
        return self.kinds[work.kind].estimate(self, device, work, config, blocks)

    def launch_options(self, config: Config) -> Mapping[str, Any]:
        reason = self.refuse_options(config.options)
        if reason:
            raise Infeasible(reason)
        launch = {k: v for k, v in config.options.items() if self.knobs[k].launch}
        return {**launch, "enable_fp_fusion": True}

    def refuse_options(self, options: Mapping[str, Any]) -> str | None:
        """Why these vendor options are none that the target takes, or None."""
        for name, value in options.items():
            if name not in self.knobs:
                return (
                    f"option {name!r} is unknown on {self.target}; it takes "
                    f"{', '.join(self.knobs) or 'none'}: leave {name!r} out"
                )
            if not self.knobs[name].takes(value):
                return f"option {name} is {value!r}; {self.target} takes one of {_listed(self.knobs[name].values)}"
        return None

    def _kind(self, work: Work) -> Kind:
        if work.kind not in self.kinds:
            raise UnknownName(
                f"the plugin of {self.arch} has no rules for the kind {work.kind!r}; it knows "
                f"{', '.join(self.kinds)}: give the op candidates of its own"
            )
        return self.kinds[work.kind]


def refuse_registers(rules: CommonBackend, device: Device, registers: float, config: Config) -> str | None:
    """Why a kernel that a model gives this many ``registers`` would spill, or None."""
    cap = rules.register_cap(device, config)
    registers *= rules.register_margin
    if registers <= cap:
        return None
    return (
        f"{config.variant} would take about {round(registers)} registers a lane with num_warps="
        f"{config.num_warps}, over the {cap} there are: use a smaller block, other warps or fewer "
        "stages"
    )


def refuse_shared(device: Device, shared_bytes: int, config: Config) -> str | None:
    """Why the prefetched tiles of ``config`` do not fit in shared memory, or None."""
    if shared_bytes <= device.shared_bytes:
        return None
    return (
        f"num_stages={config.num_stages} would take {shared_bytes:,} bytes of shared memory, over "
        f"the {device.shared_bytes:,} that {device.name} gives a program: use fewer stages or a "
        "smaller block"
    )


def _refuse_variant(device: Device, work: Work, config: Config) -> str | None:
    if config.variant not in work.variants:
        return f"variant {config.variant!r} is none of this work's: {', '.join(work.variants)}"
    if config.variant in work.waiting and not device.cooperative:
        return (
            f"{config.variant} waits for other programs, and {device.name} cannot launch them "
            f"together: use {' or '.join(v for v in work.variants if v not in work.waiting)}"
        )
    return None


def _refuse_threads(device: Device, config: Config) -> str | None:
    lanes = device.target.warp_size
    if config.num_warps * lanes <= device.max_threads:
        return None
    return (
        f"num_warps={config.num_warps} of {lanes} lanes are {config.num_warps * lanes} threads, "
        f"over the {device.max_threads} of {device.name}: use at most {device.max_threads // lanes}"
    )


def _listed(values: tuple[Any, ...]) -> str:
    return f"{values[0]} to {values[-1]}" if len(values) > 8 else ", ".join(map(str, values))
