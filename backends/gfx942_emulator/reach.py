"""How memory instructions reach their memory: lanes that take part, loads, stores and atomic operations on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from portkern.backends.gfx942_emulator import atomics
from portkern.backends.gfx942_emulator.memory import Outside
from portkern.backends.gfx942_emulator.numbers import I64, U32, U64, Array
from portkern.backends.gfx942_emulator.operands import (
    PRIVATE_APERTURE,
    SHARED_APERTURE,
)
from portkern.backends.gfx942_emulator.state import LANES, Waves
from portkern.errors import UnmodelledInstruction

Where = Callable[[Waves], Array]  # byte addresses [n, 64], i64


class Lanes(NamedTuple):
    """The enabled lanes of an access, flat: which they are, and their addresses."""

    chosen: Any  # booleans [n, 64], or None for all
    addresses: Array

    def spread(self, w: Waves, values: Array) -> Array:
        if self.chosen is None:
            return values.reshape(w.count, LANES)
        full = np.zeros((w.count, LANES), values.dtype)
        full[self.chosen] = values
        return full

    def pick(self, w: Waves, values: Array) -> Array:
        values = np.broadcast_to(values, (w.count, LANES))
        return values.reshape(-1) if self.chosen is None else values[self.chosen]


def enabled(w: Waves, where: Array) -> Lanes:
    """The enabled lanes and their addresses."""
    where = np.broadcast_to(where, (w.count, LANES))
    if w.mask is None:
        return Lanes(None, where.reshape(-1))
    return Lanes(w.mask, where[w.mask])


class Memory(NamedTuple):
    """How one instruction reaches its memory: ``find`` gives the lanes that take part."""

    find: Callable[[Waves], Lanes]
    load: Callable[[Waves, Lanes, int, int], list[Array]]
    store: Callable[[Waves, Lanes, int, list[Array]], None]
    atomic: Callable[..., Array]


def global_memory(where: Where) -> Memory:
    """The buffers of the launch."""

    def find(w: Waves) -> Lanes:
        return enabled(w, where(w))

    def load(w: Waves, lanes: Lanes, size: int, count: int) -> list[Array]:
        try:
            return w.machine.space.load(lanes.addresses, size, count)
        except Outside as fault:
            raise w.machine.outside(w, lanes.chosen, fault) from None

    def store(w: Waves, lanes: Lanes, size: int, values: list[Array]) -> None:
        try:
            w.machine.space.store(lanes.addresses, size, values)
        except Outside as fault:
            raise w.machine.outside(w, lanes.chosen, fault) from None

    def atomic(w: Waves, lanes: Lanes, size: int, function: Any, *values: Array) -> Array:
        try:
            parts = w.machine.space.parts(lanes.addresses, size)
        except Outside as fault:
            raise w.machine.outside(w, lanes.chosen, fault) from None
        space = w.machine.space
        space.requested += 2 * size * len(lanes.addresses)
        found = np.empty(len(lanes.addresses), U64 if size == 8 else U32)
        for region, chosen in parts:
            offsets = lanes.addresses[chosen] - region.start
            found[chosen] = atomics.apply(region, offsets, size, function, *(value[chosen] for value in values))
            space._touch([(region, chosen)], lanes.addresses, size, 1)
        return found

    return Memory(find, load, store, atomic)


def private_memory(where: Where) -> Memory:
    """Private memory: each lane has its own bytes. Its atomic operations raise UnmodelledInstruction."""

    def find(w: Waves) -> Lanes:
        machine = w.machine
        offsets = where(w)
        taking = enabled(w, offsets)
        machine.check_private(w, taking.chosen, taking.addresses)
        own = (w.numbers()[:, None] * LANES + np.arange(LANES)) * machine.private_bytes
        return enabled(w, offsets + own)

    def load(w: Waves, lanes: Lanes, size: int, count: int) -> list[Array]:
        return [w.machine.private.load(lanes.addresses + size * number, size) for number in range(count)]

    def store(w: Waves, lanes: Lanes, size: int, values: list[Array]) -> None:
        for number, unit in enumerate(values):
            w.machine.private.store(lanes.addresses + size * number, size, unit)

    def atomic(w: Waves, lanes: Lanes, size: int, function: Any, *values: Array) -> Array:
        raise UnmodelledInstruction("an atomic operation on private memory")

    return Memory(find, load, store, atomic)


def flat_memory(where: Where) -> Memory:
    """Global memory. Raises UnmodelledInstruction where the upper half of an address says shared or private."""
    memory = global_memory(where)

    def find(w: Waves) -> Lanes:
        lanes = memory.find(w)
        upper = lanes.addresses >> 32
        if ((upper == SHARED_APERTURE) | (upper == PRIVATE_APERTURE)).any():
            raise UnmodelledInstruction("a flat address in shared or private memory")
        return lanes

    return memory._replace(find=find)


GLOBAL = global_memory(lambda w: np.empty(0, I64))
