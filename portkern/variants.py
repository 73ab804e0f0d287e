"""The config that each variant of a call gets when nothing was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from portkern import lookup
from portkern.config import Blocks, Config
from portkern.dispatch import Situation
from portkern.errors import Infeasible, UnknownName
from portkern.launch_failures import out_of_resources
from portkern.lookup import Choice
from portkern.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class VariantDefault:
    """A variant with its default config, or the reason why the device cannot hold it."""

    variant: str
    choice: Choice | None
    reason: str = ""


def variant_defaults(situation: Situation) -> Iterator[VariantDefault]:
    """One answer for each variant that the problem allows."""
    for variant in situation.work.variants:
        try:
            configs = _configs(situation, variant)
        except (Infeasible, UnknownName) as error:
            yield VariantDefault(variant, None, str(error))
            continue
        yield _first_fit(situation, variant, configs)


def plugin_default(situation: Situation) -> VariantDefault:
    """What runs when no record answers."""
    layer = lookup.default_layer(situation.op, situation.work, situation.device, situation.backend)
    return _first_fit(situation, "", (candidate.config for candidate in layer))


def variant_default(situation: Situation, variant: str) -> VariantDefault:
    """The answer for ``variant``. Raises UnknownName if the problem has no such variant."""
    for found in variant_defaults(situation):
        if found.variant == variant:
            return found
    known = ", ".join(situation.work.variants)
    raise UnknownName(f"{situation.problem} has no variant {variant!r}; it has {known}")


def run_fitting(situation: Situation, choice: Choice, run: Callable[[Plan, Mapping[str, Any]], T]) -> T:
    """``run(plan, launch options)`` of ``choice``; with fewer programs where they wait for each other and do not all
    fit, as dispatch would go on.

    Raises Infeasible if the device takes none of these, and whatever else ``run`` raises.
    """
    for config in (choice.config, *lookup.fewer_programs(choice.config, situation.work)):
        blocks, refusal = _fits(situation, config)
        if blocks is None:
            raise Infeasible(refusal)
        plan = situation.plan(dataclasses.replace(choice, config=config, blocks=blocks))
        try:
            return run(plan, situation.backend.launch_options(config))
        except Exception as error:
            if not out_of_resources(error) or config.variant not in situation.work.waiting:
                raise
    raise Infeasible(f"[{choice.config}] does not start on {situation.device.name}, even with one program a unit")


def _configs(situation: Situation, variant: str) -> Iterable[Config]:
    try:
        return (situation.backend.default(situation.device, situation.work, variant),)
    except UnknownName:
        if situation.op.candidates is None:
            raise
    candidates = situation.op.candidates(situation.device, situation.work)
    return tuple(config for config in candidates if config.variant == variant)


def _first_fit(situation: Situation, variant: str, configs: Iterable[Config]) -> VariantDefault:
    reason = "there is no candidate for it"
    for config in configs:
        blocks, refusal = _fits(situation, config)
        if blocks is not None:
            choice = Choice(config, blocks, "default", "its default")
            return VariantDefault(config.variant, choice)
        reason = f"[{config}] {refusal}"
    return VariantDefault(variant, None, reason)


def _fits(situation: Situation, config: Config) -> tuple[Blocks | None, str]:
    return lookup.fits(situation.op, situation.work, situation.device, situation.backend, config)
