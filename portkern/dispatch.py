"""From a call to a launch: find the device, choose the config, plan, run. Never measures.

A prepared call (its plan and choice) is cached by op, input key, device and database epoch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from portkern import lookup
from portkern.backend import Backend
from portkern.config import Config
from portkern.errors import (
    DeviceMismatch,
    PluginError,
    PortkernError,
    UnknownName,
    UnsupportedDtype,
)
from portkern.executors import recall
from portkern.executors.launch import allocate, execute
from portkern.executors.replay import Call, prepare
from portkern.launch_failures import does_not_build, out_of_resources
from portkern.lookup import Choice
from portkern.op import Op, pack, unpack
from portkern.plan import Meta, Plan, metas_of
from portkern.problem import Problem, Work
from portkern.runtime import Runtime, current, pinned, sink
from portkern.target import Device
from portkern.toolchain import require_triton

ARCH_VARIABLE = "PORTKERN_ARCH"  # whose choices the interpreter follows
# The architecture as which kernels run: on CPU tensors in its emulator, on a GPU as code that the driver translates.
EMULATE_VARIABLE = "PORTKERN_EMULATE"


@dataclass(frozen=True)
class Situation:
    """One call resolved as far as the choice: what explain, tune, verify and dispatch share."""

    op: Op
    args: tuple[Any, ...]  # Metas in the place of tensors
    problem: Problem
    work: Work
    device: Device
    backend: Backend

    def plan(self, choice: Choice) -> Plan:
        """The plan that runs with ``choice``."""
        plan: Plan = _asked(self.op, "plan", choice.config, choice.blocks, self.device, *self.args)
        return plan


class Planned:
    """A plan that has run once on ``device``, and what Triton compiled for its launches."""

    def __init__(self, situation: Situation, choice: Choice, device: torch.device) -> None:
        self.situation, self.choice, self.device = situation, choice, device
        self.plan, self.options = situation.plan(choice), situation.backend.launch_options(choice.config)
        self.launched: list[Any] = []

    def execute(self, args: Sequence[Any], launched: list[Any] | None = None) -> Any:
        """Run it by Triton's own launch, or what stands in for a device."""
        run = executor(self.situation.backend, self.device)
        first: dict[str, Any] = {}
        if launched is not None and run is execute and self.device.type != "cpu":
            first = {"launched": launched, "start": partial(recall.start, known=current().recalled)}
        outputs = run(self.plan, args, self.device, self.options, **first)
        return pack(outputs, self.situation.op.listed)

    @cached_property
    def call(self) -> Call:
        """It as a function of the op's arguments."""
        args = self.situation.args
        places = {i: i for i, arg in enumerate(args) if isinstance(arg, Meta) or i in self.situation.op.values}
        return self.replay(args, places) or self.execute

    def replay(self, args: Sequence[Any], places: Mapping[int, int], hidden: int = 0) -> Call | None:
        """It as a function of a sequence in which ``places`` says where the tensors of ``args`` are, without the last
        ``hidden`` outputs (see ``executors.replay.prepare``); None where nothing was launched by Triton."""
        if not self.launched:
            return None

        # Not ``args`` themselves: a prepared call lasts, and would keep the memory of the tensors in them.
        constants = [None if i in places else arg for i, arg in enumerate(args)]

        def otherwise(given: Sequence[Any]) -> Any:
            outputs = self.execute([given[places[i]] if i in places else arg for i, arg in enumerate(constants)])
            return pack(unpack(outputs)[:-hidden]) if hidden else outputs

        return prepare(
            self.plan, self.launched, self.device.index, args, places, otherwise,
            listed=self.situation.op.listed, hidden=hidden, sink=sink(self.device) if hidden else None,
        )  # fmt: skip


def run(op: Op, args: Sequence[Any]) -> Any:
    """Run ``op`` on canonical arguments, on the device that its tensors lie on; give what its schema promises."""
    device = common_device(op, args)
    if device.type == "cpu" and not interpreting() and not emulated():
        return pack(_run_reference(op, args, device), op.listed)
    runtime = current()
    target = target_device(runtime, device)
    metas = input_key(op, args)
    key = _plan_key(runtime, op, metas, device, target)
    prepared = runtime.plans.get(key)
    if prepared is None:
        with runtime.lock:  # many threads make the first call of one op: one compiles
            prepared = runtime.plans.get(key)
            if prepared is None:
                prepared, outputs = _first_run(runtime, op, args, metas, device, target)
                runtime.plans.put(key, prepared)
                return outputs
    return prepared.call(args)


def planned(op: Op, args: Sequence[Any]) -> Planned | None:
    """What ``run`` planned for ``args`` and still keeps."""
    runtime, device = current(), common_device(op, args)
    key = _plan_key(runtime, op, input_key(op, args), device, target_device(runtime, device))
    found: Planned | None = runtime.plans.get(key)
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


def situate(runtime: Runtime, op: Op, args: Sequence[Any], device: Device) -> Situation:
    """Problem and work of a call with these ``args`` (Metas for tensors) on ``device``."""
    problem = _asked(op, "problem", *args)
    return Situation(op, tuple(args), problem, _asked(op, "work", problem), device, runtime.backend(device.target))


def _asked(op: Op, name: str, *args: Any) -> Any:
    """What a function of ``op`` gives. A fault in it is reported with the op's name and the function's."""
    try:
        return getattr(op, name)(*args)
    except PortkernError:
        raise
    except Exception as error:
        raise PluginError(f"op {op.name}: its {name}() raises {type(error).__name__}: {error}") from error


def resolve(runtime: Runtime, situation: Situation) -> Choice:
    """The lookup's answer for ``situation``."""
    return lookup.choose(
        runtime,
        situation.op,
        situation.problem,
        situation.work,
        situation.device,
        situation.backend,
    )


def candidates(situation: Situation) -> tuple[Config, ...]:
    """What is worth measuring, best first, not yet refused: the plugin's, or the op's own where
    the plugin does not know the kind of work."""
    try:
        return tuple(situation.backend.candidates(situation.device, situation.work))
    except UnknownName:
        if situation.op.candidates is None:
            raise
        return tuple(situation.op.candidates(situation.device, situation.work))


def target_device(runtime: Runtime, device: torch.device) -> Device:
    """The Device that tensors on ``device`` are planned for; the interpreter follows the choices of
    the architecture in PORTKERN_ARCH, or of the first plugin. Raises UnknownName for none."""
    if emulated():
        return reference_device(runtime, emulated())
    if device.type == "cpu":
        return _interpreted_device(runtime)
    if device.index is None:
        raise UnknownName(f"tensors on {device} name no GPU to plan for; pass device=, as from portkern.devices()")
    return runtime.device(device.index)


def common_device(op: Op, args: Sequence[Any]) -> torch.device:
    """The one device of all tensors in ``args``. Raises DeviceMismatch before anything runs."""
    found = dict.fromkeys(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "no tensor at all"
        raise DeviceMismatch(f"{op.name} got tensors on {names}; all must be on one device: use .to(device)")
    return next(iter(found))


def not_interpreted(situation: Situation) -> str:
    """Why Triton's interpreter would compute wrong numbers, or nothing."""
    if situation.work.dtypes.get("dot") != "bfloat16":
        return ""
    return (
        f"{situation.op.name}(): Triton's interpreter multiplies bfloat16 matrices wrongly; unset TRITON_INTERPRET, "
        "or convert to float32"
    )


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors: Triton's own reading of the variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "yes", "true", "on")


def emulated() -> str:
    """The architecture that is stood in for; empty where none is."""
    return "" if interpreting() else os.environ.get(EMULATE_VARIABLE, "")


def executor(backend: Backend, device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What runs a plan on tensors of ``device``: the launching executor, or what stands in for another architecture."""
    if not emulated():
        return execute
    if device.type == "cpu":
        from portkern.executors import emulate

        return partial(emulate.execute, backend=backend)
    from portkern.executors import translate

    return partial(translate.execute, backend=backend)


def reference_device(runtime: Runtime, arch: str) -> Device:
    """The plugin's reference device for ``arch``, as the user spells it."""
    from portkern.plugins import parse_arch

    return runtime.backend(parse_arch(runtime.plugins, arch)).reference_device()


def _interpreted_device(runtime: Runtime) -> Device:
    arch = os.environ.get(ARCH_VARIABLE)
    if arch:
        return reference_device(runtime, arch)
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


def _plan_key(runtime: Runtime, op: Op, metas: Sequence[Any], device: torch.device, target: Device) -> tuple[Any, ...]:
    """Everything that can change the choice, the plan or the code. Constants carry their type and spelling: 1, 1.0 and
    True are equal in Python, and so are 0.0 and -0.0."""
    constants = tuple(each if isinstance(each, Meta) else (type(each), repr(each)) for each in metas)
    place = (device.type, device.index, target.slug, target.target)
    return (op.name, id(op), constants, place, pinned(op.name), runtime.database.epoch())


def _run_reference(op: Op, args: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """CPU tensors: torch computes, into outputs of the layout that the kernels would give."""
    with torch.autocast("cpu", enabled=False):  # it was heeded where the arguments became canonical
        found = op.reference(*args)
    found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    outputs = tuple(allocate(buffer, device) for buffer in op.outputs(*metas_of(args)))
    for output, value in zip(outputs, found, strict=True):
        output.copy_(value)
    return outputs
