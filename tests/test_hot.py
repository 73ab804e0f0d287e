"""The fast route, as far as it goes without a GPU: its autograd function, and that CPU tensors take the other route."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch, hot, library
from portkern.errors import NotDifferentiable
from portkern.op import Backward, pack, unpack, visible
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current, using


def derived(name: str, *args: object) -> torch.Tensor:
    """The call as the fast route makes it where a gradient is wanted."""
    op = all_ops()[name]
    assert op.signature is not None
    canonical = op.signature(*args)
    found: torch.Tensor = hot._derive(op, None, args, canonical)
    return found


def test_gradients_are_those_of_the_other_route() -> None:
    x, grad = (torch.randn(5, 7, dtype=torch.float64) for _ in range(2))
    a, b = (x.clone().requires_grad_() for _ in range(2))
    derived("softmax", a, -1).backward(grad)
    portkern.softmax(b, -1).backward(grad)
    assert torch.equal(a.grad, b.grad)
    left, right = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 5, dtype=torch.float64)
    (found,) = torch.autograd.grad(derived("matmul", left, right).sum(), left)
    torch.testing.assert_close(found, right.sum(1).expand(3, 4))


def test_gradcheck_and_second_derivative() -> None:
    a, b = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: derived("matmul", a, b), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: derived("matmul", a, b), (a, b))
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: derived("log_softmax", x, -1), x)
    (first,) = torch.autograd.grad(derived("softmax", x, -1).pow(2).sum(), x, create_graph=True)
    with pytest.raises(NotDifferentiable, match="softmax_backward"):
        first.sum().backward()
    # The derivative's own op, by the fast route: it has no derivative, and says so.
    grad = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    second = hot._derive(all_ops()["softmax_backward"], None, (), (grad, torch.softmax(x, -1), 1, torch.float64))
    assert second.requires_grad
    with pytest.raises(NotDifferentiable, match="softmax_backward"):
        second.sum().backward()


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    function = current().functions["matmul_backward"]
    monkeypatch.setitem(current().functions, "matmul_backward", lambda *args: (called.append(1), function(*args))[1])
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    derived("matmul", a, b).sum().backward()
    assert len(called) == 1 and b.grad is None


def test_cpu_tensors_prepare_nothing() -> None:
    before = len(current().calls)
    for _ in range(2):
        portkern.softmax(torch.randn(3, 4), -1)
    assert len(current().calls) == before


def test_the_second_call_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes once costs no preparation; from the third call on nothing is looked up but the key."""
    runtime, op, x = current().anew(), all_ops()["softmax"], torch.randn(3, 4)
    seen: list[str] = []

    def call(given: object) -> torch.Tensor:
        seen.append("call")
        return x

    def prepare(args: object, places: object, hidden: int) -> object:
        seen.append(f"prepare {places} {hidden}")
        return call

    monkeypatch.setattr(dispatch, "run", lambda op, args: (seen.append("run"), x)[1])
    monkeypatch.setattr(dispatch, "planned", lambda op, args: SimpleNamespace(replay=prepare))
    for _ in range(2):
        assert hot._unprepared(runtime, op, "key", (x, -1, None), (x, -1), False, frozenset(), 0) is x
    assert seen == ["run", "prepare {0: 0} 0", "call"]
    prepared = runtime.calls.get("key")
    assert prepared.canonical((x, -1)) == (x, -1, None) and prepared.call is call
    seen.clear()
    for _ in range(2):
        hot._unprepared(runtime, op, "other key", (x, -1, None), (x, -1), False, frozenset(), 1)
    assert seen == ["run", "prepare {0: 0} 1", "run"], "what was prepared lacks an output, and this call gives all"


def test_numbers_that_change_per_call_reach_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved for it is this call's number, not that of the call that prepared."""
    runtime, op, x = current().anew(), all_ops()["softmax"], torch.randn(3, 4)
    monkeypatch.setattr(dispatch, "run", lambda op, args: x)
    monkeypatch.setattr(dispatch, "planned", lambda op, args: SimpleNamespace(replay=lambda *rest: lambda given: x))
    for number in (1, 2):
        given = (x, number, None)
        hot._unprepared(runtime, op, "key", given, given, False, frozenset((1,)), 0)
    assert runtime.calls.get("key").canonical((x, 3, None)) == (x, 3, None)


def test_a_prepared_call_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts as long as its key is asked for: what it was prepared with is memory of the caller's."""
    runtime, op, x = current(), all_ops()["softmax"], torch.randn(3, 4)
    seen: list[Any] = []
    monkeypatch.setattr(
        "portkern.planned.prepare", lambda *args, **rest: args[5]
    )  # what it does where a profiler listens
    monkeypatch.setattr(dispatch.Planned, "execute", lambda self, args: seen.append(args))
    args = (x, 1, torch.float32)
    situation = dispatch.situate(runtime, op, metas_of(args), dispatch.reference_device(runtime, "sm90"))
    prepared = dispatch.Planned(situation, dispatch.resolve(runtime, situation), torch.device("cuda:0"))
    prepared.launched.append("compiled")
    call, kept = prepared.replay(args, {0: 0}), weakref.ref(x)
    assert call is not None
    del x, args
    gc.collect()
    assert kept() is None
    other = torch.randn(3, 4)
    call((other, -1))
    assert seen == [[other, 1, torch.float32]]


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, list[int]]:
    """The public function of an op as on a GPU, its prepared calls made by torch; and how many outputs each gave."""
    op, given = all_ops()[name], list[int]()

    def replay(each: Any, args: Any, places: Any, hidden: int = 0) -> Any:
        def call(now: Any) -> Any:
            outputs = unpack(dispatch.run(each, [now[places[i]] if i in places else arg for i, arg in enumerate(args)]))
            if each is op:
                given.append(len(outputs) - hidden)
            return pack(outputs[: len(outputs) - hidden])

        return call

    monkeypatch.setattr(dispatch, "planned", lambda each, args: SimpleNamespace(replay=partial(replay, each)))
    monkeypatch.setattr(hot, "_on_gpu", lambda given: True)
    assert op.signature is not None
    slow = current().functions[name]
    return hot.function(op, op.signature, lambda *args: slow(*op.signature(*args)), visible), given


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "group_norm", "cross_entropy", "logsumexp"])
def test_prepared_calls_show_what_the_function_gives(monkeypatch: pytest.MonkeyPatch, name: str, dims: int) -> None:
    """With outputs in another shape and with those as they are, which leave out what is for the derivative."""
    x, r, t = torch.randn(2, 6, 8), torch.randn(2, 6, 8), torch.randint(6, (2, 8))
    args: dict[str, tuple[Any, ...]] = {
        "layer_norm": (x, x.shape[-dims:]),
        "add_layer_norm": (x, r, x.shape[-dims:]),
        "group_norm": (x.flatten(3 - dims), 2),
        "cross_entropy": (x, t),
        "logsumexp": (x, tuple(range(dims)), dims == 1),
    }
    public = getattr(torch.nn.functional, name.removeprefix("add_"), torch.logsumexp)
    with using(current().anew()):
        function, given = on_the_cpu(monkeypatch, name)
        found = [function(*args[name]) for _ in range(4)]
    total = x + r
    expected = [public(total, x.shape[-dims:]), total] if name.startswith("add_") else [public(*args[name])]
    for each in found:
        assert isinstance(each, torch.Tensor) == (len(expected) == 1)
        torch.testing.assert_close(list(unpack(each)), expected)
    bare = name == "cross_entropy" or dims == 1 and name != "logsumexp"
    assert given[-1] == len(expected) + (0 if bare else all_ops()[name].saved)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_rms_norm", "softmax", "cross_entropy", "gelu", "add"])
def test_gradients_of_prepared_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first prepared call works out what is kept for the derivative, and the others go by that."""
    op = all_ops()[name]

    def other(*args: Any) -> Any:
        assert op.signature is not None
        return visible(op, library.call(name, *op.signature(*args)), args, {})

    with using(current().anew()) as runtime:
        function, given = on_the_cpu(monkeypatch, name)
        for turn in range(5):
            leaves, grads = [], []
            for call in (function, other):
                torch.manual_seed(turn)
                args = [torch.randn(4, 8, requires_grad=True), *_rest(name)]
                outputs = unpack(call(*args))
                leaves.append([each for each in args if isinstance(each, torch.Tensor) and each.requires_grad])
                grads.append(torch.autograd.grad(sum(each.float().pow(2).sum() for each in outputs), leaves[-1]))
            torch.testing.assert_close(grads[0], grads[1])
        (prepared,) = (each for each in runtime.calls.young.values() if each.op is op)
    assert len(given) == 4, "from the second call on"
    assert isinstance(prepared.recipe, library.Recipe) == (name != "cross_entropy"), "which keeps a tensor made for it"
    assert op.differentiated


def test_results_that_are_the_outputs_themselves() -> None:
    x, y, z = torch.randn(3), torch.randn(3), torch.randn(3)
    one, two = SimpleNamespace(saved=1, listed=False), SimpleNamespace(saved=0, listed=False)
    assert hot.are_bare(one, (x, y), x) and hot.are_bare(two, (x, y), (x, y)) and hot.are_bare(two, x, x)
    others = [
        (one, (x, y), (x,)),
        (one, (x, y), x.view(3)),
        (two, (x, y), [x, y]),
        (two, (x, y), (y, x)),
        (two, x, None),
    ]
    others += [(two, (x, y, z), (x, y)), (SimpleNamespace(saved=0, listed=True), [x], [x])]
    assert not any(hot.are_bare(*each) for each in others)


def _rest(name: str) -> tuple[Any, ...]:
    weight = torch.randn(8, requires_grad=True)
    return {
        "layer_norm": ((8,), weight, torch.randn(8)),
        "rms_norm": ((8,), weight, 1e-3),
        "add_rms_norm": (torch.randn(4, 8), (8,), weight),
        "softmax": (-1,),
        "cross_entropy": (torch.randint(8, (4,)),),
        "gelu": (),
        "add": (weight,),
    }[name]


def test_what_is_kept_by_no_recipe() -> None:
    """A tensor made for the derivative, a number that changes per call, and a tensor that was given twice."""
    x, y = torch.randn(3), torch.randn(3)

    def op(save: Any, values: tuple[int, ...] = ()) -> Any:
        part = Backward("other", save, lambda saved, grads: grads, (0,))
        return SimpleNamespace(saved=0, depends=(), backwards=(part,), values=values)

    def kept(save: Any, values: tuple[int, ...] = (), args: tuple[Any, ...] = (x, 2.0)) -> Any:
        return library.recipe(op(save, values), (0,), args, y)

    assert kept(lambda args, outputs: (args[0], outputs[0], args[1], (1, 2))).tensors == (0, 2)
    assert kept(lambda args, outputs: (args[1],)).tensors == ()
    assert kept(lambda args, outputs: (args[0].clone(),)) is None
    assert kept(lambda args, outputs: ((args[0],),)) is None
    assert kept(lambda args, outputs: (args[0], args[1]), (1,)).numbers == ((0, 1, 1),)
    assert kept(lambda args, outputs: (args[1] if type(args[1]) is float else None,), (1,)) is None
    assert kept(lambda args, outputs: (2 * args[1],), (1,)) is None
    assert kept(lambda args, outputs: ((3, args[1]),), (1,)) is None
    assert kept(lambda args, outputs: (args[1],), args=(x, x)) is None


def test_what_nothing_trained_is_in_has_no_gradient_in_prepared_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    x, r, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, requires_grad=True)
    with using(current().anew()) as runtime:
        function, _ = on_the_cpu(monkeypatch, "add_rms_norm")
        for _ in range(4):
            y, s = function(x, r, (8,), w)
            assert y.requires_grad and not s.requires_grad
            torch.autograd.grad(y.sum(), w)
        (prepared,) = (each for each in runtime.calls.young.values() if each.op is all_ops()["add_rms_norm"])
        assert isinstance(prepared.recipe, library.Recipe) and prepared.recipe.constant == (1,)
