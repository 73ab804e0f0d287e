"""What code is made for (``Target``) and one GPU that runs it (``Device``)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from portkern.record import FrozenMap, Record, frozen_map


@dataclass(frozen=True)
class Target(Record):
    """An architecture to compile for; it may exist with no such GPU present.

    ``backend`` and ``warp_size`` are Triton's; ``arch`` is portkern's spelling
    (``sm80``, ``gfx942``), made by the plugin that parsed it.
    """

    backend: str
    arch: str
    warp_size: int

    def __post_init__(self) -> None:
        self._require(bool(self.backend), "backend is empty")
        self._require(
            bool(re.fullmatch(r"[a-z0-9]+", str(self.arch))),
            f"arch {self.arch!r} must be lower-case letters and digits, as in 'sm90'",
        )
        self._require(self.warp_size in (16, 32, 64), f"warp_size {self.warp_size!r} is not 16, 32, 64")

    def __str__(self) -> str:
        return self.arch


@dataclass(frozen=True)
class Device(Record):
    """One GPU with its limits and rates, as its driver states them.

    Limits are those of this very part: a plugin that serves a neighbouring architecture lends its
    choices, never its limits. For an absent target the plugin supplies a reference device.
    """

    target: Target
    name: str  # the marketing name as the driver gives it
    slug: str  # the database's file name, from device_slug()
    units: int  # SMs or CUs
    memory_bytes: int
    max_threads: int  # per program
    shared_bytes: int  # the most that one program may ask for
    shared_bytes_per_unit: int
    registers_per_unit: int  # 32-bit registers
    max_registers: int  # per thread (lane), of 32 bits
    max_warps_per_unit: int
    max_programs_per_unit: int
    cache_bytes: int  # last-level cache: what a cold-cache measurement has to flush
    memory_gbps: float  # nominal
    matrix_tflops: float  # nominal, dense 16-bit
    cooperative: bool  # programs can be launched so that all run at once
    driver: str = ""
    identity: str = ""  # UUID or PCI address; empty for a reference device
    index: int | None = None  # torch's index in this process; never stored, never a key
    extra: FrozenMap[str] = field(default_factory=FrozenMap)  # clocks, power limit: provenance

    _nested: ClassVar = {"target": Target}

    def __post_init__(self) -> None:
        self._require(isinstance(self.target, Target), f"target is {self.target!r}")
        for name in (
            "units", "memory_bytes", "max_threads", "shared_bytes", "shared_bytes_per_unit",
            "registers_per_unit", "max_registers", "max_warps_per_unit", "max_programs_per_unit",
        ):  # fmt: skip
            value = getattr(self, name)
            self._require(isinstance(value, int) and value > 0, f"{name} is {value!r}, expected a count above 0")
        self._require(self.slug == device_slug(self.slug), f"slug {self.slug!r} is not in device_slug's form")
        self._set(extra=frozen_map(self, "extra", self.extra, (str,)))

    @property
    def present(self) -> bool:
        """Whether this is a GPU of this machine rather than a reference device."""
        return self.index is not None

    def to_json(self) -> dict[str, Any]:
        """All fields but the index, which means nothing in another process."""
        data = super().to_json()
        data.pop("index")
        return data


# Words that vendors add to one part's name from one driver to the next; they pick no kernel.
_NOISE = re.compile(r"\b(\d+gb|hbm\d\w*|sxm\d?|oam|vf|corporation|instinct|graphics|geforce)\b")


def device_slug(name: str, partition: str = "") -> str:
    """The database's name for a device: the marketing name, normalised, plus a partition profile.

    ``"NVIDIA H100 80GB HBM3"`` and ``"NVIDIA H100"`` both give ``nvidia_h100``: the one place
    where names are normalised, for readers and writers alike. PCIe and NVL parts keep their
    suffix, since their clocks and memory differ.
    """
    text = _NOISE.sub(" ", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    slug = "_".join(text.split()) or "unknown"
    profile = re.sub(r"[^a-z0-9]+", "", partition.lower())  # one word: nothing in it is noise
    return f"{slug}_{profile}" if profile else slug
