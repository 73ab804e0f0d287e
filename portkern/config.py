"""``Config``: the free parameters of one launch, as plugins propose and records store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from portkern.record import FrozenMap, Record, frozen_map


@dataclass(frozen=True)
class Config(Record):
    """Free parameters only: what follows from problem and device is derived by the op's ``fit``.

    ``params`` holds the tunable ``BLOCK_*``, ``PROGRAMS_PER_UNIT``, ``SPLITS`` and whatever else
    the kind names; ``options`` holds backend knobs (``waves_per_eu``, ``maxnreg``), which the
    plugin of the target filters.
    """

    variant: str
    params: FrozenMap[int] = field(default_factory=FrozenMap)
    num_warps: int = 4
    num_stages: int = 1
    options: FrozenMap[Any] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        self._require(bool(self.variant) and isinstance(self.variant, str), "variant is empty")
        self._set(
            params=frozen_map(self, "params", self.params, (int,)),
            options=frozen_map(self, "options", self.options, (int, float, str, bool)),
        )
        # Several are made at every new shape: messages only where they are needed.
        for name, value in self.params.items():
            if value < 0:
                self._require(False, f"{name} is {value}, expected 0 or more")
            if (name.startswith("BLOCK_") or "_BLOCK_" in name) and not _is_power_of_two(value):
                self._require(False, f"{name} is {value}, not a power of two")
        if (
            not isinstance(self.num_warps, int)
            or isinstance(self.num_warps, bool)
            or not _is_power_of_two(self.num_warps)
        ):
            self._require(False, f"num_warps is {self.num_warps!r}, not a power of two")
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            self._require(False, f"num_stages is {self.num_stages!r}, expected 1 or more")

    def __str__(self) -> str:
        params = " ".join(f"{name}={value}" for name, value in self.params.items())
        knobs = " ".join(f"{name}={value}" for name, value in self.options.items())
        parts = [self.variant, params, f"warps={self.num_warps} stages={self.num_stages}", knobs]
        return " ".join(part for part in parts if part)

    def replace(self, **changes: Any) -> Config:
        """A copy with fields changed; ``params`` and ``options`` given here are merged in."""
        values: dict[str, Any] = {
            "variant": self.variant,
            "params": self.params,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "options": self.options,
        }
        for name, change in changes.items():
            values[name] = {**values[name], **change} if isinstance(change, Mapping) else change
        return Config(**values)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


# What ``fit`` derives from a config: constexprs of the kernel, by name.
Blocks = FrozenMap[int]
