"""Dropout on the CPU route: the mask, the seed, what is refused; the interpreter's tests run the kernels."""

from __future__ import annotations

import pytest
import torch

import portkern
from portkern.errors import BadArgument, UnsupportedDtype
from portkern.kernels.dropout import keep_mask, philox
from portkern.registry import all_ops


def test_philox_is_the_published_one() -> None:
    """The known answer of Random123 for Philox4x32-10 at counter and key 0."""
    words = philox(0, torch.zeros(1, dtype=torch.int64))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_mask_keeps_its_share_and_scales() -> None:
    torch.manual_seed(1)
    y = portkern.dropout(torch.ones(200_000), 0.3)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
    assert abs(float((y == 0).double().mean()) - 0.3) < 0.005


def test_seed_comes_from_the_generator_which_advances() -> None:
    torch.manual_seed(1)
    first, second = (portkern.dropout(torch.ones(256), 0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, portkern.dropout(torch.ones(256), 0.5))


def test_the_seed_counts_by_value() -> None:
    op = all_ops()["dropout"]
    x, seed = torch.ones(500), torch.tensor([7])
    same = torch.tensor([3, 7])[1:]
    found = [op.reference(x, None, None, each, 0.5, True, torch.float32) for each in (seed, same)]
    assert torch.equal(*found)


def test_no_mask_repeats_2_to_the_31_apart() -> None:
    index = torch.arange(512)
    near, far = (torch.stack(philox(5, (index + offset) // 4)) for offset in (0, 2**33))
    assert int((near == far).sum()) == 0


def test_masks_do_not_depend_on_strides_or_dtype() -> None:
    seed = torch.tensor([11])
    mask = keep_mask(seed, (6, 10), 0.5)
    op = all_ops()["dropout"]
    for x in (torch.ones(6, 10), torch.ones(10, 6).t(), torch.ones(6, 20)[:, ::2], torch.ones(6, 10).half()):
        assert torch.equal(op.reference(x, None, None, seed, 0.5, True, x.dtype) != 0, mask)


def test_gradient_draws_the_mask_again() -> None:
    x = torch.randn(3, 300, requires_grad=True)
    y = portkern.dropout(x, 0.4)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    bias, residual = torch.randn(300, requires_grad=True), torch.randn(3, 300, requires_grad=True)
    y = portkern.bias_dropout_add(x, bias, residual, 0.4)
    found = torch.autograd.grad(y.sum(), (x, bias, residual))
    assert torch.equal(found[2], torch.ones(3, 300))
    torch.testing.assert_close(found[1], found[0].sum(0))


def test_without_training_nothing_is_done() -> None:
    x, bias = torch.randn(3, 4), torch.randn(4)
    state = torch.get_rng_state()
    assert portkern.dropout(x, training=False) is x and portkern.dropout(x, 0.0) is x
    assert torch.equal(portkern.bias_dropout_add(x, bias, x, training=False), x + (x + bias))
    assert torch.equal(torch.get_rng_state(), state)
    assert portkern.explain("dropout", x, training=False).layer == "none"
    assert float(portkern.dropout(x, 1.0).abs().sum()) == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: portkern.dropout(torch.ones(3), 1.5), ValueError, "between 0 and 1, but got 1.5"),
        (lambda: portkern.dropout(torch.ones(3), None), TypeError, "argument 'p' must be a number, not NoneType"),
        (
            lambda: portkern.dropout(torch.ones(3), torch.ones(2)),
            TypeError,
            "'p' must be a number, not a tensor of shape",
        ),
        (lambda: portkern.bias_dropout_add(torch.ones(2, 3), torch.ones(2), torch.ones(3)), RuntimeError, "broadcast"),
        (lambda: portkern.dropout(torch.ones(3), inplace=True), BadArgument, "inplace"),
        (lambda: portkern.dropout(torch.ones(3, dtype=torch.int64)), NotImplementedError, "int64"),
        (lambda: portkern.bias_dropout_add(torch.ones(3), None, torch.ones(2, 3)), BadArgument, "must broadcast"),
    ],
)
def test_errors(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def test_gradcheck() -> None:
    x, bias, residual = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,), (3, 5))
    )

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return portkern.bias_dropout_add(*tensors, 0.4)

    assert torch.autograd.gradcheck(f, (x, bias, residual))


def test_compiles_without_a_break() -> None:
    compiled = torch.compile(lambda x: portkern.dropout(x, 0.5) * 2, fullgraph=True, backend="aot_eager")
    x = torch.ones(4, 300, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_where_nothing_is_dropped_any_dtype_passes(dtype: torch.dtype) -> None:
    """As in torch: a model in evaluation does not care."""
    x = torch.ones(3).to(dtype)
    assert portkern.dropout(x, 0.5, training=False) is x and portkern.dropout(x, 0.0) is x
    with pytest.raises(UnsupportedDtype):
        portkern.dropout(x)


def test_the_scale_is_not_rounded_to_16_bits() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float16):
        y, narrow = portkern.dropout(x.to(dtype), 0.1), x.to(dtype)
        kept = y != 0
        assert torch.equal(y[kept], (narrow[kept].float() * (1 / 0.9)).to(dtype))


def test_what_is_not_finite_shows_also_where_it_is_dropped() -> None:
    """As in torch, whose mask is a factor."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf])
    for p in (0.5, 1.0):
        assert bool((~portkern.dropout(x.repeat(64), p).isfinite()).all())
    assert bool(portkern.bias_dropout_add(x, None, torch.zeros(3), 1.0, True).isnan().all())
