"""The GPUs of this machine, as their drivers state them and the plugins understand them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from portkern.errors import UnknownName
from portkern.plugins import device_from, environment, targets
from portkern.target import Device

if TYPE_CHECKING:
    import pluggy


class Variable(NamedTuple):
    """An environment variable that decides which GPUs are visible, and its value here."""

    name: str
    value: str
    remarks: tuple[str, ...]


def devices(pm: pluggy.PluginManager) -> tuple[Device, ...]:
    """The visible GPUs that a plugin serves, in torch's order; empty if there is none.

    Nothing is initialised where there is no GPU. Those that no plugin serves are ``unserved``.
    """
    found = (_ask(pm, index) for index in range(torch.cuda.device_count()))
    return tuple(device for device in found if device is not None)


def unserved(pm: pluggy.PluginManager) -> tuple[str, ...]:
    """Names of the visible GPUs that no plugin serves."""
    return tuple(
        str(torch.cuda.get_device_properties(index).name)
        for index in range(torch.cuda.device_count())
        if _ask(pm, index) is None
    )


def device_at(pm: pluggy.PluginManager, index: int) -> Device:
    """The GPU with torch's ``index``.

    Raises UnknownName if there is none, or if no plugin serves it.
    """
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        hidden = ", ".join(f"{name}={value!r}" for name, value, _ in visibility(pm))
        raise UnknownName(
            f"there is no GPU {index}: torch sees {count}"
            + (f" with {hidden}" if hidden else "")
            + ("" if count else "; is this a GPU build of torch, and is the driver loaded?")
        )
    device = _ask(pm, index)
    if device is None:
        name = torch.cuda.get_device_properties(index).name
        known = ", ".join(target.arch for target in targets(pm))
        raise UnknownName(
            f"no plugin serves GPU {index} ({name}); there are plugins for {known} and their "
            "neighbours: install a package that offers one for it"
        )
    return device


def visibility(pm: pluggy.PluginManager) -> tuple[Variable, ...]:
    """The variables that are set, of those that decide which GPUs are visible."""
    return tuple(
        Variable(name, os.environ[name], remarks) for name, remarks in environment(pm).items() if name in os.environ
    )


def _ask(pm: pluggy.PluginManager, index: int) -> Device | None:
    return device_from(pm, torch.cuda.get_device_properties(index), index)
