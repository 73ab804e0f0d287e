"""What a replay asks and tells others at each launch: hooks, chosen kernels, launchers, the current device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from portkern.errors import PluginError
from portkern.executors import replay
from portkern.executors.replay import prepare
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan
from tests.test_replay import F32, Launcher, driver, launch, one


class Direct:
    """Triton 3.6's launcher, as far as a replay looks at it."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = True, False

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch(self, *args: Any) -> None:
        self.launched.append(args)

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:  # noqa: N803
        raise AssertionError("the C function behind it is called instead")


@pytest.fixture(autouse=True)
def plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the Triton that is installed may be ``direct``: these tests say which they mean."""
    monkeypatch.setattr(replay, "DIRECT_VERSIONS", ())


def test_launch_hooks_are_honoured() -> None:
    from triton import knobs

    x, asked = torch.randn(4), []

    def otherwise(given: Sequence[Any]) -> str:
        asked.append(given)
        return "by Triton"

    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(0), 4),))
    call, kernel = one([Meta.of(x)], plan, {0: 0}, otherwise=otherwise)
    call([x])

    def hook(metadata: Any) -> None: ...

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        assert call([x]) == "by Triton"
        chain.remove(hook)
    before = knobs.runtime.launch_enter_hook
    knobs.runtime.launch_enter_hook = hook
    assert call([x]) == "by Triton"
    knobs.runtime.launch_enter_hook = before
    call([x])
    assert len(asked) == 3 and len(kernel.launched) == 2


def test_a_hook_that_is_set_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    x = torch.randn(4)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(0), 4),))
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    call, kernel = one([Meta.of(x)], plan, {0: 0}, otherwise=lambda given: "by Triton")
    assert call([x]) == "by Triton"
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    call([x])
    assert len(kernel.launched) == 1


def test_a_hook_of_the_kernel_itself() -> None:
    """Set before the first call or later: Triton's own launch runs it."""
    x, hooks = torch.randn(4), list[Any]()
    kernel = SimpleNamespace(arg_names=["y", "x"], params=[], pre_run_hooks=hooks)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(Launch(kernel, (3,), (Out(0), In(0)), {}, 4),) * 2)
    call, launched = one([Meta.of(x)], plan, {0: 0}, otherwise=lambda given: "by Triton")
    call([x])
    hooks.append(print)
    assert call([x]) == "by Triton"
    hooks.clear()
    call([x])
    assert len(launched.launched) == 4


def test_parameters_that_the_launch_leaves_out_or_names() -> None:
    """A number by its default or by keyword, which Triton takes like any other. Constexprs no launcher reads."""

    def function(y: Any, x: Any, n: Any, scale: Any = 0.5, B: tl.constexpr = 7) -> None: ...  # noqa: N803

    x, kernel = torch.randn(4), JITFunction(function)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(Launch(kernel, (3,), (Out(0), In(0)), {"n": 4, "B": 128}, 4),))
    call, launched = one([Meta.of(x)], plan, {0: 0})
    call([x])
    assert launched.launched[0][11:] == (4, 0.5, None)


def test_no_kernel_that_chooses_for_itself() -> None:
    """Its choice, and what it does before a launch, would be missing from a replay."""

    def function(x: Any, BLOCK: tl.constexpr) -> None: ...  # noqa: N803

    kernel = triton.heuristics({"BLOCK": lambda args: 16})(JITFunction(function))
    with pytest.raises(PluginError, match=r"inside Heuristics.*kernel\.fn"):
        Launch(kernel, (1,), (), {}, 4)
    assert Launch(kernel.fn, (1,), (), {}, 4).kernel is kernel.fn


def test_direct_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DIRECT_VERSIONS", replay.RUN_VERSIONS)
    x = torch.randn(4)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(0), 4),))
    kernel = SimpleNamespace(run=Direct(), function=77, packed_metadata="packed")
    call = prepare(plan, [kernel], 0, [Meta.of(x)], {0: 0}, otherwise=None, driver=driver())
    y = call([x])
    assert kernel.run.launched == [
        (3, 1, 1, 1000, 77, True, False, None, None, "packed", None, None, None, y.data_ptr(), x.data_ptr(), 4, None)
    ]
    kernel.run.global_scratch_size = 16
    call = prepare(plan, [kernel], 0, [Meta.of(x)], {0: 0}, otherwise=None, driver=driver())
    with pytest.raises(AssertionError, match="the C function"):
        call([x])  # memory for the kernel is allocated by Triton's own launcher


def test_an_unknown_launcher_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(0), 4),))
    interpreted = prepare(plan, [None], 0, [Meta.of(x)], {0: 0}, otherwise=None, driver=driver())
    monkeypatch.setattr(replay, "RUN_VERSIONS", ())
    unknown = prepare(plan, [Launcher()], 0, [Meta.of(x)], {0: 0}, otherwise=None, driver=driver())
    assert interpreted is None and unknown is None


def test_another_current_device_is_changed_for_the_call() -> None:
    x, entered = torch.randn(4), list[int]()
    plan = Plan((Buffer((4,), (1,), F32),), launches=(launch(Out(0), In(0), 4),))
    kernel = Launcher()
    for current, index in ((0, 1), (1, 1)):
        call = prepare(plan, [kernel], index, [Meta.of(x)], {0: 0}, None, driver(2, current, entered))
        assert call is not None
        call([x])
    assert entered == [1], "only where another one is current"
    assert [seen[3] for seen in kernel.launched] == [1001, 1001], "the stream of the tensors' device"
