"""Families of calls: what a traced plan must have asked, so that it serves no call that would be planned otherwise."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from portkern import dispatch, families
from portkern.config import Config
from portkern.families import Member, Untraceable
from portkern.lock import Entry, Lock
from portkern.op import Op
from portkern.plan import Buffer, In, Meta, Out, Scratch
from portkern.planned import Planned
from portkern.registry import all_ops, get
from portkern.runtime import Runtime, current, using
from portkern.situation import resolve, situate
from portkern.sizes import Size, is_traced
from tests.test_families import others, with_sizes

DEVICE = torch.device("cuda", 0)
Metas = tuple[Any, ...]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with using(current().anew()) as found:
        yield found


def softmax(rows: int, columns: int = 128) -> Metas:
    return Meta((rows, columns), (columns, 1), torch.bfloat16), 1, torch.bfloat16


def planned(runtime: Runtime, op: Op, metas: Metas) -> Planned:
    situation = situate(runtime, op, metas, dispatch.reference_device(runtime, "sm90"))
    return Planned(situation, resolve(runtime, situation), DEVICE)


def traced(runtime: Runtime, op: Op, metas: Metas) -> Member:
    return families.trace(runtime, planned(runtime, op, metas))


def test_a_part_of_an_unaligned_tensor_may_be_aligned(runtime: Runtime) -> None:
    """The second half of a packed tensor that starts 8 bytes past a multiple of 16: compiled for vectors, or not."""
    op = get("swiglu")

    def packed(size: int) -> Metas:
        x = torch.zeros(2 * size + 4, dtype=torch.bfloat16)[4:].view(1, 2 * size)
        assert op.signature is not None and x.data_ptr() % 16 == 8
        return dispatch.input_key(op, op.signature(x))

    member = traced(runtime, op, packed(1004))  # 2008 bytes on there is a multiple of 16
    assert member.values(families.sizes_of(packed(1012))) is not None
    assert member.values(families.sizes_of(packed(1002))) is None, "and 2004 bytes on there is none"


def code_of(plan: Any, metas: Metas, start: int) -> list[Any]:
    """What Triton compiles the launches of ``plan`` for, where every tensor of the call starts ``start`` bytes past a
    multiple of 16: after its documentation, not by what a trace asks."""

    def kind(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(kind, argument))
        if isinstance(argument, (In, Out, Scratch)):
            where = {In: metas, Out: plan.outputs, Scratch: plan.scratch}[type(argument)]
            address = argument.offset * where[argument.position].dtype.itemsize
            return type(argument), (address + (start if isinstance(argument, In) else 0)) % 16 == 0
        if type(argument) is int:
            return 1 if argument == 1 else (argument % 16 == 0, -(2**31) <= argument < 2**31)
        return argument

    return [
        (each.kernel, kind(each.args), each.constexprs, each.num_warps, each.num_stages, each.options, each.coresident)
        for each in plan.launches
    ]


@pytest.mark.parametrize("start", [0, 4, 8])
def test_what_is_served_is_compiled_alike(runtime: Runtime, start: int) -> None:
    draw, served = random.Random(start), 0
    for op in all_ops().values():
        for case in op.cases:
            args = op.inputs(case.sizes, getattr(torch, draw.choice(op.dtypes)), device="cpu", **case.options)
            metas = tuple(
                dataclasses.replace(each, aligned=start == 0) if isinstance(each, Meta) else each
                for each in dispatch.input_key(op, args)
            )
            try:
                member = traced(runtime, op, metas)
            except Untraceable:
                continue
            sizes = families.sizes_of(metas)
            expected = code_of(planned(runtime, op, metas).plan, metas, start)
            for other in (others(draw, sizes) for _ in range(6)):
                again = with_sizes(metas, other)
                values = member.values(other) if len(families.sizes_of(again)) == len(other) else None
                if values is not None and list(other) != sizes:
                    assert code_of(member.settle(member.plan, values), again, start) == expected, (op.name, case, other)
                    served += 1
    assert served > 50


def with_plan(see: Callable[[Any], Any]) -> Op:
    """softmax whose plan has no launch where ``see`` says so of the number of rows."""
    op = get("softmax")

    def plan(config: Any, blocks: Any, device: Any, *args: Any) -> Any:
        found = op.plan(config, blocks, device, *args)
        return dataclasses.replace(found, launches=()) if see(args[0].shape[0]) else found

    return dataclasses.replace(op, plan=plan)


@pytest.mark.parametrize(
    "see",
    [
        lambda n: str(n) == "1007",
        lambda n: {"1007x128": True}.get(f"{n}x128", False),
        lambda n: f"{n:04d}".endswith("7"),
        lambda n: [n].index(n) == 0 and n in (1007,),
    ],
)
def test_whatever_decides_is_asked_of_the_size(runtime: Runtime, see: Callable[[Any], Any]) -> None:
    op = with_plan(see)
    member = traced(runtime, op, softmax(1003))
    assert not planned(runtime, op, softmax(1007)).plan.launches
    assert member.values([1003, 128]) is not None and member.values([1007, 128]) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: dataclasses.asdict(Buffer((n,), (1,), torch.bool))])
def test_copies_are_not_traced(runtime: Runtime, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(Untraceable, match="no copy of a traced size"):
        traced(runtime, with_plan(lambda n: copied(n) == 1007), softmax(1003))


def test_flags_of_sizes_are_held(runtime: Runtime) -> None:
    """Records are found by the text of a problem's flags."""
    op = get("softmax")

    def problem(*args: Any) -> Any:
        found = op.problem(*args)
        return dataclasses.replace(found, flags={"ragged": found.sizes["M"] % 4})

    other = dataclasses.replace(op, problem=problem)
    looped = Config("looped_row", {"BLOCK_M": 1, "BLOCK_N": 128}, 4)  # type: ignore[arg-type]
    device = dispatch.reference_device(runtime, "sm90")
    runtime.frozen = Lock([Entry(device.slug, other.problem(*softmax(1005)), looped, "")])
    assert planned(runtime, other, softmax(1005)).choice.config == looped
    member = traced(runtime, other, softmax(1003))
    assert not any(map(is_traced, member.situation.problem.flags.values()))
    assert member.values([1005, 128]) is None and member.values([1007, 128]) is not None


def test_what_failed_of_one_op_leaves_the_others_traced(runtime: Runtime) -> None:
    device = dispatch.reference_device(runtime, "sm90")
    runtime.bad[(device.slug, "another problem", Config("looped_row"))] = "out of resource"
    assert traced(runtime, get("softmax"), softmax(1003)).values([1005, 128]) is not None
    used = planned(runtime, get("softmax"), softmax(1003)).choice.config
    runtime.bad[(device.slug, "another problem", used)] = "out of resource"
    with pytest.raises(Untraceable):
        traced(runtime, get("softmax"), softmax(1003))


def test_a_lock_of_many_entries_is_asked_by_key(runtime: Runtime) -> None:
    op, device = get("softmax"), dispatch.reference_device(runtime, "sm90")
    problems = [op.problem(*softmax(rows)) for rows in (3, 5)]
    lock = Lock([Entry(device.slug, problem, Config("looped_row"), "") for problem in problems])
    compared: list[Any] = []

    class Other(type(problems[0].sizes)):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return super().__eq__(other)

        __hash__ = type(problems[0].sizes).__hash__

    found = lock.get(device.slug, dataclasses.replace(problems[1], sizes=Other(problems[1].sizes)))
    assert found is not None and found.problem == problems[1] and len(compared) == 1
    assert lock.get(device.slug, op.problem(*softmax(7))) is None


def test_lists_of_any_kind_count(runtime: Runtime) -> None:
    """The sizes of a key are those that a trace is given, for x.shape as for a list."""
    device = dispatch.reference_device(runtime, "sm90")
    for dims in ([0, 1], (0, 1), torch.Size([0, 1])):
        args = (torch.zeros(3, 5), dims, torch.float32)
        _, sizes = dispatch._key(runtime, get("sum"), args, DEVICE, device)
        assert list(sizes) == families.sizes_of(dispatch.input_key(get("sum"), args)) == [3, 5, 0, 1]


def test_a_member_keeps_no_notes(runtime: Runtime) -> None:
    """A process has hundreds of members, and what they were traced with is several times their own size."""
    member = traced(runtime, get("softmax"), softmax(1003))
    size: Size = member.wanted[0]
    assert not (size.trace.texts or size.trace.made or size.trace.asked or size.trace.variables)


def test_no_fault_of_a_trace_fails_a_call(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise SyntaxError("a number that is none in Python")

    found = planned(runtime, get("softmax"), softmax(1003))
    found.launched = [None]
    monkeypatch.setattr("portkern.sizes.Trace.function", fails)
    for _ in range(families.TRACED_FROM):
        families.learn(runtime, ("family",), found)
    assert "SyntaxError" in runtime.families.get(("family",)).refused


def test_traces_that_never_serve_end(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that reads its sizes as plain numbers: each trace holds for one shape, and costs several plans."""
    op = with_plan(lambda n: not list(range(n)))
    monkeypatch.setattr(families, "_call", lambda member, planned: member)
    for rows in range(1001, 1001 + 4 * families.FRUITLESS, 2):
        found = planned(runtime, op, softmax(rows))
        found.launched = [None]
        assert families.served(runtime, ("family",), [rows, 128], DEVICE) is None
        families.learn(runtime, ("family",), found)
    assert len(runtime.families.get(("family",)).members) == families.FRUITLESS
