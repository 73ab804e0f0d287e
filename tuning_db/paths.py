"""Where the database lies, and which names may become files in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from portkern.errors import InvalidRecord
from portkern.target import device_slug

VARIABLE = "PORTKERN_HOME"
SUFFIX = ".sqlite3"
NOWHERE = Path(os.devnull, "portkern")
MAX_SLUG = 100
SETTLED_NS = 2_000_000_000  # file systems may stamp two writes this close with one time

Stamp = tuple[int, int, int]


def home() -> Path:
    """The folder of the user's own records: ``PORTKERN_HOME``, or the user's data folder.

    Never raises. Where no home can be told, the path lies under the null device, where no folder
    can be made: the Database then says which variable to set.
    """
    from platformdirs import user_data_dir

    try:
        return absolute(os.environ.get(VARIABLE, "").strip() or user_data_dir("portkern"))
    except RuntimeError:  # platformdirs found no home directory for this user
        return NOWHERE


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` with ``~`` expanded and made absolute; links are kept as they are."""
    text = os.path.expanduser(path)
    try:
        resolved = os.path.abspath(text)
    except OSError:  # the working directory is gone
        resolved = ""
    unknown_home = text.startswith("~") and not os.path.exists(text)
    return NOWHERE if unknown_home or not resolved else Path(resolved)


def check_slug(slug: str) -> str:
    """``slug``, if it may name a file. Raises InvalidRecord otherwise."""
    if not isinstance(slug, str) or slug != device_slug(slug):
        raise InvalidRecord(
            f"device {slug!r} is not in device_slug's form: lower-case letters, digits and single "
            "underscores, as in 'nvidia_h200'"
        )
    if len(slug) > MAX_SLUG:
        raise InvalidRecord(f"device {slug[:20]}... has {len(slug)} letters, the limit is {MAX_SLUG}")
    return slug


def slugs_in(folder: Path, suffix: str) -> list[str]:
    """The slugs that have a file in ``folder``; none if there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(slug for slug in found if slug == device_slug(slug))


def stamp(path: Path) -> Stamp:
    """Inode, time of the last change, and size. Raises OSError as ``os.stat`` does."""
    stat = os.stat(path)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def settled(found: Stamp) -> bool:
    """Whether a later write must change the stamp: the last one is not too young."""
    return time.time_ns() - found[1] > SETTLED_NS
