"""Matrix instructions: every shape against a product computed element by element from the published layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.emulation.bench import Bench

Pack = Callable[[Any], Any]  # values of one lane, in order, as 32-bit words


def _words(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint32)


def _bf16(values: Any) -> Any:
    return _words((np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16))


def _fp8(values: Any) -> Any:
    """Small whole numbers and halves as 8-bit floats (4 exponent bits, bias 8)."""
    codes = []
    for value in np.asarray(values, float):
        sign, size = (0x80, -value) if value < 0 else (0, value)
        exponent = int(np.floor(np.log2(size))) if size else 0
        codes.append(0 if size == 0 else sign | (exponent + 8) << 3 | int((size / 2.0**exponent - 1) * 8))
    return _words(np.array(codes, np.uint8))


PACK: dict[str, tuple[int, Pack]] = {
    "f16": (4, lambda v: _words(np.asarray(v, np.float16))),
    "bf16": (4, _bf16),
    "f32": (1, lambda v: _words(np.asarray(v, np.float32))),
    "xf32": (2, lambda v: _words(np.asarray(v, np.float32))),
    "f64": (1, lambda v: _words(np.asarray(v, np.float64))),
    "i8": (8, lambda v: _words(np.asarray(v, np.int8))),
    "fp8_fp8": (8, _fp8),
}
# instruction, rows and columns, depth, blocks, elements
SHAPES = [
    ("v_mfma_f32_16x16x16_f16", 16, 16, 1, "f16"),
    ("v_mfma_f32_32x32x8_f16", 32, 8, 1, "f16"),
    ("v_mfma_f32_4x4x4_16b_f16", 4, 4, 16, "f16"),
    ("v_mfma_f32_16x16x4_4b_f16", 16, 4, 4, "f16"),
    ("v_mfma_f32_32x32x4_2b_f16", 32, 4, 2, "f16"),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, 1, "bf16"),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, 1, "bf16"),
    ("v_mfma_f32_32x32x8_bf16_1k", 32, 8, 1, "bf16"),
    ("v_mfma_f32_4x4x4_16b_bf16", 4, 4, 16, "bf16"),
    ("v_mfma_f32_16x16x8_xf32", 16, 8, 1, "xf32"),
    ("v_mfma_f32_32x32x4_xf32", 32, 4, 1, "xf32"),
    ("v_mfma_f32_16x16x4_f32", 16, 4, 1, "f32"),
    ("v_mfma_f32_32x32x2_f32", 32, 2, 1, "f32"),
    ("v_mfma_f32_4x4x1_16b_f32", 4, 1, 16, "f32"),
    ("v_mfma_f64_16x16x4_f64", 16, 4, 1, "f64"),
    ("v_mfma_i32_16x16x32_i8", 16, 32, 1, "i8"),
    ("v_mfma_i32_32x32x16_i8", 32, 16, 1, "i8"),
    ("v_mfma_f32_16x16x32_fp8_fp8", 16, 32, 1, "fp8_fp8"),
    ("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, 1, "fp8_fp8"),
]


def result_place(kind: str, extent: int, block: int, row: int, column: int) -> tuple[int, int]:
    """Register and lane of an element of D."""
    if kind == "f64":
        return row // 4, column + 16 * (row % 4)
    if extent == 4:
        return row, column + 4 * block
    if extent == 16:
        return row % 4 + 4 * block, column + 16 * (row // 4)
    return row % 4 + 4 * (row // 8) + 16 * block, column + 32 * (row // 4 % 2)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_layout(shape: tuple[str, int, int, int, str]) -> None:
    name, extent, depth, blocks, kind = shape
    each, pack = PACK[kind]
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (blocks, extent, depth)).astype(float)
    b = rng.integers(-4, 5, (blocks, depth, extent)).astype(float)
    c = rng.integers(-9, 10, (blocks, extent, extent)).astype(float)
    wanted = np.einsum("bik,bkj->bij", a, b) + c
    wide = 2 if kind == "f64" else 1
    left, right = ([[0.0] * each for _ in range(64)] for _ in range(2))
    for block in range(blocks):
        for i in range(extent):
            for k in range(depth):
                lane = i + extent * (k // each) + extent * block * (1 if blocks > 1 else 0)
                left[lane][k % each] = a[block, i, k]
                right[lane][k % each] = b[block, k, i]
    count = len(pack(left[0]))
    results = extent * extent * blocks // 64 * wide
    line = f"{name} v[40:{39 + results}], {span(0, count)}, {span(8, count)}, v[40:{39 + results}]"
    bench = Bench(line)
    for start, values in ((0, left), (8, right)):
        packed = np.array([pack(lane) for lane in values])
        bench.set({start + i: packed[:, i].astype(np.uint32) for i in range(count)})
    result_type = {"f64": np.float64, "i8": np.int32}.get(kind, np.float32)
    before = np.zeros((results // wide, 64), result_type)
    for block, row, column in np.ndindex(blocks, extent, extent):
        register, lane = result_place(kind, extent, block, row, column)
        before[register, lane] = c[block, row, column]
    for register in range(results // wide):
        if wide == 2:
            bench.pair(40 + 2 * register, before[register])
        else:
            bench.set({40 + register: before[register].view(np.uint32)})
    bench.mask(1).run()  # EXEC is not looked at
    for block, row, column in np.ndindex(blocks, extent, extent):
        register, lane = result_place(kind, extent, block, row, column)
        bits = bench.longs(40 + 2 * register) if wide == 2 else bench.words(40 + register)
        assert bits.view(result_type)[lane] == wanted[block, row, column], (block, row, column)


def span(start: int, count: int) -> str:
    return f"v{start}" if count == 1 else f"v[{start}:{start + count - 1}]"


def test_constant_accumulator_and_agprs() -> None:
    line = "v_mfma_f32_16x16x4_f32 a[0:3], v0, v1, 1.0"
    lines = [line, *(f"v_accvgpr_read_b32 v{4 + i}, a{i}" for i in range(4))]
    ones = np.ones(64, np.float32)
    bench = Bench(lines).set({0: ones, 1: ones}).run()
    assert all((bench.words(4 + i).view(np.float32) == 5.0).all() for i in range(4))


def test_tf32_like_operands_are_rounded_to_ten_bits() -> None:
    """To nearest even; what float32 would keep is gone."""
    one = np.float32(1)
    for value, wanted in ((one + 2**-11, 1.0), (one + 3 * 2**-11, 1 + 2**-9), (one + 2**-10, 1 + 2**-10)):
        a = np.zeros((2, 64), np.float32)
        a[0, :16] = value
        b = np.zeros((2, 64), np.float32)
        b[0, :16] = 1
        bench = Bench("v_mfma_f32_16x16x8_xf32 v[8:11], v[0:1], v[2:3], 0")
        bench.set({0: a[0], 1: a[1], 2: b[0], 3: b[1]}).run()
        assert (bench.words(8).view(np.float32) == np.float32(wanted)).all()


def test_narrow_sums_round_once() -> None:
    """2048 + 1 + 1 in float16 operands: no partial sum is cut to 16 bits."""
    a = np.zeros((64, 4), np.float16)
    a[:16] = [2048, 1, 1, 0.25]
    b = np.ones((64, 4), np.float16)
    words = [np.ascontiguousarray(each).view(np.uint32) for each in (a, b)]
    bench = Bench("v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], 0")
    bench.set({0: words[0][:, 0], 1: words[0][:, 1], 2: words[1][:, 0], 3: words[1][:, 1]}).run()
    assert bench.words(8).view(np.float32)[0] == 2050.25
