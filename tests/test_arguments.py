"""Public functions raise torch's error classes, naming the argument, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy
import pytest
import torch

import portkern
from portkern.errors import BadType, PortkernError
from portkern.registry import public_names

X = torch.randn(2, 3)
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((X, 2), {}, IndexError, r"dim 2 .* -2 to 1"),
    ((X, -3), {}, IndexError, r"dim -3"),
    ((torch.tensor(1.0), 1), {}, IndexError, r"rank 0 takes -1 to 0"),
    ((X, 0.5), {}, TypeError, r"'dim' must be an int, not float"),
    ((X, True), {}, TypeError, r"'dim' must be an int, not bool"),
    ((X, None), {}, TypeError, r"'dim' must be an int"),
    ((X.long(),), {}, NotImplementedError, r"int64.*dtype=torch.float32"),
    ((X.long(),), {}, TypeError, r"int64"),
    ((X.to(torch.complex64),), {}, NotImplementedError, r"complex64"),
    ((X,), {"dtype": torch.int32}, NotImplementedError, r"'dtype' is int32"),
    ((X,), {"dtype": "float32"}, TypeError, r"'dtype' must be a torch.dtype"),
    (([1.0, 2.0],), {}, TypeError, r"'input' must be a torch.Tensor, not list"),
    ((numpy.ones(3),), {}, TypeError, r"ndarray"),
    ((X.to_sparse(),), {}, ValueError, r"sparse.*to_dense"),
    ((torch.nested.nested_tensor([X, X], layout=torch.jagged),), {}, ValueError, r"nested.*to_padded_tensor"),
    ((X.to(torch.float8_e4m3fn),), {}, NotImplementedError, r"float8_e4m3fn"),
]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("args", "kwargs", "kind", "message"), BAD)
def test_bad_arguments(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        getattr(portkern, name)(*args, **kwargs)
    assert isinstance(caught.value, PortkernError)
    assert f"{name}()" in str(caught.value)


def test_numbers_that_torch_takes() -> None:
    assert torch.equal(portkern.softmax(X, numpy.int64(1)), torch.softmax(X, 1))
    assert torch.equal(portkern.softmax(X, torch.tensor(1)), torch.softmax(X, 1))
    assert portkern.softmax(torch.tensor(3.0)) == 1.0
    assert portkern.softmax(X).shape == X.shape


# Whatever may stand for the number 1.
ONES: dict[str, Any] = {
    "bool": True, "numpy bool": numpy.True_, "int": 1, "float": 1.0, "str": "1",
    **{f"0-d {dtype}": torch.tensor(1, dtype=dtype) for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    )},
    "1-d": torch.tensor([1]), "2-d": torch.tensor([[1]]), "1-d bool": torch.tensor([True]),
    "with gradient": torch.tensor(1.0, requires_grad=True),
    **{f"numpy {kind.__name__}": kind(1) for kind in (
        numpy.uint8, numpy.int8, numpy.int32, numpy.int64, numpy.uint64, numpy.float16, numpy.float32, numpy.float64,
    )},
    "0-d array": numpy.array(1), "0-d float array": numpy.array(1.0), "1-d array": numpy.array([1]),
}  # fmt: skip
Y, LABELS = torch.randn(2, 3, 4), torch.tensor([0, 2])
NUMBERS: dict[str, tuple[Any, Any]] = {
    "softmax dim": (lambda one: portkern.softmax(Y, one), lambda one: torch.softmax(Y, one)),
    "log_softmax dim": (lambda one: portkern.log_softmax(Y, one), lambda one: torch.log_softmax(Y, one)),
    "argmax dim": (lambda one: portkern.argmax(Y, one), lambda one: torch.argmax(Y, one)),
    "sum dims": (lambda one: portkern.sum(Y, (one,)), lambda one: torch.sum(Y, (one,))),
    "groups": (lambda one: portkern.group_norm(Y, one), lambda one: torch.nn.functional.group_norm(Y, one)),
    "bins": (
        lambda one: portkern.bincount(LABELS, minlength=one), lambda one: torch.bincount(LABELS, minlength=one)
    ),
    "normalized_shape": (
        lambda one: portkern.layer_norm(Y[..., :1], (one,)),
        lambda one: torch.nn.functional.layer_norm(Y[..., :1], (one,)),
    ),
    "ignore_index": (
        lambda one: portkern.cross_entropy(X, LABELS, ignore_index=one),
        lambda one: torch.nn.functional.cross_entropy(X, LABELS, ignore_index=one),
    ),
    "eps": (lambda one: portkern.rms_norm(Y, (4,), None, one), lambda one: torch.rms_norm(Y, (4,), None, one)),
    "slope": (lambda one: portkern.leaky_relu(Y, one), lambda one: torch.nn.functional.leaky_relu(Y, one)),
    "smoothing": (
        lambda one: portkern.cross_entropy(X, LABELS, label_smoothing=one),
        lambda one: torch.nn.functional.cross_entropy(X, LABELS, label_smoothing=one),
    ),
    "correction": (
        lambda one: portkern.var_mean(Y, 0, correction=one), lambda one: torch.var_mean(Y, 0, correction=one)
    ),
    "keepdim": (lambda one: portkern.sum(Y, 0, one), lambda one: torch.sum(Y, 0, one)),
}  # fmt: skip
# torch compares the number of groups, which these have no operator for; of a complex number it takes the real part.
OURS_ALONE = {("groups", "0-d torch.uint16"), ("groups", "0-d torch.uint32"), ("groups", "0-d torch.uint64")}


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize("one", ONES)
def test_what_stands_for_a_number_is_what_torch_takes_for_one(argument: str, one: str) -> None:
    ours, theirs = NUMBERS[argument]
    try:
        wanted = theirs(ONES[one])
    except (TypeError, RuntimeError):
        if (argument, one) not in OURS_ALONE:
            with pytest.raises((TypeError, RuntimeError)):
                ours(ONES[one])
        return
    if one == "0-d torch.complex64":
        with pytest.raises(TypeError):
            ours(ONES[one])
    else:
        torch.testing.assert_close(ours(ONES[one]), wanted)


@pytest.mark.parametrize("half", [0.5, numpy.float64(0.5), numpy.float32(0.5), numpy.float16(0.5)])
def test_numpy_floats_are_numbers(half: Any) -> None:
    assert torch.equal(portkern.axpy(X, X, half), 0.5 * X + X)
    assert torch.equal(portkern.add(X, half, alpha=half), torch.add(X, 0.5, alpha=0.5))
    assert torch.equal(portkern.leaky_relu(X, half), torch.nn.functional.leaky_relu(X, 0.5))
    assert torch.equal(portkern.swiglu(X, half), portkern.swiglu(X, 0.5))
    assert portkern.add(X.half(), half).dtype == torch.float16
    with pytest.raises(RuntimeError, match="must be an integer"):
        portkern.add(X.long(), 1, alpha=half)


@pytest.mark.parametrize("kind", [int, numpy.int64, numpy.int32, numpy.uint8])
def test_numpy_integers_are_numbers(kind: Any) -> None:
    x, target = torch.randn(2, 4), torch.tensor([0, 2])
    assert torch.equal(portkern.add(X.long(), kind(3), alpha=kind(2)), X.long() + 6)
    assert torch.equal(portkern.group_norm(x, kind(2)), portkern.group_norm(x, 2))
    assert torch.equal(portkern.bincount(target, minlength=kind(5)), torch.bincount(target, minlength=5))
    ignored = portkern.cross_entropy(x, target, ignore_index=kind(2))
    assert torch.equal(ignored, portkern.cross_entropy(x, target, ignore_index=2))
    q, table = torch.randn(1, 2, 1, 4), torch.randn(5, 2)
    found = portkern.rope(q, q, table, table, offset=kind(3), rotary_dim=kind(4))
    assert torch.equal(found[0], portkern.rope(q, q, table, table, offset=3)[0])
    with pytest.raises(TypeError, match="'num_groups' must be an int, not bool"):
        portkern.group_norm(x, True)


def flags() -> list[tuple[str, str]]:
    """(op, argument) for each argument of a public op that is a bool by its annotation, but for ``inplace``, of which
    torch takes anything, and a ``dim`` that may be a flag instead."""
    found = []
    for name in public_names():
        for parameter in inspect.signature(getattr(portkern, name)).parameters.values():
            if "bool" in str(parameter.annotation) and parameter.name not in ("inplace", "dim"):
                found.append((name, parameter.name))
    return found


def test_every_flag_has_to_be_a_bool() -> None:
    """By torch's rule: True and False alone."""
    x = torch.randn(1, 4, 4, 4)
    table = torch.ones(4, 2)
    needed = {"rope": (x, x, table, table), "bias_dropout_add": (x, None, x), "logsumexp": (x, 1)}
    assert {"keepdim", "training", "causal", "interleaved"} <= {flag for _, flag in flags()}
    for name, flag in flags():
        function, args = getattr(portkern, name), needed.get(name, (x,))
        for value in ("no", 1, 0, None, numpy.True_, torch.tensor(True)):
            if value is None and name == "var_mean" and flag == "unbiased":
                continue
            with pytest.raises(TypeError, match=f"'{flag}' must be a bool, not") as caught:
                function(*args, **{flag: value})
            assert isinstance(caught.value, BadType) and f"{name}()" in str(caught.value)
        for value in (True, False):
            function(*args, **{flag: value})


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (3, 0, 2)])
def test_empty(shape: tuple[int, ...]) -> None:
    for dim in range(-len(shape), len(shape)):
        x = torch.empty(shape, requires_grad=True)
        y = portkern.softmax(x, dim)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no op 'softmaks'; did you mean softmax or "):
        portkern.softmaks  # noqa: B018
    with pytest.raises(LookupError, match="no public function"):
        portkern.function("softmax_backward")
    with pytest.raises(LookupError, match="softmax"):
        portkern.explain("nothing", X)
    with pytest.raises(TypeError, match="be a portkern.Device, not str .'sm90'.; .* explain softmax --device sm90"):
        portkern.explain("softmax", X, device="sm90")
