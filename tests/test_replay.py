"""Prepared calls: what a replay allocates and launches, with a launcher and a device that only write down."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portkern.executors import replay
from portkern.executors.launch import execute
from portkern.executors.replay import Driver, form, prepare
from portkern.plan import Buffer, Desc, In, Launch, Meta, Out, Plan, Scratch, Value
from portkern.runtime import Recent

F32 = torch.float32


@dataclass
class Launcher:
    """In the place of Triton's compiled kernel: it keeps what it was launched with."""

    packed_metadata: str = "packed"
    function: int = 77
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self, *args: Any) -> None:
        self.launched.append(args)


def driver(count: int = 1, current: int = 0, entered: list[int] | None = None) -> Driver:
    @contextmanager
    def guard(index: int) -> Iterator[None]:
        assert entered is not None
        entered.append(index)
        yield

    return Driver(
        stream_of=lambda index: 1000 + index,
        empty=lambda shape, strides, dtype: torch.full(shape, 7.0, dtype=dtype).as_strided(shape, strides),
        current=lambda: current,
        count=count,
        guard=guard,
    )


def launch(*args: Any, names: str = "y x n B", grid: tuple[int, ...] = (3,)) -> Launch:
    kernel = SimpleNamespace(arg_names=names.split(), params=[], pre_run_hooks=[])
    return Launch(kernel=kernel, grid=grid, args=args, constexprs={"B": 128}, num_warps=4)


def one(args: Sequence[Any], plan: Plan, places: dict[int, int], **options: Any) -> tuple[Any, Launcher]:
    kernel = Launcher()
    options.setdefault("otherwise", None)
    call = prepare(plan, [kernel] * len(plan.launches), 0, args, places, driver=driver(), **options)
    assert call is not None
    return call, kernel


@pytest.fixture(autouse=True)
def plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the Triton that is installed may be ``direct``: these tests say which they mean."""
    monkeypatch.setattr(replay, "DIRECT_VERSIONS", ())


def test_forms() -> None:
    assert [form(version) for version in ("3.6.0", "3.9.1", "3.8.0+git", "3.5.1", "3.10.0", "4.0")] == [
        "run", "run", "run", "jit", "jit", "jit",
    ]  # fmt: skip


def test_arguments_come_in_the_kernels_order() -> None:
    x = torch.randn(4)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(0), 4),))
    call, kernel = one([Meta.of(x)], plan, {0: 0})
    y = call([x])
    assert torch.equal(y, torch.full((4,), 7.0)), "the output is what was allocated"
    (seen,) = kernel.launched
    assert seen == (3, 1, 1, 1000, 77, "packed", None, None, None, y.data_ptr(), x.data_ptr(), 4, None)


def test_tensors_are_taken_from_their_places_and_values_from_the_call() -> None:
    x, w = torch.randn(4), torch.randn(4)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(1), Value(0), names="y x n B"),))
    call, kernel = one([0.5, Meta.of(x)], plan, {1: 2, 0: 0})
    call([0.25, w, x])
    assert kernel.launched[0][9 + 1] == x.data_ptr() and kernel.launched[0][9 + 2] == 0.25
    fixed, kernel = one([0.5, Meta.of(x)], plan, {1: 0})
    fixed([x])
    assert kernel.launched[0][9 + 2] == 0.5, "a value without a place stays as it was"


def test_offsets_scratch_zeros_and_several_launches() -> None:
    x = torch.randn(8, dtype=torch.float16)
    plan = Plan(
        outputs=(Buffer((2,), (1,), F32), Buffer((3,), (1,), F32, init=0)),
        scratch=(Buffer((5,), (1,), torch.float64),),
        launches=(launch(Scratch(0, 2), In(0, 3), None), launch(Out(1), Scratch(0), 9, grid=(2, 5, 6))),
    )
    call, kernel = one([Meta.of(x)], plan, {0: 0})
    first, second = call([x])
    assert second.tolist() == [0.0] * 3 and first.tolist() == [7.0] * 2
    a, b = kernel.launched
    assert a[10] == x.data_ptr() + 3 * 2 and a[11] is None
    assert a[9] == b[10] + 2 * 8, "one buffer in both launches, two float64 further in the first"
    assert b[:3] == (2, 5, 6) and b[9] == second.data_ptr()


def test_hidden_outputs_lie_in_the_sink_where_they_may() -> None:
    x, sink = torch.randn(4), torch.empty(16, dtype=torch.uint8)
    outputs = (
        Buffer((4,), (1,), F32, unread=True),  # shown
        Buffer((2, 2), (2, 1), F32, unread=True),
        Buffer((5,), (1,), F32, unread=True),  # does not fit
        Buffer((2,), (1,), F32, init=0, unread=True),
        Buffer((2,), (1,), F32),  # another launch may read it
        Buffer((2,), (1,), F32, unread=True),  # described to the kernel
    )
    args = (Out(0), Out(1, 1), Out(2), Out(3), Out(4), Desc(Out(5), (2,), (1,), (2,)), In(0))
    plan = Plan(outputs, launches=(launch(*args, names="a b c d e f x"),))
    call, kernel = one([Meta.of(x)], plan, {0: 0}, hidden=5, sink=sink)
    y = call([x])
    assert isinstance(y, torch.Tensor) and y.shape == (4,), "one output is shown"
    addresses = kernel.launched[0][9:]
    assert addresses[0] == y.data_ptr() and addresses[1] == sink.data_ptr() + 4
    ours = range(sink.data_ptr(), sink.data_ptr() + 16)
    assert not any(address in ours for address in addresses[2:5]) and addresses[5].shape == [2]
    whole, kernel = one([Meta.of(x)], plan, {0: 0}, sink=sink)
    assert len(whole([x])) == 6 and not any(address in ours for address in kernel.launched[0][9:14])


def test_descriptors_are_made_of_the_tensor() -> None:
    x = torch.randn(16, 16)
    block = Desc(In(0), (16, 16), (16, 1), (16, 16))
    call, kernel = one([Meta.of(x)], Plan((), launches=(launch(block, None, None),)), {0: 0})
    assert call([x]) is None, "no output"
    made = kernel.launched[0][9]
    assert made.base is x and made.shape == [16, 16] and made.block_shape == [16, 16]


def test_new_shapes_share_compiled_source() -> None:
    before = replay._compiled.cache_info().misses
    for n in (5, 6, 7):
        x = torch.randn(n)
        call, kernel = one([Meta.of(x)], Plan((Buffer((n,), (1,), F32),), launches=(launch(Out(0), In(0), n),)), {0: 0})
        assert call([x]).shape == (n,) and kernel.launched[0][11] == n
    assert replay._compiled.cache_info().misses - before <= 1


def test_recent_forgets_what_was_not_asked_for() -> None:
    cache = Recent(10)
    for number in range(1000):
        cache.put(number, str(number))
        assert cache.get(0) == "0", "asked for all the time"
        assert len(cache) <= 20
    assert cache.get(999) == "999" and cache.get(500) is None
    cache.clear()
    assert cache.get(999) is None and len(cache) == 0


class Started:
    """In the place of a kernel: its launch computes nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **words: None


def test_a_launch_leaves_no_tensor_to_the_collector_of_cycles() -> None:
    """Garbage of 100 GB is not collected before Python has allocated a few hundred objects more."""
    arguments = (In(0), (In(0), Out(0)), Scratch(0), Value(1))
    launch = Launch(Started(), (1,), arguments, {}, 1)
    plan = Plan((Buffer((4,), (1,), F32),), (Buffer((2,), (1,), F32),), (launch,))
    x = torch.ones(4)
    gc.collect()
    gc.disable()
    try:
        (y,) = execute(plan, (x, 0.5), torch.device("cpu"), {})
        watched = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()
