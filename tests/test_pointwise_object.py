"""What ``@portkern.pointwise`` gives: calls and how they bind, torch.compile, copies and pickles."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import portkern
from portkern.errors import UnknownName
from portkern.pointwise_object import Pointwise, restored
from portkern.pointwise_op import pointwise
from portkern.registry import all_ops
from portkern.runtime import Runtime, current, using


@triton.jit
def _square_gradient(grad, x):
    return 2.0 * x * grad


@pointwise("test::square", reference=lambda x: x * x, derivative=_square_gradient)
@triton.jit
def square(x):
    """The square of each element."""
    return x * x


@triton.jit
def _scaled(x, y, scale: float = 2.0, MODE: tl.constexpr = 1):
    return x * scale + y * MODE


@triton.jit
def _line(x, scale: float):
    return x * scale


@triton.jit
def _line_gradient(grad, scale):
    return grad * scale


@triton.jit
def _shifted(x, shift: float):
    return x + shift


@triton.jit
def _shifted_gradient(grad):
    return grad


def scaled(name: str = "test::scaled", **changes: Any) -> Pointwise:
    return pointwise(name, **{"reference": lambda x, y, scale, MODE: x * scale + y * MODE, **changes})(_scaled)


def line(name: str = "test::line", function: Any = _line, **changes: Any) -> Pointwise:
    return pointwise(name, **{"reference": lambda x, scale: x * scale, "derivative": _line_gradient, **changes})(
        function
    )


class Activated(torch.nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.layer, self.activation = torch.nn.Linear(2, 2), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x))


# ---- torch.compile, and what a call costs -------------------------------------------------------------------------


@pytest.mark.parametrize("called", [False, True])
def test_compiles_without_a_break(called: bool) -> None:
    """Whether or not it was called, and so registered, before; the lock of ``register`` was traced."""
    activation = line(f"test::compiled_{called}".lower())
    x = torch.randn(3, requires_grad=True)
    if called:
        activation(x, 2.0)
    compiled = torch.compile(lambda z: activation(z, scale=3.0), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), 3.0 * x)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 3.0))
    assert all(current().ops[op.name] is op for op in activation.ops)


def test_compiles_as_the_attribute_of_a_module() -> None:
    module, x = Activated(square), torch.randn(4, 2)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


def test_an_object_declared_again_is_the_one_that_is_compiled() -> None:
    results = []
    for factor in (2.0, 3.0):  # as a notebook cell that is run twice
        activation = line("test::again", reference=lambda x, scale, by=factor: x * scale * by, derivative=None)
        compiled = torch.compile(lambda z, f=activation: f(z, 1.0), fullgraph=True, backend="aot_eager")
        results.append(compiled(torch.ones(1)).item())
    assert results == [2.0, 3.0]


def test_the_call_of_a_registered_op_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    activation, x = line("test::unlocked"), torch.ones(2)
    monkeypatch.setattr(current(), "lock", None)
    with pytest.raises((AttributeError, TypeError)):
        activation(x, 2.0)
    monkeypatch.undo()
    activation(x, 2.0)
    monkeypatch.setattr(current(), "lock", None)
    assert torch.equal(activation(x, 2.0), 2 * x)


def test_each_runtime_and_each_object_gets_its_op() -> None:
    first, second = line("test::two"), line("test::two", reference=lambda x, scale: x - scale)
    x = torch.ones(1)
    assert [first(x, 3.0).item(), second(x, 3.0).item(), first(x, 3.0).item()] == [3.0, -2.0, 3.0]
    with using(Runtime()):
        assert second(x, 3.0).item() == -2.0 and portkern.function("test::two")(x, 3.0).item() == -2.0


# ---- copies and pickles -------------------------------------------------------------------------------------------


def test_a_copy_is_the_object_itself() -> None:
    local = line()
    for each in (square, local):
        each(torch.ones(1), *(2.0,) * (each is local))
        assert copy.copy(each) is each and copy.deepcopy(each) is each
    averaged = copy.deepcopy(Activated(square))  # as an exponential moving average of a model does
    assert averaged.activation is square


def test_a_module_with_one_is_saved_and_loaded() -> None:
    module, memory = Activated(square), io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    assert loaded.activation is square
    x = torch.randn(3, 2)
    assert torch.equal(loaded(x), module(x))


other_name = line("test::other_name")


def test_a_pickle_names_the_attribute_or_the_op() -> None:
    assert __name__.encode() in pickle.dumps(other_name) and b"other_name" in pickle.dumps(other_name)
    assert pickle.loads(pickle.dumps(other_name)) is other_name  # not that of its function
    local = line("test::never_called")
    assert pickle.loads(pickle.dumps(local)) is local
    again = line("test::never_called")
    assert pickle.loads(pickle.dumps(local)) is again  # which has the name by now
    assert restored("test::never_called", "no_module_of_that_name", "square") is again


def test_a_pickle_that_no_declaration_answers_says_what_to_do() -> None:
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(line("test::lost")), capture_output=True)
    told = done.stderr.decode()
    assert "UnknownName: a pickle holds the pointwise op 'test::lost', which this process does not declare" in told
    assert f"run its declaration first, a local name in the module {__name__}" in told
    with pytest.raises(UnknownName, match=r"first, square in the module no\.module"):
        restored("test::lost_too", "no.module", "square")


def test_it_shows_what_it_is() -> None:
    assert repr(scaled()).startswith("<portkern.pointwise test::scaled(x: ")
    assert inspect.signature(square) == inspect.signature(portkern.function("test::square"))
    assert (square.__name__, square.__module__, square.__doc__) == ("square", __name__, "The square of each element.")


# ---- how a call binds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 1), {"x": 9}, r"scaled\(\) got multiple values for argument 'x'"),
        ((1,), {}, r"scaled\(\) missing 1 required positional argument: 'y'"),
        ((), {"scale": 1.0}, r"scaled\(\) missing 2 required positional arguments: 'x' and 'y'"),
        ((1, 1), {"z": 9}, r"scaled\(\) got an unexpected keyword argument 'z'"),
        ((1, 1, 1.0, 1, 1), {}, r"scaled\(\) takes from 2 to 4 positional arguments but 5 were given"),
    ],
)
def test_arguments_bind_as_python_binds_them(args: Any, kwargs: Any, text: str) -> None:
    """A keyword won over a positional argument."""
    with pytest.raises(TypeError, match=text):
        scaled()(*(torch.ones(1) for _ in args), **{name: torch.full((1,), 9.0) for name in kwargs})


def test_defaults_are_those_of_the_call() -> None:
    x = torch.ones(1)
    assert scaled()(x, x).item() == 3.0  # the function's own
    changed = scaled(defaults={"scale": 5.0, "MODE": 3})
    assert changed(x, x).item() == 8.0 and changed(x, x, MODE=0).item() == 5.0
    assert line(defaults={"scale": 4.0})(x).item() == 4.0
    assert [each.default for each in inspect.signature(changed).parameters.values()][2:] == [5.0, 3]
    operand = scaled(defaults={"y": 7.0})
    assert operand(x).item() == 9.0


def test_examples_are_for_tests_alone() -> None:
    x = torch.ones(1)
    declared = scaled(examples={"scale": 9.0})
    assert declared(x, x).item() == 3.0
    for changes, numbers in (
        ({}, (2.0, 1)),
        ({"defaults": {"scale": 5.0}}, (5.0, 1)),
        ({"examples": {"MODE": 4}}, (2.0, 4)),
    ):
        op = scaled(**changes).ops[0]
        assert op.inputs((3,), torch.float32)[4:6] == numbers
    assert line().ops[0].inputs((3,), torch.float32)[2] == 1.5


def test_a_shipped_op_has_its_own_default_and_another_in_tests() -> None:
    assert portkern.add(torch.ones(1), torch.ones(1)).item() == 2.0
    assert all_ops()["add"].inputs((1,), torch.float32)[4] == 1.5


def test_a_number_that_the_derivative_does_not_take_is_there_for_autograd() -> None:
    """The reference was given None for it."""
    shifted = line("test::shifted", _shifted, reference=lambda x, shift: x + shift, derivative=_shifted_gradient)
    x = torch.ones(3, requires_grad=True)
    shifted(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]
