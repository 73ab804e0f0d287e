"""``Runtime``: the one piece of process state. Plugins, devices, records, plans and pins.

It is made at first use, replaceable (``with using(Runtime(...))``), and safe for threads and fork.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portkern.config import Config
from portkern.discovery import device_at
from portkern.discovery import devices as discover
from portkern.lock import Lock, asked_for
from portkern.plugins import backend_for, plugin_manager
from portkern.target import Device, Target
from portkern.tuning_db import Database

if TYPE_CHECKING:
    import pluggy
    import torch

    from portkern.backend import Backend
    from portkern.op import Op
    from portkern.pointwise_object import Pointwise

SINK_BYTES = 1 << 20  # where an allocation would cost more than what is written
MAX_PLANS = 4096  # prepared calls kept; the least recently used goes
MAX_FAMILIES = 512  # of calls that differ in sizes alone; likewise


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

    def values(self) -> list[Any]:
        with self._lock:
            return list(self._items.values())

    def clear(self) -> None:
        with self._lock:
            self._items.clear()

    def __len__(self) -> int:
        return len(self._items)


class Recent:
    """A bounded map whose reader takes no lock: what was not asked for while ``size`` entries were new goes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self.young: dict[Any, Any] = {}  # to look in before ``get``
        self._old: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        found = self.young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Any, value: Any) -> None:
        with self._lock:
            if len(self.young) >= self._size:
                self.young, self._old = {}, self.young
            self.young[key] = value

    def values(self) -> list[Any]:
        """Of both ages."""
        with self._lock:
            return [*self._old.values(), *self.young.values()]

    def clear(self) -> None:
        with self._lock:
            self.young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self.young.keys() | self._old.keys())


class Runtime:
    """Everything that portkern remembers in this process."""

    def __init__(
        self,
        *,
        plugins: pluggy.PluginManager | None = None,
        database: Database | None = None,
        frozen: Callable[[], Lock | None] = asked_for,
    ) -> None:
        self.plugins = plugin_manager() if plugins is None else plugins
        self.database = Database() if database is None else database
        self.ops: dict[str, Op] = {}
        self.functions: dict[str, Callable[..., Any]] = {}  # of each op's canonical arguments
        self.plans = Cache(MAX_PLANS)  # by what the op is given
        self.families = Cache(MAX_FAMILIES)  # plans as functions of sizes
        self.calls = Recent(MAX_PLANS)  # by what the public function is given
        self.once = Recent(MAX_PLANS)  # what it was given once: the second time it is prepared
        self.recalled: set[str] = set()  # compiled kernels that a later process finds fast
        self.indexes: dict[Any, Any] = {}  # lookup's views of the database, by slug and epoch
        self.bad: dict[tuple[str, str, Config], str] = {}  # configs that failed to launch here
        self.frozen = frozen()  # the lock file that answers in the place of records
        self.lock = threading.RLock()
        self.interpreting = threading.RLock()  # Triton's interpreter keeps a launch in globals: one at a time
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

    def anew(self) -> Runtime:
        """Another one with the same plugins, ops and folders of records, and locks of its own."""
        database = Database(self.database.home, self.database.shipped)
        made = Runtime(plugins=self.plugins, database=database, frozen=lambda: self.frozen)
        made.ops.update(self.ops)
        made.functions.update(self.functions)
        return made


class _Process:
    """Holds the Runtime, and sets it aside in a forked child: its locks are the parent's.

    The child makes its own from it at first use, and most children use none. What belongs to the process whatever its
    Runtime is here too, and nowhere else.
    """

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.inherited: Runtime | None = None
        self.sinks: dict[torch.device, torch.Tensor] = {}
        self.libraries: dict[str, torch.library.Library] = {}
        self.declared: dict[str, Pointwise] = {}
        self.forks = 0
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def make(self) -> Runtime:
        """The Runtime for this process, which has none yet."""
        return Runtime() if self.inherited is None else self.inherited.anew()

    def inherit(self, runtime: Runtime | None) -> None:
        """Have none, until one like ``runtime`` (of a parent process) is asked for."""
        self.runtime, self.inherited = None, runtime

    def _forked(self) -> None:
        self.forks += 1
        self.lock = threading.Lock()
        self.inherit(self.runtime or self.inherited)


_process = _Process()
pins_of_context: ContextVar[Mapping[str, Config]] = ContextVar("portkern_pins", default={})  # noqa: B039
_planned_for: ContextVar[Device | None] = ContextVar("portkern_planned_for", default=None)


def current() -> Runtime:
    """The Runtime of this process, made at first use."""
    found = _process.runtime
    if found is None:
        with _process.lock:
            if _process.runtime is None:
                _process.runtime = _process.make()
            found = _process.runtime
    return found


def sink(device: torch.device) -> torch.Tensor:
    """Memory on ``device`` for results that nobody reads. The process keeps it, whatever its Runtime, since a captured
    graph may write there."""
    import torch

    with _process.lock:
        if device not in _process.sinks:
            _process.sinks[device] = torch.empty(SINK_BYTES, dtype=torch.uint8, device=device)
        return _process.sinks[device]


def libraries() -> dict[str, torch.library.Library]:
    """What was defined by ``torch.library``, by qualified name: torch's registry is the process's, and a Library undoes
    its work when it is collected."""
    return _process.libraries


def declared() -> dict[str, Pointwise]:
    """The latest ``@portkern.pointwise`` object of each name. A declaration is made once, when its module is imported,
    and is good in every Runtime: a pickle may name one that is no attribute of a module, and that no call has
    registered yet."""
    return _process.declared


@contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Use ``runtime`` in this process until the block ends: for tests and workers."""
    before, inherited, forks = _process.runtime, _process.inherited, _process.forks
    _process.runtime = runtime
    try:
        yield runtime
    finally:
        if _process.forks == forks:
            _process.runtime = before
        else:  # a child leaves the block that its parent entered
            _process.inherit(before or inherited)


@contextmanager
def pins(configs: Mapping[str, Config]) -> Iterator[None]:
    """Pin exactly ``configs``, by op, until the block ends."""
    token = pins_of_context.set(configs)
    try:
        yield
    finally:
        pins_of_context.reset(token)


def pinned(op: str) -> Config | None:
    """The config that this context pins for ``op``."""
    return pins_of_context.get().get(op)


@contextmanager
def planning_for(device: Device | None) -> Iterator[None]:
    """Until the block ends, arguments without data (on torch's meta device) are made for ``device``."""
    token = _planned_for.set(device)
    try:
        yield
    finally:
        _planned_for.reset(token)


def planned_for() -> Device | None:
    """The device that arguments without data are made for here; None where that is nobody's concern."""
    return _planned_for.get()


def devices() -> tuple[Device, ...]:
    """The GPUs of this machine that portkern serves, with limits as their driver states them."""
    return current().devices
