"""Numbers among the arguments of public functions: what torch takes for one is taken, and nothing else."""

from __future__ import annotations

import decimal
import fractions
import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import portkern
from portkern.arguments import INTEGERS, check_int, check_number, check_scalar
from portkern.errors import BadArgument, BadType
from portkern.hot import _places
from portkern.registry import public_names


class Floating:
    """Has a float in it, and is none."""

    def __float__(self) -> float:
        return 0.5


X, TARGET = torch.randn(2, 4), torch.tensor([0, 2])
Q, TABLE = torch.randn(1, 2, 1, 4), torch.randn(5, 2)
Function = Callable[[Any], Any]

# What stands for a number: of one half, which every float argument here takes, and of integers.
HALVES: list[Any] = [
    0.5, numpy.float64(0.5), numpy.float32(0.5), numpy.float16(0.5), torch.tensor(0.5), torch.tensor(0.5).half(),
    torch.tensor(0.5).bfloat16(), torch.tensor(0.5).double(),
]  # fmt: skip
ONES: list[Any] = [1, numpy.int64(1), numpy.uint8(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8)]
FLAGS: list[Any] = [True, numpy.True_, torch.tensor(True)]
NEITHER: list[Any] = [
    fractions.Fraction(1, 2), decimal.Decimal("0.5"), Floating(), "0.5", b"1", [0.5], (1,), numpy.array(0.5),
    numpy.array([1]), numpy.str_("1"), torch.tensor([0.5]), torch.tensor([1]), torch.tensor([[1.0]]),
    torch.tensor(0.5, requires_grad=True), torch.nn.Parameter(torch.tensor(0.5)), torch.ones((), device="meta"),
    object(),
]  # fmt: skip
IDS = {"ids": lambda value: f"{type(value).__name__} {str(value)[:12]}"}


def _times_four(value: Any) -> Any:
    """rope takes no other dim here than 4: that of each way to write 1."""
    whole = not isinstance(value, bool) and isinstance(value, (int, numpy.integer))
    return 4 * value if whole or (isinstance(value, Tensor) and value.dtype in INTEGERS) else value


# Public function and argument: portkern's, and torch's where it has one.
FLOATS: dict[tuple[str, str], tuple[Function, Function | None]] = {
    ("leaky_relu", "negative_slope"): (lambda v: portkern.leaky_relu(X, v), lambda v: F.leaky_relu(X, v)),
    ("add", "alpha"): (lambda v: portkern.add(X, X, alpha=v), lambda v: torch.add(X, X, alpha=v)),
    ("axpy", "a"): (lambda v: portkern.axpy(X, X, v), None),
    ("cross_entropy", "label_smoothing"): (
        lambda v: portkern.cross_entropy(X, TARGET, label_smoothing=v),
        lambda v: F.cross_entropy(X, TARGET, label_smoothing=v),
    ),
    ("cross_entropy", "z_loss"): (lambda v: portkern.cross_entropy(X, TARGET, z_loss=v), None),
    ("cross_entropy", "softcap"): (lambda v: portkern.cross_entropy(X, TARGET, softcap=v), None),
    ("dropout", "p"): (lambda v: portkern.dropout(X, v, False), lambda v: F.dropout(X, v, False)),
    ("bias_dropout_add", "p"): (lambda v: portkern.bias_dropout_add(X, None, X, v, False), None),
    ("group_norm", "eps"): (lambda v: portkern.group_norm(X, 2, eps=v), lambda v: F.group_norm(X, 2, eps=v)),
    ("layer_norm", "eps"): (lambda v: portkern.layer_norm(X, (4,), eps=v), lambda v: F.layer_norm(X, (4,), eps=v)),
    ("add_layer_norm", "eps"): (lambda v: portkern.add_layer_norm(X, X, (4,), eps=v)[0], None),
    ("rms_norm", "eps"): (lambda v: portkern.rms_norm(X, (4,), eps=v), lambda v: F.rms_norm(X, (4,), eps=v)),
    ("add_rms_norm", "eps"): (lambda v: portkern.add_rms_norm(X, X, (4,), eps=v)[0], None),
    ("masked_softmax", "scale"): (lambda v: portkern.masked_softmax(X, scale=v), None),
    ("var_mean", "correction"): (
        lambda v: portkern.var_mean(X, 1, correction=v)[0],
        lambda v: torch.var_mean(X, 1, correction=v)[0],
    ),
}
INTS: dict[tuple[str, str], tuple[Function, Function | None]] = {
    ("bincount", "minlength"): (
        lambda v: portkern.bincount(TARGET, minlength=v),
        lambda v: torch.bincount(TARGET, minlength=v),
    ),
    ("cross_entropy", "ignore_index"): (
        lambda v: portkern.cross_entropy(X, TARGET, ignore_index=v),
        lambda v: F.cross_entropy(X, TARGET, ignore_index=v),
    ),
    ("group_norm", "num_groups"): (lambda v: portkern.group_norm(X, v), lambda v: F.group_norm(X, v)),
    ("layer_norm", "normalized_shape"): (
        lambda v: portkern.layer_norm(X[:, :1], (v,)),
        lambda v: F.layer_norm(X[:, :1], (v,)),
    ),
    ("softmax", "dim"): (lambda v: portkern.softmax(X, v), lambda v: F.softmax(X, v)),
    ("log_softmax", "dim"): (lambda v: portkern.log_softmax(X, v), lambda v: F.log_softmax(X, v)),
    ("argmax", "dim"): (lambda v: portkern.argmax(X, v), lambda v: torch.argmax(X, v)),
    ("rope", "rotary_dim"): (lambda v: portkern.rope(Q, Q, TABLE, TABLE, rotary_dim=_times_four(v))[0], None),
}
POINTWISE = ("negative_slope", "alpha", "a")  # integers stay integers, of which an array says nothing
CASES = [pytest.param(name, *found, id="-".join(name)) for name, found in {**FLOATS, **INTS}.items()]


def test_every_number_of_a_public_function_is_here() -> None:
    found = {
        (name, parameter.name)
        for name in public_names()
        for parameter in inspect.signature(getattr(portkern, name)).parameters.values()
        if parameter.annotation in ("float", "float | None", "int", "int | None")
    }
    assert found - set(FLOATS) - set(INTS) == set()
    assert len(found) > 20


def refused(function: Function, value: Any) -> bool:
    """Whether torch's ``function`` does not take ``value``, by its type or because it is outside of what is taken."""
    try:
        function(value)
    except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize(("name", "ours", "torchs"), CASES)
@pytest.mark.parametrize("value", [*HALVES, *ONES, *FLAGS], **IDS)
def test_what_torch_takes_for_a_number_is_taken(
    name: tuple[str, str], ours: Function, torchs: Function | None, value: Any
) -> None:
    """By value, whatever it stands in; bools as each function of torch does."""
    if torchs is None:
        torchs = (lambda v: check_number(*name, v)) if name in FLOATS else (lambda v: check_int(*name, v))
    if name[1] == "dim" and isinstance(value, Tensor) and value.dtype == torch.bool:
        return  # which is an index to Python
    if refused(torchs, value):
        with pytest.raises(BadArgument, match=rf"{name[0]}\(\):.*{name[1]}"):
            ours(value)
        return
    plain = value.item() if isinstance(value, (Tensor, numpy.generic)) else value
    if isinstance(plain, bool):
        plain = 1.0
    assert torch.equal(ours(value), ours(plain))


@pytest.mark.parametrize(("name", "ours", "torchs"), CASES)
@pytest.mark.parametrize("value", NEITHER, **IDS)
def test_what_torch_takes_for_no_number_is_refused(
    name: tuple[str, str], ours: Function, torchs: Function | None, value: Any
) -> None:
    if name in INTS and isinstance(value, Tensor) and value.dtype == torch.int64:
        return  # torch's functions differ; here an integer may be whatever Python takes for one
    assert torchs is None or refused(torchs, value)
    with pytest.raises(BadType, match=rf"{name[0]}\(\): argument '{name[1]}' must be (a number|an int), not "):
        ours(value)


def test_the_value_is_told_and_what_to_write_instead() -> None:
    for value, text in (
        (fractions.Fraction(1, 2), r"not Fraction \(Fraction\(1, 2\)\); write it as a Python float or int"),
        ("a" * 99, r"not str \('a{39}\.\.\.\); write it as"),
        (numpy.ones(3), r"not ndarray \(of shape \[3\]\); write it as"),
        (torch.ones(2, 1), r"not a tensor of shape \[2, 1\]: give a number"),
        (torch.ones(1, 1), r"not a tensor of shape \[1, 1\]: give eps\.item\(\)"),
        (
            torch.ones((), requires_grad=True),
            r"not a tensor that requires a gradient, .* lost: give eps\.item\(\)",
        ),
        (torch.ones((), device="meta"), r"not a tensor without a value \(.*\): give a number"),
        (1j, r"not complex \(1j\); write it as"),
    ):
        with pytest.raises(BadType, match=rf"f\(\): argument 'eps' must be a number, {text}"):
            check_scalar("f", "eps", value)
    with pytest.raises(BadType, match=r"must be an int, not float \(0\.5\); write it as a Python int"):
        check_int("f", "n", 0.5)
    with pytest.raises(BadArgument, match="no float64 holds"):
        check_number("f", "eps", 10**400)


def test_an_integer_factor_stays_one() -> None:
    whole = torch.tensor([1, 2])
    for two in (2, numpy.int32(2), torch.tensor(2), torch.tensor(2, dtype=torch.int16)):
        found = portkern.add(whole, whole, alpha=two)
        assert found.dtype == torch.int64 and torch.equal(found, 3 * whole)
    for two in (2.0, torch.tensor(2.0), numpy.True_, torch.tensor(True)):
        with pytest.raises(RuntimeError):
            torch.add(whole, whole, alpha=two)
        with pytest.raises(BadArgument, match=r"add\(\): alpha is"):
            portkern.add(whole, whole, alpha=two)


def test_operands_are_tensors_or_numbers_as_torchs_are() -> None:
    for value in (fractions.Fraction(1, 2), numpy.array(0.5), Floating(), "1"):
        with pytest.raises(TypeError):
            torch.add(X, value)
        with pytest.raises(BadType, match="'other' must be a torch.Tensor or a number"):
            portkern.add(X, value)
    whole = torch.tensor([1, 2])
    for value in (numpy.True_, numpy.float32(2), numpy.int64(2), True):
        expected = torch.add(whole, value)
        assert portkern.add(whole, value).dtype == expected.dtype and torch.equal(portkern.add(whole, value), expected)


# One for each way by which a number comes in: seconds of compiling each.
@pytest.mark.parametrize("name", [("add", "alpha"), ("layer_norm", "eps"), ("leaky_relu", "negative_slope")])
def test_a_python_number_compiles_without_a_break_and_a_tensor_with_one(name: tuple[str, str]) -> None:
    ours, _ = FLOATS[name]

    def compiled(**options: bool) -> Function:
        torch._dynamo.reset()
        return torch.compile(ours, backend="eager", **options)

    for value in (0.25, *([] if name[1] in POINTWISE else [numpy.float64(0.25), torch.tensor(1)])):
        assert torch.equal(compiled(fullgraph=True)(value), ours(value))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"'{name[1]}' must be a number, .*not known while this is"):
        compiled(fullgraph=True)(torch.tensor(0.25))
    for value in (torch.tensor(0.25), numpy.float32(0.25)):
        assert torch.equal(compiled()(value), ours(value))


def test_a_fake_tensor_has_no_value() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, unknown = torch.empty(2, 4), torch.empty(())
        with pytest.raises(BadType, match=r"layer_norm\(\): argument 'eps' must be a number, not a tensor without a"):
            portkern.layer_norm(x, (4,), eps=unknown)
        assert portkern.layer_norm(x, (4,), eps=1e-5).shape == (2, 4)


def test_a_call_whose_number_is_a_tensor_is_not_prepared() -> None:
    """Its value is no part of the key of a prepared call."""
    x, eps = torch.randn(2, 4), torch.tensor(1e-5)
    assert _places((x, 1e-5), (x, 1e-5)) == {0: 0}
    assert _places((x, 1e-5), (x, eps)) is None
