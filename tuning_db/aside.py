"""Setting a corrupt database file aside, once, however many processes find it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from portkern.errors import DatabaseError
from portkern.tuning_db.notices import unusable

_CORRUPT = ("malformed", "not a database", "no such table", "no such column", "has no column")


def is_corrupt(error: BaseException) -> bool:
    """Whether SQLite says that the file's content is at fault."""
    return isinstance(error, sqlite3.Error) and any(word in str(error) for word in _CORRUPT)


def set_aside(path: Path, error: Exception) -> Path | None:
    """Rename a corrupt ``path`` and its journal; the new name, or None if another process did.

    The journal goes too: it would be played back into the file that takes the name.
    Raises DatabaseError if the folder does not allow it.
    """
    moved = path.with_name(f"{path.name}.corrupt-{datetime.now():%Y%m%dT%H%M%S%f}")
    try:
        with _folder_lock(path.parent):
            if _sound(path):
                return None
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}-journal", f"{moved}-journal")
            os.rename(path, moved)
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise DatabaseError(unusable(path, f"{error}; and it cannot be renamed: {failure}")) from error
    return moved


def _sound(path: Path) -> bool:
    """Whether the file under this name is good by now, since another process replaced it."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as db:
            (tables,) = db.execute(
                "SELECT count(*) FROM sqlite_master WHERE name IN ('facts', 'quarantine', 'meta')"
            ).fetchone()
            if tables not in (0, 3):
                return False
            if tables:
                db.execute("SELECT key, op, family, device, json FROM facts LIMIT 0")
            return db.execute("PRAGMA integrity_check(1)").fetchall() == [("ok",)]
    except sqlite3.DatabaseError as error:
        return not is_corrupt(error)  # busy or full: not for us to move


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """One process at a time, where the platform and the file system can lock a folder."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network disks: the renames above still lose nothing
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
