"""Which config a call runs with, layer by layer, each with a printable reason.

pinned -> exact -> exact but stale -> near -> near and stale -> the same four of a sibling device of
the same architecture -> predicted -> the plugin's default. Nothing here measures or launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from portkern.backend import Backend
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.fact import Fact, winner
from portkern.kernel_hash import kernel_hash
from portkern.op import Op
from portkern.problem import Problem, Work
from portkern.runtime import Runtime, pinned
from portkern.target import Device
from portkern.toolchain import triton_series

MAX_DISTANCE = 1.0  # a factor of two in any size: farther records cost more than the default does

POWER_LIMIT = "power_limit_mw"  # in Device.extra and in a fact's provenance

Index = dict[tuple[str, str], list[Fact]]  # winners by (op, family)


@dataclass(frozen=True)
class Candidate:
    """A config that a layer offers."""

    layer: str
    config: Config
    reason: str
    fact: Fact | None = None
    distance: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The config that answers, with the blocks that ``fit`` derived and why it was taken."""

    config: Config
    blocks: Blocks
    layer: str
    reason: str
    fact: Fact | None = None
    passed_over: tuple[tuple[Candidate, str], ...] = ()


def choose(runtime: Runtime, op: Op, problem: Problem, work: Work, device: Device, backend: Backend) -> Choice:
    """The config for ``problem`` on ``device``. Raises Infeasible when nothing can run."""
    passed_over: list[tuple[Candidate, str]] = []
    for candidate in _layers(runtime, op, problem, work, device, backend):
        blocks, refusal = admit(runtime, op, problem, work, device, backend, candidate.config)
        if blocks is not None:
            return Choice(
                candidate.config,
                blocks,
                candidate.layer,
                candidate.reason,
                candidate.fact,
                tuple(passed_over),
            )
        if candidate.layer == "pinned":
            raise Infeasible(
                f"the pinned config [{candidate.config}] cannot run {problem} on {device.name}: "
                f"{refusal}; pin another one or leave the pin() block"
            )
        passed_over.append((candidate, refusal))
    reasons = "; ".join(f"[{candidate.config}] {refusal}" for candidate, refusal in passed_over)
    raise Infeasible(f"no config of {op.name} can run {problem} on {device.name}: {reasons}")


def admit(
    runtime: Runtime,
    op: Op,
    problem: Problem,
    work: Work,
    device: Device,
    backend: Backend,
    config: Config,
) -> tuple[Blocks | None, str]:
    """The blocks of ``config`` if it can run here, or None and the reason why it cannot."""
    bad = runtime.bad.get((device.slug, problem.key, config))
    if bad is not None:
        return None, f"it failed to launch in this process: {bad}"
    return fits(op, work, device, backend, config)


def fits(op: Op, work: Work, device: Device, backend: Backend, config: Config) -> tuple[Blocks | None, str]:
    """``admit`` without the memory of failed launches: what the tuner asks of a candidate."""
    if config.variant not in work.variants:
        return None, f"variant {config.variant!r} does not apply; this problem has {work.variants}"
    try:
        blocks = op.fit(config, work, device)
    except Infeasible as error:
        return None, str(error)
    refusal = backend.refuse(device, work, config, blocks)
    return (None, refusal) if refusal else (blocks, "")


def distance(a: Problem, b: Problem) -> float:
    """Largest |log2 ratio| over the sizes; infinite between zero and non-zero."""
    if a.sizes.keys() != b.sizes.keys():
        return math.inf
    found = 0.0
    for name, size in a.sizes.items():
        other = b.sizes[name]
        if size == other:
            continue
        found = max(found, abs(math.log2(size / other)) if size and other else math.inf)
    return found


def near_facts(index: Index, problem: Problem) -> list[tuple[float, Fact]]:
    """Winners of the same family, nearest first; ties go to the larger problem."""
    found = [(distance(problem, fact.problem), fact) for fact in index.get((problem.op, problem.family), ())]
    return sorted(found, key=lambda pair: (pair[0], [-size for size in pair[1].problem.sizes.values()]))


def _layers(
    runtime: Runtime, op: Op, problem: Problem, work: Work, device: Device, backend: Backend
) -> Iterator[Candidate]:
    pin = pinned(op.name)
    if pin is not None:
        yield Candidate("pinned", pin, "pinned by this context")
    yield from _device_layers(runtime, op, problem, device, device.slug, "")
    for slug in sibling_slugs(runtime, op, device):
        yield from _device_layers(runtime, op, problem, device, slug, "sibling ")
    predictions = index_of(runtime, op, device.target.arch, "predicted")
    for gap, fact in near_facts(predictions, problem):
        if gap <= MAX_DISTANCE and not _differences(op, fact):
            what = "predicted for it" if gap == 0 else f"predicted for {fact.problem}"
            yield Candidate("predicted", fact.config, f"{what} by cross-compiling", fact, gap)
    yield from default_layer(op, work, device, backend)


def default_layer(op: Op, work: Work, device: Device, backend: Backend) -> Iterator[Candidate]:
    """The plugin's default, then its default of each other variant, then the op's candidates."""
    name = f"the default of the {backend.target} plugin"
    name += f" ({backend.note})" if backend.note else ""
    try:
        default = backend.default(device, work)
        yield Candidate("default", default, name)
        for config in fewer_programs(default, work):
            yield Candidate("default", config, f"{name}, with fewer programs at once")
    except UnknownName:
        if op.candidates is None:
            raise
        for config in op.candidates(device, work):
            yield Candidate("default", config, f"the op's own candidate for kind {work.kind!r}")
        return
    for variant in work.variants:
        try:
            yield Candidate("default", backend.default(device, work, variant), name)
        except (Infeasible, UnknownName):  # a plugin need not know every variant of a kind
            continue  # explain() asks the plugin again and prints its reason


def fewer_programs(config: Config, work: Work) -> Iterator[Config]:
    """Where programs wait for each other and the compiler took more registers than the plugin's model said, the
    launch is refused: the same code with fewer programs is the next best thing."""
    if config.variant in work.waiting:
        for programs in range(config.params.get("PROGRAMS_PER_UNIT", 1) - 1, 0, -1):
            yield config.replace(params={"PROGRAMS_PER_UNIT": programs})


def _device_layers(
    runtime: Runtime, op: Op, problem: Problem, device: Device, slug: str, prefix: str
) -> Iterator[Candidate]:
    """The four layers of one device's measurements: exact, stale, near, near and stale."""
    found = near_facts(index_of(runtime, op, slug, "measured"), problem)
    whose = f" on {slug}" if prefix else ""
    for exact in (True, False):
        for stale in (False, True):
            for gap, fact in found:
                differences = _differences(op, fact)
                if (gap == 0) != exact or bool(differences) != stale or gap > MAX_DISTANCE:
                    continue
                if bool(prefix) != _other_power(fact, device, slug):
                    continue
                layer = prefix + ("exact" if exact else "near") + (" stale" if stale else "")
                what = "measured for it" if exact else f"measured for {fact.problem}"
                reason = f"{what}{whose}" + (f", but {differences}" if stale else "")
                yield Candidate(layer, fact.config, reason, fact, gap)


def _other_power(fact: Fact, device: Device, slug: str) -> bool:
    """Whether the fact counts as a sibling's: of another device, or at another power limit."""
    here, there = device.extra.get(POWER_LIMIT), fact.provenance.get(POWER_LIMIT)
    return slug != device.slug or (here is not None and there is not None and here != there)


def _differences(op: Op, fact: Fact) -> str:
    """What makes a fact stale, for a person to read; empty when it is fresh."""
    found = []
    if fact.kernel_hash != kernel_hash(op):
        found.append("the kernel has changed since")
    if fact.toolchain != triton_series():
        found.append(f"with Triton {fact.toolchain}, this is {triton_series()}")
    return " and ".join(found)


def sibling_slugs(runtime: Runtime, op: Op, device: Device) -> Iterable[str]:
    """Slugs whose records may stand in: this one again (other power limit), then its siblings."""
    yield device.slug
    for slug in runtime.database.slugs():
        if slug in (device.slug, device.target.arch):
            continue
        if any(fact.arch == device.target.arch for fact in runtime.database.facts(slug, op.name)):
            yield slug


def index_of(runtime: Runtime, op: Op, slug: str, outcome: str) -> Index:
    """The winners of ``slug`` for ``op`` by family, rebuilt when the database's epoch moves."""
    key = (slug, op.name, outcome)
    epoch = runtime.database.epoch(slug)
    cached = runtime.indexes.get(key)
    if cached is None or cached[0] != epoch:
        cached = (epoch, _build_index(runtime.database.facts(slug, op.name), outcome))
        runtime.indexes[key] = cached
    index: Index = cached[1]
    return index


def _build_index(facts: Iterable[Fact], outcome: str) -> Index:
    questions: dict[tuple[str, ...], list[Fact]] = {}
    for fact in facts:
        if fact.outcome in (outcome, "wrong"):
            questions.setdefault(fact.question, []).append(fact)
    index: Index = {}
    for group in questions.values():
        best = winner(group)
        if best is not None:
            index.setdefault((best.op, best.problem.family), []).append(best)
    return index
