"""Traced sizes: what is computed with them, what is asked of them, and for which other sizes it holds."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portkern.sizes import Trace, is_traced, kept, log2, plain


def traced(function: Callable[..., Any], *sizes: int) -> tuple[Any, Callable[[Sequence[int]], Any]]:
    """What ``function`` gives for ``sizes``, and the same as a function of other sizes."""
    trace = Trace()
    found = function(*map(trace.variable, sizes))
    results = found if isinstance(found, tuple) else (found,)
    made = trace.function([each for each in results if is_traced(each)])

    def other(sizes: Sequence[int]) -> Any:
        numbers = made(sizes)
        if numbers is None:
            return None
        rest = iter(numbers)
        return tuple(next(rest) if is_traced(each) else each for each in results)

    return tuple(map(plain, results)), other


def plan(m: int, n: int) -> tuple[Any, ...]:
    """What plans do with sizes."""
    block = min(1 << max(n - 1, 0).bit_length(), 1024)
    rows = 1 if n > 4096 else max(1, 4096 // block)
    tiles = -(-m // rows)
    grid = tiles if tiles < 132 * 4 else 132
    return block, rows, grid, m * n, (m * n) % 16 == 0, abs(m - n), math.ceil(m / 3), m << 2, 7 - n, n == m, bool(m)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_it_holds_for_all_sizes_that_answer_alike(m: int, n: int, m2: int, n2: int) -> None:
    found, other = traced(plan, m, n)
    assert found == plan(m, n) == other((m, n))
    assert other((m2, n2)) in (None, plan(m2, n2))


def test_it_serves_other_sizes() -> None:
    _, other = traced(plan, 1002, 1000)
    assert [other((m, 1000)) for m in (1004, 1010, 2002)] == [plan(m, 1000) for m in (1004, 1010, 2002)]
    assert other((1002, 900)) is None and other((1001, 1000)) is None, "another answer to n == m, and to m * n % 16"


@pytest.mark.parametrize(
    "reads",
    [
        lambda n: list(range(n)),
        lambda n: [0] * n,
        lambda n: "abcdefgh"[n],
        lambda n: int(n) + 1,
        lambda n: float(n) + 1,
        lambda n: math.log2(n),
        lambda n: (1,) * n,
        lambda n: round(n, 1),
        lambda n: str(n),
        lambda n: f"{n:>4}",
    ],
)
def test_what_python_reads_as_a_number_holds_for_this_one(reads: Callable[[Any], Any]) -> None:
    found, other = traced(lambda n: (reads(n), n * 2), 5)
    assert found[0] == reads(5) and other((5,)) == (reads(5), 10) and other((6,)) is None


def test_nothing_keeps_a_traced_number() -> None:
    size: Any = Trace().variable(5)
    for keeps in (
        hash,
        lambda n: {n},
        lambda n: {n: 1},
        lambda n: {5: 1}.get(n),
        json.dumps,
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
    ):
        with pytest.raises(TypeError):
            keeps(size)


def test_it_passes_for_a_number() -> None:
    trace = Trace()
    size, ratio = trace.variable(5), trace.variable(5) / 2
    assert isinstance(size, int) and not isinstance(size, float) and isinstance(ratio, float)
    trace.telling = True
    assert str(size) == f"{size:>4}" == "<size v0>", "a reason shows no number, which nobody would have asked for"
    assert (size == "5", size is None) == (False, False)
    with pytest.raises(TypeError):
        _ = size + "5"


def test_a_division_by_what_was_not_zero() -> None:
    _, other = traced(lambda m, n: (m // n, 10 % n), 7, 2)
    assert other((9, 4)) == (2, 2) and other((9, 0)) is None


class _Limit(enum.IntEnum):
    ROWS = 4


class _Float(float):
    """As numpy's float64: its text is no number in Python."""

    def __repr__(self) -> str:
        return f"Float({float(self)})"


def test_numbers_of_other_types() -> None:
    found, other = traced(lambda n: (n > _Limit.ROWS, n * _Float(0.5), n & True), 5)
    assert found == other((5,)) == (True, 2.5, 1)
    assert other((7,)) == (True, 3.5, 1) and other((3,)) is None
    _, other = traced(lambda n: n * math.nan, 5)
    assert math.isnan(other((7,))[0])


def test_powers_change_their_type() -> None:
    found, other = traced(lambda n: (2 ** (n - 3), isinstance(2 ** (n - 3), int)), 5)
    assert found == (4, True) and other((6,)) == (8, True) and other((2,)) is None, "0.5"
    _, other = traced(lambda n: (n - 3) ** 0.5 > 1.0, 9)
    assert other((8,)) == (True,) and other((1,)) is None, "a complex number"


def test_questions_are_merged() -> None:
    trace = Trace()
    size = trace.variable(100)
    for limit in (1, 5, 7, 99):
        assert size > limit and size != limit
    for limit in (1000, 101, 500):
        assert size < limit
    made = trace.function([size])
    assert [made((n,)) for n in (99, 100, 101)] == [None, (100,), None]
    unequal = Trace()
    size = unequal.variable(100)
    assert not any(size == n for n in (3, 4, 5))
    made = unequal.function([size])
    assert [made((n,)) for n in (2, 3, 5, 6)] == [(2,), None, None, (6,)]


def test_sizes_compared_with_each_other() -> None:
    _, other = traced(lambda a, b, c: (a * b, a == b, b < c), 4, 4, 8)
    assert other((5, 5, 6)) == (25, True, True)
    assert other((5, 4, 6)) is None and other((5, 5, 5)) is None


def test_log2() -> None:
    found, other = traced(lambda n: log2(n / 3), 24)
    assert found == (3.0,) and other((48,)) == (4.0,) and log2(8) == 3.0
    assert other((0,)) is None, "its logarithm is none"


def test_kept_takes_what_has_no_hash() -> None:
    calls = []

    @kept(maxsize=4)
    def double(n: Any) -> Any:
        calls.append(n)
        return n * 2

    assert double(3) == double(3) == 6 and len(calls) == 1
    assert double(3.0) == 6.0 and len(calls) == 2, "3 and 3.0 are equal, and of different types"
    size = Trace().variable(3)
    assert is_traced(double(size)) and is_traced(double(size)) and len(calls) == 4
    assert double(3) == 6 and len(calls) == 4, "what a trace asked for was not kept"
