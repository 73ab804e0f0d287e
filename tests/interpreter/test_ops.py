"""Every op, variant and dtype over shapes and layouts, in Triton's interpreter, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.op import Op
from portkern.ops import public
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.target import Device
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import REDUCTIONS, generator, ops_of_kind, run_config, variants

# The interpreter runs programs one after another: one that waits for another would hang.
VARIANTS = ("packed_rows", "resident_row", "cached_row", "looped_row", "split_row")
ARCHS = ("sm90", "gfx942")
DTYPES = ("float32", "float16", "bfloat16", "float64")
OPS = [name for name in ops_of_kind("row_reduction") if name not in REDUCTIONS]
SOFTMAX = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")
OTHERS = [name for name in OPS if name not in SOFTMAX]
# Round within the kernel, and Triton's interpreter cuts off what a conversion to bfloat16 should round.
ROUNDS = ("add_layer_norm", "add_rms_norm")
# Variants that an op does not have.
LACKED = {
    "group_norm": ("packed_rows",), "group_norm_backward": ("packed_rows",),
    "cross_entropy_backward": ("packed_rows", "resident_row"), "logsumexp_backward": ("packed_rows", "resident_row"),
    "quantize_fp8_rows": ("split_row",),
}  # fmt: skip
MAX_ROWS = 24  # a program takes 10 to 30 ms here


def device_of(arch: str) -> Device:
    return dispatch.reference_device(current(), arch)


def few_rows(sizes: tuple[int, ...]) -> bool:
    longest = max(sizes, default=1) or 1
    return torch.Size(sizes).numel() // longest <= MAX_ROWS


def cut_small(config: Config, sizes: tuple[int, ...]) -> Config:
    """Blocks so small that a row of these sizes takes several of them, and a split has few programs."""
    if "BLOCK_N" not in config.params:
        return config
    small = {"BLOCK_N": 32 if max(sizes, default=1) < 500 else 1024, "BLOCK_M": 2}
    if "SPLITS" in config.params:
        small["SPLITS"] = 3
    return config.replace(params=small, num_warps=max(8, config.num_warps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SOFTMAX)
def test_variant(name: str, variant: str, dtype: str) -> None:
    """Every second case, so that each meets two dtypes; style and layout rotate, so that each op and variant meets all
    of them."""
    op, ran = all_ops()[name], 0
    turn = DTYPES.index(dtype) * 5 + VARIANTS.index(variant)
    for number, case in enumerate([case for case in op.cases if few_rows(case.sizes)][turn % 2 :: 2]):
        style = ("normal", "wide", "nonfinite")[(number + turn) % 3]
        layout = list(LAYOUTS)[(number + turn) % len(LAYOUTS)]
        if dtype == "bfloat16" and "source" in case.options:
            continue  # Triton's interpreter cuts off what a conversion to bfloat16 should round
        device = device_of(ARCHS[number % len(ARCHS)])
        args = op.inputs(case.sizes, getattr(torch, dtype), generator=generator(number), style=style, **case.options)
        args = lay_out(args, layout)
        for config, found in variants(current(), op, args, device):
            if found != variant:
                continue
            config = cut_small(config, case.sizes)
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{case} {layout} {style} [{config}]: {verdict.reason}"
            ran += 1
    assert ran == 0 if variant == "cached_row" else ran >= 5  # it takes long 16-bit rows only: test_long_rows


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OTHERS)
def test_variant_in_turns(name: str, variant: str) -> None:
    """Every second case, in one dtype, style and layout, another one for each op and variant."""
    op, ran, turn = all_ops()[name], 0, OTHERS.index(name) + 5 * VARIANTS.index(variant)
    for number, case in enumerate(case for case in op.cases if few_rows(case.sizes)):
        if (number + VARIANTS.index(variant)) % 2:
            continue
        dtype = DTYPES[(number + turn) % (2 if name in ROUNDS else 4)]
        style = ("normal", "wide", "nonfinite")[(number + turn) % 3]
        layout = list(LAYOUTS)[(number + turn // 2) % len(LAYOUTS)]
        device = device_of(ARCHS[number % len(ARCHS)])
        args = op.inputs(case.sizes, getattr(torch, dtype), generator=generator(number), style=style, **case.options)
        args = lay_out(args, layout)
        for config, found in variants(current(), op, args, device):
            if found == variant:
                config = cut_small(config, case.sizes)
                verdict = judge(op, args, run_config(current(), op, args, device, config))
                assert verdict.right, f"{case} {dtype} {layout} {style} [{config}]: {verdict.reason}"
                ran += 1
    assert ran == 0 if variant in ("cached_row", *LACKED.get(name, ())) else ran >= 3


@pytest.mark.parametrize("name", [name for name in SOFTMAX if name in public()])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=5),
    long=st.integers(1, 70),
    data=st.data(),
)
def test_any_shape_strides_and_dim(name: str, shape: list[int], long: int, data: st.DataObject) -> None:
    """Forward and gradient through the public function, on views of any strides."""
    function, torch_function = getattr(portkern, name), getattr(torch, name)
    rank = len(shape)
    dim = data.draw(st.integers(-max(rank, 1), max(rank, 1) - 1))
    if rank:
        shape[dim] = long
    if torch.Size(shape).numel() // (long if rank else 1) > 30:
        shape[:] = [min(size, 2) if axis != dim % rank else size for axis, size in enumerate(shape)]
    order = data.draw(st.permutations(range(rank)))
    steps = [data.draw(st.sampled_from((1, 1, 2, 3))) for _ in shape]
    memory = torch.randn([shape[axis] * steps[axis] for axis in order], generator=generator(1))
    x = memory.permute(*(order.index(axis) for axis in range(rank))) if rank else memory
    x = x[tuple(slice(None, None, step) for step in steps)].detach().requires_grad_()
    assert x.shape == torch.Size(shape)
    y, expected = function(x, dim), torch_function(x, dim)
    assert y.shape == expected.shape and y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-6)
    gradient = torch.randn(shape, generator=generator(2))
    (got,) = torch.autograd.grad(y, x, gradient)
    (want,) = torch.autograd.grad(expected, x, gradient)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_gradients_of_any_layout() -> None:
    """Expanded, sliced and narrowed gradients give what a contiguous one gives, and are not written."""
    x = torch.randn(6, 10, generator=generator(3), requires_grad=True)
    gradients = {
        "expanded scalar": torch.tensor(1.0).expand(6, 10),
        "expanded row": torch.randn(10, generator=generator(4)).expand(6, 10),
        "sliced": torch.randn(6, 20, generator=generator(5))[:, ::2],
        "transposed": torch.randn(10, 6, generator=generator(6)).t(),
        "narrowed": torch.randn(8, 10, generator=generator(7)).narrow(0, 1, 6),
    }
    for what, gradient in gradients.items():
        before = gradient.clone()
        for function in (portkern.softmax, portkern.log_softmax):
            (got,) = torch.autograd.grad(function(x), x, gradient)
            (want,) = torch.autograd.grad(function(x), x, gradient.contiguous())
            assert torch.equal(got, want), what
        assert torch.equal(gradient, before), what


LENGTHS = (16384, 30000, 65536, 65537, 131072, 1048576, 1048577)


# In one of the dtypes alone: they take the interpreter 9 s each.
MILLIONS = {1048576: torch.float16, 1048577: torch.float32}


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, dtype) for n in LENGTHS for dtype in (torch.float16, torch.float32) if MILLIONS.get(n, dtype) == dtype],
)
def test_long_rows(n: int, dtype: torch.dtype) -> None:
    """Either op at each length, one in each dtype."""
    name = ("softmax", "log_softmax")[(LENGTHS.index(n) + (dtype == torch.float32)) % 2]
    rows = 2 if n <= 131072 else 1
    x = (torch.randn(rows, n, generator=generator(n)) * 4).to(dtype)
    cached = portkern.explain(name, x).config.startswith("cached_row")
    assert cached == (n == 16384 and dtype == torch.float16)
    verdict = judge(all_ops()[name], (x, 1, dtype), (getattr(portkern, name)(x),))
    assert verdict.right, f"{name}: {verdict.reason}"


def test_masked_square() -> None:
    """An upper triangle of -inf: exact zeros there, finite elsewhere, at both sizes."""
    for shape in ((1, 1, 8, 8), (1, 4, 31, 31)):
        x = torch.randn(shape, generator=generator(8))
        mask = torch.ones(shape, dtype=torch.bool).triu(1)
        y = portkern.softmax(x.masked_fill(mask, -torch.inf))
        assert bool(y.isfinite().all()) and bool((y[mask] == 0).all())


def test_same_bits_every_time() -> None:
    x = torch.randn(32, 64, generator=generator(9))
    first = portkern.log_softmax(x, dim=0)
    assert all(torch.equal(first, portkern.log_softmax(x, dim=0)) for _ in range(3))


def test_integers_with_dtype() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        x = torch.randint(0, 2, (3, 9), generator=generator(10)).to(dtype)
        got = portkern.softmax(x, -1, torch.float32)
        torch.testing.assert_close(got, torch.softmax(x, -1, torch.float32))


def test_explain_says_interpreter_plans() -> None:
    answer = portkern.explain("softmax", torch.randn(4, 8))
    assert answer.layer == "default" and "absent" in answer.device and answer.launches


def test_op_defined_in_a_file() -> None:
    from portkern.registry import load_file

    (op,) = load_file("tests/ops/scale.py")
    assert isinstance(op, Op)
    x = torch.randn(100, generator=generator(11))
    assert torch.equal(portkern.function("example::scale")(x, 3.0), x * 3.0)
    x.requires_grad_()
    portkern.function("example::scale")(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("sizes", [(5, 33), (3, 20000)])  # whole rows, and rows that are walked
def test_op_over_rows_defined_in_a_file(sizes: tuple[int, int]) -> None:
    from portkern.registry import load_file

    load_file("tests/ops/l2_normalize.py")
    x = torch.randn(sizes, generator=generator(12))
    for rows, dim in ((x, -1), (x.t(), 0)):
        got = portkern.function("example::l2_normalize")(rows, dim, eps=1e-6)
        torch.testing.assert_close(got, torch.nn.functional.normalize(rows, dim=dim))
