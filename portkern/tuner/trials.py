"""In the child: run configs on the device, check them against the reference, then time them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from portkern import dispatch, lookup, registry
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.executors.launch import execute
from portkern.judging import examine, expect
from portkern.library import altered_by
from portkern.memory import Guarded, Kept
from portkern.op import Case
from portkern.plan import Plan
from portkern.runtime import current
from portkern.testing import Expected, Verdict
from portkern.timing import load_timer
from portkern.tuner.questions import arguments

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError  # says nothing about a config


class Trials:
    """One device, and one problem at a time. The methods answer requests; see ``worker``."""

    def open(self, index: int | None, timer: str | None) -> dict[str, Any]:
        """Take the GPU with torch's ``index``, or the CPU (for the interpreter)."""
        self._where = torch.device("cpu") if index is None else torch.device("cuda", index)
        if index is not None:
            torch.cuda.set_device(index)
        self._device = dispatch.target_device(current(), self._where)
        self._timer = load_timer(timer)
        ceiling = self._timer.copy_ceiling(self._device)
        own: dict[str, Any] = {"copy_gbps": round(ceiling, 1)}
        if index is not None:
            own |= {"identity": self._device.identity, **_clock(self._where)}
        return {"provenance": own}

    def prepare(self, op: str, sizes: Sequence[int], options: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Make the inputs of one problem."""
        # The last problem's memory goes first.
        self._inputs: Kept | None = None
        self._expected: Expected | None = None
        self._op = registry.get(op)
        make = partial(arguments, self._op, Case(tuple(sizes), options), dtype, self._where)
        self._make: Callable[[str], tuple[Any, ...]] = lambda style: make(style=style)
        self._style = ""
        self._use("wide")
        return {}

    def check(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Run ``config`` once on poisoned memory and wide-ranging inputs: right, wrong or refused."""
        inputs = self._use("wide")
        try:
            run = self._runner(Config.from_json(config), inputs)
            memory = Guarded()
            outputs = run(allocate=memory)
            self._synchronize()
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            return self._lost(error)
        verdict = examine(self._op, inputs, outputs, memory, self._expect)
        return {"outcome": "right" if verdict.right else "wrong", **_numbers(verdict)}

    def time(self, configs: Sequence[Mapping[str, Any]], budget_ms: float, slow: float) -> dict[str, Any]:
        """Time ``configs`` in turns, then check each once more, on the inputs that were timed."""
        inputs = self._use("normal")
        try:
            runs = {str(config): self._runner(config, inputs) for config in map(Config.from_json, configs)}
            before = inputs.restore if altered_by(self._op) else None
            times = self._timer.interleaved(runs, self._device, budget_ms=budget_ms, before=before, slow=slow)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            return self._lost(error)
        found = []
        for name, run in runs.items():
            inputs.restore()
            memory = Guarded()
            verdict = examine(self._op, inputs, run(allocate=memory), memory, self._expect)
            found.append({**times[name].to_json(), **_numbers(verdict)})
        return {"outcome": "timed", "times": found}

    def _use(self, style: str) -> Kept:
        """The inputs of ``style``, with their first values."""
        if self._inputs is None or self._style != style:
            self._inputs = self._expected = None
            self._inputs = Kept(self._make(style))
            self._style = style
        else:
            self._inputs.restore()
        return self._inputs

    def _expect(self) -> Expected:
        """What the op should give for its inputs: the reference takes longer than many candidates."""
        if self._expected is None:
            assert self._inputs is not None
            self._expected = expect(self._op, self._inputs)
        return self._expected

    def _runner(self, config: Config, inputs: Kept) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A launch of ``config``, as dispatch would make it."""
        metas = dispatch.input_key(self._op, inputs.args)
        situation = dispatch.situate(current(), self._op, metas, self._device)
        backend, work = situation.backend, situation.work
        blocks, reason = lookup.fits(self._op, work, self._device, backend, config)
        if blocks is None:
            raise Infeasible(reason)
        plan: Plan = self._op.plan(config, blocks, self._device, *metas)
        options = backend.launch_options(config)
        return partial(execute, plan, inputs.args, self._where, options)

    def _synchronize(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)

    def _lost(self, error: Exception) -> dict[str, Any]:
        """The answer after ``error``: the config is refused, unless the device broke with it."""
        first = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first}"
        try:
            self._synchronize()
        except RuntimeError:
            return {"outcome": "crashed", "reason": reason, "broken": True}
        return {"outcome": "refused", "reason": reason}


def _clock(where: torch.device) -> dict[str, int]:
    """The clock right after work, where torch can read it (it needs the vendor's own package)."""
    try:
        return {"clock_mhz": torch.cuda.clock_rate(where)}
    except (ImportError, RuntimeError, AttributeError, KeyError):
        return {}


def _numbers(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON, which has no infinity."""
    ratio = verdict.ratio if math.isfinite(verdict.ratio) else None
    return {"ratio": ratio, "reason": verdict.reason}
