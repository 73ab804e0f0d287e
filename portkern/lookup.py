"""Which config a call runs with, layer by layer, each with a printable reason.

pinned -> exact -> exact but stale -> near -> near and stale -> the same four of a sibling device of
the same architecture -> predicted -> the plugin's default. In a frozen process its lock file stands in
the place of all records. Nothing here measures or launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from portkern.backend import Backend
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.fact import Fact
from portkern.kernel_hash import kernel_hash
from portkern.lock import Lock
from portkern.op import Op
from portkern.problem import Problem, Work
from portkern.records import (
    STALE,
    Here,
    differences,
    is_stale,
    loss,
    loss_text,
    near_facts,
    records_of,
)
from portkern.runtime import Runtime, pinned
from portkern.target import Device

MAX_DISTANCE = 1.0  # a factor of two in any size: farther records cost more than the default does

Ranked = Sequence[tuple[float, Fact]]  # facts of one device with their distances, best first


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
    here = Here(op, problem, device)
    passed_over: list[tuple[Candidate, str]] = []
    for candidate in _layers(runtime, here, work, backend):
        blocks, refusal = admit(runtime, here, work, backend, candidate)
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
    runtime: Runtime, here: Here, work: Work, backend: Backend, candidate: Candidate
) -> tuple[Blocks | None, str]:
    """The candidate's blocks if it can run here, or None and the reason why it cannot.

    Beyond ``fits`` it knows what failed to launch in this process and what was recorded as lost.
    """
    bad = _failed(runtime, here, candidate.config) if runtime.bad else None
    if bad is not None:
        return None, f"it failed to launch in this process: {bad}"
    lost = loss(here, runtime, candidate.config, candidate.fact)
    if lost is not None:
        return None, loss_text(lost)
    stored = candidate.layer != "default"
    return fits(here.op, work, here.device, backend, candidate.config, stored=stored)


def _failed(runtime: Runtime, here: Here, config: Config) -> str | None:
    """Why ``config`` failed to launch for this problem in this process, or None."""
    if all(each != config for _, _, each in tuple(runtime.bad)):
        return None
    # Problem.key is JSON, which takes 15 us of a new shape, and no traced sizes.
    return runtime.bad.get((here.device.slug, here.problem.key, config))


def fits(
    op: Op, work: Work, device: Device, backend: Backend, config: Config, *, stored: bool = False
) -> tuple[Blocks | None, str]:
    """The blocks of ``config`` if op and plugin take it, or None and the reason: what the tuner asks of a candidate.

    A ``stored`` config (a record's or a user's) may be of an older op: one that ``fit`` chokes on is
    refused. From the plugin's own proposals such an error is a bug, and surfaces.
    """
    if config.variant not in work.variants:
        return None, f"variant {config.variant!r} does not apply; this problem has {work.variants}"
    foreign = (LookupError, TypeError, ValueError, ArithmeticError) if stored else ()
    try:
        blocks = op.fit(config, work, device)
        refusal = backend.refuse(device, work, config, blocks)
    except Infeasible as error:
        return None, str(error)
    except foreign as error:
        return None, f"{op.name} cannot take its params {dict(config.params)}: {type(error).__name__}: {error}"
    return (None, refusal) if refusal else (blocks, "")


def _layers(runtime: Runtime, here: Here, work: Work, backend: Backend) -> Iterator[Candidate]:
    op, device = here.op, here.device
    pin = pinned(op.name)
    if pin is not None:
        yield Candidate("pinned", pin, "pinned by this context")
    if runtime.frozen is not None:
        yield from _frozen(runtime.frozen, here)
        yield from default_layer(op, work, device, backend, ", since the lock file has no entry that runs")
        return
    found = near_facts(here, records_of(runtime, op, device.slug), within=MAX_DISTANCE)
    yield from _measured(here, [[pair for pair in found if not here.other_power(pair[1])]], "")
    other_limits = [pair for pair in found if here.other_power(pair[1])]
    yield from _measured(here, [other_limits, *_sibling_facts(runtime, here)], "sibling ")
    for gap, fact in near_facts(here, records_of(runtime, op, device.target.arch), "predicted", MAX_DISTANCE):
        if not is_stale(differences(here, fact)):
            what = "predicted for it" if gap == 0 else f"predicted for {fact.problem}"
            yield Candidate("predicted", fact.config, f"{what} by cross-compiling", fact, gap)
    yield from default_layer(op, work, device, backend)


def _frozen(lock: Lock, here: Here) -> Iterator[Candidate]:
    """What the lock file says, in the place of all records."""
    entry = lock.get(here.device.slug, here.problem)
    if entry is not None:
        changed = "" if entry.kernel == kernel_hash(here.op) else ", though the kernel has changed since"
        yield Candidate("frozen", entry.config, f"frozen by the lock file {lock.hash[:12]}{changed}")


def _measured(here: Here, places: Sequence[Ranked], prefix: str) -> Iterator[Candidate]:
    """The four layers of measurements, exact, stale, near, near and stale: each asks every place in turn."""
    if not any(places):
        return
    for exact in (True, False):
        for stale in (False, True):
            for gap, fact in (pair for found in places for pair in found):
                if (gap == 0) != exact:
                    continue
                differs = differences(here, fact)
                if is_stale(differs) != stale:
                    continue
                layer = prefix + ("exact" if exact else "near") + (" stale" if stale else "")
                what = "measured for it" if exact else f"measured for {fact.problem}"
                where = [differs[aspect] for aspect in ("device", "power") if aspect in differs]
                but = " and ".join(differs[aspect] for aspect in STALE if aspect in differs)
                reason = " ".join([what, *where]) + (f", but {but}" if but else "")
                yield Candidate(layer, fact.config, reason, fact, gap)


def _sibling_facts(runtime: Runtime, here: Here) -> Iterator[Ranked]:
    """The measurements of each other device of the architecture, in the order of their names: facts tell nothing
    that would rank devices, such as their unit counts. Nearer than all is this device at another power limit."""
    arch = here.device.target.arch
    for slug in _slugs(runtime):
        if slug not in (here.device.slug, arch):
            facts = near_facts(here, records_of(runtime, here.op, slug), within=MAX_DISTANCE)
            yield [(gap, fact) for gap, fact in facts if fact.arch == arch]


def _slugs(runtime: Runtime) -> list[str]:
    """The devices that there are records of, as of this epoch: listing folders at every new shape takes too long."""
    epoch, cached = runtime.database.epoch(), runtime.indexes.get("slugs")
    if cached is None or cached[0] != epoch:
        cached = runtime.indexes["slugs"] = (epoch, runtime.database.slugs())
    found: list[str] = cached[1]
    return found


def default_layer(op: Op, work: Work, device: Device, backend: Backend, why: str = "") -> Iterator[Candidate]:
    """The plugin's default, then its default of each other variant, then the op's candidates."""
    name = f"the default of the {backend.target} plugin"
    name += (f" ({backend.note})" if backend.note else "") + why
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
    launch is refused: the same config with fewer programs is the next best thing."""
    if config.variant in work.waiting:
        for programs in range(config.params.get("PROGRAMS_PER_UNIT", 1) - 1, 0, -1):
            yield config.replace(params={"PROGRAMS_PER_UNIT": programs})
