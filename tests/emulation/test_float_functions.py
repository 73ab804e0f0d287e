"""Division, square roots, exponentials, logarithms and their parts, against exact fractions or double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.emulation.bench import FORMS, Bench, interesting, same, to_bits, to_float
from tests.emulation.test_floats import KINDS, check, finite, loaded, registers, results

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
