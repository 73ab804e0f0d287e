"""The keys of prepared calls: what they tell apart, what is no part of them, and what has none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portkern import dispatch, hot
from portkern.registry import all_ops, public_names
from portkern.runtime import current, using


def test_functions_that_compute_something_else_share_no_key() -> None:
    """An op before and after it was registered again, as in a notebook, and a public function beside the op itself."""
    op, x, keys = all_ops()["softmax"], torch.randn(3, 4), []

    class Seen(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            keys.append(key)

    with using(current().anew()) as runtime:
        runtime.calls.young = Seen()
        for each in (op, op, dataclasses.replace(op)):
            assert op.signature is not None
            hot.function(each, op.signature, lambda *args: x)(x, -1)
        hot.function(op, hot._canonical, lambda *args: x)(x, -1)
    first, again, later, canonical = keys[::2]  # each asks twice
    assert first == again and len({first, later, canonical}) == 3


def test_the_op_that_is_registered_by_now_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function that is older than the op, as by torch.library."""
    runtime, op, x = current().anew(), all_ops()["softmax"], torch.randn(3, 4)
    runtime.ops["softmax"] = now = dataclasses.replace(op)
    ran: list[Any] = []
    monkeypatch.setattr(dispatch, "run", lambda op, args: (ran.append(op), x)[1])
    planned = SimpleNamespace(replay=lambda *rest: lambda given: x)
    monkeypatch.setattr(dispatch, "planned", lambda op, args: (ran.append(op), planned)[1])
    for _ in range(2):
        hot._unprepared(runtime, op, "key", (x, -1, None), (x, -1), False, frozenset(), 0)
    assert [each is now for each in ran] == [True, True] and runtime.calls.get("key").op is now


def test_values_that_change_per_call_are_no_part_of_the_key() -> None:
    x, skipped = torch.randn(3, 4), frozenset((1,))

    def key(*args: object) -> object:
        return hot._without("op", args, skipped)

    assert key(x, 0.5, True, [1, 2]) == key(x, 0.25, True, [1, 2])
    assert key(x, 0.5, True, [1, 2]) != key(x, 1, True, [1, 2]) and key(x, 0.5, 1, [1, 2]) != key(x, 0.5, True, [1, 2])
    assert key(x, 0.5, -0.0) != key(x, 0.5, 0.0) and key(x[:2], 0.5) != key(x, 0.5)


def test_a_key_tells_what_requires_a_gradient() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    plain = hot._parts("op", (x, y), {})
    leaf = x.clone().requires_grad_()
    first, second = hot._parts("op", (leaf, y), {}), hot._parts("op", (y, leaf), {})
    assert plain[0] is False and first[0] is second[0] is True
    assert first[1] != plain[1] and first[1] != second[1]


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Calls of public functions on tensors without data: a signature that asks for a value fails.
CALLS = {
    "add": (_meta(4, 8), _meta(8)),
    "add_layer_norm": (_meta(4, 8), _meta(4, 8), (8,), _meta(8), _meta(8)),
    "add_rms_norm": (_meta(4, 8), _meta(4, 8), (8,), _meta(8)),
    "amax": (_meta(4, 8), -1),
    "argmax": (_meta(4, 8), -1),
    "axpy": (_meta(4, 8), _meta(4, 8), 2.0),
    "bias_dropout_add": (_meta(4, 8), _meta(8), _meta(4, 8)),
    "bincount": (_meta(8, dtype=torch.int64),),
    "cross_entropy": (_meta(4, 8), _meta(4, dtype=torch.int64)),
    "dropout": (_meta(4, 8),),
    "geglu": (_meta(4, 8),),
    "group_norm": (_meta(2, 4, 8), 2),
    "layer_norm": (_meta(4, 8), (8,), _meta(8), _meta(8)),
    "log_softmax": (_meta(4, 8), -1),
    "logsumexp": (_meta(4, 8), -1),
    "masked_softmax": (_meta(4, 8),),
    "matmul": (_meta(4, 8), _meta(8, 3)),
    "mean": (_meta(4, 8),),
    "prelu": (_meta(4, 8), _meta(8)),
    "quantize_fp8": (_meta(4, 8),),
    "reglu": (_meta(4, 8),),
    "rms_norm": (_meta(4, 8), (8,), _meta(8)),
    "rope": (_meta(2, 3, 4, 8), _meta(2, 3, 1, 8), _meta(3, 4), _meta(3, 4)),
    "softmax": (_meta(4, 8), -1),
    "sum": (_meta(4, 8),),
    "swiglu": (_meta(4, 8),),
    "var_mean": (_meta(4, 8),),
}


@pytest.mark.parametrize("name", sorted(public_names()))
def test_signatures_read_no_values(name: str) -> None:
    """What is prepared for one call serves all with its key: a signature that reads values says so."""
    op = all_ops()[name]
    assert op.signature is not None
    args = CALLS.get(name, (_meta(4, 8),))
    if op.reads_values:
        with pytest.raises((RuntimeError, NotImplementedError)):
            op.signature(*args)
    else:
        op.signature(*args)


def test_a_tensor_that_is_given_twice_has_no_place() -> None:
    """add(x, x) has the key of add(x, y): what is prepared for it must not read one of them twice."""
    x, y, made = torch.randn(3), torch.randn(3), torch.randn(3)
    assert hot._places((y, x, 1.0), (x, y)) == {0: 1, 1: 0}
    assert hot._places((x, x, 1.0), (x, x)) is None and hot._places((x, None), (x, x)) is None
    assert hot._places((x, x, 1.0), (x, x, 1.0)) == {0: 0, 1: 1}, "canonical arguments stand where they are given"
    assert hot._places((x, made), (x, y)) is None and hot._places((None, 2), ()) == {}


def test_lists_of_tensors_take_the_other_route() -> None:
    """A tensor in a list has no place: what is prepared would go on reading it."""
    assert hot._parts("op", ([torch.randn(3)],), {}) == (False, None)
    assert hot._parts("op", ([3, 4],), {})[1] is not None


def test_keys_tell_constants_apart() -> None:
    """Equal in Python is not the same argument; one NaN is like another."""
    given = [0.0, -0.0, 1.0, 1, True, float("inf"), -1.0, float("nan"), "1", None, torch.float32, (1,), [1], (1.0,)]
    given += [(True,), (1, int), (), [], (1, 1), [True], ((1,),), torch.Size((1,))]
    keys = [hot._parts("op", (each, 1), {})[1] for each in given]
    found = [tuple(key) for key in keys if key is not None]
    assert len(found) == len(set(found)) == len(given) - 3, "tuples of floats, types and tuples have none"
    assert hot._parts("op", (float("nan"),), {}) == hot._parts("op", (float("nan"),), {})
    assert hot._parts("op", ([1], True), {}) != hot._parts("op", ([1, bool], True), {})
