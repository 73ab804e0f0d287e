"""The hooks of portkern. Their docstrings are the specification.

A plugin is a module or object with functions marked ``@portkern.hookspecs.hookimpl`` under these
names. Packages offer theirs by the entry-point group ``portkern``. A plugin registered later is
asked first, so a package can override what is shipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from portkern.backend import Backend
    from portkern.op import Op
    from portkern.target import Device, Target

PROJECT = "portkern"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def portkern_parse_arch(text: str) -> Target | None:
    """The target that a user or a driver means by ``text``, or None if it is not this vendor's.

    Spellings: ``sm90``, ``sm_90a``, ``9.0``, ``gfx942:sramecc+:xnack-``. A neighbouring part that
    this plugin serves keeps its own arch in the Target (``sm89``, not ``sm80``).
    """


@hookspec(firstresult=True)
def portkern_device(properties: Any, index: int) -> Device | None:
    """The Device behind ``torch.cuda.get_device_properties(index)``, or None if it is not this
    plugin's. Limits come from the driver, identity from UUID or PCI address, never from the index.
    """


@hookspec(firstresult=True)
def portkern_backend(target: Target) -> Backend | None:
    """The Backend for ``target``, or None if this plugin does not serve it."""


@hookspec
def portkern_targets() -> Iterable[Target]:  # type: ignore[empty-body]
    """The targets that this plugin is written for: what ``--device all`` tunes offline."""


@hookspec
def portkern_environment() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Environment variables of this vendor that decide which devices are visible, each with a
    sentence about it; ``portkern doctor`` and ``portkern devices`` print those that are set."""


@hookspec
def portkern_ops() -> Iterable[Op]:  # type: ignore[empty-body]
    """Ops that this plugin brings."""
