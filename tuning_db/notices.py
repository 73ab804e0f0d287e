"""Warnings that are given once, and the advice that they carry."""

from __future__ import annotations

import warnings
from pathlib import Path

from portkern.tuning_db.paths import VARIABLE


class DatabaseWarning(UserWarning):
    """The tuning database could not be used as usual: answers are right, but may be slow."""


class Notices:
    """Gives each kind of warning once. Each Database has one."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warnings.warn(message, DatabaseWarning, stacklevel=4)


def unusable(path: Path, error: object) -> str:
    """The message for a home or file that cannot be used, with its remedy."""
    return (
        f"the tuning database cannot use {path}: {error}. Set {VARIABLE} to a folder that can be "
        "written, with free space."
    )
