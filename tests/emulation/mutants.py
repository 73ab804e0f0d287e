"""The kernels of ``kernels.py`` with inputs of a wide range, run whole or with one instruction taken out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from portkern.backends.gfx942_emulator.emulator import Gfx942Emulator
from portkern.backends.gfx942_emulator.launch import Kernel, without
from portkern.emulator import Settings
from portkern.errors import EmulationError
from portkern.executors.emulate import compile_for, run
from portkern.plugins import parse_arch
from portkern.runtime import current
from tests.emulation import kernels

# They order memory or time, which the emulator does not have.
LEFT_OUT = ("s_nop", "s_waitcnt", "s_setprio", "s_sleep", "s_endpgm", "s_barrier")


@dataclass
class Case:
    """One input of a kernel: its arguments, the output among them, and what the output should be."""

    grid: tuple[int, ...]
    values: dict[str, Any]
    output: str
    wanted: torch.Tensor
    allowed: torch.Tensor


class Subject:
    """A kernel, compiled once, with the cases that it runs on."""

    def __init__(self, kernel: Any, cases: list[Case], warps: int = 4) -> None:
        self.name, self.cases = kernel.fn.__name__, cases
        runtime = current()
        backend = runtime.backend(parse_arch(runtime.plugins, "gfx942"))
        words = {**cases[0].values, "num_warps": warps, "enable_fp_fusion": True}
        self.compiled = compile_for(backend, kernel, [], cases[0].grid, words)
        self.kernel = Gfx942Emulator().prepare(self.compiled)

    def run(self, kernel: Kernel, case: Case, budget: int = 20_000_000, seed: int | None = 0) -> Any:
        """Run ``kernel`` on poisoned output; its counters."""
        case.values[case.output].fill_(float("nan"))
        buffers = {name: value for name, value in case.values.items() if isinstance(value, torch.Tensor)}
        settings = Settings(seed=seed, budget=budget)
        return run(_Fixed(kernel), self.compiled, case.grid, case.values, buffers, settings)

    def caught(self, kernel: Kernel, budget: int = 20_000_000, seed: int | None = 0) -> str:
        """How a mutant gives itself away on one of the cases; empty if it does not."""
        for case in self.cases:
            try:
                self.run(kernel, case, budget, seed)
            except EmulationError as error:
                return type(error).__name__
            error = (case.values[case.output].double() - case.wanted).abs()
            if not bool((error <= case.allowed).all()):
                return "numbers"
        return ""

    def positions(self) -> list[int]:
        """Instructions that run and may be taken out."""
        executed: set[int] = set()

        def recording(position: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def recorded(w: Any) -> Any:
                executed.add(position)
                return step(w)

            return recorded

        steps = [recording(i, step) for i, step in enumerate(self.kernel.steps)]
        assert not self.caught(dataclasses.replace(self.kernel, steps=steps)), self.name
        code = self.kernel.program.code
        return [i for i in sorted(executed) if not code[i].name.startswith(LEFT_OUT)]

    def steps(self) -> int:
        """How many steps the longest case takes."""
        budgets = (self.run(self.kernel, case).instructions for case in self.cases)
        return max(budgets)

    def mutant(self, position: int) -> Kernel:
        return without(self.kernel, position)


class _Fixed(Gfx942Emulator):
    """Runs one kernel, whatever was compiled."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def prepare(self, compiled: Any, settings: Settings = Settings()) -> Kernel:  # noqa: B008
        return self._kernel


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _wide(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of small numbers, of large ones, far from zero on either side, and all equal."""
    x = _random(rows, columns, seed=seed)
    factors = torch.tensor([1.0, 30.0, 1e-3, 5.0, 0.0])
    shifts = torch.tensor([0.0, 0.0, 500.0, -900.0, 3.0])
    return x * factors.repeat(rows)[:rows, None] + shifts.repeat(rows)[:rows, None]


def _peaks(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Wide rows, each with one number far above the others, at another place in each."""
    x = _wide(rows, columns, seed)
    for row in range(5, rows):
        x[row, (row * 61) % columns] += 150.0
    return x


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def softmax() -> Subject:
    cases = []
    for n in (1000, 769):
        x = _peaks(70, n, n).bfloat16()
        x[1, ::9] = -float("inf")
        wanted = torch.softmax(x.double(), -1)
        y = torch.empty(70, n)
        # The exponential's error grows with the distance from the maximum; below the normals it may flush.
        allowed = 256 * _eps(y) * wanted + 2.0**-125
        values = {"x_ptr": x, "y_ptr": y, "N": n, "stride": n, "BLOCK": 1024}
        cases.append(Case((70,), values, "y_ptr", wanted, allowed))
    return Subject(kernels.softmax_kernel, cases)


def layer_norm() -> Subject:
    cases = []
    for n in (300, 511):
        x, w, b = _wide(5, n, n), _random(n, seed=3) * 3, _random(n, seed=4)
        wanted = torch.nn.functional.layer_norm(x.double(), (n,), w.double(), b.double(), 1e-5)
        y = torch.empty(5, n)
        # The row far from zero loses bits of its mean.
        scale = wanted.abs() + w.double().abs() * x.double().abs().amax(-1, keepdim=True) / (
            x.double().var(-1, keepdim=True) + 1e-5).sqrt()  # fmt: skip
        values = {"x_ptr": x, "w_ptr": w, "b_ptr": b, "y_ptr": y, "N": n, "eps": 1e-5, "BLOCK": 512}
        cases.append(Case((5,), values, "y_ptr", wanted, 4 * _eps(y) * scale + 1e-30))
    return Subject(kernels.layer_norm_kernel, cases)


def matmul() -> Subject:
    cases = []
    for m, n, k in ((70, 50, 90), (123, 61, 33), (33, 27, 97), (6, 5, 1)):
        a, b = _wide(m, k, m).half() / 8, _wide(k, n, n).half() / 8
        wanted = a.double() @ b.double()
        c = torch.empty(m, n)
        values = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, "ACC": tl.float32, "BLOCK_M": 64,
                  "BLOCK_N": 32, "BLOCK_K": 32}  # fmt: skip
        allowed = 16 * _eps(c) * (a.double().abs() @ b.double().abs()) + 1e-30
        cases.append(Case(((m + 63) // 64, (n + 31) // 32), values, "c_ptr", wanted, allowed))
    return Subject(kernels.matmul_kernel, cases)


def attention() -> Subject:
    cases = []
    for n, spread in ((100, 3), (37, 12), (125, 0.5)):
        q, k, v = (_random(n, 32, seed=7 + i).half() * (spread, spread, 1)[i] for i in range(3))
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        scores = (q.double() @ k.double().T * 0.25).masked_fill(~mask, -float("inf"))
        weights = torch.softmax(scores, -1)
        o = torch.empty(n, 32)
        # The weights are rounded to float16 before the second product.
        allowed = 2.0**-9 * (weights @ v.double().abs())
        values = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "N": n, "scale": 0.25, "BLOCK_M": 64, "BLOCK_N": 32,
                  "D": 32}  # fmt: skip
        cases.append(Case(((n + 63) // 64,), values, "o_ptr", weights @ v.double(), allowed))
    return Subject(kernels.attention_kernel, cases)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "softmax": softmax, "layer_norm": layer_norm, "matmul": matmul, "attention": attention,
}  # fmt: skip
