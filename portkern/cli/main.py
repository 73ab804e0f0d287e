"""The group ``portkern``: it loads commands by name and turns every failure into one line."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

import click

from portkern._version import __version__
from portkern.cli._output import one_line, say
from portkern.cli._parameters import ops_option
from portkern.errors import PortkernError

COMMANDS = ("devices", "ops", "doctor", "explain", "compile", "tune", "bench", "verify", "db")
DEBUG = "PORTKERN_DEBUG"
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Commands(click.Group):
    """Commands are modules of this package; ``main`` maps exceptions to exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            close = difflib.get_close_matches(cmd_name, COMMANDS, 1)
            advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {cmd_name!r}; {advice}")
        command: click.Command = import_module(f"portkern.cli.{cmd_name}").command
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run and exit: 0 done, 1 failed or found something broken, 2 bad input, 130 interrupted."""
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        _open_streams()
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                result = super().main(given, prog_name or "portkern", complete_var, False, **extra)
            code = result if isinstance(result, int) else 0
        except Exception as error:
            if os.environ.get(DEBUG, "0") not in ("", "0"):
                raise
            code = _report(error)
        except KeyboardInterrupt:
            code = _report(click.Abort())
        sys.exit(code)


def _open_streams() -> None:
    """Let what is printed go nowhere where the shell closed a stream, which Python then leaves None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends


def _report(error: Exception) -> int:
    """Say in one line on stderr what went wrong, and what to do. Returns the exit code."""
    if isinstance(error, click.Abort):
        say("interrupted")
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        advice = f" (see {context.command_path} --help)" if context is not None else ""
        say(f"error: {one_line(error.format_message())}{advice}")
        return BAD_INPUT
    if isinstance(error, PortkernError):
        say(f"error: {one_line(error)}")
        return BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        say(f"error: {error.filename}: {error.strerror}; name another file or mend its permissions")
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        say(f"error: {error.strerror}; free some space, or write elsewhere")
        return FAILED
    if type(error).__name__ == "OutOfMemoryError":  # torch's: not imported for one name
        say(f"error: the device has too little free memory: use a smaller --shape ({one_line(error)})")
        return BAD_INPUT
    say(f"error: {type(error).__name__}: {one_line(error)}; set {DEBUG}=1 for the traceback")
    return FAILED


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    say(f"warning: {one_line(message)}")


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="portkern")
@ops_option
def portkern() -> None:
    """One Triton source per op, tuned for the GPU that runs it.

    Results go to stdout, progress and warnings to stderr. Every command takes --json and --help.
    """
