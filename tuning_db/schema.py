"""The tables of one database file, their version, and how older files become current ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from portkern.errors import InvalidRecord, NewerSchema
from portkern.fact import Fact
from portkern.record import canonical
from portkern.tuning_db.jsonl import decode
from portkern.tuning_db.paths import VARIABLE

# Rises with every change of the tables and with every change of portkern.fact.SCHEMA.
SCHEMA = 1

_TABLES = (
    "CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, op TEXT NOT NULL,"
    " family TEXT NOT NULL, device TEXT NOT NULL, json TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS facts_by_family ON facts (op, family, device)",
    "CREATE TABLE IF NOT EXISTS quarantine (key TEXT, json TEXT, reason TEXT, moved TEXT)",
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT)",
)
INSERT = "INSERT OR IGNORE INTO facts (key, op, family, device, json) VALUES (?, ?, ?, ?, ?)"
QUARANTINE = "INSERT INTO quarantine (key, json, reason, moved) VALUES (?, ?, ?, ?)"


def row(fact: Fact) -> tuple[str, str, str, str, str]:
    """The columns of ``INSERT``."""
    return (fact.key, fact.op, fact.problem.family, fact.device, canonical(fact))


def now() -> str:
    """The time in UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def version(connection: sqlite3.Connection, path: Path) -> int | None:
    """The file's version, or None if it holds no tables yet. Raises NewerSchema for a newer one."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if "meta" in names:  # a dump and reload of the file loses user_version
        for (value,) in connection.execute("SELECT value FROM meta WHERE name = 'schema'"):
            found = max(found, int(value) if str(value).isdecimal() else 0)
    if found > SCHEMA:
        raise NewerSchema(
            f"{path} has schema {found}, this portkern reads up to {SCHEMA}: upgrade portkern, or "
            f"set {VARIABLE} to another folder"
        )
    return found if "facts" in names else None


def select(found: int, op: str | None) -> tuple[str, tuple[str, ...]]:
    """The query for (rowid, key, op, json) of a file of version ``found``: of one op, or of all.

    Version 0 has no column for the op, which comes as None: its rows are of every op.
    """
    if found == 0:
        return "SELECT rowid, key, NULL, json FROM facts ORDER BY key", ()
    where, values = ("", ()) if op is None else (" WHERE op = ?", (op,))
    return f"SELECT rowid, key, op, json FROM facts{where} ORDER BY key", values


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create or migrate the tables, inside the caller's transaction."""
    found = version(connection, path)
    if found == SCHEMA:
        return
    for step in range(SCHEMA if found is None else found, SCHEMA):
        MIGRATIONS[step](connection)
    _create(connection)
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    about = (("schema", str(SCHEMA)), ("device", path.stem), ("prepared", now()))
    connection.executemany("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", about)


def _create(connection: sqlite3.Connection) -> None:
    for statement in _TABLES:  # executescript would commit the transaction
        connection.execute(statement)


def _from_0(connection: sqlite3.Connection) -> None:
    """Version 0 had no columns to look facts up by: only a key and the JSON."""
    connection.execute("ALTER TABLE facts RENAME TO facts_0")
    _create(connection)
    for key, text in connection.execute("SELECT key, json FROM facts_0").fetchall():
        try:
            connection.execute(INSERT, row(decode(text)))
        except InvalidRecord as error:
            connection.execute(QUARANTINE, (key, text, str(error), now()))
    connection.execute("DROP TABLE facts_0")


# The step from each older version to the next one.
MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {0: _from_0}
