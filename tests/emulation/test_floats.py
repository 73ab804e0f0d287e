"""Floating-point instructions against exact fractions, rounded once by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.emulation.bench import FORMS, Bench, interesting, same, to_float

KINDS = ("f16", "f32", "f64")


def finite(*values: float) -> bool:
    return all(math.isfinite(each) for each in values)


def rounded(kind: str, exact: Callable[..., Fraction], plain: Callable[..., float], *values: float) -> float:
    """The exact result rounded once; IEEE rules for zeros, infinities and NaN by Python's own floats."""
    if not finite(*values):
        return plain(*values)
    found = exact(*(Fraction(each) for each in values))
    return FORMS[kind].round(found) if found else plain(*values) * 0.0 if plain(*values) else plain(*values)


def fused(a: float, b: float, c: float) -> float:
    """Multiply and add for what is not finite, or exactly zero (where only the sign is asked)."""
    product = a * b if finite(a, b) and abs(a) < 1e150 and abs(b) < 1e150 else _times(a, b)
    return product + c


def _times(a: float, b: float) -> float:
    if finite(a, b):
        return math.copysign(1e300, math.copysign(1, a) * math.copysign(1, b)) if a and b else a * b
    return a * b


EXACT: dict[str, tuple[Callable[..., Fraction], Callable[..., float]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "subrev": (lambda a, b: b - a, lambda a, b: b - a),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "fma": (lambda a, b, c: a * b + c, fused),
}


def registers(kind: str, number: int) -> str:
    return f"v[{number}:{number + 1}]" if kind == "f64" else f"v{number}"


def loaded(line: str, kind: str, sources: list[np.ndarray]) -> Bench:
    bench = Bench(line)
    for i, each in enumerate(sources):
        if kind == "f64":
            bench.pair(2 * i, each)
        else:
            bench.set({2 * i: each.astype(np.uint32)})
    return bench.run()


def results(bench: Bench, kind: str) -> list[float]:
    bits = bench.longs(20) if kind == "f64" else bench.words(20)
    return [to_float(int(each) & ((1 << FORMS[kind].width) - 1), kind) for each in bits]


def check(
    name: str, kind: str, count: int, wanted: Callable[..., float], result: str | None = None, seeds: int = 6
) -> None:
    for seed in range(seeds):
        sources = [interesting(kind, seed * 7 + i) for i in range(count)]
        line = f"{name} {registers(result or kind, 20)}, {', '.join(registers(kind, 2 * i) for i in range(count))}"
        found = results(loaded(line, kind, sources), result or kind)
        for lane in range(64):
            values = [to_float(int(each[lane]), kind) for each in sources]
            assert same(found[lane], wanted(*values)), (name, values, found[lane], wanted(*values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", EXACT)
def test_arithmetic(word: str, kind: str) -> None:
    if kind == "f64" and word in ("sub", "subrev"):
        word = "add"  # there is no other in float64
    exact, plain = EXACT[word]
    name = f"v_{word}_{kind}" + ("" if word == "fma" or kind == "f64" else "_e32")
    check(name, kind, 3 if word == "fma" else 2, lambda *v: rounded(kind, exact, plain, *v))


@pytest.mark.parametrize("name", ["v_fmac_f32_e32", "v_fmac_f16_e32", "v_fmac_f64_e32"])
def test_accumulating(name: str) -> None:
    kind = name[7:10]
    a, b, c = (interesting(kind, i) for i in range(3))
    line = f"{name} {registers(kind, 20)}, {registers(kind, 0)}, {registers(kind, 2)}"
    bench = Bench(line)
    for number, each in ((0, a), (2, b), (20, c)):
        bench = bench.pair(number, each) if kind == "f64" else bench.set({number: each.astype(np.uint32)})
    found = results(bench.run(), kind)
    for lane in range(64):
        values = [to_float(int(each[lane]), kind) for each in (a, b, c)]
        assert same(found[lane], rounded(kind, EXACT["fma"][0], fused, *values)), values


def test_fused_rounding_differs_from_two_roundings() -> None:
    """Where float64 ends just on a tie of float32: rounding twice would give another number."""
    a, b, c = 1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-60
    tie = Fraction(a) * Fraction(b) + Fraction(c)
    bench = Bench("v_fma_f32 v20, v0, v2, v4")
    for number, value in ((0, a), (2, b), (4, c)):
        bench.set({number: np.full(64, value, np.float32)})
    assert results(bench.run(), "f32")[0] == FORMS["f32"].round(tie)
    assert FORMS["f32"].round(tie) != FORMS["f32"].round(Fraction(float(tie)))


def _bigger(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return a if (a, math.copysign(1, a)) >= (b, math.copysign(1, b)) else b


def _smaller(a: float, b: float) -> float:
    return -_bigger(-a, -b)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str) -> None:
    tail = "" if kind == "f64" else "_e32"
    check(f"v_max_{kind}{tail}", kind, 2, _bigger)
    check(f"v_min_{kind}{tail}", kind, 2, _smaller)
    if kind != "f64":
        check(f"v_max3_{kind}", kind, 3, lambda a, b, c: _bigger(_bigger(a, b), c))
        check(f"v_min3_{kind}", kind, 3, lambda a, b, c: _smaller(_smaller(a, b), c))


COMPARE: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b, "ge": lambda a, b: a >= b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)), "u": lambda a, b: math.isnan(a) or math.isnan(b),
    "nge": lambda a, b: not a >= b, "nlg": lambda a, b: not (a < b or a > b), "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b, "neq": lambda a, b: a != b, "nlt": lambda a, b: not a < b,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", COMPARE)
def test_compare(word: str, kind: str) -> None:
    a, b = interesting(kind, 1), interesting(kind, 2)
    b[::4] = a[::4]
    bench = loaded(f"v_cmp_{word}_{kind}_e64 s[4:5], {registers(kind, 0)}, {registers(kind, 2)}", kind, [a, b])
    values = [(to_float(int(x), kind), to_float(int(y), kind)) for x, y in zip(a, b, strict=True)]
    assert bench.scalar64(4) == sum(COMPARE[word](*each) << lane for lane, each in enumerate(values))


@pytest.mark.parametrize("kind", KINDS)
def test_class(kind: str) -> None:
    bits = interesting(kind, 6)
    form = FORMS[kind]
    for number in range(10):
        bench = loaded(f"v_cmp_class_{kind}_e64 s[4:5], {registers(kind, 0)}, 0x{1 << number:x}", kind, [bits])
        for lane in range(64):
            x = to_float(int(bits[lane]), kind)
            quiet = int(bits[lane]) >> (form.precision - 2) & 1
            side = 0 if math.copysign(1, x) < 0 else 1
            if math.isnan(x):
                wanted = 1 if quiet else 0
            elif math.isinf(x):
                wanted = (2, 9)[side]
            elif x == 0:
                wanted = (5, 6)[side]
            else:
                wanted = (4, 7)[side] if abs(x) < math.ldexp(1, form.smallest) else (3, 8)[side]
            assert bench.scalar64(4) >> lane & 1 == (wanted == number), (x, number)


def test_signs_and_output_modifiers() -> None:
    values = np.linspace(-2, 2, 64).astype(np.float32)
    lines = ["v_add_f32_e64 v20, |v0|, -v0", "v_mul_f32_e64 v21, -|v0|, 1.0", "v_add_f32_e64 v22, v0, v0 clamp",
             "v_add_f32_e64 v23, v0, 1.0 mul:2", "v_add_f32_e64 v24, v0, 1.0 div:2"]  # fmt: skip
    bench = Bench(lines).set({0: values}).run()
    read = lambda n: bench.words(n).view(np.float32)  # noqa: E731
    assert (read(20) == np.abs(values) - values).all() and (read(21) == -np.abs(values)).all()
    assert (read(22) == np.clip(2 * values, 0, 1)).all()
    assert (read(23) == (values + 1) * 2).all() and (read(24) == (values + 1) / 2).all()


PACKED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@pytest.mark.parametrize("word", PACKED)
def test_packed_singles(word: str) -> None:
    """Two products at once, with the halves of the sources exchanged and signs changed."""
    rng = np.random.default_rng(0)
    count = PACKED[word].__code__.co_argcount
    data = rng.integers(-8, 8, (2 * count, 64)).astype(np.float32)
    operands = ", ".join(f"v[{2 * i}:{2 * i + 1}]" for i in range(count))
    rest = ",1" * (count - 2)
    line = f"v_pk_{word}_f32 v[20:21], {operands} op_sel:[1,0{rest}] op_sel_hi:[0,1{rest}] neg_lo:[0,1{rest}]"
    bench = Bench(line).set(dict(enumerate(data))).run()
    pick = lambda i, half: data[2 * i + half]  # noqa: E731
    low = [pick(0, 1), -pick(1, 0), *([-pick(2, 1)] if count == 3 else [])]
    high = [pick(0, 0), pick(1, 1), *([pick(2, 1)] if count == 3 else [])]
    assert (bench.words(20).view(np.float32) == PACKED[word](*low)).all()
    assert (bench.words(21).view(np.float32) == PACKED[word](*high)).all()


@pytest.mark.parametrize("word", PACKED)
def test_packed_halves(word: str) -> None:
    rng = np.random.default_rng(0)
    count = PACKED[word].__code__.co_argcount
    data = rng.integers(-8, 8, (count, 64, 2)).astype(np.float16)
    operands = ", ".join(f"v{i}" for i in range(count))
    line = f"v_pk_{word}_f16 v20, {operands} op_sel_hi:[0,1{',1' * (count - 2)}]"
    bench = Bench(line).set({i: np.ascontiguousarray(each).view(np.uint32)[:, 0] for i, each in enumerate(data)}).run()
    found = bench.words(20).view(np.float16).reshape(64, 2)
    assert (found[:, 0] == PACKED[word](*(each[:, 0] for each in data))).all()
    assert (found[:, 1] == PACKED[word](data[0][:, 0], *(each[:, 1] for each in data[1:]))).all()


def test_mixed_precision() -> None:
    """A float16 half, a float32 and a constant in one product; the result may be one half of a register."""
    rng = np.random.default_rng(0)
    pairs = rng.normal(size=(64, 2)).astype(np.float16)
    single = rng.normal(size=64).astype(np.float32)
    lines = ["v_fma_mix_f32 v20, v0, v1, v1 op_sel:[1,0,0] op_sel_hi:[1,0,0]",
             "v_fma_mixlo_f16 v21, v0, v1, 0 op_sel_hi:[1,0,0]",
             "v_fma_mixhi_f16 v21, v0, v1, 0 op_sel:[1,0,0] op_sel_hi:[1,0,0]"]  # fmt: skip
    bench = Bench(lines).set({0: np.ascontiguousarray(pairs).view(np.uint32)[:, 0], 1: single}).run()
    form = FORMS["f32"]
    for lane in range(64):
        low, high = (Fraction(float(each)) for each in pairs[lane])
        s = Fraction(float(single[lane]))
        assert float(bench.words(20).view(np.float32)[lane]) == form.round(high * s + s)
        halves = bench.words(21).view(np.float16).reshape(64, 2)[lane]
        for got, exact in zip(halves, (low * s, high * s), strict=True):
            assert float(got) == FORMS["f16"].round(Fraction(form.round(exact)))
