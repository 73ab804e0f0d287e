"""Families of calls: a plan of traced sizes is what would be planned, for every size that it serves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch, families
from portkern.broadcast import contiguous
from portkern.config import Config
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


def softmax(rows: int, columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    return dispatch.run(get("softmax"), (torch.zeros(rows, columns, dtype=dtype), 1, dtype))


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
