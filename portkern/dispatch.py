"""From a call to a launch: find the device, choose the config, plan, run. Never measures.

A prepared call (its plan and choice) is cached by op, input key, device and database epoch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from portkern import families
from portkern.errors import DeviceMismatch, PluginError, UnknownName, UnsupportedDtype
from portkern.executors.launch import allocate
from portkern.launch_failures import does_not_build, out_of_resources
from portkern.op import Op, pack
from portkern.plan import metas_of
from portkern.planned import EMULATE_VARIABLE as EMULATE_VARIABLE
from portkern.planned import Planned as Planned
from portkern.planned import emulated as emulated
from portkern.planned import executor as executor
from portkern.planned import interpreting as interpreting
from portkern.runtime import Runtime, current, pinned
from portkern.situation import Situation as Situation
from portkern.situation import candidates as candidates
from portkern.situation import not_interpreted as not_interpreted
from portkern.situation import resolve as resolve
from portkern.situation import situate as situate
from portkern.target import Device
from portkern.toolchain import require_triton

ARCH_VARIABLE = "PORTKERN_ARCH"  # whose choices the interpreter follows


def run(op: Op, args: Sequence[Any]) -> Any:
    """Run ``op`` on canonical arguments, on the device that its tensors lie on; give what its schema promises."""
    device = common_device(op, args)
    if device.type == "cpu" and not interpreting() and not emulated():
        return pack(_run_reference(op, args, device), op.listed)
    runtime = current()
    target = target_device(runtime, device)
    family, sizes = key = _key(runtime, op, args, device, target)
    prepared: Planned | None = runtime.plans.get(key)
    if prepared is not None:
        return prepared.call(args)
    served = families.served(runtime, family, sizes, device)
    if served is not None:
        try:
            outputs = served.call(args)
        except Exception as error:
            if not out_of_resources(error):
                raise
            families.forget(runtime, family, served)  # more programs than fit for other sizes did
        else:
            runtime.plans.put(key, served)
            return outputs
    with runtime.lock:  # many threads make the first call of one op: one compiles
        prepared = runtime.plans.get(key)
        if prepared is None:
            prepared, outputs = _first_run(runtime, op, args, input_key(op, args), device, target)
            runtime.plans.put(key, prepared)
            families.learn(runtime, family, prepared)
            return outputs
    return prepared.call(args)


def planned(op: Op, args: Sequence[Any]) -> Planned | None:
    """What ``run`` planned for ``args`` and still keeps."""
    runtime, device = current(), common_device(op, args)
    found: Planned | None = runtime.plans.get(_key(runtime, op, args, device, target_device(runtime, device)))
    return found


def _first_run(
    runtime: Runtime, op: Op, args: Sequence[Any], metas: tuple[Any, ...], device: torch.device, target: Device
) -> tuple[Planned, Any]:
    """Choose, compile and launch; a config that the device does not take makes room for the next one."""
    require_triton()
    while True:
        situation = situate(runtime, op, metas, target)
        if interpreting() and (wrong := not_interpreted(situation)):
            raise UnsupportedDtype(wrong)
        choice = resolve(runtime, situation)
        prepared = Planned(situation, choice, device)
        try:
            return prepared, prepared.execute(args, prepared.launched)
        except Exception as error:
            stored = choice.fact is not None
            if not out_of_resources(error) and not (stored and does_not_build(error)):
                raise
            # The compiler took more than the plugin's model said, or no longer takes a stored config: never again here.
            runtime.bad[(target.slug, situation.problem.key, choice.config)] = str(error)


def target_device(runtime: Runtime, device: torch.device) -> Device:
    """The Device that tensors on ``device`` are planned for; the interpreter follows the choices of
    the architecture in PORTKERN_ARCH, or of the first plugin. Raises UnknownName for none."""
    if emulated():
        return _asked_for(runtime, EMULATE_VARIABLE, emulated())
    if device.type == "cpu":
        return _interpreted_device(runtime)
    if device.index is None:
        raise UnknownName(f"tensors on {device} name no GPU to plan for; pass device=, as from portkern.devices()")
    return runtime.device(device.index)


def common_device(op: Op, args: Sequence[Any]) -> torch.device:
    """The one device of all tensors in ``args``. Raises DeviceMismatch before anything runs."""
    found = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found))) or "no tensor at all"
        raise DeviceMismatch(f"{op.name} got tensors on {names}; all must be on one device: use .to(device)")
    return next(iter(found))


def reference_device(runtime: Runtime, arch: str) -> Device:
    """The plugin's reference device for ``arch``, as the user spells it."""
    from portkern.plugins import parse_arch

    return runtime.backend(parse_arch(runtime.plugins, arch)).reference_device()


def _asked_for(runtime: Runtime, variable: str, arch: str) -> Device:
    """The reference device for what an environment variable says. Raises UnknownName, which names it."""
    try:
        return reference_device(runtime, arch)
    except UnknownName as error:
        raise UnknownName(f"{variable}={arch}: {error}") from None


def _interpreted_device(runtime: Runtime) -> Device:
    arch = os.environ.get(ARCH_VARIABLE)
    if arch:
        return _asked_for(runtime, ARCH_VARIABLE, arch)
    targets = [target for found in runtime.plugins.hook.portkern_targets() for target in found]
    if not targets:
        raise UnknownName("no plugin names a target for the interpreter; install or enable one")
    return runtime.backend(targets[0]).reference_device()


def input_key(op: Op, args: Sequence[Any]) -> tuple[Any, ...]:
    """What a call is planned from: Metas for tensors, None for what changes per call."""
    metas = metas_of(args)
    if not op.values:
        return metas
    return tuple(None if i in op.values else meta for i, meta in enumerate(metas))


def _key(
    runtime: Runtime, op: Op, args: Sequence[Any], device: torch.device, target: Device
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Everything that can change the choice, the plan or the code: what calls of one family have in common, and their
    sizes, in the order of ``families.sizes_of``.

    Of an address that is no multiple of 16 the remainder counts: what starts further into the tensor may be one.
    Constants carry their type, and floats are spelt: 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0.
    """
    place = (device.type, device.index, target.slug, target.target)
    family: list[Any] = [op.name, id(op), *place, pinned(op.name), runtime.database.epoch()]
    sizes: list[int] = []
    for position, arg in enumerate(args):
        kind = type(arg)
        if isinstance(arg, torch.Tensor):
            shape = arg.shape
            dense = arg.is_contiguous() and 1 not in shape and 0 not in shape
            family += (len(shape), dense, arg.dtype, arg.data_ptr() % 16)
            sizes += shape
            if not dense:
                sizes += arg.stride()
        elif position in op.values:
            family.append(None)
        elif isinstance(arg, (list, tuple)) and arg and all(type(each) is int for each in arg):
            family.append((kind, len(arg)))
            sizes += arg
        else:
            family += (kind, arg if kind in PLAIN else repr(arg))
    return tuple(family), tuple(sizes)


PLAIN = frozenset((int, bool, str, type(None), torch.dtype))  # equal and of one type: the same argument


def _run_reference(op: Op, args: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """CPU tensors: torch computes, into outputs of the layout that the kernels would give. Raises PluginError for a
    reference that gives others."""
    with torch.autocast("cpu", enabled=False):  # it was heeded where the arguments became canonical
        found = op.reference(*args)
    found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    outputs = tuple(allocate(buffer, device) for buffer in op.outputs(*metas_of(args)))
    shapes, wanted = [tuple(value.shape) for value in found], [tuple(output.shape) for output in outputs]
    if shapes != wanted:  # copy_ would broadcast a sum over the whole result
        raise PluginError(
            f"op {op.name}: its reference gives tensors of the shapes {shapes}, and its results have {wanted}: make it "
            "return all elements, without a reduction, expanded where they repeat"
        )
    for output, value in zip(outputs, found, strict=True):
        output.copy_(value)
    return outputs
