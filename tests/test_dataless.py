"""Arguments without data: what torch gives on the meta device, without what torch loads for it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from portkern.dataless import Dataless
from portkern.op import Case, Op
from portkern.registry import all_ops

META = torch.device("meta")


@pytest.mark.parametrize("op", sorted(all_ops().values(), key=lambda op: op.name), ids=lambda op: op.name)
def test_inputs_of_every_op_are_as_without_it(op: Op) -> None:
    for dtype in op.dtypes:
        for case in (*op.cases, *op.tune_cases):
            wanted, found = _shown(op, case, dtype, contextlib.nullcontext()), _shown(op, case, dtype, Dataless())
            assert found == wanted, (str(case), dtype)


def _shown(op: Op, case: Case, dtype: str, mode: Any) -> list[Any]:
    with mode:
        try:
            made = op.inputs(case.sizes, getattr(torch, dtype), device=META, **case.options)
        except (RuntimeError, NotImplementedError) as error:  # an op that reads values
            return [type(error)]
    return [
        (each.shape, each.stride(), each.dtype, each.device) if isinstance(each, torch.Tensor) else each
        for each in made
    ]


def _of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _of(4, 1, 5) + _of(3, 1),
        lambda: _of(4, 5).t() * _of(5, 4),
        lambda: _of(3, 4) * _of(dtype=torch.float32),
        lambda: _of(3, dtype=torch.int32) / 2,
        lambda: _of(3, dtype=torch.int32) + _of(dtype=torch.float64),
        lambda: _of(4, 5, 6).amax((0, 2)),
        lambda: _of(4, 5, 6).logsumexp(1, keepdim=True),
        lambda: _of(0, 5) + 1,
        lambda: _of(0, 5).sum(0),
        lambda: _of(1, 5).sum(1),
        lambda: _of(2, 1, 2, 1, 2, 1, 2).exp(),
        lambda: _of(4).add_(1),
        lambda: torch.randn(3, 4, dtype=torch.float16, device="meta"),
        lambda: torch.randint(3, (4, 5), device="meta"),
        lambda: torch.rand(()) + 1,
        lambda: torch.frexp(_of(3, dtype=torch.float32)).mantissa,
        lambda: _of(2, 3, 4, 5, dtype=torch.float32).clone(memory_format=torch.channels_last),
        lambda: _of(3, dtype=torch.int64) % _of(3, dtype=torch.int64),
    ],
)  # fmt: skip
def test_a_function_gives_what_torch_gives(make: Callable[[], torch.Tensor]) -> None:
    wanted = make()
    with Dataless():
        found = make()
    assert (found.shape, found.stride(), found.dtype, found.device) == (
        wanted.shape, wanted.stride(), wanted.dtype, wanted.device,
    )  # fmt: skip


def test_what_does_not_broadcast_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="broadcast"), Dataless():
        _of(3) + _of(4)


@pytest.mark.parametrize("command", [["ops"], ["explain", "softmax", "--device", "sm90"]])
def test_a_command_that_shows_plans_loads_no_compiler_of_torchs(command: list[str]) -> None:
    code = f"""
import json, sys
from portkern.cli.main import portkern
try:
    portkern({command!r})
except SystemExit as exit:
    heavy = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
    print(json.dumps([exit.code, heavy]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []], done.stderr
