"""Cross entropy through its public function, by kernels: the made gradient, the rescaled and the recomputed one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, judge
from tests.spine import generator, run_config


def case(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, generator=generator(1), requires_grad=True)
    t = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator(2))
    t.view(-1)[1::4] = -100
    return x, t


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 2)])
def test_gradients(shape: tuple[int, ...], reduction: str) -> None:
    """B63, B21: upstream gradients of 1, of another number, expanded and row by row; again on the same graph."""
    x, t = case(shape)
    loss, want = (f(x, t, reduction=reduction) for f in (portkern.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    one = torch.ones(()).expand(want.shape)
    for upstream in (one, 2.5 * one, torch.randn(want.shape, generator=generator(3))):
        fresh = portkern.cross_entropy(x, t, reduction=reduction)
        for each in (fresh, loss):
            (got,) = torch.autograd.grad(each, x, upstream, retain_graph=True)
            (expected,) = torch.autograd.grad(want, x, upstream, retain_graph=True)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_any_layout(layout: str) -> None:
    x, t = case((4, 12))
    x = LAYOUTS[layout](x.detach())
    kept, leaf = x.clone(), x.requires_grad_()
    (got,), (want,) = (torch.autograd.grad(f(leaf, t), leaf) for f in (portkern.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert torch.equal(leaf.detach(), kept)


def test_without_gradient() -> None:
    """B69."""
    x, t = case((4, 3))
    torch.testing.assert_close(portkern.cross_entropy(x.detach(), t), F.cross_entropy(x.detach(), t))


def test_what_is_scaled_by_one_is_left_alone() -> None:
    op, device = all_ops()["cross_entropy_backward_rescale"], dispatch.reference_device(current(), "sm90")
    config = op.candidates(device, op.work(op.problem(*_metas(op))))[0]  # type: ignore[misc]
    gradient, upstream, dim = op.inputs((4, 33), torch.float32, generator=generator(4), one=True)
    before = gradient.clone()
    run_config(current(), op, (gradient, upstream, dim), device, config)
    assert torch.equal(gradient, before)
    for rows in (False, True):
        gradient, upstream, dim = op.inputs((4, 33), torch.float32, generator=generator(5), rows=rows)
        want = gradient * (upstream[:, None] if rows else upstream)
        run_config(current(), op, (gradient, upstream, dim), device, config)
        torch.testing.assert_close(gradient, want)


def _metas(op: object) -> tuple[object, ...]:
    from portkern.plan import metas_of

    return metas_of(op.inputs((4, 33), torch.float32))  # type: ignore[attr-defined]


@pytest.mark.parametrize("flags", [{}, {"softcap": 20.0}, {"z_loss": 0.01, "weight": ""}], ids=str)
def test_coresident(flags: dict[str, object]) -> None:
    """One program that waits for itself: the interpreter runs no more of them at once."""
    op, device = all_ops()["cross_entropy"], dispatch.reference_device(current(), "sm90")
    for style in ("normal", "nonfinite"):
        args = op.inputs((7, 130), torch.float32, generator=generator(6), style=style, stray=True, **flags)
        config = Config("coresident_row", {"BLOCK_N": 256, "PROGRAMS_PER_UNIT": 1}, num_warps=4)  # type: ignore[arg-type]
        verdict = judge(op, args, run_config(current(), op, args, device, config))
        assert verdict.right, verdict.reason


@pytest.mark.parametrize(
    ("variant", "params", "smoothing"),
    [
        ("resident_row", {"PROGRAMS_PER_UNIT": 0}, 0.0),
        ("resident_row", {"PROGRAMS_PER_UNIT": 0}, 0.1),
        ("looped_row", {"BLOCK_M": 1, "BLOCK_N": 64}, 0.1),
        ("split_row", {"BLOCK_M": 1, "BLOCK_N": 64, "SPLITS": 2}, 0.1),
        ("coresident_row", {"BLOCK_N": 256, "PROGRAMS_PER_UNIT": 1}, 0.0),
        ("cached_row", {"PROGRAMS_PER_UNIT": 0}, 0.0),
    ],
)
def test_what_all_logits_share_counts_nowhere(variant: str, params: dict[str, int], smoothing: float) -> None:
    """Losses and gradients are those of the logits without it, and those of equal logits, however large, of zeros."""
    op, device = all_ops()["cross_entropy"], dispatch.reference_device(current(), "sm90")
    dtype = torch.bfloat16 if variant == "cached_row" else torch.float32
    x, t = torch.randint(-3, 3, (4, 200), generator=generator(8)), torch.tensor([3, 199, 0, 64])

    def made(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args = (logits.to(dtype), t, None, -100, 2, smoothing, 0.0, 0.0, True, torch.float32)
        loss, _, _, gradient = run_config(current(), op, args, device, Config(variant, params, num_warps=4))  # type: ignore[arg-type]
        return loss, gradient

    equal = [torch.full(x.shape, value) for value in (0.0, torch.finfo(dtype).min, torch.finfo(dtype).max)]
    for others in ([x, x + 2**14, x - 2**20] if dtype == torch.float32 else [], equal):
        found = [made(logits) for logits in others]
        for each in found[1:]:
            torch.testing.assert_close(each, found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("weight", ["none", "float32"])
@pytest.mark.parametrize(
    ("variant", "params"),
    [
        ("resident_row", {"PROGRAMS_PER_UNIT": 0}),
        ("looped_row", {"BLOCK_M": 1, "BLOCK_N": 64}),
        ("split_row", {"BLOCK_M": 1, "BLOCK_N": 64, "SPLITS": 2}),
    ],
)
def test_smoothed_losses_of_rows_with_a_masked_class(variant: str, params: dict[str, int], weight: str) -> None:
    """The first one, a whole block, or the last one: what is far from the others hides them in no sum."""
    op, device = all_ops()["cross_entropy"], dispatch.reference_device(current(), "sm90")
    x, _, w, *_ = op.inputs((6, 200), torch.float32, generator=generator(9), weight=weight)
    t = torch.tensor([3, 199, 70, 64, 100, 5])
    for value in (-1e4, -1e9, -1e36):  # times 64 and a weight, a number that float32 holds
        for masked in (slice(0, 1), slice(199, 200), slice(0, 64)):
            logits = x.clone()
            logits[:, masked] = value
            args = (logits, t, w, -100, 0, 0.1, 0.0, 0.0, True, torch.float32)
            loss, _, _, gradient = run_config(current(), op, args, device, Config(variant, params, num_warps=4))  # type: ignore[arg-type]
            exact = logits.double().requires_grad_()
            want = F.cross_entropy(exact, t, w if w is None else w.double(), label_smoothing=0.1, reduction="none")
            torch.testing.assert_close(loss, want.float(), rtol=1e-5, atol=1e-5)
            (expected,) = torch.autograd.grad(want.sum(), exact)
            torch.testing.assert_close(gradient, expected.float(), rtol=1e-4, atol=1e-6)


def test_many_rows_are_summed_in_two_steps() -> None:
    op = all_ops()["cross_entropy"]
    args = op.inputs((66_000, 2), torch.float32, generator=generator(7), gradient=False)
    device = dispatch.reference_device(current(), "sm90")
    config = Config("packed_rows", {"BLOCK_M": 4096, "PROGRAMS_PER_UNIT": 0}, num_warps=8)  # type: ignore[arg-type]
    situation = dispatch.situate(current(), op, dispatch.input_key(op, args), device)
    plan = op.plan(config, op.fit(config, situation.work, device), device, *situation.args)
    assert len(plan.launches) == 5
    verdict = judge(op, args, run_config(current(), op, args, device, config))
    assert verdict.right, verdict.reason


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "weight": "float32"}, {"z_loss": 0.01}, {"gradient": False}])
@pytest.mark.parametrize("columns", [1, 1025, 20_000])
def test_rows_that_are_read_again(columns: int, options: dict[str, object]) -> None:
    """Whole, and in parts; the rows hold infinities and NaN, and targets that are no classes."""
    op = all_ops()["cross_entropy"]
    for style in ("wide", "nonfinite"):
        args = op.inputs(
            (4, columns), torch.bfloat16, generator=generator(columns), style=style, stray=True, **options
        )  # fmt: skip
        with portkern.pin("cross_entropy", Config("cached_row", {"PROGRAMS_PER_UNIT": 0}, 4)):
            outputs = dispatch.run(op, args)
        verdict = judge(op, args, outputs)
        assert verdict.right, f"{style}: {verdict.reason}"
