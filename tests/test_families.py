"""Families of calls: a plan of traced sizes is what would be planned, for every size that it serves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch, families
from portkern.broadcast import contiguous
from portkern.config import Config
from portkern.errors import PortkernError
from portkern.executors.replay import Driver
from portkern.lock import Entry, Lock
from portkern.op import Op
from portkern.plan import Meta
from portkern.planned import Planned
from portkern.registry import all_ops, get
from portkern.runtime import Runtime, current, using
from portkern.situation import resolve, situate

DEVICE = torch.device("cuda", 0)
ROUNDS = 6  # of other sizes for each case: CI draws the same ones each time


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with using(current().anew()) as found:
        yield found


def planned(runtime: Runtime, op: Op, metas: Sequence[Any], arch: str = "sm90") -> Planned:
    situation = situate(runtime, op, metas, dispatch.reference_device(runtime, arch))
    return Planned(situation, resolve(runtime, situation), DEVICE)


def with_sizes(metas: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, ...]:
    """``metas`` with other sizes, in the order of ``families.sizes_of``."""
    rest = iter(sizes)
    found: list[Any] = []
    for each in metas:
        if isinstance(each, Meta):
            shape = tuple(next(rest) for _ in each.shape)
            dense = each.strides == contiguous(each.shape) and not {0, 1} & set(each.shape)
            strides = contiguous(shape) if dense else tuple(next(rest) for _ in each.strides)
            each = Meta(shape, strides, each.dtype, each.aligned)
        elif isinstance(each, tuple) and all(type(size) is int for size in each):
            each = tuple(next(rest) for _ in each)
        found.append(each)
    return tuple(found)


def others(draw: random.Random, sizes: Sequence[int]) -> list[int]:
    """Other sizes: as consistent as these, or not."""
    if draw.random() < 0.2:
        return [draw.choice([size, size, size + 1, 2 * size, 0, 1]) for size in sizes]
    change = {
        size: draw.choice([size, size, size + 1, size + 2, 2 * size, 16 * size, 1000 * size + 8])
        for size in sorted(set(sizes))
    }
    return [change[size] for size in sizes]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_what_is_served_is_what_would_be_planned(runtime: Runtime, arch: str) -> None:
    """All ops and cases: plan, config, blocks, problem and work, or it is not served. All of them can be traced."""
    draw, served = random.Random(arch), 0
    for op in all_ops().values():
        for case in op.cases:
            args = op.inputs(case.sizes, getattr(torch, draw.choice(op.dtypes)), device="cpu", **case.options)
            metas = dispatch.input_key(op, args)
            member = families.trace(runtime, planned(runtime, op, metas, arch))
            sizes = families.sizes_of(metas)
            for other in (sizes, *(others(draw, sizes) for _ in range(ROUNDS))):
                again = with_sizes(metas, other)
                values = member.values(other) if len(families.sizes_of(again)) == len(other) else None
                if values is None:
                    assert list(other) != sizes
                    continue
                expected = planned(runtime, op, again, arch)  # a call that would be refused is not served
                found = families.Served(member, values, None, [], DEVICE)
                for name in ("plan", "situation", "options"):
                    assert getattr(found, name) == getattr(expected, name), (op.name, case, other, name)
                assert (found.choice.config, found.choice.blocks) == (expected.choice.config, expected.choice.blocks)
                served += list(other) != sizes
    assert served > 200


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("softmax", [(n, 256) for n in range(1, 2000, 25)]),
        ("softmax", [(8, n) for n in range(1, 20000, 200)]),
        ("layer_norm", [(n, 256) for n in range(1, 2000, 25)]),
        ("layer_norm_backward", [(n, 256) for n in range(1, 2000, 25)]),
        ("cross_entropy", [(n, 250) for n in range(1, 2000, 25)]),
        ("gelu", [(n, 256) for n in range(1, 2000, 25)]),
        ("add", [(n, 256) for n in range(1, 2000, 25)]),
        ("sum", [(n, 256) for n in range(1, 2000, 25)]),
    ],
)
def test_most_new_shapes_are_served(runtime: Runtime, name: str, shapes: list[tuple[int, ...]]) -> None:
    op, members, served = get(name), [], 0
    for shape in shapes:
        metas = dispatch.input_key(op, op.inputs(shape, torch.bfloat16, device="cpu"))
        if any(member.values(families.sizes_of(metas)) is not None for member in members):
            served += 1
        else:
            members.append(families.trace(runtime, planned(runtime, op, metas)))
    assert served >= 0.6 * len(shapes) and len(members) <= families.MEMBERS, (served, len(members))


def test_products_whose_sums_are_cut_are_served(runtime: Runtime) -> None:
    """Parts, their memory and both launches follow the sizes. By descriptors a call is planned each time."""
    op, served = get("matmul"), 0
    loads = Config("split_k", {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPLITS": 6}, 4, 3)
    with portkern.pin("matmul", loads):
        metas = [
            dispatch.input_key(op, op.inputs((m, 96, k), torch.bfloat16, device="cpu"))
            for m, k in ((33, 1024), (41, 1024), (57, 1024), (63, 960), (40, 1024), (120, 2048), (49, 256))
        ]
        member = families.trace(runtime, planned(runtime, op, metas[0]))
        for each in metas:
            values = member.values(families.sizes_of(each))
            expected = planned(runtime, op, each)
            assert expected.plan.launches[1].kernel.fn.__name__ == "_matmul_sum_kernel"
            if values is not None:
                assert families.Served(member, values, None, [], DEVICE).plan == expected.plan
                served += 1
    assert served >= 3


@pytest.mark.parametrize("value", [1, 2])
def test_products_of_packed_operands_are_served(value: int, runtime: Runtime) -> None:
    """Copies, their memory and their launches follow the sizes."""
    op, served = get("matmul"), 0
    config = Config("tiles", {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "PACK_A": value, "PACK_B": value}, 4, 3)
    with portkern.pin("matmul", config):
        metas = [
            dispatch.input_key(op, op.inputs((m, 96, k), torch.float32, device="cpu", order="nt"))
            for m, k in ((33, 1024), (41, 1024), (57, 1024), (63, 960), (40, 1024), (120, 2048), (49, 256))
        ]
        member = families.trace(runtime, planned(runtime, op, metas[0]))
        for each in metas:
            values = member.values(families.sizes_of(each))
            expected = planned(runtime, op, each)
            assert [launch.kernel.fn.__name__ for launch in expected.plan.launches[:2]] == ["_matmul_pack_kernel"] * 2
            if values is not None:
                assert families.Served(member, values, None, [], DEVICE).plan == expected.plan
                served += 1
    assert served >= 3


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


def softmax(rows: int, columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    return dispatch.run(get("softmax"), (torch.zeros(rows, columns, dtype=dtype), 1, dtype))


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


def test_explain_says_whether_other_sizes_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trace cannot do is no secret: the call is planned one by one, and why is printed."""
    device, op = dispatch.reference_device(current(), "sm90"), get("softmax")
    x = torch.empty(64, 128, device="meta")
    assert "served from this plan" in str(portkern.explain("softmax", x, -1, device=device))

    def keeps(*args: Any) -> Any:
        problem = op.problem(*args)
        return {problem.sizes["M"]: problem}[problem.sizes["M"]]

    for changes, why in (({"problem": keeps}, "unhashable"), ({"traced": False}, "traced=False")):
        other = dataclasses.replace(op, **changes)
        monkeypatch.setattr("portkern.explanation.get", lambda name, other=other: other)
        found = portkern.explain("softmax", x, -1, device=device).other_sizes
        assert found.startswith("planned one by one: ") and why in found
