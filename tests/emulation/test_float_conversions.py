"""Conversions of floating-point numbers, against exact fractions, rounded once by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.emulation.bench import FORMS, Bench, interesting, same, to_bits, to_float
from tests.emulation.test_floats import KINDS, check, finite, loaded, registers, results

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
