"""Overrides what portkern ships for sm90: every default gets eight warps where the device takes them."""

from __future__ import annotations

from portkern.backend import Backend
from portkern.backends.nvidia_sm90 import Hopper
from portkern.config import Config
from portkern.hookspecs import hookimpl
from portkern.problem import Work
from portkern.target import Device, Target


class EightWarps(Hopper):
    """The shipped choices for sm90, with eight warps."""

    note = "defaults of portkern-example-plugin"

    def default(self, device: Device, work: Work, variant: str | None = None) -> Config:
        return super().default(device, work, variant).replace(num_warps=8)


@hookimpl
def portkern_backend(target: Target) -> Backend | None:
    return EightWarps(target) if target.arch == "sm90" else None
