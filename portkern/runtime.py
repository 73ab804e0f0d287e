"""``Runtime``: the one piece of process state. Plugins, devices, records, plans and pins.

It is made at first use, replaceable (``with using(Runtime(...))``), and safe for threads and fork.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portkern.config import Config
from portkern.discovery import device_at
from portkern.discovery import devices as discover
from portkern.plugins import backend_for, plugin_manager
from portkern.target import Device, Target
from portkern.tuning_db import Database

if TYPE_CHECKING:
    import pluggy

    from portkern.backend import Backend
    from portkern.op import Op

MAX_PLANS = 4096  # prepared calls kept; the least recently used goes


class Cache:
    """A bounded, locked map: the least recently used entry goes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._items: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key not in self._items:
                return None
            self._items.move_to_end(key)
            return self._items[key]

    def put(self, key: Any, value: Any) -> None:
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > self._size:
                self._items.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._items.clear()

    def __len__(self) -> int:
        return len(self._items)


class Runtime:
    """Everything that portkern remembers in this process."""

    def __init__(
        self,
        *,
        plugins: pluggy.PluginManager | None = None,
        database: Database | None = None,
    ) -> None:
        self.plugins = plugin_manager() if plugins is None else plugins
        self.database = Database() if database is None else database
        self.ops: dict[str, Op] = {}
        self.plans = Cache(MAX_PLANS)
        self.indexes: dict[Any, Any] = {}  # lookup's views of the database, by slug and epoch
        self.bad: dict[tuple[str, str, Config], str] = {}  # configs that failed to launch here
        self.lock = threading.RLock()
        self._backends: dict[Target, Backend] = {}
        self._devices: dict[int, Device] = {}

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs of this machine that a plugin serves."""
        return discover(self.plugins)

    def device(self, index: int) -> Device:
        """The GPU with torch's ``index``."""
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = device_at(self.plugins, index)
        return found

    def backend(self, target: Target) -> Backend:
        """The plugin's Backend for ``target``."""
        found = self._backends.get(target)
        if found is None:
            found = self._backends[target] = backend_for(self.plugins, target)
        return found


class _Process:
    """Holds the Runtime, and forgets it in a forked child (its locks and files are the parent's)."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.lock = threading.Lock()
        if self.runtime is not None:
            ops = self.runtime.ops
            self.runtime = Runtime(plugins=self.runtime.plugins)
            self.runtime.ops.update(ops)


_process = _Process()
_pins: ContextVar[Mapping[str, Config]] = ContextVar("portkern_pins", default={})  # noqa: B039


def current() -> Runtime:
    """The Runtime of this process, made at first use."""
    found = _process.runtime
    if found is None:
        with _process.lock:
            if _process.runtime is None:
                _process.runtime = Runtime()
            found = _process.runtime
    return found


@contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Use ``runtime`` in this process until the block ends: for tests and workers."""
    before, _process.runtime = _process.runtime, runtime
    try:
        yield runtime
    finally:
        _process.runtime = before


@contextmanager
def pin(op: str, config: Config) -> Iterator[None]:
    """Use ``config`` for every call of ``op`` in this context (and thread) until the block ends.

    Raises Infeasible at the call if the device or the problem cannot take it.
    """
    token = _pins.set({**_pins.get(), op: config})
    try:
        yield
    finally:
        _pins.reset(token)


def pinned(op: str) -> Config | None:
    """The config that this context pins for ``op``."""
    return _pins.get().get(op)


def devices() -> tuple[Device, ...]:
    """The GPUs of this machine that portkern serves, with limits as their driver states them."""
    return current().devices
