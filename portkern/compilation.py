"""``compile_op``: what the compiler makes of an op for a target, present or absent.

It replaces Triton's driver for a moment, so use it only in processes that never launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from portkern.config import Config
from portkern.dispatch import Situation, interpreting, situate
from portkern.emulator import Counters, Settings
from portkern.errors import BadArgument, CompileFailed, EmulationError
from portkern.executors.compile import CompiledLaunch, compile_plan
from portkern.executors.emulate import emulator_of, execute
from portkern.judging import examine
from portkern.memory import Kept
from portkern.op import Op
from portkern.plan import metas_of
from portkern.record import Record
from portkern.runtime import Runtime
from portkern.target import Device
from portkern.variants import VariantDefault, plugin_default, variant_default, variant_defaults


@dataclass(frozen=True)
class Compilation(Record):
    """One variant of an op for one target: what its launches need, or why there are none.

    ``refused`` says why the device cannot hold the variant; ``error`` is the compiler's.
    """

    op: str
    target: str
    device: str
    problem: str
    variant: str
    config: Config | None
    launches: tuple[CompiledLaunch, ...] = ()
    refused: str = ""
    error: str = ""
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether the default spills or does not compile."""
        return bool(self.error) or any(launch.resources.spills for launch in self.launches)


def compile_op(
    runtime: Runtime, op: Op, args: Sequence[Any], device: Device, variant: str | None = None
) -> Iterator[Compilation]:
    """Compile the default of ``op`` for ``device``: of ``variant``, of each one for ``"all"``, or
    the one that dispatch takes when nothing was measured.

    Raises UnknownName for a variant that the problem does not have, BadArgument where Triton interprets.
    """
    if interpreting():
        raise BadArgument("TRITON_INTERPRET=1 interprets kernels, and compiles none; unset it to compile")
    situation = situate(runtime, op, metas_of(args), device)
    for found in _wanted(situation, variant):
        yield _compile(situation, found)


@dataclass(frozen=True)
class Emulation(Record):
    """What the launches of one variant really do: counts, never a time. ``wrong`` says what an error or the fp64
    reference found, empty where the numbers are right."""

    op: str
    target: str
    problem: str
    variant: str
    launches: tuple[Counters, ...]
    wrong: str = ""


def emulate_op(
    runtime: Runtime, op: Op, args: Sequence[Any], device: Device, variant: str | None = None
) -> Iterator[Emulation]:
    """Execute on ``args``, CPU tensors, what ``compile_op`` compiles, and count.

    Raises UnknownName where no plugin emulates the device's target.
    """
    situation = situate(runtime, op, metas_of(args), device)
    emulator_of(situation.backend)
    for found in _wanted(situation, variant):
        if found.choice is None:
            continue
        counters: list[Counters] = []
        wrong = ""
        plan, options = situation.plan(found.choice), situation.backend.launch_options(found.choice.config)
        inputs = Kept(args)
        try:
            outputs = execute(
                plan, args, torch.device("cpu"), options, backend=situation.backend, settings=Settings(count=True),
                observe=counters.append,
            )  # fmt: skip
            wrong = examine(op, inputs, outputs).reason
        except EmulationError as error:
            wrong = str(error)
        yield Emulation(op.name, device.target.arch, str(situation.problem), found.variant, tuple(counters), wrong)


def _wanted(situation: Situation, variant: str | None) -> Iterable[VariantDefault]:
    if variant == "all":
        return variant_defaults(situation)
    if variant is None:
        return (plugin_default(situation),)
    return (variant_default(situation, variant),)


def _compile(situation: Situation, found: VariantDefault) -> Compilation:
    choice, backend, device = found.choice, situation.backend, situation.device
    launches: Sequence[CompiledLaunch] = ()
    error = ""
    if choice is not None:
        options = backend.launch_options(choice.config)
        try:
            with _fresh():
                plan = situation.plan(choice)
                launches = compile_plan(plan, situation.args, backend, device, options)
        except CompileFailed as failure:
            error = str(failure)
    return Compilation(
        op=situation.op.name,
        target=device.target.arch,
        device=device.slug,
        problem=str(situation.problem),
        variant=found.variant,
        config=choice.config if choice else None,
        launches=tuple(launches),
        refused=found.reason,
        error=error,
        note=backend.note,
    )


@contextmanager
def _fresh() -> Iterator[None]:
    """Compile even what Triton's cache on disk holds, so that the times are the compiler's."""
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        yield
