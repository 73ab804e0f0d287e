"""``portkern_bakend`` should read ``portkern_backend``: portkern must say so at once."""

from __future__ import annotations

from typing import Any

from portkern.hookspecs import hookimpl


@hookimpl
def portkern_bakend(target: Any) -> None:
    return None
