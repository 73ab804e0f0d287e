"""Families of calls that differ in their sizes alone: planned once with traced sizes, then served without planning.

A trace (``portkern.sizes``) runs problem, work, lookup and plan of one call and notes every question that its sizes
answered, and those by which Triton specialises code. Another call of the family whose sizes answer alike has the same
plan with other numbers in it, the same config and the same compiled kernels: it costs the evaluation of those numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch

from portkern.broadcast import contiguous
from portkern.executors.replay import prepare
from portkern.lookup import Choice
from portkern.plan import Buffer, In, Meta, Out, Plan, Scratch
from portkern.planned import Planned
from portkern.runtime import Runtime
from portkern.situation import Situation, resolve, situate
from portkern.sizes import Made, Size, Trace, is_traced, plain

TRACED_FROM = 2  # shapes of a family that were planned: most ops of a process see one, and a trace costs a few plans
MEMBERS = 64  # traces of one family; what answers unlike all of them is planned as ever
FRUITLESS = 8  # traces of which none served: what reads its sizes as plain numbers has one for each shape
SPECIALISED_BYTES = 2**31  # below it some compilers address a tensor by other instructions


@dataclass(frozen=True)
class Member:
    """One traced plan: what holds for all sizes for which ``values`` gives something."""

    situation: Situation
    choice: Choice
    plan: Plan
    wanted: tuple[Size, ...]
    values: Made  # of the sizes of a call: the numbers in the place of ``wanted``, or None

    def settle(self, found: Any, values: Sequence[Any]) -> Any:
        """``found``, a part of this member, with the numbers of a call."""
        numbers = {each.name: value for each, value in zip(self.wanted, values, strict=True)}
        return settled(found, lambda size: numbers[size.name])


@dataclass
class Family:
    """The members of one family with what Triton compiled for each, and how many shapes were planned one by one."""

    members: list[tuple[Member, Any, list[Any]]] = field(default_factory=list)  # with the call and the kernels
    planned: int = 0
    serves: bool = False
    refused: str = ""  # why a call of this family could not be traced: it is not tried again


class Served(Planned):
    """A call whose plan is a member's, settled only when somebody asks for it."""

    def __init__(self, member: Member, values: Sequence[Any], call: Any, launched: list[Any], device: Any) -> None:
        self.member, self.values, self.launched, self.device = member, values, launched, device
        self._call = call

    @cached_property
    def call(self) -> Any:
        """As of ``Planned``; no code is made for it."""
        return self._with_values

    def _with_values(self, args: Sequence[Any]) -> Any:
        return self._call(args, self.values)

    @cached_property
    def situation(self) -> Situation:  # type: ignore[override]
        member = self.member
        found = {
            name: member.settle(getattr(member.situation, name), self.values) for name in ("args", "problem", "work")
        }
        return dataclasses.replace(member.situation, **found)

    @cached_property
    def choice(self) -> Choice:  # type: ignore[override]
        choice = self.member.choice
        return dataclasses.replace(choice, blocks=self.member.settle(choice.blocks, self.values))

    @cached_property
    def plan(self) -> Plan:  # type: ignore[override]
        found: Plan = self.member.settle(self.member.plan, self.values)
        return found

    @cached_property
    def options(self) -> Any:  # type: ignore[override]
        return self.situation.backend.launch_options(self.choice.config)


def served(runtime: Runtime, key: tuple[Any, ...], sizes: Sequence[int], device: torch.device) -> Served | None:
    """The plan of a member of the family with this ``key`` that holds for these ``sizes``, or None."""
    family: Family | None = runtime.families.get(key)
    if family is None:
        return None
    for member, call, launched in family.members:
        values = member.values(sizes)
        if values is not None:
            family.serves = True
            return Served(member, values, call, launched, device)
    return None


def forget(runtime: Runtime, key: tuple[Any, ...], found: Served) -> None:
    """Serve no more from the member of ``found``."""
    family: Family | None = runtime.families.get(key)
    if family is not None:
        family.members = [each for each in family.members if each[0] is not found.member]


def learn(runtime: Runtime, key: tuple[Any, ...], planned: Planned) -> None:
    """Note that a call was ``planned`` and has run; trace it where its family is seen again and again.

    Called under the runtime's lock. What cannot be traced is planned each time, as it was here.
    """
    situation = planned.situation
    if not (planned.launched and situation.op.traced and situation.backend.traced):
        return
    family: Family | None = runtime.families.get(key)
    if family is None:
        family = Family()
        runtime.families.put(key, family)
    family.planned += 1
    most = MEMBERS if family.serves else FRUITLESS
    if family.planned < TRACED_FROM or len(family.members) >= most or family.refused:
        return
    try:
        member = trace(runtime, planned)
    except Untraceable as error:
        family.refused = str(error)
        return
    call = _call(member, planned)
    if call is None:
        family.refused = "this Triton's launcher is unknown"
    else:
        family.members = [*family.members, (member, call, planned.launched)]


class Untraceable(Exception):
    """A plan that is no function of traced sizes. No caller sees it: such calls are planned one by one."""


def trace(runtime: Runtime, planned: Planned) -> Member:
    """What was ``planned``, as a function of the sizes of the call.

    Raises Untraceable where something keeps sizes, or gives another plan for traced ones.
    """
    noted, op = Trace(), planned.situation.op
    args = _traced(noted, planned.situation.args)
    try:
        situation = situate(runtime, op, args, planned.situation.device)
        # Records are found by the text of the flags.
        problem = dataclasses.replace(situation.problem, flags=settled(situation.problem.flags, Size.fixed))
        situation = dataclasses.replace(situation, problem=problem)
        noted.telling = True  # why a config was refused, with the sizes that it was refused for
        choice = resolve(runtime, situation)
        noted.telling = False
        choice = dataclasses.replace(
            choice, config=settled(choice.config, Size.fixed), fact=None, passed_over=(), reason=planned.choice.reason
        )
        plan = _specialised(situation.plan(choice), args)
        alike = choice.config == planned.choice.config and settled(plan, plain) == planned.plan
        parts = (plan, situation.args, situation.problem, situation.work, choice.blocks)
        wanted = tuple({each.name: each for each in sizes_in(parts)}.values())
        values = noted.function(wanted)
    except Exception as error:  # whatever a plan does with sizes that a trace does not know
        raise Untraceable(f"{op.name} with traced sizes: {type(error).__name__}: {error}") from error
    if not alike:
        raise Untraceable(f"{op.name} plans otherwise for traced sizes")
    noted.forget()
    return Member(situation, choice, plan, wanted, values)


def sizes_of(metas: Sequence[Any]) -> list[int]:
    """The sizes of a call: shapes, lists of integers, and strides where they do not follow from a shape."""
    noted = Trace()
    _traced(noted, metas)
    return [each.value for each in noted.variables]


def _traced(noted: Trace, metas: Sequence[Any]) -> tuple[Any, ...]:
    """``metas`` with their sizes as variables. Of dims of one element or none the shape does not tell the strides."""
    found: list[Any] = []
    for each in metas:
        if type(each) is Meta:
            shape: tuple[Any, ...] = tuple(map(noted.variable, each.shape))
            dense = each.strides == contiguous(each.shape) and 1 not in each.shape and 0 not in each.shape
            strides = contiguous(shape) if dense else tuple(map(noted.variable, each.strides))
            each = Meta(shape, strides, each.dtype, each.aligned)
        elif isinstance(each, tuple) and all(type(size) is int for size in each):
            each = tuple(map(noted.variable, each))
        found.append(each)
    return tuple(found)


def _specialised(plan: Plan, args: Sequence[Any]) -> Plan:
    """``plan`` with its constexprs fixed, having asked what Triton asks of a launch's arguments."""
    launches = []
    for launch in plan.launches:
        for argument in launch.args:
            _ask(argument, plan, args)
        rest = {
            name: settled(getattr(launch, name), Size.fixed)
            for name in ("constexprs", "options", "num_warps", "num_stages")
        }
        launches.append(dataclasses.replace(launch, **rest))
    for buffer in (*plan.outputs, *plan.scratch):
        _ = buffer.extent < SPECIALISED_BYTES
    for each in args:
        if isinstance(each, Meta):
            _ = Buffer(each.shape, each.strides, each.dtype).extent < SPECIALISED_BYTES
    return dataclasses.replace(plan, launches=tuple(launches))


def _ask(argument: Any, plan: Plan, args: Sequence[Any]) -> None:
    """Note what decides the code for ``argument``: a number that is 1, a multiple of 16 or of 64 bits, and whether the
    address of a pointer is a multiple of 16."""
    if isinstance(argument, tuple):
        for each in argument:
            _ask(each, plan, args)
    elif isinstance(argument, (In, Out, Scratch)):
        operand = _operand(argument, plan, args)
        past = argument.offset * operand.dtype.itemsize % 16
        # Of a tensor that is not aligned the family holds the remainder: 8 bytes further its elements may be.
        _ = past == 0 if getattr(operand, "aligned", True) else settled(past, Size.fixed)
    elif is_traced(argument):
        _ = argument == 1, argument % 16 == 0, argument < 2**31, argument >= -(2**31)
    elif any(True for _ in sizes_in(argument)):
        raise NotImplementedError(f"{type(argument).__name__} of traced sizes")  # a descriptor


def _operand(argument: In | Out | Scratch, plan: Plan, args: Sequence[Any]) -> Any:
    where: Sequence[Any] = args if isinstance(argument, In) else plan.outputs
    return (plan.scratch if isinstance(argument, Scratch) else where)[argument.position]


def _call(member: Member, planned: Planned) -> Any:
    """The member as a function of the op's arguments and of ``values``; None where Triton's launcher is unknown."""
    args = member.situation.args
    places = {i: i for i, arg in enumerate(args) if isinstance(arg, Meta) or i in member.situation.op.values}

    def otherwise(given: Sequence[Any], values: Sequence[Any]) -> Any:
        return Served(member, values, None, planned.launched, planned.device).execute(given)

    return prepare(
        member.plan, planned.launched, planned.device.index, args, places, otherwise,
        listed=member.situation.op.listed, sizes=[each.name for each in member.wanted],
    )  # fmt: skip


def sizes_in(found: Any) -> Iterator[Size]:
    """Every traced number in ``found``: in tuples, mappings and records, however deep."""
    if is_traced(found):
        yield found
    else:
        for part in _parts(found):
            yield from sizes_in(part)


def _parts(found: Any) -> Sequence[Any]:
    if isinstance(found, (tuple, list)):
        return found
    if isinstance(found, Mapping):
        return tuple(found.values())
    if is_dataclass(found) and not isinstance(found, type):
        return [getattr(found, each.name) for each in fields(found)]
    return ()


def settled(found: Any, number: Callable[[Any], Any]) -> Any:
    """``found`` with ``number(size)`` in the place of each traced number."""
    if is_traced(found):
        return number(found)
    if not any(True for _ in sizes_in(found)):
        return found
    parts = [settled(part, number) for part in _parts(found)]
    if isinstance(found, (tuple, list)):
        make = getattr(type(found), "_make", type(found))  # of a NamedTuple
        return make(parts)
    if isinstance(found, Mapping):
        kind: Any = type(found)
        return kind(dict(zip(found, parts, strict=True)))
    names = [each.name for each in fields(found)]
    return type(found)(**dict(zip(names, parts, strict=True)))
