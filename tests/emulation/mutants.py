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
from tests.emulation.identities import changes_nothing

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
        settings = Settings(seed=seed, budget=budget, upper=True)
        return run(_Fixed(kernel), self.compiled, case.grid, case.values, buffers, settings)

    def caught(self, kernel: Kernel, budget: int = 20_000_000, seed: int | None = 0) -> str:
        """How a mutant gives itself away on one of the cases; empty if it does not."""
        for case in self.cases:
            try:
                self.run(kernel, case, budget, seed)
            except EmulationError as error:
                return type(error).__name__
            if not self.right(case):
                return "numbers"
        return ""

    def right(self, case: Case) -> bool:
        """Whether the output, as it stands, is within what is allowed."""
        error = (case.values[case.output].double() - case.wanted).abs()
        return bool((error <= case.allowed).all())

    def positions(self) -> tuple[list[int], int]:
        """Instructions that run and may be taken out, and how many steps the longest case takes."""
        executed: dict[int, int] = {}

        def recording(position: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def recorded(w: Any) -> Any:
                executed[position] = executed.get(position, 0) + 1
                return step(w)

            return recorded

        steps = [recording(i, step) for i, step in enumerate(self.kernel.steps)]
        longest = 0
        for case in self.cases:
            before = sum(executed.values())
            self.run(dataclasses.replace(self.kernel, steps=steps), case)
            assert self.right(case), self.name
            longest = max(longest, sum(executed.values()) - before)
        program = self.kernel.program
        kept = (i for i in sorted(executed) if not program.code[i].name.startswith(LEFT_OUT))
        return [i for i in kept if not changes_nothing(program, i)], longest

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
    for n in (300, 1, 257, 513, 1000):  # the quick ones first
        x = _peaks(70, n, n)
        # Weights below the normals, and quotients of 1 by the numbers of numbers above -inf.
        x[3::10] = -95 + 5 * _random(7, n, seed=n)
        x[3::10, n // 3] = 0
        x[4::5] = torch.where(torch.arange(n) % 64 < torch.arange(1, 15)[:, None], 3.0, -float("inf"))
        x[1, 1::9] = -float("inf")
        x = x.bfloat16()
        wanted = torch.softmax(x.double(), -1)
        y = torch.empty(70, n)
        # The exponential's error grows with its argument.
        far = (x.double().amax(-1, keepdim=True) - x.double()).clamp(max=200)
        allowed = (8 + far) * _eps(y) * wanted + 2.0**-148
        exact = (far.minimum(200 - far) == 0).all(-1, keepdim=True)  # each weight is 1 or 0: only the quotient rounds
        wanted, allowed = torch.where(exact, wanted.float().double(), wanted), torch.where(exact, 0.0, allowed)
        values = {"x_ptr": x, "y_ptr": y, "N": n, "stride": n, "BLOCK": 1024}
        cases.append(Case((70,), values, "y_ptr", wanted, allowed))
    return Subject(kernels.softmax_kernel, cases)


def layer_norm() -> Subject:
    cases = []
    for n in (300, 511, 1):
        x, w, b = _wide(5, n, n), _random(n, seed=3) * 3, _random(n, seed=4)
        wanted = torch.nn.functional.layer_norm(x.double(), (n,), w.double(), b.double(), 1e-5)
        y = torch.empty(5, n)
        # The row far from zero loses bits of its mean.
        scale = wanted.abs() + w.double().abs() * x.double().abs().amax(-1, keepdim=True) / (
            x.double().var(-1, keepdim=True, correction=0) + 1e-5).sqrt()  # fmt: skip
        values = {"x_ptr": x, "w_ptr": w, "b_ptr": b, "y_ptr": y, "N": n, "eps": 1e-5, "BLOCK": 512}
        cases.append(Case((5,), values, "y_ptr", wanted, 4 * _eps(y) * scale + 1e-30))
    return Subject(kernels.layer_norm_kernel, cases)


def matmul() -> Subject:
    cases = []
    # Sums of no turn, one and many; last rows and columns between any two that a lane holds.
    ends = [(m, 33 - m, 40 - m) for m in (1, 2, 3, 9, 10, 11, 17, 18, 19, 25, 26, 27)]
    for m, n, k in ((70, 50, 90), (123, 61, 33), (33, 27, 97), (6, 5, 1), (40, 40, 0), *ends):
        a, b = _wide(m, k, m).half() / 8, _wide(k, n, n).half() / 8
        b[:, ::3] = 0
        wanted = a.double() @ b.double()
        c = torch.empty(m, n)
        values = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, "ACC": tl.float32, "BLOCK_M": 64,
                  "BLOCK_N": 32, "BLOCK_K": 32}  # fmt: skip
        allowed = 16 * _eps(c) * (a.double().abs() @ b.double().abs())
        cases.append(Case(((m + 63) // 64, (n + 31) // 32), values, "c_ptr", wanted, allowed))
    return Subject(kernels.matmul_kernel, cases)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Case:
    """``q`` [m, 32], ``k`` [n, 32] in float16, ``v`` [n, 32] in float32."""
    m, n = len(q), len(k)
    mask = torch.ones(m, n, dtype=torch.bool).tril()
    scores = (q.double() @ k.double().T * 0.25).masked_fill(~mask, -float("inf"))
    weights = torch.softmax(scores, -1)
    wanted, o = weights @ v.double(), torch.empty(m, 32)
    # Scores round by their terms, exponentials by their arguments.
    span = (q.double().abs() @ k.double().abs().T * 0.25).amax(-1, keepdim=True)
    allowed = (16 + 2 * span) * _eps(o) * (weights @ v.double().abs()) + 2.0**-148 * v.double().abs().sum(0)
    if not q.any():  # the weights are 1, sums of whole numbers are exact: only the quotient rounds
        counts = mask.double().sum(-1, keepdim=True)
        wanted, allowed = ((mask.double() @ v.double()) / counts).float().double(), torch.zeros(m, 32)
    values = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "M": m, "N": n, "scale": 0.25, "BLOCK_M": 64,
              "BLOCK_N": 32, "D": 32}  # fmt: skip
    return Case(((m + 63) // 64,), values, "o_ptr", wanted, allowed)


def attention() -> Subject:
    def normal(m: int, n: int, spread: float) -> Case:
        q, k = (_random(size, 32, seed=7 + size).half() * spread for size in (m, n))
        return _attention(q, k, _random(n, 32, seed=9))

    def tiny(n: int, mixed: bool) -> Case:
        """Weights below the normals: a key far above the others (the first or another, by the query) has the value 0,
        and so have those that weigh more, half of all if ``mixed``."""
        other = min(40, n - 1)
        q, k, v = torch.zeros(100, 32), _random(n, 32, seed=n), _random(n, 32, seed=n + 1)
        heavy = k[:, 2] > (0 if mixed else 9)
        k = torch.where(heavy[:, None], -10.0, -23.5 + 0.4 * k)
        q[::2, 0], q[1::2, 1], k[0, 0], k[other, 1] = 16, 16, 0, 0
        v[heavy], v[0], v[other] = 0, 0, 0
        return _attention(q.half(), k.half(), v)

    cases = [normal(100, 100, 3), normal(70, 37, 12), normal(125, 66, 0.5)]
    # One key far above the others, at another place for each query.
    key, dim = torch.arange(128)[:, None], torch.arange(32)
    q = 16.0 * (torch.where(key < 64, key, 5 * key) % 32 == dim)
    k = torch.where(key % 64 < 32, 3.0, 30.0) * (key % 32 == dim)
    cases.append(_attention(q.half(), k.half(), _random(128, 32, seed=1)))
    # All keys alike, and whole numbers of unlike sizes: a mean, of which only the quotient rounds.
    v = torch.randint(-9, 10, (100, 32), generator=torch.Generator().manual_seed(5)) * 2.0 ** (dim * 89 % 230 - 120)
    cases.append(_attention(torch.zeros(100, 32).half(), _random(100, 32, seed=2).half(), v))
    cases += [tiny(n, mixed) for n in (100, 64, 33) for mixed in (False, True)]
    cases += [normal(66 - n, n, 3) for n in (1, 2, 3, 5, 9, 12, 17, 20, 25, 28, 31)]
    return Subject(kernels.attention_kernel, cases)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "softmax": softmax, "layer_norm": layer_norm, "matmul": matmul, "attention": attention,
}  # fmt: skip
