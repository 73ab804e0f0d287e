"""Calls of many sizes: which are served by a family, which are planned, and what a served one is like."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch, families
from portkern.config import Config
from portkern.errors import PortkernError
from portkern.executors.replay import Driver
from portkern.lock import Entry, Lock
from portkern.plan import Meta
from portkern.planned import Planned
from portkern.registry import get
from portkern.runtime import Runtime, current, using
from tests.test_families import DEVICE, planned, softmax


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with using(current().anew()) as found:
        yield found


class Kernels:
    """In the place of Triton's compiled kernels: they write down how they were launched."""

    packed_metadata, function = "packed", 77

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def run(self, *args: Any) -> None:
        if self.error is not None:
            raise self.error
        self.launched.append(args)


@pytest.fixture
def kernels(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Calls on CPU tensors that take the way of calls on a GPU."""
    found = Kernels()
    driver = Driver(
        stream_of=lambda index: 0,
        empty=lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
        current=lambda: 0,
        count=1,
        guard=lambda index: None,
    )

    def execute(self: Planned, args: Sequence[Any], launched: list[Any] | None = None) -> Any:
        if launched is not None:
            launched += [found] * len(self.plan.launches)
        return f"planned {self.choice.config.variant}"

    monkeypatch.setattr(Driver, "of_torch", staticmethod(lambda: driver))
    monkeypatch.setattr("portkern.executors.replay.DIRECT_VERSIONS", ())
    monkeypatch.setattr(Planned, "execute", execute)
    monkeypatch.setattr(dispatch, "common_device", lambda op, args: DEVICE)
    monkeypatch.setattr(dispatch, "target_device", lambda runtime, device: dispatch.reference_device(runtime, "sm90"))
    return found


def test_the_third_shape_is_served(runtime: Runtime, kernels: Kernels) -> None:
    assert [softmax(rows) for rows in (1003, 1005)] == ["planned packed_rows"] * 2
    found = softmax(1007)
    assert isinstance(found, torch.Tensor) and found.shape == (1007, 128)
    (launched,) = kernels.launched
    expected = planned(runtime, get("softmax"), (Meta((1007, 128), (128, 1), torch.bfloat16), 1, torch.bfloat16)).plan
    assert launched[0] == expected.launches[0].grid[0] and 1007 in launched
    assert softmax(1009).shape == (1009, 128), "any number of times"
    assert softmax(1007).shape == (1007, 128) and len(kernels.launched) == 3


def given(x: torch.Tensor, dim: int = 1) -> Any:
    return dispatch.run(get("softmax"), (x, dim, x.dtype))


@pytest.mark.parametrize(
    "other",
    [
        lambda: softmax(1007, dtype=torch.float32),
        lambda: softmax(1008),  # a multiple of 16: other code
        lambda: softmax(1007, 128 * 33),
        lambda: given(torch.zeros(1007, 128, dtype=torch.bfloat16), 0),
        lambda: given(torch.zeros(128, 1007, dtype=torch.bfloat16).t()),
        lambda: given(torch.zeros(1007 * 128 + 1, dtype=torch.bfloat16)[1:].view(1007, 128)),
    ],
)
def test_what_answers_otherwise_is_planned(kernels: Kernels, other: Any) -> None:
    for rows in (1003, 1005):
        softmax(rows)
    assert str(other()).startswith("planned")


def test_a_pin_and_new_records_are_no_part_of_a_family(runtime: Runtime, kernels: Kernels) -> None:
    for rows in (1003, 1005):
        softmax(rows)
    with portkern.pin("softmax", Config("looped_row", {"BLOCK_M": 1, "BLOCK_N": 128}, 4)):  # type: ignore[arg-type]
        assert softmax(1007) == "planned looped_row"


def test_served_calls_are_prepared_and_frozen_like_others(runtime: Runtime, kernels: Kernels, tmp_path: Any) -> None:
    for rows in (1003, 1005, 1007):
        softmax(rows)
    x = torch.zeros(1007, 128, dtype=torch.bfloat16)
    found = dispatch.planned(get("softmax"), (x, 1, torch.bfloat16))
    assert isinstance(found, families.Served)
    replayed = found.replay((x, 1, torch.bfloat16), {0: 0})
    assert replayed is not None and replayed([x]).shape == (1007, 128)
    assert kernels.launched[0][:1] == kernels.launched[1][:1]
    assert [each for each in kernels.launched[0][11:]] == [each for each in kernels.launched[1][11:]]
    portkern.freeze(tmp_path / "lock")
    assert runtime.frozen is not None
    assert sorted(entry.problem.sizes["M"] for entry in runtime.frozen.entries.values()) == [1003, 1005, 1007]
    assert [str(softmax(rows)) for rows in (1011, 1013)] == ["planned packed_rows"] * 2, "no record decides any more"
    assert softmax(1015).shape == (1015, 128), "a frozen process serves new shapes as well"


def test_a_lock_answers_for_traced_sizes(runtime: Runtime) -> None:
    """What the file says of one size is said of no other."""
    op = get("softmax")
    metas = (Meta((1003, 128), (128, 1), torch.bfloat16), 1, torch.bfloat16)
    problem = op.problem(*metas)
    looped = Config("looped_row", {"BLOCK_M": 1, "BLOCK_N": 128}, 4)  # type: ignore[arg-type]
    runtime.frozen = Lock([Entry(dispatch.reference_device(runtime, "sm90").slug, problem, looped, "")])
    exact = planned(runtime, op, metas)
    assert exact.choice.config == looped
    member = families.trace(runtime, exact)
    assert member.values([1005, 128]) is None and member.values([1003, 128]) is not None
    metas = (Meta((1005, 128), (128, 1), torch.bfloat16), 1, torch.bfloat16)
    member = families.trace(runtime, planned(runtime, op, metas))
    assert member.values([1003, 128]) is None and member.values([1007, 128]) is not None


def test_more_programs_than_fit(runtime: Runtime, kernels: Kernels) -> None:
    """A launch that is refused for other sizes makes room for one that is planned; any other error is the caller's."""
    for rows in (1003, 1005):
        softmax(rows)
    kernels.error = RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
    assert softmax(1007) == "planned packed_rows"
    kernels.error = None
    assert softmax(1009) != "planned packed_rows", "that one was traced instead"
    kernels.error = ZeroDivisionError("a fault")
    with pytest.raises(ZeroDivisionError):
        softmax(1011)


def test_an_op_that_keeps_sizes_is_planned_each_time(
    runtime: Runtime, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = get("softmax")
    kept: dict[Any, Any] = {}

    def keeps(*args: Any) -> Any:
        problem = op.problem(*args)
        return kept.setdefault(problem.sizes["M"], problem)

    for other in (dataclasses.replace(op, problem=keeps), dataclasses.replace(op, traced=False)):
        for rows in (1003, 1005, 1007, 1009):
            assert str(dispatch.run(other, (torch.zeros(rows, 128), 1, torch.float32))).startswith("planned")
    assert set(map(type, kept)) == {int}
    assert [each.refused[:50] for each in runtime.families.values() if each.refused] == [
        "softmax with traced sizes: PluginError: op softmax"
    ], "once: it is not tried again"


def test_profilers_are_told(runtime: Runtime, kernels: Kernels) -> None:
    from triton import knobs

    for rows in (1003, 1005):
        softmax(rows)
    before = knobs.runtime.launch_enter_hook
    knobs.runtime.launch_enter_hook = print
    try:
        assert softmax(1007) == "planned packed_rows", "by Triton's own launch, which calls the hooks"
    finally:
        knobs.runtime.launch_enter_hook = before


def test_addresses_that_are_no_multiple_of_16_are_told_apart() -> None:
    """What starts a few elements into a tensor may be aligned where the tensor is not."""
    memory, device = torch.zeros(64, dtype=torch.bfloat16), dispatch.reference_device(current(), "sm90")
    keys = [
        dispatch._key(current(), get("relu"), (memory[start : start + 8],), DEVICE, device) for start in (1, 4, 8, 0)
    ]
    assert keys[0] != keys[1] != keys[2] == keys[3]


def test_errors_of_a_call_are_raised_as_ever(runtime: Runtime, kernels: Kernels) -> None:
    for rows in (1003, 1005, 1007):
        softmax(rows)
    with pytest.raises((PortkernError, RuntimeError, TypeError)):
        dispatch.run(get("softmax"), (SimpleNamespace(), 1, torch.bfloat16))
