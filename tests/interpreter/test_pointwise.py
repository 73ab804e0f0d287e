"""Pointwise ops in Triton's interpreter: every op over shapes, layouts and values; strides, promotion, edge values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import portkern
from portkern import dispatch, library
from portkern.kernels import quantize
from portkern.registry import all_ops, load_file
from portkern.runtime import Runtime, current, using
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import generator, ops_of_kind, run_config, variants
from tests.test_pointwise import page_code

ARCHS = ("sm90", "gfx942")
DTYPES = ("float32", "float16", "bfloat16", "float64")
STYLES = ("normal", "wide", "nonfinite")
OPS = ops_of_kind("pointwise")
# One tile; several; several that one program walks.
BLOCKS = ({}, {"BLOCK": 128}, {"BLOCK": 64, "PROGRAMS_PER_UNIT": 1})


def check(name: str, case: Any, dtype: str, layout: str, style: str, number: int) -> None:
    op, device = all_ops()[name], dispatch.reference_device(current(), ARCHS[number % 2])
    args = op.inputs(case.sizes, getattr(torch, dtype), generator=generator(number), style=style, **case.options)
    args = lay_out(args, layout)
    ((config, _),) = variants(current(), op, args, device)
    config = config.replace(params=BLOCKS[number % len(BLOCKS)])
    verdict = judge(op, args, run_config(current(), op, args, device, config))
    assert verdict.right, f"{name} {case} {dtype} {layout} {style} [{config}]: {verdict.reason}"


@pytest.mark.parametrize("name", OPS)
def test_cases(name: str) -> None:
    """Dtype, layout and style rotate, so that each op meets all of them."""
    turn, dtypes = OPS.index(name), all_ops()[name].dtypes
    for number, case in enumerate(all_ops()[name].cases):
        for shift in range(1 + number % 2):
            dtype = dtypes[(number + turn + 2 * shift) % len(dtypes)]
            if dtype == "bfloat16" and "mixed" in case.options:
                dtype = "float16"  # the interpreter cuts off what a conversion to bfloat16 should round
            layout = list(LAYOUTS)[(number + turn + 3 * shift) % len(LAYOUTS)]
            check(name, case, dtype, layout, STYLES[(number // 2 + shift + turn) % 3], number)


def view(data: st.DataObject, shape: list[int], seed: int) -> torch.Tensor:
    """A tensor of ``shape``, or of sizes 1 in it, or of fewer dims, as a view of any strides."""
    sizes = [size if data.draw(st.booleans()) or seed == 1 else 1 for size in shape][data.draw(st.integers(0, 1)) :]
    order = data.draw(st.permutations(range(len(sizes))))
    steps = [data.draw(st.sampled_from((1, 1, 2))) for _ in sizes]
    memory = torch.randn([sizes[axis] * steps[axis] for axis in order], generator=generator(seed))
    x = memory.permute(*(order.index(axis) for axis in range(len(sizes)))) if sizes else memory
    return x[tuple(slice(None, None, step) for step in steps)].detach().requires_grad_()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(shape=st.lists(st.sampled_from((0, 1, 2, 3, 5)), min_size=0, max_size=5), data=st.data())
def test_broadcasting_of_any_views(shape: list[int], data: st.DataObject) -> None:
    """Values, memory format and gradients of ``add`` are torch's."""
    x, y = view(data, shape, 1), view(data, shape, 2)
    got, want = portkern.add(x, y, alpha=2), torch.add(x, y, alpha=2)
    assert got.shape == want.shape and torch.equal(got, want)
    significant = [axis for axis, size in enumerate(want.shape) if size > 1]
    if want.numel():
        assert [got.stride(axis) for axis in significant] == [want.stride(axis) for axis in significant]
    gradient = torch.randn(want.shape, generator=generator(3))
    for ours, theirs in zip(
        torch.autograd.grad(got, (x, y), gradient), torch.autograd.grad(want, (x, y), gradient), strict=True
    ):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)


def test_many_dims_that_do_not_merge() -> None:
    x = torch.randn(2, 3, 2, 3, 2, 3, 4, generator=generator(4))[::1, ::2, :, ::2, :, ::2, ::2]
    y = torch.randn(2, 2, 2, 2, 3, 2, 2, generator=generator(5)).permute(6, 5, 3, 1, 0, 2, 4)[..., :2]
    assert torch.equal(portkern.add(x, y), torch.add(x, y))


def test_dtypes_are_promoted() -> None:
    """Values as well as types: integers stay exact, a 0-d tensor and a number do not widen."""
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    for first in kinds:
        for second in kinds:
            for shape in ((3,), ()):
                x = torch.tensor([1, 0, 100]).to(first)
                y = torch.tensor([1, 1, 27]).to(second)[0 if shape == () else slice(None)]
                got, want = portkern.add(x, y), torch.add(x, y)
                assert got.dtype == want.dtype and torch.equal(got, want), (first, second, shape)
        for number in (True, 3, 2.5):
            x = torch.tensor([1, 0, 100]).to(first)
            got, want = portkern.add(x, number), torch.add(x, number)
            assert got.dtype == want.dtype and torch.equal(got, want), (first, number)
            assert torch.equal(portkern.add(number, x), torch.add(x, number))
    large = torch.tensor([2**62 + 1, -(2**53) - 1])
    assert torch.equal(portkern.add(large, 2**53 + 1, alpha=3), torch.add(large, 2**53 + 1, alpha=3))
    assert torch.equal(portkern.axpy(large, large, 3), 3 * large + large)


EDGES = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-30, -1e-30, 1e30, -1e30, 0.5, -100.0])


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu", "silu", "mish", "sigmoid", "tanh"])
def test_edge_values(name: str) -> None:
    """NaN, infinities, the sign of zero, subnormals and large values, and the gradients there, as torch has them."""
    ours, theirs = getattr(portkern, name), getattr(F, name)
    for options in ({}, {"approximate": "tanh"}) if name == "gelu" else ({},):
        x, same = EDGES.clone().requires_grad_(), EDGES.clone().requires_grad_()
        got, want = ours(x, **options), theirs(same, **options)
        if name == "gelu":
            want = torch.where(same == math.inf, same, want)  # torch's vectorised erf is NaN there on the CPU
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, equal_nan=True, rtol=2e-6, atol=2e-38)
        here = ~want.isnan()
        assert torch.equal(got[here].signbit(), want[here].signbit()), (got, want)
        (slope,) = torch.autograd.grad(got.nansum(), x)
        (wanted,) = torch.autograd.grad(want.nansum(), same)
        keep = wanted.isfinite()  # of gelu, torch's slope at 1e30 is inf * 0; here it is 1
        torch.testing.assert_close(slope[keep], wanted[keep], rtol=2e-6, atol=2e-7)


def test_tail_of_gelu_tanh_decays_smoothly() -> None:
    x = torch.tensor([-5.0, -6.0, -8.0, -10.0])
    exact = x.double() * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3))
    torch.testing.assert_close(portkern.gelu(x, approximate="tanh").double(), exact, rtol=1e-4, atol=2e-38)


def test_tail_of_gelu_decays_smoothly() -> None:
    """Where 1 + erf has lost every digit, and torch with it."""
    x = torch.linspace(-9, -2, 701)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    torch.testing.assert_close(portkern.gelu(x).double(), exact, rtol=2e-3, atol=0)
    far = portkern.gelu(torch.linspace(-60, -9, 701))
    assert (far <= 0).all() and (far.diff() <= 0).all() and far[-1] > -2e-18


def test_gelu_keeps_the_digits_of_its_argument() -> None:
    x = torch.cat([torch.logspace(-30, 3, 2000), -torch.logspace(-30, 0, 2000)])
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    torch.testing.assert_close(portkern.gelu(x).double(), exact, rtol=6e-7, atol=0)


def test_small_arguments_of_tanh_keep_their_digits() -> None:
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.float64, 1e-15)):
        x = torch.logspace(-30, 1, 2000, dtype=torch.float64).to(dtype)
        torch.testing.assert_close(portkern.tanh(x).double(), torch.tanh(x.double()), rtol=tolerance, atol=0)
        assert torch.equal(portkern.tanh(-x), -portkern.tanh(x))


def test_packed_is_what_two_tensors_are() -> None:
    x = torch.randn(3, 5, 34, generator=generator(6), requires_grad=True)
    first, second = (half.detach().requires_grad_() for half in x.chunk(2, -1))
    gradient = torch.randn(3, 5, 17, generator=generator(7))
    for name in ("swiglu", "geglu", "reglu"):
        function = getattr(portkern, name)
        assert torch.equal(function(x), function(first, second))
        (got,) = torch.autograd.grad(function(x), x, gradient)
        want = torch.autograd.grad(function(first, second), (first, second), gradient)
        assert torch.equal(got, torch.cat(want, -1)) and got.is_contiguous()


def test_dropout_masks_are_the_same_for_every_tile_and_layout() -> None:
    """Rows of whole groups of neighbours take one way through the kernel, others another: they agree."""
    op, device, seed = all_ops()["dropout"], dispatch.reference_device(current(), "sm90"), torch.tensor([2**61 + 5])
    x = torch.ones(4, 512)
    first = None
    for each in (x, x.t().contiguous().t(), torch.ones(4, 1024)[:, ::2], torch.ones(4, 515)[:, :512], x.half()):
        args = (each, None, None, seed, 0.4, True, each.dtype)
        ((config, _),) = variants(current(), op, args, device)
        for block in (128, 256, 1024, 2048):
            (y,) = run_config(current(), op, args, device, config.replace(params={"BLOCK": block}, num_warps=8))
            first = y != 0 if first is None else first
            assert torch.equal(y != 0, first)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_every_8_bit_code(kind: torch.dtype) -> None:
    """Each code, what lies half way between two, and its neighbours, are rounded as torch rounds them."""
    op, device = all_ops()["quantize_fp8"], dispatch.reference_device(current(), "sm80")
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()].unique()
    half = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(each, torch.tensor(way)) for each in (codes, half) for way in (-1e9, 1e9)]
    x = torch.cat([codes, half, *near, torch.tensor([math.nan, math.inf, -math.inf, 1e5, -1e5, -0.0])])
    args = (x, torch.tensor(1.0), 0, 0, int(kind == torch.float8_e4m3fnuz), 0, torch.float32)
    ((config, _),) = variants(current(), op, args, device)
    (got,) = run_config(current(), op, args, device, config)
    assert torch.equal(got, op.reference(*args))


def test_the_8_bit_format_is_the_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 40, generator=generator(8))
    for arch, kind in (("sm80", torch.float8_e4m3fn), ("gfx942", torch.float8_e4m3fnuz)):
        monkeypatch.setenv("PORTKERN_ARCH", arch)
        q, scale = portkern.quantize_fp8(x)
        assert q.dtype == kind
        # Half a step of three bits of mantissa, or of the codes next to zero.
        torch.testing.assert_close(q.float() * scale, x, rtol=2**-4, atol=float(scale.max()) * 2**-10)


def test_weights_are_added_in_no_order() -> None:
    """Any order of the elements and any block gives the same bits, which are those of an exact sum."""
    x = torch.randint(0, 9, (800,), generator=generator(9))
    w = torch.randn(800, generator=generator(10)) * 10.0 ** torch.randint(-9, 9, (800,), generator=generator(11))
    first = portkern.bincount(x, w)
    order = torch.randperm(800, generator=generator(12))
    assert torch.equal(first, portkern.bincount(x[order], w[order]))
    exact = torch.tensor([math.fsum(w[x == value].tolist()) for value in range(9)], dtype=torch.float64)
    assert torch.equal(first, exact.float())
    bad = torch.tensor([1.0, math.inf, -math.inf, math.nan, math.inf])
    got = portkern.bincount(torch.tensor([0, 1, 2, 3, 4]), bad)
    torch.testing.assert_close(got, bad, equal_nan=True)
    assert bool(portkern.bincount(torch.tensor([0, 0]), bad[1:3])[0].isnan())


@pytest.mark.parametrize("size", [1e-310, 1e-270, 1e-50, 1e38, 1e39, 1e300, 1e307])
def test_weights_of_any_size_of_64_bits(size: float) -> None:
    """Exact, up to the largest number and down to the least: 1e38 has sums that pass 32 bits, 1e-310 is subnormal."""
    w = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0], dtype=torch.float64) * size
    got = portkern.bincount(torch.tensor([0, 1, 1, 2, 0]), w)
    exact = [math.fsum(terms) for terms in ((w[0], w[4]), (w[1], w[2]), (w[3],))]
    assert got.tolist() == exact


def test_the_page_on_ops_is_right(tmp_path: Path) -> None:
    file = tmp_path / "squared_relu.py"
    file.write_text(page_code())
    with using(Runtime()):
        for op in load_file(file):
            for number, case in enumerate(op.cases):
                check(op.name, case, DTYPES[number % 2], "padded", STYLES[number % 3], number)


def views(x: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
    """Tensors with the values of ``x``, (6, 64), in rows of several lengths and strides, and the dims of a row."""
    blocks = x.view(6, 4, 16)
    return [
        (x, -1), (x.half(), -1), (x.bfloat16(), -1), (x.t().contiguous().t(), 1), (x[:, ::3], -1),
        (x[:1].expand(3, 64), -1), (blocks, (1, 2)), (blocks, (2, -2)), (blocks, None), (blocks.transpose(0, 1), -1),
        (x[2, 1], None), (x.view(2, 3, 2, 2, 2, 8).permute(4, 2, 0, 3, 1, 5), -1),
    ]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_in_one_launch_have_the_bits_of_three(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of zeros, of a NaN, of infinities and of subnormals among them."""
    monkeypatch.setenv("PORTKERN_ARCH", arch)
    x = torch.randn(6, 64, generator=generator(3)) * 10.0 ** torch.arange(-3, 3)[:, None]
    x[0], x[1, 5], x[2, 7], x[3, 9] = 0, math.nan, -math.inf, 1e-40
    x[3] = x[3].clamp(0, 1e-40)
    called, call = [], library.call
    monkeypatch.setattr(library, "call", lambda name, *args: called.append(name) or call(name, *args))
    for values, dim in views(x):
        found = portkern.quantize_fp8(values, dim)
        with monkeypatch.context() as few:
            few.setattr(quantize, "LONG_ROW", 0)
            few.setattr(quantize, "FEW_ROWS", 2**40)
            expected = portkern.quantize_fp8(values, dim)
        assert called == ["quantize_fp8_rows", "absmax", "fp8_scale", "quantize_fp8"]
        called.clear()
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


@pytest.mark.parametrize("fnuz", [0, 1])
def test_8_bit_codes_are_those_of_a_division(fnuz: int) -> None:
    """Of every exponent, NaN and infinities among them; of what one scale gives; at ties and at edges."""
    op, device = all_ops()["quantize_fp8"], dispatch.reference_device(current(), "sm90")
    x, scale = torch.randint(-(2**31), 2**31 - 1, (2, 1 << 16), generator=generator(1), dtype=torch.int32).view(
        torch.float32
    )
    near, ties = torch.randn(scale.shape, generator=generator(2)) * 100, torch.arange(1024.0) / 1024
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 1e-38, 3e38, 448.0, 464.0, 2.0**-10])
    for values, scales in ((x, scale), (scale * near, scale), (ties * 0.3, torch.tensor(0.3)), (edges[:, None], edges)):
        sizes = torch.broadcast_shapes(values.shape, scales.shape)
        args = (values.expand(sizes).contiguous(), scales, 0, 0, fnuz, 0, torch.float32)
        ((config, _),) = variants(current(), op, args, device)
        (codes,) = run_config(current(), op, args, device, config)
        assert torch.equal(codes, op.reference(*args))
