"""Freezing: no lookup changes under a running service.

    portkern.freeze("service.lock")                                     writes a lock file, and freezes this process
    PORTKERN_MODE=frozen PORTKERN_LOCK=service.lock python serve.py     starts frozen by it

A frozen process asks no database. What the file has no entry for is answered by the plugin's default, which is a
function of the installed versions alone. ``portkern.lock_hash()`` tells ranks apart that are frozen by other files.
"""

from __future__ import annotations

import os
from pathlib import Path

from portkern.errors import BadLock
from portkern.kernel_hash import kernel_hash
from portkern.lock import MODE, Entry, Lock
from portkern.runtime import current


def freeze(path: str | os.PathLike[str]) -> str:
    """Write every config that this process has resolved to the lock file ``path``, and freeze this process by it.

    Those of the last 4,096 shapes that were planned, and of all that are called again and again. Returns the hash of
    the file's entries, as ``lock_hash`` does. From then on a lookup takes what the file says, or else the plugin's
    default, and no record. Raises BadLock if the file cannot be written.
    """
    runtime = current()
    known = () if runtime.frozen is None else runtime.frozen.entries.values()
    called = [prepared.planned for prepared in runtime.calls.values()]
    resolved = [
        Entry(each.situation.device.slug, each.situation.problem, each.choice.config, kernel_hash(each.situation.op))
        for each in (*called, *runtime.plans.values())
        if each.choice.layer != "pinned"  # in one context, for a while
    ]
    lock = Lock([*resolved, *known])
    lock.write(Path(path))
    runtime.frozen = lock
    runtime.families.clear()  # they were resolved by records
    return lock.hash


def lock_hash() -> str:
    """The hash of the lock file that this process is frozen by. Raises BadLock if it is not."""
    lock = current().frozen
    if lock is None:
        raise BadLock(f"this process is not frozen: call portkern.freeze(path), or start it with {MODE}=frozen")
    return lock.hash
