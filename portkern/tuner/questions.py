"""What there is to find out: one ``Question`` for each op, problem and device.

Everything here is pure: the same code, device and records give the same candidates in the same
order, which is what lets an interrupted run go on and a second one find nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from portkern import dispatch, lookup
from portkern.config import Config
from portkern.errors import BadArgument, PortkernError, UnknownName
from portkern.fact import Fact
from portkern.gemm import copies
from portkern.kernel_hash import kernel_hash
from portkern.op import Case, Op
from portkern.plan import metas_of
from portkern.record import FrozenMap
from portkern.runtime import Runtime, planning_for
from portkern.target import Device
from portkern.toolchain import triton_series
from portkern.tuner.findings import Key, Known

SEED = 0
DEPTH = 3  # times the limit: how far down the ranking to look for candidates that launch
CLOSE = 1.5  # a variant whose best estimate is within this factor of the best is worth a try
# Of 478 problems of all ops, each measured with eight configs (docs/decisions.md), the first four held one within
# 0.3 % of the best in the mean; with the rest where one of the four beat the default by 1 %, within 0.1 %.
FIRST = 4
AHEAD = 0.99
ALIKE = 3  # where times of a problem alike are known: the default, and the two that were fastest there


@dataclass(frozen=True)
class Place:
    """Where questions are answered: the GPUs of one slug, the interpreter, or an absent target.

    ``slug`` and ``arch`` are what facts are filed under.
    """

    device: Device
    slug: str
    arch: str
    measured: bool
    indices: tuple[int, ...] = ()  # torch's, of the GPUs that share the work; none: the CPU

    @property
    def label(self) -> str:
        return self.slug if self.measured else f"{self.arch} (absent)"


@dataclass(frozen=True)
class Sorted:
    """``admitted`` are the configs that fit, the default first, then as worth trying; ``refused``
    those that do not, with reasons. ``scores`` are the plugin's estimates, where it has any."""

    admitted: tuple[Config, ...]
    refused: tuple[tuple[Config, str], ...]
    scores: Mapping[Config, float]


@dataclass(frozen=True)
class Question:
    """Which config is best for one problem at one place. ``args`` have Metas for tensors."""

    place: Place
    situation: dispatch.Situation
    case: Case
    dtype: str
    args: tuple[Any, ...]

    @cached_property
    def candidates(self) -> Sorted:
        """All configs that are proposed, sorted when first asked for: it takes some milliseconds."""
        return _sort(self.place, self.situation)

    @property
    def admitted(self) -> tuple[Config, ...]:
        return self.candidates.admitted

    @property
    def op(self) -> Op:
        return self.situation.op

    @property
    def default(self) -> Config | None:
        """What dispatch would run untuned; None if nothing fits."""
        return self.admitted[0] if self.admitted else None

    @property
    def key(self) -> Key:
        """As ``Fact.question``."""
        op = self.op
        key = self.situation.problem.key
        return (self.place.slug, op.name, kernel_hash(op), triton_series(), key)

    def fact(self, config: Config, outcome: str, provenance: FrozenMap[Any], **more: Any) -> Fact:
        """A fact about ``config`` for this question."""
        slug, op, kernel, toolchain, _ = self.key
        return Fact(
            device=slug,
            arch=self.place.arch,
            op=op,
            kernel_hash=kernel,
            toolchain=toolchain,
            problem=self.situation.problem,
            config=config,
            outcome=outcome,
            role="default" if config == self.default else "candidate",
            provenance=provenance,
            **more,
        )

    def chosen(self, known: Known, limit: int, alike: Mapping[Config, float]) -> list[Config]:
        """The configs to try, at most ``limit``, the default first.

        Those are the first ``FIRST`` that are admitted, and the rest only where one of them is faster than the
        default, so that the ranking was wrong. Configs that could not be launched are passed over, but not
        without end: where nothing launches, more of the same is no use. ``alike`` are times of a problem alike.
        """
        tried = [config for config in sorted(alike, key=lambda each: alike[each]) if config in self.admitted]
        order = dict.fromkeys((*self.admitted[:1], *tried, *self.admitted))
        near = [config for config in list(order)[: DEPTH * limit] if not _refused(known, config)]
        if tried:
            return near[: min(ALIKE, limit)]
        return near[: limit if self._surpassed(known, near[:FIRST]) else min(FIRST, limit)]

    def undecided(self, known: Known, limit: int, alike: Mapping[Config, float]) -> list[Config]:
        """Those of ``chosen`` that no outcome is known of."""
        return [config for config in self.chosen(known, limit, alike) if config not in known]

    def _surpassed(self, known: Known, first: Sequence[Config]) -> bool:
        """Whether all of ``first`` are decided, and the default is not the best of them."""
        if self.default is None or any(config not in known for config in first):
            return False
        found = known.get(self.default)
        if found is None or found.time_us is None:
            return True
        times = (known[config].time_us for config in first)
        return any(time is not None and time < AHEAD * found.time_us for time in times)


def request(question: Question) -> dict[str, Any]:
    """How a question's inputs are named to a child."""
    return {
        "op": question.op.name,
        "sizes": question.case.sizes,
        "options": dict(question.case.options),
        "dtype": question.dtype,
    }


def ask(runtime: Runtime, place: Place, op: Op, case: Case, dtype: str) -> Question:
    """The Question for one case of ``op``, planned without a launch.

    Raises BadArgument for sizes that the op makes no inputs of.
    """
    try:
        with planning_for(place.device):
            args = metas_of(arguments(op, case, dtype, torch.device("meta")))
    except (PortkernError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the op's input maker does with sizes that it did not expect
        shape = "x".join(map(str, case.sizes)) or "scalar"
        raise BadArgument(
            f"{op.name} cannot make inputs of shape {shape} and dtype {dtype}: {' '.join(str(error).split())[:200]}; "
            "leave shapes out for those that it proposes"
        ) from error
    situation = dispatch.situate(runtime, op, dispatch.input_key(op, args), place.device)
    return Question(place, situation, case, dtype, args)


def arguments(op: Op, case: Case, dtype: str, device: torch.device, style: str = "normal") -> tuple[Any, ...]:
    """The op's canonical arguments for ``case``: equal in every process.

    On the meta device they have no data; an op that cannot make such gets real ones on the CPU.
    """
    made = getattr(torch, dtype)
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(SEED)
        return op.inputs(case.sizes, made, device=device, generator=generator, style=style, **case.options)
    try:
        return op.inputs(case.sizes, made, device=device, generator=None, style=style, **case.options)
    except (NotImplementedError, RuntimeError):
        return arguments(op, case, dtype, torch.device("cpu"), style)


def _refused(known: Known, config: Config) -> bool:
    return config in known and known[config].outcome == "refused"


def _sort(place: Place, situation: dispatch.Situation) -> Sorted:
    """Defaults in the order in which dispatch would take them, candidates; those that fit, by rank."""
    defaults = lookup.default_layer(situation.op, situation.work, situation.device, situation.backend)
    proposed = (*(each.config for each in defaults), *dispatch.candidates(situation))
    admitted: list[Config] = []
    refused: list[tuple[Config, str]] = []
    scores: dict[Config, float] = {}
    for config in dict.fromkeys(proposed):
        blocks, reason = _fits(place, situation, config)
        if blocks is None:
            refused.append((config, reason))
            continue
        admitted.append(config)
        score = _estimate(situation, config, blocks)
        if score is not None:
            scores[config] = score
    ordered = (*admitted[:1], *_most_promising(admitted, scores))
    return Sorted(ordered, tuple(refused), scores)


def _fits(place: Place, situation: dispatch.Situation, config: Config) -> tuple[Any, str]:
    if config.variant in situation.work.waiting and place.measured and not place.indices:
        return None, (
            f"programs of {config.variant} wait for one another, and the interpreter runs them one "
            "after another: measure it on a GPU"
        )
    return lookup.fits(situation.op, situation.work, situation.device, situation.backend, config)


def _estimate(situation: dispatch.Situation, config: Config, blocks: Any) -> float | None:
    try:
        return situation.backend.estimate(situation.device, situation.work, config, blocks)
    except UnknownName:
        return None  # a kind that the plugin does not know: the op's own order stands


def _most_promising(configs: Sequence[Config], scores: Mapping[Config, float]) -> list[Config]:
    """All but the default, which comes first, by estimate, but first the best of each variant that is not far behind: a
    model errs most between variants. Before it the best that copies operands where the default does not, or the other
    way: operands that are worth a copy are those that a model knows least of."""
    default, configs = configs[0] if configs else None, configs[1:]
    ranked = sorted((config for config in configs if config in scores), key=lambda config: scores[config])
    otherwise = [config for config in ranked if default is not None and copies(config) != copies(default)][:1]
    first: dict[str, Config] = {}
    for config in ranked:
        if scores[config] <= CLOSE * scores[ranked[0]]:
            first.setdefault(config.variant, config)
    unscored = (config for config in configs if config not in scores)
    return list(dict.fromkeys((*otherwise, *first.values(), *ranked, *unscored)))
