"""``Problem``, the key that decides which config is best, and ``Work``, what a plugin sees of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from portkern.record import FrozenMap, Record, canonical, frozen_map


@dataclass(frozen=True)
class Problem(Record):
    """The key of a record: never a pointer, never an index of a device.

    ``sizes`` are extents by name (``M``, ``N``); ``dtypes`` by operand; ``flags`` are the op's own
    switches; ``layout`` gives each operand's layout class (see ``portkern.layout``).
    """

    op: str
    sizes: FrozenMap[int]
    dtypes: FrozenMap[str]
    flags: FrozenMap[Any] = field(default_factory=FrozenMap)
    layout: FrozenMap[str] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or not self.op:
            self._require(False, f"op is {self.op!r}")
        self._set(
            sizes=frozen_map(self, "sizes", self.sizes, (int,)),
            dtypes=frozen_map(self, "dtypes", self.dtypes, (str,)),
            flags=frozen_map(self, "flags", self.flags, (bool, int, float, str)),
            layout=frozen_map(self, "layout", self.layout, (str,)),
        )
        for name, size in self.sizes.items():
            if size < 0:
                self._require(False, f"size {name} is {size}, expected 0 or more")

    @cached_property
    def key(self) -> str:
        """The exact key: canonical JSON of every field."""
        return canonical(self)

    @cached_property
    def family(self) -> str:
        """What tells problems apart but the sizes, within this process: records of one family differ only by size."""
        return f"{self.op} {self.dtypes} {self.flags} {self.layout}"

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in self.sizes.values())
        dtypes = "/".join(dict.fromkeys(self.dtypes.values()))
        flags = " ".join(f"{name}={value}" for name, value in self.flags.items())
        layout = ",".join(dict.fromkeys(self.layout.values()))
        return " ".join(part for part in (self.op, sizes, dtypes, flags, layout) if part)


@dataclass(frozen=True)
class Work(Record):
    """All that a plugin sees of an op: quantities, never a name.

    ``live`` is the number of 32-bit registers per element and lane that each variant keeps;
    ``reads`` and ``writes`` are the least bytes moved; ``partials`` is the scratch, in bytes, that
    each program writes where it also keeps sums over its rows (0: it keeps none); ``flops`` the
    arithmetic of a matrix unit, whose precision ``dtypes`` names (``dot``) apart from those of the
    operands. ``variants`` lists what the algorithm allows, and ``waiting`` those of them whose
    programs wait for one another, so that all must be resident at once.
    """

    kind: str
    sizes: FrozenMap[int]
    dtypes: FrozenMap[str]
    layout: FrozenMap[str]
    live: FrozenMap[float]
    reads: int
    writes: int
    variants: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    partials: int = 0
    flops: int = 0
    element_bytes: int = 4  # of the widest operand
    compute_bytes: int = 4  # of the accumulator: 8 for fp64
    chained: int = 0  # loads of a row that wait for the value of another one
    takes: tuple[str, ...] = ()  # parameters of the kind that not all kernels have, and these do

    def __post_init__(self) -> None:
        self._set(
            sizes=frozen_map(self, "sizes", self.sizes, (int,)),
            dtypes=frozen_map(self, "dtypes", self.dtypes, (str,)),
            layout=frozen_map(self, "layout", self.layout, (str,)),
            live=frozen_map(self, "live", self.live, (int, float)),
            variants=tuple(self.variants),
            waiting=tuple(self.waiting),
            takes=tuple(self.takes),
        )
        self._require(bool(self.kind), "kind is empty")
        self._require(bool(self.variants), "variants is empty: name at least one algorithm")
        lacking = [name for name in self.variants if name not in self.live]
        if lacking:
            self._require(False, f"live lacks {sorted(lacking)}")
        if len(self.waiting) >= len(self.variants) or not set(self.waiting) <= set(self.variants):
            self._require(False, f"waiting {self.waiting} must leave a variant of {self.variants} that does not wait")
