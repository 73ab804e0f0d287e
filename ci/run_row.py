"""Run one row of ci/matrix.toml in a fresh virtual environment. Needs Python 3.11 and nothing else.

python3 ci/run_row.py cpu               run the row
python3 ci/run_row.py cpu --print       print the command that sets up and tests, run nothing
python3 ci/run_row.py --github-matrix   print the rows as outputs of a GitHub job
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEYS = {
    "about": str,
    "hosted": bool,
    "labels": list,
    "image": str,
    "options": str,
    "python": str,
    "venv": str,
    "prepare": list,
    "install": str,
    "tests": str,
    "checks": list,
}

Row = dict[str, Any]


class BadMatrix(Exception):
    """The matrix, or what was asked of it, is wrong."""


def load(path: Path) -> dict[str, Row]:
    """The rows of a matrix file, by name, checked."""
    try:
        import tomllib
    except ModuleNotFoundError:
        version = ".".join(map(str, sys.version_info[:2]))
        raise BadMatrix(f"this is Python {version}: run it with 3.11 or newer") from None
    rows: dict[str, Row] = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, row in rows.items():
        if set(row) != set(KEYS):
            wrong = ", ".join(sorted(set(row) ^ set(KEYS)))
            raise BadMatrix(f"{path.name}: row {name}: missing or unknown: {wrong}")
        for key, kind in KEYS.items():
            if type(row[key]) is not kind:
                raise BadMatrix(f"{path.name}: row {name}: {key} is no {kind.__name__}")
        if not row["venv"].startswith(".venv"):
            raise BadMatrix(f"{path.name}: row {name}: venv {row['venv']!r} is not named .venv*")
    return rows


def command(row: Row) -> str:
    """The one shell line that sets up a row's environment and runs its tests."""
    python, pip = f"{row['venv']}/bin/python", f"{row['venv']}/bin/pip"
    steps = [
        f"python3 -m venv {row['venv']}",
        *row["prepare"],
        f"{pip} install {row['install']}",
        f"{python} -m pytest {row['tests']}".strip(),
    ]
    return " && ".join(steps)


def github_matrix(rows: dict[str, Row]) -> str:
    """``hosted=`` and ``gpu=`` lines, each a matrix for ``fromJSON``."""
    lines = []
    for output, hosted in (("hosted", True), ("gpu", False)):
        chosen = [{"name": name, **row} for name, row in rows.items() if row["hosted"] is hosted]
        lines.append(f"{output}={json.dumps({'include': chosen})}")
    return "\n".join(lines)


def run(name: str, row: Row, root: Path, *, replace: bool) -> int:
    """Run a row's command, then its checks. The exit status, 0 where all passed."""
    venv = root / row["venv"]
    if venv.exists():
        if not replace:
            raise BadMatrix(
                f"{row['venv']} exists, and a row runs in a fresh environment: add --replace to remove it first"
            )
        shutil.rmtree(venv)
    started = time.monotonic()
    failed = [] if _shell(command(row), root, os.environ) else ["set-up or tests"]
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if venv.exists():
        environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(venv)}
        failed += [check for check in row["checks"] if not _shell(check, root, environment)]
    outcome = f"FAILED: {', '.join(failed)}" if failed else "passed"
    _say(f"row {name}: {outcome} ({time.monotonic() - started:.0f} s)")
    return 1 if failed else 0


def _shell(line: str, root: Path, environment: Any) -> bool:
    _say(f"+ {line}")
    done = subprocess.run(["bash", "-c", line], cwd=root, env=dict(environment), stdin=subprocess.DEVNULL)
    return done.returncode == 0


def _say(text: str) -> None:
    print(text, flush=True)  # in order with what the commands print


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("row", nargs="?", help="name of the row")
    parser.add_argument("--print", action="store_true", help="print the command, run nothing")
    parser.add_argument("--replace", action="store_true", help="remove the row's old environment")
    parser.add_argument("--github-matrix", action="store_true", help="print the rows for GitHub")
    options = parser.parse_args(arguments)
    try:
        rows = load(ROOT / "ci" / "matrix.toml")
        if options.github_matrix:
            print(github_matrix(rows))
            return 0
        if options.row not in rows:
            raise BadMatrix(f"no row {options.row!r}; rows: {', '.join(rows)}")
        if options.print:
            print(command(rows[options.row]))
            return 0
        return run(options.row, rows[options.row], ROOT, replace=options.replace)
    except BadMatrix as error:
        print(f"run_row.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
