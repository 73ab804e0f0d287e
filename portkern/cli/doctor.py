"""``portkern doctor``."""

from __future__ import annotations

import click

from portkern.cli._output import emit, table
from portkern.cli._parameters import common


@click.command(short_help="What is missing here, and what mends it.")
@common
def command(as_json: bool) -> int:
    """What portkern needs of this machine, what is missing, and the command that mends it.

    Exits with 1 if something that is needed does not work.
    """
    from portkern.doctor import BROKEN, WARN, broken, diagnose

    checks = diagnose()
    text = table(("", "check", "found"), [(each.status, each.name, each.value) for each in checks], ("found",))
    mend = [(each.name, each.remedy) for each in checks if each.remedy and each.status in (BROKEN, WARN)]
    if mend:
        text += "\n\n" + table(("to mend", "do"), mend)
    elif broken(checks):
        text += "\n\nSomething is broken; the lines marked so say what."
    else:
        text += "\n\nNothing to mend."
    data = {"healthy": not broken(checks), "checks": checks}
    emit("doctor", data, text, as_json)
    return int(broken(checks))
