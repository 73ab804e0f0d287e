"""A plan with its choice, and how it runs: on a GPU, in the interpreter, or in what stands in for an architecture."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from portkern.backend import Backend
from portkern.errors import UnknownName
from portkern.executors import recall
from portkern.executors.launch import execute
from portkern.executors.replay import Call, prepare
from portkern.lookup import Choice
from portkern.op import pack, unpack
from portkern.plan import Meta
from portkern.runtime import current, sink
from portkern.situation import Situation

# The architecture as which kernels run: on CPU tensors in its emulator, on a GPU as code that the driver translates.
EMULATE_VARIABLE = "PORTKERN_EMULATE"


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


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors: Triton's own reading of the variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "yes", "true", "on")


def emulated() -> str:
    """The architecture that is stood in for; empty where none is."""
    return "" if interpreting() else os.environ.get(EMULATE_VARIABLE, "")


def executor(backend: Backend, device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What runs a plan on tensors of ``device``: the launching executor, or what stands in for another architecture.

    Raises UnknownName where nothing stands in for what was asked for.
    """
    if not emulated():
        return execute
    if device.type == "cpu":
        from portkern.executors import emulate

        try:
            emulate.emulator_of(backend)
        except UnknownName as error:
            raise UnknownName(f"{EMULATE_VARIABLE}={emulated()}: {error}; unset it, or name another") from None
        return partial(emulate.execute, backend=backend)
    from portkern.executors import translate

    return partial(translate.execute, backend=backend)
