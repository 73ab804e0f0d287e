"""One call resolved as far as the choice of a config: what explain, tune, verify and dispatch share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portkern import lookup
from portkern.backend import Backend
from portkern.config import Config
from portkern.errors import PluginError, PortkernError, UnknownName
from portkern.lookup import Choice
from portkern.op import Op
from portkern.plan import Plan
from portkern.problem import Problem, Work
from portkern.runtime import Runtime
from portkern.target import Device


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


def not_interpreted(situation: Situation) -> str:
    """Why Triton's interpreter would compute wrong numbers, or nothing."""
    if situation.work.dtypes.get("dot") != "bfloat16":
        return ""
    return (
        f"{situation.op.name}(): Triton's interpreter multiplies bfloat16 matrices wrongly; unset TRITON_INTERPRET, "
        "or convert to float32"
    )
