"""The fixture that users get."""

from __future__ import annotations

from portkern.pytest_fixtures import emulated

__all__ = ["emulated"]
