"""``explain``: what dispatch would do for a call, and why, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from tabulate import tabulate

from portkern import dispatch, families
from portkern.errors import BadType, Infeasible, UnknownName
from portkern.fact import Fact
from portkern.lookup import Choice, fits
from portkern.op import Result
from portkern.plan import metas_of
from portkern.record import FrozenMap
from portkern.records import Here, differences, near_facts, records_of
from portkern.registry import get
from portkern.runtime import Runtime, current
from portkern.target import Device


@dataclass(frozen=True)
class NearRecord:
    """A measured record of the same family, and what keeps it from being an exact answer."""

    device: str
    problem: str
    config: str
    time_us: float | None
    distance: float
    differs: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """A config that cannot run here, and why."""

    config: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The answer of the lookup for one call. ``str()`` prints it; ``to_json()`` is for programs."""

    op: str
    device: str
    layer: str
    reason: str
    problem: str
    config: str
    blocks: FrozenMap[int]
    launches: tuple[str, ...]
    near: tuple[NearRecord, ...]
    refused: tuple[Refusal, ...]
    other_sizes: str = ""  # whether a call of other sizes is served without planning, or why not

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON types."""
        from dataclasses import asdict

        data = asdict(self)
        data["blocks"] = dict(self.blocks)
        return data

    def __str__(self) -> str:
        rows = [
            ("op", self.problem or self.op),
            ("device", self.device),
            ("layer", f"{self.layer}: {self.reason}"),
            ("config", self.config),
            ("blocks", " ".join(f"{name}={value}" for name, value in self.blocks.items())),
            ("launches", "\n".join(self.launches)),
            ("other sizes", self.other_sizes),
        ]
        parts = [tabulate([row for row in rows if row[1]], tablefmt="plain")]
        if self.near:
            table = [
                (each.device, each.problem, each.config, each.time_us, f"{each.distance:.2f}",
                 "; ".join(each.differs) or "nothing")
                for each in self.near
            ]  # fmt: skip
            headers = ("nearest records", "problem", "config", "us", "distance", "differs in")
            parts.append(tabulate(table, headers))
        if self.refused:
            table2 = [(each.config, each.reason) for each in self.refused]
            parts.append(tabulate(table2, ("refused candidates", "reason")))
        return "\n\n".join(parts)


def explain(op: str, *args: Any, device: Device | None = None, **kwargs: Any) -> Explanation:
    """Explain how ``op`` would run with these arguments: those of its public function.

    ``device`` plans for another device, present or not, instead of the tensors' own; tensors on
    torch's ``meta`` device stand for any. Raises UnknownName for an unknown op, BadType.
    """
    if not isinstance(device, (Device, NoneType)):
        raise BadType(
            f"explain(): argument 'device' must be a portkern.Device, not {type(device).__name__} "
            f"({device!r}); the command takes names: portkern explain {op} --device {device}"
        )
    found = get(op)
    canonical = found.signature(*args, **kwargs) if found.signature else args
    if isinstance(canonical, Result):
        return _without_kernel(
            op,
            "",
            "none",
            "the public function needs no kernel of this op here: nothing is to compute, or other ops do it",
        )
    return explain_canonical(op, canonical, device)


def explain_canonical(op: str, args: Sequence[Any], device: Device | None = None) -> Explanation:
    """``explain`` for the op's canonical arguments."""
    runtime, found = current(), get(op)
    if device is None:
        where = dispatch.common_device(found, args)
        if where.type == "cpu" and not dispatch.interpreting():
            return _reference_explanation(op)
        device = dispatch.target_device(runtime, where)
    situation = dispatch.situate(runtime, found, metas_of(args), device)
    choice = dispatch.resolve(runtime, situation)
    plan = situation.plan(choice)
    return Explanation(
        op=op,
        device=f"{device.name} ({device.target}, {'present' if device.present else 'absent'})"
        + (f"; {situation.backend.note}" if situation.backend.note else ""),
        layer=choice.layer,
        reason=choice.reason,
        problem=str(situation.problem),
        config=str(choice.config),
        blocks=choice.blocks,
        launches=tuple(
            f"{launch.kernel.fn.__name__} grid={'x'.join(map(str, launch.grid))}"
            + (" (programs wait for each other)" if launch.coresident else "")
            for launch in plan.launches
        ),
        near=_near(runtime, situation),
        refused=_refused(situation, choice),
        other_sizes=_other_sizes(runtime, situation, choice),
    )


def _other_sizes(runtime: Runtime, situation: dispatch.Situation, choice: Choice) -> str:
    """Whether calls that differ in sizes alone share this plan, as dispatch finds out when the second one comes."""
    if not (situation.op.traced and situation.backend.traced):
        return "planned one by one: the op or the plugin says traced=False"
    try:
        families.trace(runtime, dispatch.Planned(situation, choice, torch.device("meta")))
    except families.Untraceable as error:
        return f"planned one by one: {error}"
    return "served from this plan, where they answer its questions alike"


def _reference_explanation(op: str) -> Explanation:
    reason = (
        "CPU tensors are computed by the op's torch reference; set TRITON_INTERPRET=1 "
        "before starting Python to interpret the kernels instead"
    )
    return _without_kernel(op, "cpu", "reference", reason)


def _without_kernel(op: str, device: str, layer: str, reason: str) -> Explanation:
    return Explanation(
        op=op,
        device=device,
        layer=layer,
        reason=reason,
        problem="",
        config="",
        blocks=FrozenMap(),
        launches=(),
        near=(),
        refused=(),
    )


def _near(runtime: Runtime, situation: dispatch.Situation) -> tuple[NearRecord, ...]:
    """The five nearest records of every device, whether or not they were close enough to use."""
    here = Here(situation.op, situation.problem, situation.device)
    found: list[tuple[float, Fact]] = []
    for slug in runtime.database.slugs():
        found += near_facts(here, records_of(runtime, here.op, slug))
    found.sort(key=lambda pair: (pair[1].device != here.device.slug, pair[0]))  # equal ones keep their order
    return tuple(
        NearRecord(
            device=fact.device,
            problem=str(fact.problem),
            config=str(fact.config),
            time_us=fact.time_us,
            distance=gap,
            differs=tuple(differences(here, fact).values()),
        )
        for gap, fact in found[:5]
    )


def _refused(situation: dispatch.Situation, choice: Choice) -> tuple[Refusal, ...]:
    """What lookup passed over, then every candidate and variant that the plugin refuses."""
    op, work, device, backend = (
        situation.op,
        situation.work,
        situation.device,
        situation.backend,
    )
    found = {str(candidate.config): reason for candidate, reason in choice.passed_over}
    for variant in work.variants:
        try:
            backend.default(device, work, variant)
        except Infeasible as error:
            found.setdefault(variant, str(error))
        except UnknownName:
            continue  # an unknown kind or variant: the op's own candidates follow
    for config in dispatch.candidates(situation):
        _, refusal = fits(op, work, device, backend, config)
        if refusal:
            found.setdefault(str(config), refusal)
    return tuple(Refusal(config, reason) for config, reason in found.items())
