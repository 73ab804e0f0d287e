"""8-bit quantisation: the format that each plugin decides, scales, every code, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portkern
from portkern import library
from portkern.kernels import quantize
from portkern.kernels.quantize import LARGEST
from portkern.plugins import parse_arch
from portkern.registry import all_ops
from portkern.runtime import current


@pytest.mark.parametrize(
    ("arch", "name", "native"),
    [
        ("sm80", "float8_e4m3fn", False), ("sm86", "float8_e4m3fn", False), ("sm89", "float8_e4m3fn", True),
        ("sm90", "float8_e4m3fn", True), ("sm120", "float8_e4m3fn", True), ("gfx942", "float8_e4m3fnuz", True),
        ("gfx950", "float8_e4m3fn", True), ("gfx90a", "float8_e4m3fn", False),
    ],
)  # fmt: skip
def test_the_plugin_decides_the_format(arch: str, name: str, native: bool) -> None:
    runtime = current()
    assert runtime.backend(parse_arch(runtime.plugins, arch)).fp8() == (name, native)


@pytest.mark.parametrize("dim", [-1, 0, None, (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_and_values(dtype: torch.dtype, dim: object) -> None:
    x = (torch.randn(4, 5, 96) * 30).to(dtype)
    x[0, 0] = 0
    q, scale = portkern.quantize_fp8(x, dim)
    dims = tuple(range(3)) if dim is None else dim
    assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape and scale.dtype == torch.float32
    size = x.float().abs().amax(dims, keepdim=True)
    torch.testing.assert_close(scale, torch.where(size == 0, 1.0, size / 448))
    assert float(q.float().abs().max()) == 448
    # Half a step of 3 mantissa bits, or of the smallest numbers.
    error = (q.float() * scale - x.float()).abs()
    assert bool((error <= x.float().abs() / 16 + scale * 2**-10 * 1.001).all())


def test_what_is_not_finite_and_what_is_empty() -> None:
    q, scale = portkern.quantize_fp8(torch.tensor([[1.0, torch.nan], [2.0, -4.0]]))
    assert bool(q[0].float().isnan().all()) and q[1].float().tolist() == [224.0, -448.0]
    q, scale = portkern.quantize_fp8(torch.ones(3, 0))
    assert q.shape == (3, 0) and scale.shape == (3, 1)
    q, scale = portkern.quantize_fp8(torch.tensor(-3.0), None)
    assert float(q.float() * scale) == -3.0


def test_formats_have_their_own_largest() -> None:
    assert {kind: torch.finfo(kind).max for kind in LARGEST} == LARGEST
    op = all_ops()["quantize_fp8"]
    x, one = torch.tensor([1e9, -1e9, 0.0, -0.0]), torch.tensor(1.0)
    for fnuz, kind in ((0, torch.float8_e4m3fn), (1, torch.float8_e4m3fnuz)):
        codes = op.reference(x, one, 0, 0, fnuz, 0, torch.float32)
        assert codes.view(kind).float().tolist() == [LARGEST[kind], -LARGEST[kind], 0.0, 0.0]


ONE, THREE = ["quantize_fp8_rows"], ["absmax", "fp8_scale", "quantize_fp8"]


@pytest.mark.parametrize(
    ("sizes", "dim", "expected"),
    [
        ((8192, 8192), -1, ONE), ((1, 4096), -1, ONE), ((127, 131072), 1, ONE), ((128, 131073), 1, ONE),
        ((127, 131073), 1, THREE), ((1, 1 << 26), -1, THREE), ((8192, 8192), None, THREE), ((4, 5), None, ONE),
        ((), None, ONE), ((7,), 0, ONE), ((4, 5, 96), (1, 2), ONE), ((4, 5, 96), (-1, -2), ONE),
        ((4, 5, 96), (0, 2), THREE), ((4, 5, 96), 1, THREE), ((8192, 8192), 0, THREE), ((3, 0), -1, []),
    ],
)  # fmt: skip
def test_rows_take_one_launch(sizes: Any, dim: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those along the last dims do, but for a few long ones."""
    called, call = [], library.call
    monkeypatch.setattr(library, "call", lambda name, *args: called.append(name) or call(name, *args))
    x = torch.empty(sizes, dtype=torch.bfloat16, device="meta")
    q, scale = portkern.quantize_fp8(x, dim)
    assert called == expected and (q.shape, q.stride()) == (x.shape, x.stride())
    assert scale.shape == (torch.amax(x, () if dim is None else dim, keepdim=True).shape if expected else (3, 1))


def test_dims_that_do_not_merge_take_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One would take a copy."""
    called, call = [], library.call
    monkeypatch.setattr(library, "call", lambda name, *args: called.append(name) or call(name, *args))
    x = torch.randn(4, 5, 97)[..., :96]
    q, scale = portkern.quantize_fp8(x, (1, 2))
    assert called == THREE and q.shape == x.shape and scale.shape == (4, 1, 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: portkern.quantize_fp8(torch.ones(3, dtype=torch.float64)), NotImplementedError, "float64"),
        (lambda: portkern.quantize_fp8(torch.ones(3), 1), IndexError, "out of range"),
    ],
)
def test_errors(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one launch and in three, of known and of symbolic sizes."""
    monkeypatch.setattr(quantize, "LONG_ROW", 40)
    monkeypatch.setattr(quantize, "FEW_ROWS", 3)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, dim: portkern.quantize_fp8(x * 2, dim), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for sizes, dim in (((4, 32), -1), ((4, 48), -1), ((2, 48), -1), ((5, 3, 8), (1, 2)), ((5, 3, 8), None)):
        x = torch.randn(sizes)
        for ours, eager in zip(compiled(x, dim), portkern.quantize_fp8(x * 2, dim), strict=True):
            assert ours.dtype == eager.dtype
            torch.testing.assert_close(ours.float(), eager.float(), rtol=0, atol=0)


@pytest.mark.parametrize("largest", sorted(LARGEST.values()))
@pytest.mark.parametrize("bits", [7, 10])
def test_a_reciprocal_in_two_parts_gives_the_quotients_of_16_bit_numbers(bits: int, largest: float) -> None:
    """As kernels take them: rounded down, and what that lacks. All mantissas of x and of the largest size: neither
    exponent alters a rounding, as long as nothing is subnormal. float64 holds each of the products and sums exactly."""
    mantissas = ((1 << bits) + torch.arange(1 << bits, dtype=torch.float64)) / (1 << bits)
    scale = (mantissas / largest).float()
    high = 1 / scale
    high = torch.where(1 - high.double() * scale.double() < 0, torch.nextafter(high, torch.zeros(())), high)
    low = (1 - high.double() * scale.double()).float() * high
    assert bool((low >= 0).all())
    x = mantissas.float()[:, None]
    product = (x.double() * high.double() + (x * low).double()).float()
    assert torch.equal(product, x / scale)
