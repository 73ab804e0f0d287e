"""``portkern db``: list, show, export and import the tuning database."""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portkern.cli._output import emit, say, table
from portkern.cli._parameters import common, words
from portkern.errors import DatabaseError, UnknownName

if TYPE_CHECKING:
    from portkern.fact import Fact
    from portkern.tuning_db import Database

MAX_REJECTED = 10  # lines of a bad file that are printed


@click.group(no_args_is_help=False)
def command() -> None:
    """The tuning database: list, show, export, import."""


@command.command("list")
@common
def list_(as_json: bool) -> None:
    """The devices that there are records about, with counts."""
    database = _database()
    found: list[dict[str, Any]] = []
    for slug in database.slugs():
        facts = database.facts(slug)
        found.append(
            {
                "slug": slug,
                "facts": len(facts),
                "outcomes": dict(sorted(Counter(fact.outcome for fact in facts).items())),
                "ops": sorted({fact.op for fact in facts}),
                "arch": sorted({fact.arch for fact in facts}),
                "quarantined": _quarantined(database, slug),
            }
        )
    rows = [
        (each["slug"], " ".join(each["arch"]), each["facts"], _counts(each["outcomes"]), " ".join(each["ops"]),
         each["quarantined"] or "")
        for each in found
    ]  # fmt: skip
    headers = ("device", "arch", "facts", "outcomes", "ops", "quarantined")
    text = table(headers, rows, ("ops",)) if rows else "No records yet; portkern tune makes some."
    data = {"home": str(database.home), "devices": found}
    emit("db-list", data, f"{text}\n\nhome: {database.home}", as_json)


@command.command()
@click.argument("slug")
@click.option("--op", help="Only this op.")
@click.option("--all", "everything", is_flag=True, help="Every fact, not only winners and defaults.")
@common
def show(slug: str, op: str | None, everything: bool, as_json: bool) -> None:
    """Winners and defaults recorded for SLUG, a device's name in the database."""
    from portkern.tuning_db import winners_only

    database = _database()
    facts = database.facts(_known_slug(database, slug), op)
    if op is not None and not facts:
        ops = ", ".join(sorted({fact.op for fact in database.facts(_known_slug(database, slug))}))
        raise UnknownName(f"nothing is recorded about op {op!r} on {slug}; there is about {ops}")
    shown = facts if everything else winners_only(facts)
    shown = sorted(shown, key=lambda fact: (fact.op, str(fact.problem), fact.time_us or 0.0))
    rows = [
        (str(fact.problem), fact.role, fact.outcome, _time(fact), str(fact.config), fact.toolchain,
         fact.kernel_hash[:8], fact.reason)
        for fact in shown
    ]  # fmt: skip
    headers = ("problem", "role", "outcome", "us", "config", "Triton", "kernel", "reason")
    emit("db-show", shown, table(headers, rows, ("reason",)), as_json)


@command.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--winners", is_flag=True, help="Only winners and defaults, as shipped files hold.")
@click.option("--device", "slugs", multiple=True, callback=words, metavar="SLUG", help="Only these.")
@common
def export_(file: Path, winners: bool, slugs: tuple[str, ...], as_json: bool) -> None:
    """Write facts to FILE, one JSON line each, replacing it whole."""
    database = _database()
    wanted = [_known_slug(database, slug) for slug in slugs] or None
    count = database.export(file, wanted, winners=winners)
    if count == 0:
        say("warning: there was nothing to export; portkern tune makes records")
    emit("db-export", {"file": str(file), "facts": count}, f"{count} facts written to {file}", as_json)


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@common
def import_(file: Path, as_json: bool) -> int:
    """Add the facts of FILE, which `portkern db export` wrote. Exits with 1 if lines were refused."""
    report = _database().import_file(file)
    if report.rejected and not report.added and not report.known:
        number, reason = report.rejected[0]
        advice = "" if "upgrade portkern" in reason else "; name a file that portkern db export wrote"
        raise DatabaseError(f"{file} holds no fact: line {number}: {reason}{advice}")
    rejected = [{"line": number, "reason": reason} for number, reason in report.rejected]
    text = f"{report.added} facts added, {report.known} already known, {len(rejected)} lines refused"
    if rejected:
        shown = [(each["line"], each["reason"]) for each in rejected[:MAX_REJECTED]]
        text += "\n\n" + table(("line", "refused because"), shown, ("refused because",))
    data = {"file": str(file), "added": report.added, "known": report.known, "rejected": rejected}
    emit("db-import", data, text, as_json)
    return int(bool(rejected))


def _database() -> Database:
    from portkern.runtime import current

    return current().database


def _quarantined(database: Database, slug: str) -> int | None:
    """None where the file cannot be read: the database has warned of it, and what is shipped still counts."""
    try:
        return len(database.quarantined(slug))
    except DatabaseError:
        return None


def _known_slug(database: Database, text: str) -> str:
    """The recorded slug that ``text`` means: itself, or a marketing name. Raises UnknownName."""
    from portkern.target import device_slug

    slug, known = device_slug(text), database.slugs()
    if slug in known:
        return slug
    close = difflib.get_close_matches(slug, known, 3, 0.4)
    advice = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known) or 'none yet'}"
    raise UnknownName(f"nothing is recorded about {text!r} (as {slug}); {advice}")


def _counts(outcomes: dict[str, Any]) -> str:
    return " ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def _time(fact: Fact) -> str:
    return "" if fact.time_us is None else f"{fact.time_us:.2f}"
