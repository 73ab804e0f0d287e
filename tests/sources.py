"""The source files of the project, for tests that read them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("portkern", "backends", "peers", "tuning_db")


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
