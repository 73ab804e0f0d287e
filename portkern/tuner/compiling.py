"""In the child: compile one config for a target, present or not, and say whether it fits there."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Mapping
from typing import Any

from portkern import dispatch, lookup, registry
from portkern.backend import Resources
from portkern.config import Config
from portkern.errors import CompileFailed, Infeasible
from portkern.executors.compile import build_launcher, compile_plan
from portkern.plan import Launch
from portkern.runtime import current
from portkern.target import Device


def compile_config(
    device: Mapping[str, Any],
    op: str,
    args: str,
    config: Mapping[str, Any],
    present: bool,
) -> dict[str, Any]:
    """Compile ``config`` as dispatch would launch it on ``device``, for pickled ``args`` with Metas.

    The answer is a ``reason`` against it, or ``resources``, one entry a launch. Triton keeps what
    was compiled on disk, so that a launch in another process finds it: the host's part of it too
    where such a device is ``present``.
    """
    where = Device.from_json(device)
    found = registry.get(op)
    metas = pickle.loads(base64.b64decode(args))  # from this process's own parent
    situation = dispatch.situate(current(), found, dispatch.input_key(found, metas), where)
    tried = Config.from_json(config)
    kernels: list[Any] = []
    try:
        plan = _plan(situation, tried)
        knobs = situation.backend.launch_options(tried)
        compiled = compile_plan(plan, metas, situation.backend, where, knobs, kernels)
    except (CompileFailed, Infeasible) as error:
        return {"reason": str(error), "resources": []}
    resources = [each.resources for each in compiled]
    pairs = zip(plan.launches, resources, strict=True)
    default = next(lookup.default_layer(situation.op, situation.work, where, situation.backend), None)
    spilling = default is not None and tried == default.config
    reason = next(filter(None, (against(launch, needs, where, spilling) for launch, needs in pairs)), "")
    if present and not reason:
        for kernel in kernels:
            build_launcher(kernel)
    return {
        "reason": reason,
        "resources": [each.to_json() for each in resources],
    }


def against(launch: Launch, needs: Resources, device: Device, spilling: bool = False) -> str:
    """Why a compiled launch is none to use on ``device``; empty if it is good.

    ``spilling``: registers in memory are none. So with the default, which runs where nothing is recorded: it is what
    candidates have to beat. Some bytes of a lane are what it can cost that one more program fits on a unit.
    """
    name = launch.kernel.fn.__name__
    if needs.spills and not spilling:
        return f"{name} spills {needs.spills:,} bytes a lane to memory at {needs.registers} registers"
    if needs.shared_bytes > device.shared_bytes:
        return (
            f"{name} takes {needs.shared_bytes:,} bytes of shared memory, over the "
            f"{device.shared_bytes:,} of {device.name}"
        )
    if needs.programs_per_unit < 1:
        return f"not one program of {name} fits on a unit of {device.name}"
    programs = math.prod(launch.grid)
    at_once = needs.programs_per_unit * device.units
    if launch.coresident and programs > at_once:
        return (
            f"the {programs} programs of {name} wait for one another, but {at_once} run at once "
            f"on {device.name} ({needs.programs_per_unit} a unit, as compiled)"
        )
    return ""


def _plan(situation: dispatch.Situation, config: Config) -> Any:
    blocks, reason = lookup.fits(situation.op, situation.work, situation.device, situation.backend, config)
    if blocks is None:
        raise Infeasible(reason)
    return situation.op.plan(config, blocks, situation.device, *situation.args)
