"""``pin``: every call of an op with one config, in a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from portkern.config import Config
from portkern.errors import BadType
from portkern.registry import get
from portkern.runtime import pins, pins_of_context


@contextmanager
def pin(op: str, config: Config) -> Iterator[None]:
    """Use ``config`` for every call of ``op`` in this context (and thread, and in the backward passes of what is
    computed here) until the block ends.

    Raises BadType for what is no Config, UnknownName for what is no op, and Infeasible at the call if the device or the
    problem cannot take it.
    """
    if not isinstance(op, str) or not isinstance(config, Config):
        raise BadType(f"pin() takes an op's name and a portkern.Config, not {op!r} and {type(config).__name__}")
    get(op)
    with pins({**pins_of_context.get(), op: config}):
        yield
