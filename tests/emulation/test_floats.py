"""Floating-point instructions against exact fractions, rounded once by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.emulation.bench import FORMS, Bench, interesting, same, to_bits, to_float

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


ROUNDINGS: dict[str, Callable[[float], float]] = {
    "trunc": math.trunc,
    "ceil": math.ceil,
    "floor": math.floor,
    "rndne": round,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ROUNDINGS)
def test_to_whole_numbers(word: str, kind: str) -> None:
    check(f"v_{word}_{kind}_e32", kind, 1,
          lambda a: a if not finite(a) else math.copysign(float(ROUNDINGS[word](a)), a))  # fmt: skip


CONVERSIONS = (("f16", "f32"), ("f32", "f16"), ("f32", "f64"), ("f64", "f32"))


@pytest.mark.parametrize(("target", "source"), CONVERSIONS)
def test_between_floats(target: str, source: str) -> None:
    def wanted(a: float) -> float:
        return FORMS[target].round(Fraction(a)) if finite(a) and a else a

    check(f"v_cvt_{target}_{source}_e32", source, 1, wanted, target)


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("whole", ["i32", "u32"])
def test_to_and_from_integers(whole: str, kind: str) -> None:
    low, high = (-(2**31), 2**31 - 1) if whole == "i32" else (0, 2**32 - 1)
    values = interesting(kind, 3)
    values[:4] = [to_bits(each, kind) for each in (2.0**31, -(2.0**31), 2.0**32, 3.999)]
    found = loaded(f"v_cvt_{whole}_{kind}_e32 v20, {registers(kind, 0)}", kind, [values]).words(20)
    for lane in range(64):
        x = to_float(int(values[lane]), kind)
        wanted = 0 if math.isnan(x) else high if x >= high else low if x <= low else math.trunc(x)
        assert int(found[lane]) == wanted % 2**32, x
    bits = np.random.default_rng(1).integers(0, 2**32, 64).astype(np.uint32)
    bench = Bench(f"v_cvt_{kind}_{whole}_e32 {registers(kind, 20)}, v0").set({0: bits}).run()
    for lane, each in enumerate(results(bench, kind)):
        x = int(bits[lane])
        x = x - 2**32 if whole == "i32" and x >> 31 else x
        assert each == FORMS[kind].round(Fraction(x))


def test_bytes_to_float() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 64).astype(np.uint32)
    for part in range(4):
        bench = Bench(f"v_cvt_f32_ubyte{part}_e32 v20, v0").set({0: bits}).run()
        assert results(bench, "f32") == [float(int(each) >> 8 * part & 255) for each in bits]


def test_towards_zero() -> None:
    a, b = interesting("f32", 1), interesting("f32", 2)
    found = loaded("v_cvt_pkrtz_f16_f32 v20, v0, v2", "f32", [a, b]).words(20)
    for lane in range(64):
        for half, source in ((int(found[lane]) & 0xFFFF, a), (int(found[lane]) >> 16, b)):
            x = to_float(int(source[lane]), "f32")
            got = to_float(half, "f16")
            if not finite(x):
                assert same(got, x)
                continue
            near = FORMS["f16"].round(Fraction(x)) if x else x
            assert abs(got) <= abs(x) and (got == near or abs(Fraction(got) - Fraction(x)) < 2 * max(
                Fraction(abs(x)) / 2**10, Fraction(2) ** -24) or abs(x) > 65504), (x, got)  # fmt: skip


SMALLEST = 2.0**-126


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("v_exp_f32", lambda x: 2.0**x if x < 129 else math.inf),
        ("v_log_f32", lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan),
        ("v_rcp_f32", lambda x: 1 / x if x else math.copysign(math.inf, x)),
        ("v_rsq_f32", lambda x: x**-0.5 if x > 0 else math.copysign(math.inf, x) if x == 0 else math.nan),
        ("v_sqrt_f32", lambda x: math.sqrt(x) if x >= 0 else math.nan),
    ],
)
def test_transcendental(name: str, function: Callable[[float], float]) -> None:
    """Within one unit in the last place; subnormals in and out are zero of their sign; infinities exactly."""
    values = interesting("f32", 5)
    assert {math.inf, -math.inf} <= {to_float(int(value), "f32") for value in values[:64]}
    found = results(loaded(f"{name}_e32 v20, v0", "f32", [values]), "f32")
    for lane in range(64):
        x = to_float(int(values[lane]), "f32")
        x = math.copysign(0.0, x) if abs(x) < SMALLEST else x
        if not finite(x):
            assert same(found[lane], x if math.isnan(x) else function(x)), (x, found[lane])
            continue
        wanted = function(x)
        if finite(wanted) and abs(wanted) < SMALLEST:
            assert found[lane] == 0
        elif not finite(wanted) or abs(wanted) > FORMS["f32"].largest:
            assert not finite(found[lane])
        else:
            assert abs(found[lane] - wanted) <= 2.0**-23 * abs(wanted), (name, x, found[lane], wanted)


def test_turns() -> None:
    values = np.linspace(-3, 3, 64).astype(np.float32)
    bench = Bench(["v_sin_f32_e32 v20, v0", "v_cos_f32_e32 v22, v0"]).set({0: values}).run()
    angles = 2 * np.pi * values.astype(np.float64)
    assert np.abs(bench.words(20).view(np.float32) - np.sin(angles)).max() < 1e-6
    assert np.abs(bench.words(22).view(np.float32) - np.cos(angles)).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_and_parts(kind: str) -> None:
    values, powers = interesting(kind, 4), np.random.default_rng(4).integers(-40, 40, 64)
    register = 2
    tail = "_e32" if kind == "f16" else ""
    bench = Bench(f"v_ldexp_{kind}{tail} {registers(kind, 20)}, {registers(kind, 0)}, v{register}")
    bench = bench.pair(0, values) if kind == "f64" else bench.set({0: values.astype(np.uint32)})
    found = results(bench.set({2: powers.astype(np.int32)}).run(), kind)
    for lane in range(64):
        x = to_float(int(values[lane]), kind)
        wanted = FORMS[kind].round(Fraction(x) * Fraction(2) ** int(powers[lane])) if finite(x) and x else x
        assert same(found[lane], wanted), (x, int(powers[lane]), found[lane], wanted)
    check(f"v_frexp_mant_{kind}_e32", kind, 1, lambda x: math.frexp(x)[0] if finite(x) else x)
    name = "v_frexp_exp_i16_f16_e32" if kind == "f16" else f"v_frexp_exp_i32_{kind}_e32"
    got = loaded(f"{name} v20, {registers(kind, 0)}", kind, [values]).words(20)
    for lane in range(64):
        x = to_float(int(values[lane]), kind)
        assert int(got[lane]) == (math.frexp(x)[1] if finite(x) else 0) % (2**16 if kind == "f16" else 2**32)


DIVIDE_32 = (
    "v_div_scale_f32 v4, s[4:5], v1, v1, v0", "v_div_scale_f32 v5, vcc, v0, v1, v0", "v_rcp_f32_e32 v6, v4",
    "v_fma_f32 v7, -v4, v6, 1.0", "v_fmac_f32_e32 v6, v7, v6", "v_mul_f32_e32 v7, v5, v6",
    "v_fma_f32 v8, -v4, v7, v5", "v_fmac_f32_e32 v7, v8, v6", "v_fma_f32 v4, -v4, v7, v5",
    "v_div_fmas_f32 v4, v4, v6, v7", "v_div_fixup_f32 v20, v4, v1, v0",
)  # fmt: skip
DIVIDE_64 = (
    "v_div_scale_f64 v[4:5], s[4:5], v[2:3], v[2:3], v[0:1]", "v_rcp_f64_e32 v[6:7], v[4:5]",
    "v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0", "v_fmac_f64_e32 v[6:7], v[6:7], v[8:9]",
    "v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0", "v_fmac_f64_e32 v[6:7], v[6:7], v[8:9]",
    "v_div_scale_f64 v[8:9], vcc, v[0:1], v[2:3], v[0:1]", "v_mul_f64 v[10:11], v[8:9], v[6:7]",
    "v_fma_f64 v[4:5], -v[4:5], v[10:11], v[8:9]", "v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[10:11]",
    "v_div_fixup_f64 v[20:21], v[4:5], v[2:3], v[0:1]",
)  # fmt: skip


def quotient(kind: str, a: float, b: float) -> float:
    if not finite(a, b) or a == 0 or b == 0:
        if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
            return math.nan
        sign = math.copysign(1, a) * math.copysign(1, b)
        return math.copysign(math.inf if b == 0 or math.isinf(a) else 0.0, sign)
    return FORMS[kind].round(Fraction(a) / Fraction(b))


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_division_is_exact(kind: str) -> None:
    """The compiler's refinement between div_scale and div_fixup rounds correctly, at both ends of the range too."""
    form = FORMS[kind]
    tops = [form.largest, form.largest / 3, 2.0 ** (form.smallest * -1), 2.0 ** (-form.smallest - 1) * 1.7]
    bottoms = [math.ldexp(1.0, form.smallest), math.ldexp(1.3, form.smallest), math.ldexp(1.0, form.smallest - 5)]
    edges = [s * each for each in (*tops, *bottoms, 1.0, 3.0, 0.1, 0.0, math.inf) for s in (1, -1)]
    pairs = [(a, b) for a in edges for b in edges]
    rng = np.random.default_rng(0)
    for _ in range(1000):
        a, b = (float(rng.normal()) * 2.0 ** float(rng.integers(form.smallest, -form.smallest)) for _ in range(2))
        pairs.append(tuple(form.round(Fraction(x)) for x in (a, b)))  # type: ignore[arg-type]
    while len(pairs) % 64:
        pairs.append((1.0, 3.0))
    for start in range(0, len(pairs), 64):
        a, b = ([to_bits(form.round(Fraction(each[i])) if finite(each[i]) and each[i] else each[i], kind)
                 for each in pairs[start : start + 64]] for i in (0, 1))  # fmt: skip
        if kind == "f64":
            bench = Bench(DIVIDE_64).pair(0, np.array(a, np.uint64)).pair(2, np.array(b, np.uint64)).run()
        else:
            bench = Bench(DIVIDE_32).set({0: np.array(a, np.uint32), 1: np.array(b, np.uint32)}).run()
        for lane, got in enumerate(results(bench, kind)):
            x, y = to_float(a[lane], kind), to_float(b[lane], kind)
            wanted = quotient(kind, x, y)
            close = finite(got, wanted) and abs(Fraction(got) - Fraction(wanted)) <= _unit(kind) * (
                abs(wanted) < math.ldexp(1, form.smallest)
            )  # a subnormal quotient is rounded twice
            assert same(got, wanted) or close, (x, y, got, wanted)


def _unit(kind: str) -> Fraction:
    form = FORMS[kind]
    return Fraction(2) ** (form.smallest - form.precision + 1)


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


def float8(code: int, exponent_bits: int) -> float:
    """The value of an 8-bit float without infinities and with one NaN, by its definition."""
    mantissa_bits, bias = 7 - exponent_bits, 1 << (exponent_bits - 1)
    if code == 0x80:
        return math.nan
    exponent, mantissa = code >> mantissa_bits & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    size = (
        math.ldexp(mantissa, 1 - bias - mantissa_bits)
        if exponent == 0
        else (math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits))
    )
    return -size if code & 0x80 else size


@pytest.mark.parametrize(("word", "exponent_bits"), [("fp8", 4), ("bf8", 5)])
def test_eight_bits(word: str, exponent_bits: int) -> None:
    """All codes as float32; and float32 to the nearest code, ties to even, by search."""
    for start in range(0, 256, 64):
        bench = Bench(f"v_cvt_f32_{word}_e32 v20, v0").set({0: np.arange(start, start + 64)}).run()
        for lane, got in enumerate(results(bench, "f32")):
            assert same(got, float8(start + lane, exponent_bits))
    codes = [code for code in range(128)]
    table = [float8(code, exponent_bits) for code in codes]
    rng = np.random.default_rng(0)
    values = np.concatenate([np.array(table, np.float64), (np.array(table[:-1]) + np.array(table[1:])) / 2,
                             rng.normal(size=63) * table[-1] / 3,
                             [1e9, table[-1] * 1.01]]).astype(np.float32)  # fmt: skip
    values = np.resize(values, 384)
    for start in range(0, 384, 64):
        part = values[start : start + 64]
        mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"
        bench = (
            Bench([mode, f"v_cvt_pk_{word}_f32 v20, v0, v1"])
            .set({0: part, 1: -part, 20: np.full(64, 0xABCD0000)})
            .run()
        )
        for lane in range(64):
            x = float(part[lane])
            distance = [abs(Fraction(each) - Fraction(abs(x))) for each in table]
            least = min(distance)
            best = [code for code in codes if distance[code] == least]
            wanted = best[0] if len(best) == 1 else next(code for code in best if code % 2 == 0)
            word_ = int(bench.words(20)[lane])
            sign = 0x80 if x < 0 else 0
            assert word_ & 0xFF == (wanted | sign if wanted else 0), (x, hex(word_))
            assert word_ >> 8 & 0xFF == (wanted | (0x80 ^ sign) if wanted else 0)
            assert word_ >> 16 == 0xABCD


def test_overflow_to_eight_bits_is_nan_unless_clamped() -> None:
    line = "v_cvt_pk_fp8_f32 v20, v0, v1"
    lines = [line, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", line.replace("v20", "v21")]
    values = {0: np.full(64, 1e5, np.float32), 1: np.full(64, -np.inf, np.float32), 20: np.zeros(64), 21: np.zeros(64)}
    bench = Bench(lines).set(values).run()
    assert int(bench.words(20)[0]) == 0x8080 and int(bench.words(21)[0]) == 0x807F
