"""What is recorded, as the lookup and ``explain`` see it: indexed, in order, and compared with here and now."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from portkern.config import Config
from portkern.fact import LOST, POWER_LIMIT, Fact, comparable, winner
from portkern.kernel_hash import kernel_hash
from portkern.op import Op
from portkern.problem import Problem
from portkern.runtime import Runtime
from portkern.sizes import log2
from portkern.target import Device
from portkern.toolchain import triton_series

STALE = ("kernel", "toolchain")  # the differences that make a fact stale


@dataclass(frozen=True)
class Records:
    """What is known about one op on one device: winners, and the configs that must not run."""

    winners: dict[tuple[str, str], list[Fact]] = field(default_factory=dict)  # by outcome and family
    lost: dict[tuple[str, Config], list[Fact]] = field(default_factory=dict)  # by problem and config


@dataclass(frozen=True)
class Here:
    """One problem on one device, with today's kernel and toolchain: what records are compared with."""

    op: Op
    problem: Problem
    device: Device

    @property
    def power_limit(self) -> str | None:
        """The device's, as its driver gave it."""
        return self.device.extra.get(POWER_LIMIT)

    def state(self) -> tuple[str, str, str]:
        """Device, kernel and toolchain, as ``state_of`` gives them for a fact."""
        return (self.device.slug, kernel_hash(self.op), triton_series())

    def other_power(self, fact: Fact) -> bool:
        """Whether the fact was found at another power limit, as far as both are known."""
        return None not in (self.power_limit, fact.power_limit) and self.power_limit != fact.power_limit


def state_of(fact: Fact) -> tuple[str, str, str]:
    """The device, kernel and toolchain that the fact is evidence about."""
    return (fact.device, fact.kernel_hash, fact.toolchain)


def differences(here: Here, fact: Fact) -> dict[str, str]:
    """What keeps ``fact`` from being an exact and fresh answer, in words, by aspect. The one place that tells."""
    found: dict[str, str] = {}
    if fact.device != here.device.slug:
        found["device"] = f"on {fact.device}"
    if here.other_power(fact):
        found["power"] = f"at a power limit of {_watts(fact.power_limit)} (here {_watts(here.power_limit)})"
    for name, size in here.problem.sizes.items():
        other = fact.problem.sizes.get(name)
        if other != size:
            found[f"size {name}"] = f"{name} {other} for {size}"
    if fact.kernel_hash != kernel_hash(here.op):
        found["kernel"] = "the kernel has changed since"
    if fact.toolchain != triton_series():
        found["toolchain"] = f"with Triton {fact.toolchain:.20} (here {triton_series()})"
    return found


def is_stale(differs: Mapping[str, str]) -> bool:
    """Whether these ``differences`` mean an older (or newer) kernel or toolchain."""
    return any(aspect in differs for aspect in STALE)


def distance(a: Problem, b: Problem, within: float = math.inf) -> float:
    """Largest |log2 ratio| over the sizes; infinite between zero and non-zero, and beyond what a float holds.

    Only what is ``within`` that far need be exact.
    """
    if a.sizes.keys() != b.sizes.keys():
        return math.inf
    found = 0.0
    for name, size in a.sizes.items():
        other = b.sizes[name]
        small, large = (size, other) if size < other else (other, size)
        if small != large:
            if within == 1.0 and large > 2 * small:  # what dispatch asks for, and mostly the case
                return math.inf
            found = max(found, log2(large / small) if small << 64 > large else math.inf)
    return found


def near_facts(
    here: Here, records: Records, outcome: str = "measured", within: float = math.inf
) -> list[tuple[float, Fact]]:
    """Winners of the problem's family that are ``within`` a distance, with it, best first.

    Nearest; then the larger problem; then fresh, with the kernel of today, with the toolchain of
    today; the newest toolchain; this power limit, an unknown one, another; the fastest. Only what is
    equal in all of that goes by its content hash.
    """
    winners = records.winners.get((outcome, here.problem.family), ())
    found = []
    for fact in winners:
        gap = distance(here.problem, fact.problem, within)
        if gap <= within:
            found.append((gap, fact))
    if len(found) < 2:
        return found
    _, kernel, toolchain = here.state()

    def order(pair: tuple[float, Fact]) -> tuple[Any, ...]:
        gap, fact = pair
        sizes = fact.problem.sizes.values()
        value = fact.time_us if fact.outcome == "measured" else fact.score
        return (
            (gap, -math.prod(sizes), [-size for size in sizes]),
            (fact.kernel_hash != kernel, fact.toolchain != toolchain, _newest_first(fact.toolchain)),
            (here.other_power(fact), fact.power_limit != here.power_limit),
            (math.inf if value is None else value, fact.key),
        )

    return sorted(found, key=order)


def loss(here: Here, runtime: Runtime, config: Config, fact: Fact | None) -> Fact | None:
    """Why ``config`` must not run for this problem: the record of a wrong result, a crash or a timeout.

    A loss counts where it was found: on this device with the kernel and toolchain of today, or with
    the device, kernel and toolchain of ``fact``, which offers the config. Another kernel or
    toolchain makes other machine code, so an old loss does not bar a config for good.
    """
    found: list[Fact] = []
    for slug in dict.fromkeys((here.device.slug, fact.device if fact else here.device.slug)):
        lost = records_of(runtime, here.op, slug).lost
        found += lost.get((here.problem.key, config), ()) if lost else ()
    if not found:
        return None
    states = (here.state(), state_of(fact) if fact else None)
    return next((each for each in found if state_of(each) in states), None)


def loss_text(lost: Fact) -> str:
    """One loss in words: outcome, place, time and reason."""
    verdict = {"wrong": "wrong", "crashed": "as crashed", "timeout": "as a timeout"}[lost.outcome]
    when = lost.provenance.get("utc")
    text = f"recorded {verdict} for this problem on {lost.device}" + (f" at {when}" if when else "")
    return text + (f": {lost.reason}" if lost.reason else "")


def records_of(runtime: Runtime, op: Op, slug: str) -> Records:
    """What is known of ``op`` on ``slug``, indexed anew when the database's epoch moves.

    Reads without waiting and without writing: a user's call may need it.
    """
    key = (slug, op.name)
    epoch = runtime.database.epoch(slug)  # before the facts, which may be newer: then they are read again
    cached = runtime.indexes.get(key)
    if cached is None or cached[0] != epoch:
        cached = (epoch, index(runtime.database.facts(slug, op.name, wait=False)))
        runtime.indexes[key] = cached
    records: Records = cached[1]
    return records


def index(facts: Iterable[Fact]) -> Records:
    """The winner of each question at each power limit, and what was lost."""
    facts, records = list(facts), Records()
    for outcome in ("measured", "predicted"):
        for group in comparable(fact for fact in facts if fact.outcome in (outcome, *LOST)):
            best = winner(group)
            if best is not None:
                records.winners.setdefault((outcome, best.problem.family), []).append(best)
    for fact in facts:
        if fact.outcome in LOST:
            records.lost.setdefault((fact.problem.key, fact.config), []).append(fact)
    return records


@cache
def _newest_first(toolchain: str) -> list[int]:
    return [-int(number) for number in re.findall(r"\d{1,9}", toolchain)[:4]]


def _watts(milliwatts: str | None) -> str:
    if milliwatts is not None and re.fullmatch(r"[0-9]{1,12}", milliwatts):
        return f"{int(milliwatts) / 1000:g} W"
    return f"{milliwatts!r:.20}"
