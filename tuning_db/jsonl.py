"""Facts as text: one canonical JSON object a line, in files that are replaced whole."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

from portkern.errors import DatabaseError, InvalidRecord
from portkern.fact import SCHEMA, Fact
from portkern.record import canonical
from portkern.tuning_db.notices import Notices
from portkern.tuning_db.paths import Stamp, check_slug, slugs_in, stamp
from portkern.tuning_db.winners import export_order

SUFFIX = ".jsonl"
MAX_LINE = 1 << 20  # bytes; a fact takes about 600


def encode(fact: Fact) -> str:
    """The one line that stands for ``fact``, without its line end."""
    return canonical(fact)


def decode(text: str | bytes) -> Fact:
    """The fact that ``text`` describes. Raises InvalidRecord, whatever the text holds."""
    if len(text) > MAX_LINE:
        raise InvalidRecord(f"{len(text)} bytes or more, the limit for one fact is {MAX_LINE}")
    try:
        data = json.loads(text, parse_constant=_no_constant)
        newer = data.get("schema") if isinstance(data, dict) else None
        if isinstance(newer, int) and newer > SCHEMA:  # first, since what is unknown here may be right there
            raise InvalidRecord(f"schema {newer}, this portkern reads up to {SCHEMA}: upgrade portkern")
        return check(Fact.from_json(data))
    except InvalidRecord:
        raise
    except RecursionError:
        raise InvalidRecord("not a fact: nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise InvalidRecord(f"not a fact: {error}") from error


def check(fact: Fact) -> Fact:
    """``fact``, if it can be stored. Raises InvalidRecord otherwise."""
    check_slug(fact.device)
    try:
        fact.op.encode()
        fact.key  # noqa: B018  it needs every field to be JSON
    except (ValueError, TypeError) as error:
        raise InvalidRecord(f"the fact about {fact.op!r} cannot be stored: {error}") from error
    return fact


def write(path: Path, facts: Iterable[Fact], *, make_folder: bool = False) -> int:
    """Write ``facts`` sorted to ``path``, which holds either its old content or all of them.

    Returns how many. Raises DatabaseError naming the path when it cannot be written.
    """
    ordered = sorted({fact.key: fact for fact in facts}.values(), key=export_order)
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():
            raise DatabaseError(f"cannot export to {path}: it is no regular file; name a new file")
        with open(part, "x", encoding="ascii", newline="\n") as out:
            out.writelines(f"{encode(fact)}\n" for fact in ordered)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, target)
    except OSError as error:
        raise DatabaseError(
            f"cannot export to {path}: {error.strerror}; name a file in a folder that can be written"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return len(ordered)


class _File(NamedTuple):
    """What was read of one file, and its facts by op (None: all), decoded when they were first asked for."""

    stamp: Stamp
    lines: list[bytes]
    facts: dict[str | None, list[Fact]]


class Shipped:
    """The read-only folder of ``<slug>.jsonl`` files that portkern brings."""

    def __init__(self, folder: Path, notify: Notices) -> None:
        self.folder = folder
        self._notify = notify
        self._cache: dict[str, _File] = {}

    def path(self, slug: str) -> Path:
        """The file of ``slug``, whether or not it exists."""
        return self.folder / f"{check_slug(slug)}{SUFFIX}"

    def slugs(self) -> list[str]:
        """The devices that something is shipped for."""
        try:
            return slugs_in(self.folder, SUFFIX)
        except OSError as error:
            self._skip(self.folder, str(error))
            return []

    def facts(self, slug: str, op: str | None = None) -> list[Fact]:
        """The good facts of one device's file, of one op or of all; none if there is no file.

        A call of an op wants its own facts alone: lines that do not name it are left, since decoding takes the longest.
        """
        path = self.path(slug)
        try:
            now = stamp(path)
            cached = self._cache.get(slug)
            if cached is None or cached.stamp != now:
                cached = self._cache[slug] = _File(now, path.read_bytes().splitlines(), {})
        except FileNotFoundError:
            return []
        except OSError as error:
            self._skip(path, str(error))
            return []
        if op not in cached.facts:
            name = b"" if op is None else json.dumps(op).encode()
            lines = [(number, line) for number, line in enumerate(cached.lines, 1) if name in line]
            found = [fact for number, line in lines for fact in self._fact(path, number, line)]
            cached.facts[op] = [fact for fact in found if op in (None, fact.op)]
        return cached.facts[op]

    def _fact(self, path: Path, number: int, line: bytes) -> list[Fact]:
        if not line.strip():
            return []
        try:
            fact = decode(line)
            if fact.device != path.stem:
                raise InvalidRecord(f"it is about the device {fact.device!r}")
            return [fact]
        except InvalidRecord as error:
            self._skip(path, f"line {number}: {error}")
            return []

    def _skip(self, path: Path, reason: str) -> None:
        self._notify(
            "shipped",
            f"skipped shipped records of {path}: {reason}. Reinstall portkern to restore them.",
        )


def _no_constant(name: str) -> NoReturn:
    raise InvalidRecord(f"{name} is no JSON number")
