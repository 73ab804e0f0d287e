"""The documents: the files that they name are there, links lead somewhere, and commands have the options shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from portkern.cli.main import portkern as cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tuning_db/shipped/*.md")])
COMMAND = re.compile(r"(?:^\s*|`|&& (?:\.venv/bin/)?)portkern ((?:--ops \S+ )?[a-z]+\b[^`#;&>\n]*)", re.MULTILINE)
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]*\w|\b[\w-]+\.(?:py|md|toml)\b")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".venv")}


def missing_files(text: str, page: Path) -> list[str]:
    """What ``text`` names in backticks as a file of this tree, or links to, that is not there."""
    named = [found for span in re.findall(r"`([^`\n]+)`", text) for found in FILE.findall(span)]
    # Names of a page's own examples, and paths of other programs, begin with no folder of this tree.
    ours = [name for name in named if name.split("/")[0] in FOLDERS or name.startswith("executors/")]
    lost = [name for name in ours if not (ROOT / name).exists() and not (ROOT / "portkern" / name).exists()]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    return lost + [link for link in links if not (page.parent / link).exists()]


def wrong_options(text: str) -> list[str]:
    """Commands of ``portkern`` in ``text`` that there are none of, and options that they do not take."""
    wrong = []
    for shown in COMMAND.findall(text):
        words = shlex.split(shown)
        words = words[2:] if words[0] == "--ops" else words
        command: click.Command | None = cli
        try:
            while isinstance(command, click.Group) and words:
                command = command.get_command(click.Context(command), words.pop(0))
        except click.UsageError:  # the group names what is close to it
            command = None
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} if command else set()
        options = {word for word in words if word.startswith("--")} - {"--help"}
        wrong += [shown] if command is None or options - known else []
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_files(text, page) == [] and wrong_options(text) == []


def test_commands_are_found() -> None:
    shown = COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(shown) > 10 and any(each.startswith("verify --device cuda:0 --as sm80") for each in shown)


@pytest.mark.parametrize(
    ("text", "files", "commands"),
    [
        ("`kernels/softmax.py`, `executors/recall.py`, [x](docs)", [], []),
        ("`kernels/sofmax.py` and [x](docs/none.md)", ["kernels/sofmax.py", "docs/none.md"], []),
        ("    portkern verify --device gfx942  # runs\n    portkern db export FILE --winners", [], []),
        ("    portkern verify --devise gfx942", [], ["verify --devise gfx942"]),
        ("run `portkern tunes`", [], ["tunes"]),
    ],
)
def test_mistakes_are_found(text: str, files: list[str], commands: list[str]) -> None:
    assert missing_files(text, ROOT / "README.md") == files
    assert [each.strip() for each in wrong_options(text)] == commands
