"""``portkern.matmul`` as torch sees it: shapes, errors, flags, tracing. CPU tensors, the reference route."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.errors import BadArgument, BadType, Infeasible, Mismatch, UnsupportedDtype
from portkern.plan import Buffer, Meta, metas_of
from portkern.product import Matrix, product_of
from portkern.registry import all_ops
from portkern.runtime import current

SHAPES = (
    ((7,), (7,)), ((7,), (7, 5)), ((5, 7), (7,)), ((3, 5, 7), (7,)), ((7,), (3, 7, 5)), ((5, 7), (7, 3)),
    ((2, 5, 7), (7, 3)), ((5, 7), (2, 7, 3)), ((2, 1, 5, 7), (3, 7, 4)), ((4, 1, 2, 5, 3), (3, 1, 3, 6)),
    ((5, 0), (0, 4)), ((0,), (0,)), ((0, 3), (3, 4)), ((3, 0, 5, 7), (7, 4)), ((2, 5, 0), (2, 0, 4)), ((5, 3), (3, 0)),
)  # fmt: skip


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("a_shape, b_shape", SHAPES)
def test_shapes_and_gradients_are_those_of_torch(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = tensors(a_shape, b_shape)
    got, want = portkern.matmul(a, b), torch.matmul(a, b)
    assert got.shape == want.shape and got.is_contiguous()
    torch.testing.assert_close(got, want)
    g = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, (a, b), g), torch.autograd.grad(want, (a, b), g, allow_unused=True), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("a_shape, b_shape", SHAPES[:10])
def test_gradcheck(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = tensors(a_shape, b_shape)
    assert torch.autograd.gradcheck(portkern.matmul, (a, b))
    assert torch.autograd.gradgradcheck(portkern.matmul, (a, b))


def test_a_sum_of_nothing_is_zero() -> None:
    assert torch.equal(portkern.matmul(torch.ones(3, 0), torch.ones(0, 4)), torch.zeros(3, 4))
    op = all_ops()["matmul"]
    plan = op.outputs(Meta((3, 0), (1, 1), torch.float32), Meta((0, 4), (4, 1), torch.float32), False)
    assert plan[0].init == 0


ERRORS: tuple[tuple[Callable[[], object], type[Exception], type[Exception], str], ...] = (
    (lambda: portkern.matmul(torch.ones(()), torch.ones(2)), Mismatch, RuntimeError, "at least 1"),
    (lambda: portkern.matmul(torch.ones(2, 3), torch.ones(2, 3)), Mismatch, RuntimeError, "cannot be multiplied"),
    (lambda: portkern.matmul(torch.ones(3), torch.ones(2)), Mismatch, RuntimeError, "cannot be multiplied"),
    (lambda: portkern.matmul(torch.ones(2, 2, 3), torch.ones(3, 3, 2)), Mismatch, RuntimeError, "broadcast"),
    (lambda: portkern.matmul(torch.ones(2, 3), torch.ones(3, 2).half()), Mismatch, RuntimeError, "same dtype"),
    (lambda: portkern.matmul(3, torch.ones(2)), BadType, TypeError, "'input'"),
    (lambda: portkern.matmul(torch.ones(2), None), BadType, TypeError, "'other'"),
    (lambda: portkern.matmul(torch.ones(2).int(), torch.ones(2).int()), UnsupportedDtype, RuntimeError, "int32"),
)


@pytest.mark.parametrize("call, kind, of_torch, word", ERRORS)
def test_errors(call: Callable[[], object], kind: type[Exception], of_torch: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word) as caught:
        call()
    assert isinstance(caught.value, of_torch)


def test_autocast_is_that_of_torch() -> None:
    a, b = tensors((3, 4), (4, 5), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = portkern.matmul(a, b.half()), torch.matmul(a, b.half())
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got.sum(), a)
    assert gradient.dtype == torch.float32


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda op, args: calls.append(op.name) or run(op, args))
    a, b = tensors((3, 4), (4, 5))
    portkern.matmul(a, b.detach()).sum().backward()
    assert calls == ["matmul", "matmul_backward"]
    assert a.grad is not None and b.grad is None


def test_gradient_lies_as_its_operand() -> None:
    (weight,) = tensors((6, 9))
    portkern.matmul(torch.ones(4, 9, dtype=torch.float64), weight.t()).sum().backward()
    assert weight.grad is not None and weight.grad.stride() == weight.stride()


def test_opcheck() -> None:
    all_ops()
    for dtype in (torch.float32, torch.float16):
        a, b = tensors((2, 3, 4), (4, 5), dtype=dtype)
        torch.library.opcheck(torch.ops.portkern.matmul.default, (a, b, False))
        g = torch.ones(2, 3, 5, dtype=dtype).requires_grad_()
        left = a.detach().mT.requires_grad_()
        torch.library.opcheck(torch.ops.portkern.matmul_backward.default, (left, g, [4, 5], True, False))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda a, b: portkern.matmul(a * 2, b), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for m in (3, 6):
        a, b = tensors((2, m, 4), (4, 5), dtype=torch.float32)
        got, want = compiled(a, b), torch.matmul(a * 2, b)
        torch.testing.assert_close(got, want)
        for ours, theirs in zip(
            torch.autograd.grad(got.sum(), (a, b)), torch.autograd.grad(want.sum(), (a, b)), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_is_in_the_key_where_it_was_asked_for(tf32: None) -> None:
    op = all_ops()["matmul"]
    for dtype, asked in ((torch.float32, True), (torch.float16, False)):
        args = op.signature(torch.ones(4, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype))  # type: ignore[misc]
        problem = op.problem(*metas_of(args))
        assert problem.flags.get("tf32", False) == asked


def test_compiled_code_follows_the_setting(monkeypatch: pytest.MonkeyPatch, tf32: None) -> None:
    seen: list[bool] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda op, args: seen.append(args[-1]) or run(op, args))
    compiled = torch.compile(lambda a, b: portkern.matmul(a, b), fullgraph=True, backend="aot_eager")
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    compiled(a, b)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    compiled(a, b)
    assert seen == [True, False]


def test_tf32_is_up_to_the_target(tf32: None) -> None:
    """The problem permits it, the plugin's default takes it up, and the plan says so to the kernel."""
    op, runtime = all_ops()["matmul"], current()
    for arch in ("sm80", "sm90", "gfx942"):
        device = dispatch.reference_device(runtime, arch)
        args = metas_of(op.inputs((512, 512, 512), torch.float32, device="meta"))
        situation = dispatch.situate(runtime, op, args, device)
        choice = dispatch.resolve(runtime, situation)
        (launch,) = situation.plan(choice).launches
        assert launch.constexprs["PRECISION"] == "tf32"
        plain = choice.config.replace()
        object.__setattr__(plain, "options", type(plain.options)())
        (launch,) = op.plan(plain, choice.blocks, device, *args).launches
        assert launch.constexprs["PRECISION"] == "ieee"


def contiguous(*shape: int) -> Matrix:
    return Matrix.of(Meta(shape, torch.empty(shape, device="meta").stride(), torch.float16))


def test_batches_of_rows_merge_into_rows() -> None:
    product = product_of(contiguous(4, 8, 16), contiguous(16, 32), contiguous(4, 8, 32))
    assert (product.batches, product.m, product.n, product.k) == (1, 32, 32, 16)


def test_summed_batches_merge_into_k() -> None:
    left, right = torch.empty(4, 8, 16, device="meta").mT, torch.empty(4, 8, 32, device="meta")
    matrices = (Matrix.of(Meta(tuple(x.shape), x.stride(), torch.float16)) for x in (left, right))
    product = product_of(*matrices, contiguous(16, 32))
    assert (product.batches, product.m, product.n, product.k, product.r) == (1, 16, 32, 32, (1, 1))


def test_result_in_columns_swaps_the_operands() -> None:
    out = Matrix((8, 32), (1, 8), 2)
    product = product_of(contiguous(8, 16), contiguous(16, 32), out)
    assert product.swapped and (product.m, product.n) == (32, 8) and product.c[2:] == (8, 1)


def test_three_summed_dims_are_copied_or_refused() -> None:
    left = contiguous(2, 3, 2, 3, 2, 4, 5)
    right = contiguous(2, 1, 2, 1, 2, 5, 6)
    with pytest.raises(BadArgument, match="do not merge"):
        product_of(left, right, contiguous(1, 3, 1, 3, 1, 4, 6))
    a, b = tensors((2, 3, 2, 3, 2, 4, 5), (1, 3, 1, 3, 1, 5, 6))
    got = torch.autograd.grad(portkern.matmul(a, b).square().sum(), b)
    torch.testing.assert_close(got, torch.autograd.grad(torch.matmul(a, b).square().sum(), b))


CUT = Config("split_k", {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "SPLITS": 5}, 4, 3)


def situation(arch: str, sizes: tuple[int, ...], dtype: torch.dtype, **options: object) -> dispatch.Situation:
    op, device = all_ops()["matmul"], dispatch.reference_device(current(), arch)
    return dispatch.situate(current(), op, metas_of(op.inputs(sizes, dtype, device="meta", **options)), device)


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_long_sums_of_few_tiles_are_cut(arch: str) -> None:
    for sizes, cut in (((512, 512, 32768), True), ((16, 256, 16384), True), ((4096, 4096, 4096), False),
                       ((64, 1024, 1024, 64), False), ((1024, 1024, 64), False)):  # fmt: skip
        found = situation(arch, sizes, torch.bfloat16)
        config = found.backend.default(found.device, found.work)
        assert (config.variant == "split_k") == cut, f"{sizes} [{config}]"
        blocks = found.op.fit(config, found.work, found.device)
        tiles = found.work.sizes["BATCH"] * math.prod(
            -(-found.work.sizes[name] // blocks[f"BLOCK_{name}"]) for name in ("M", "N")
        )
        assert not cut or found.device.units / 4 < blocks["SPLITS"] * tiles <= 2 * found.device.units, (
            f"{sizes} [{config}]"
        )


def test_candidates_begin_with_the_best_of_each_variant() -> None:
    for sizes in ((512, 512, 32768), (1024, 1024, 1024), (4096, 4096, 4096)):
        found = situation("sm90", sizes, torch.bfloat16)
        listed = dispatch.candidates(found)
        assert {config.variant for config in listed[:3]} == {"tiles", "persistent", "split_k"}
        assert listed[0] == found.backend.default(found.device, found.work) and len(set(listed)) == len(listed)


def test_few_tiles_are_small_ones_and_a_sum_is_cut_only_where_units_are_left_over() -> None:
    """The fastest of what was raced on one H200, or one of its kind."""
    for sizes, order, variant, shapes in (
        ((512, 512, 32768), "nn", "split_k", {(128, 256)}),
        ((512, 512, 4096), "nn", "split_k", {(64, 128)}),
        ((1024, 1024, 4096), "nn", "persistent", {(64, 128), (128, 64)}),
        ((256, 4096, 4096), "nt", "persistent", {(64, 128), (128, 64)}),
        ((1024, 1024, 1024), "nn", "persistent", {(64, 128), (128, 64)}),
        ((512, 512, 512), "nn", "tiles", {(64, 32)}),
        ((16, 4096, 4096), "nt", "tiles", {(16, 32)}),
        ((2048, 2048, 2048), "nn", "persistent", {(128, 256)}),
        ((4096, 4096, 4096), "nt", "persistent", {(128, 256)}),
    ):
        found = situation("sm90", sizes, torch.bfloat16, order=order)
        config = found.backend.default(found.device, found.work)
        assert config.variant == variant, f"{sizes} [{config}]"
        assert (config.params["BLOCK_M"], config.params["BLOCK_N"]) in shapes, f"{sizes} [{config}]"


def test_parts_are_float32_and_as_many_as_asked_for() -> None:
    for dtype, compute in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        found = situation("sm90", (3, 100, 72, 1000), dtype)
        blocks = found.op.fit(CUT, found.work, found.device)
        plan = found.op.plan(CUT, blocks, found.device, *found.args)
        first, second = plan.launches
        step = -(-100 * 72 // blocks["BLOCK_SUM"]) * blocks["BLOCK_SUM"]
        assert plan.scratch == (Buffer.flat(3 * 5 * step, compute),)
        assert first.grid == (3 * 5 * 2 * 2,) and second.grid == (3 * step // blocks["BLOCK_SUM"],)
        assert first.constexprs["SPLITS"] == second.constexprs["SPLITS"] == 5


def test_a_sum_of_one_block_is_not_cut() -> None:
    for k, splits in ((32, 0), (33, 2), (100, 4), (1000, 5)):
        found = situation("sm90", (64, 64, k), torch.float32)
        if splits:
            assert found.op.fit(CUT, found.work, found.device)["SPLITS"] == splits
        else:
            with pytest.raises(Infeasible, match="a sum of 32 in blocks of 32 into 1 parts: it needs SPLITS of 2"):
                found.op.fit(CUT, found.work, found.device)
    with pytest.raises(Infeasible, match="no tile"):
        found.backend.default(found.device, situation("sm90", (64, 64, 16), torch.float32).work, "split_k")


def test_grid_that_no_launch_takes_says_so() -> None:
    op, device = all_ops()["matmul"], dispatch.reference_device(current(), "sm90")
    metas = (Meta((1 << 32, 1, 1), (1, 1, 1), torch.float16), Meta((1 << 32, 1, 1), (1, 1, 1), torch.float16), False)
    with pytest.raises(portkern.errors.Infeasible, match="programs of a launch"):
        dispatch.resolve(current(), dispatch.situate(current(), op, metas, device))
