"""Cross entropy on CPU tensors: values and gradients as torch's, what it refuses, how gradients are given away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import portkern
from portkern import errors
from portkern.registry import all_ops
from portkern.testing import judge
from tests.spine import generator

OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": -1},
    {"weight": True}, {"weight": True, "label_smoothing": 0.2, "ignore_index": 2},
    {"weight": True, "reduction": "none", "label_smoothing": 0.3},
)  # fmt: skip


def given(options: dict[str, Any], classes: int = 7, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    weight = (torch.rand(classes, generator=generator(1)) + 0.5).to(dtype) if options.get("weight") else None
    return {**options, "weight": weight}


def data(shape: tuple[int, ...], ignored: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, generator=generator(2)).to(dtype).requires_grad_()
    rows = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    t = torch.randint(0, shape[min(1, len(shape) - 1)], rows, generator=generator(3))
    if t.dim() and t.numel() > 2:
        t.view(-1)[1::3] = ignored
    return x, t


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (6, 7), (2, 7, 3), (2, 7, 2, 3)])
def test_as_torch(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """B63, B65: values and gradients; an ignored row never indexes the weights."""
    options = given(options)
    x, t = data(shape, options.get("ignore_index", -100))
    got, want = portkern.cross_entropy(x, t, **options), F.cross_entropy(x, t, **options)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    upstream = torch.randn(want.shape, generator=generator(4), dtype=torch.float64)
    (ours,), (theirs,) = (torch.autograd.grad(loss, x, upstream) for loss in (got, want))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [[0.0] * 5, [1.0, 0.0, 0.0, 2.0, 0.0], [0.0, 2.0, -2.0, 0.0, 0.0]], ids=str)
def test_weights_of_zero(weight: list[float], label_smoothing: float, reduction: str) -> None:
    """A row that counts is no ignored one, though its weight is 0: neither the mean of such rows is finite, nor its
    gradient. Which infinity or NaN it is with smoothing follows in torch from how it adds up two quotients."""
    options = {"weight": torch.tensor(weight), "label_smoothing": label_smoothing, "reduction": reduction}
    x, t = torch.arange(20.0).view(4, 5).requires_grad_(), torch.tensor([1, 2, -100, -100])
    got, want = portkern.cross_entropy(x, t, **options), F.cross_entropy(x, t, **options)
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got[got.isfinite()], want[want.isfinite()])
    for upstream in (torch.ones_like(want), torch.full_like(want, 3.0)):
        fresh = portkern.cross_entropy(x, t, **options)
        for each in (fresh, got):  # the made gradient, the rescaled and the recomputed one
            (ours,) = torch.autograd.grad(each, x, upstream, retain_graph=True)
            (theirs,) = torch.autograd.grad(want, x, upstream, retain_graph=True)
            assert torch.equal(ours.isfinite(), theirs.isfinite()) and bool((ours[2:] == 0).all())
            torch.testing.assert_close(ours[ours.isfinite()], theirs[theirs.isfinite()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    x, t = data((6, 7), -100, dtype)
    got, want = portkern.cross_entropy(x, t), F.cross_entropy(x, t)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    (ours,), (theirs,) = (torch.autograd.grad(loss, x) for loss in (got, want))
    assert ours.dtype == dtype
    roundings = 4 if dtype.itemsize == 2 else 16  # torch rounds each step to the dtype
    torch.testing.assert_close(ours, theirs, rtol=roundings * torch.finfo(dtype).eps, atol=1e-6)


def test_float16_keeps_gradients_that_a_scale_makes_visible() -> None:
    """1e-8 is 0 in float16; times a loss scale of 65536 it is not."""
    x = torch.zeros(64, 4096, dtype=torch.float16, requires_grad=True)
    t = torch.zeros(64, dtype=torch.long)
    (portkern.cross_entropy(x, t) * 8192.0).backward()
    assert x.grad is not None and bool((x.grad != 0).all())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_logits_that_are_huge_or_not_finite(target: int, label_smoothing: float) -> None:
    """A term that is not asked for is left out, not multiplied by 0."""
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": label_smoothing}
    found = []
    for function in (portkern.cross_entropy, F.cross_entropy):
        rows = [[3e38, -3e38, 0.0], [1e30, 0.0, 1.0], [torch.inf, 1.0, 2.0], [-torch.inf] * 3, [0.0, -torch.inf, 0.0]]
        x = torch.tensor(rows, requires_grad=True)
        loss = function(x, torch.full((5,), target), **options)
        loss.sum().backward()
        found.append((loss, x.grad))
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows_of_no_classes(reduction: str, label_smoothing: float) -> None:
    x, t = torch.zeros(0, 0, requires_grad=True), torch.zeros(0, dtype=torch.long)
    loss = portkern.cross_entropy(x, t, reduction=reduction, label_smoothing=label_smoothing)
    # As of some classes; torch's own sum over no classes is NaN with smoothing.
    want = F.cross_entropy(torch.zeros(0, 3), t, reduction=reduction, label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, want, equal_nan=True)
    loss.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 0)


def test_z_loss_and_softcap() -> None:
    x, t = data((6, 7), -100)
    got = portkern.cross_entropy(x, t, z_loss=0.1, softcap=2.0, reduction="none")
    z = 2.0 * torch.tanh(x / 2.0)
    lse = torch.logsumexp(z, -1)
    want = F.cross_entropy(z, t, reduction="none") + torch.where(t == -100, 0.0, 0.1 * lse.square())
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "z_loss": 0.1}, {"softcap": 3.0, "label_smoothing": 0.1}])
def test_gradcheck(options: dict[str, Any]) -> None:
    x, t = data((4, 5), -100)
    # The made gradient and the recomputed one may differ in the last bits.
    assert torch.autograd.gradcheck(lambda x: portkern.cross_entropy(x, t, **options), (x,), nondet_tol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_backward_is_right(reduction: str) -> None:
    """The first backward may give the made gradient away, and alter it: the second one makes another."""
    x, t = data((6, 7), -100)
    loss = portkern.cross_entropy(x, t, reduction=reduction)
    want = F.cross_entropy(x, t, reduction=reduction)
    for factor in (1.0, 3.0, 1.0):
        upstream = torch.full(want.shape, factor, dtype=torch.float64)
        (got,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        (expected,) = torch.autograd.grad(want, x, upstream, retain_graph=True)
        torch.testing.assert_close(got, expected)
        got.zero_()  # it is the caller's own


def test_two_losses_on_the_same_logits() -> None:
    """B67: logits are never altered."""
    p = torch.randn(4, 5, generator=generator(5), dtype=torch.float64, requires_grad=True)
    logits, t = p * 2, torch.tensor([0, 1, 2, 3])
    before = logits.detach().clone()
    (portkern.cross_entropy(logits, t) + 2 * portkern.cross_entropy(logits, t)).backward()
    assert torch.equal(logits.detach(), before)
    (want,) = torch.autograd.grad(3 * F.cross_entropy(p * 2, t), p)
    torch.testing.assert_close(p.grad, want)


def test_empty_and_all_ignored() -> None:
    """B27: as torch: the mean over nothing is NaN, and the gradient 0."""
    x, t = torch.randn(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.long)
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(
            portkern.cross_entropy(x, t, reduction=reduction),
            F.cross_entropy(x, t, reduction=reduction),
            equal_nan=True,
        )
    x, t = torch.randn(4, 5, requires_grad=True), torch.full((4,), -100)
    loss = portkern.cross_entropy(x, t)
    assert bool(loss.isnan())
    loss.backward()
    assert x.grad is not None and bool((x.grad == 0).all())


def test_target_that_is_no_class() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    loss = portkern.cross_entropy(x, torch.tensor([0, 5, -1, -100]), reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False] and float(loss[3].detach()) == 0
    loss.sum().backward()
    assert x.grad is not None and x.grad.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"target": torch.rand(4, 5)}, NotImplementedError, ("probabilities",)),
        ({"target": torch.zeros(3, dtype=torch.long)}, RuntimeError, ("[3]", "[4]")),
        ({"target": torch.zeros(4, dtype=torch.int16)}, NotImplementedError, ("int16", "target.long()")),
        ({"weight": torch.ones(4)}, RuntimeError, ("[4]", "[5]")),
        ({"weight": torch.ones(5, requires_grad=True)}, RuntimeError, ("detach",)),
        ({"reduction": "avg"}, ValueError, ("'avg'", "none, mean, sum")),
        ({"label_smoothing": 2.0}, RuntimeError, ("2.0", "between 0 and 1")),
        ({"softcap": -1.0}, ValueError, ("softcap is -1.0",)),
        ({"ignore_index": 1.5}, TypeError, ("ignore_index", "float")),
        ({"ignore_index": 2**63}, RuntimeError, ("ignore_index", "64 bits")),
        ({"input": torch.tensor(1.0)}, RuntimeError, ("0-d",)),
        ({"input": torch.ones(4, 5, dtype=torch.long)}, NotImplementedError, ("int64",)),
        ({"input": torch.ones(4, 0)}, RuntimeError, ("no classes",)),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    arguments = {"input": torch.randn(4, 5), "target": torch.zeros(4, dtype=torch.long), **change}
    with pytest.raises(error) as raised:
        portkern.cross_entropy(**arguments)
    assert isinstance(raised.value, errors.PortkernError)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    x, t = data((6, 7), -100, torch.float32)
    compiled = torch.compile(
        lambda x: portkern.cross_entropy(x * 2, t) * 3, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    torch.testing.assert_close(compiled(x), F.cross_entropy(x * 2, t) * 3)
    (got,), (want,) = (torch.autograd.grad(each, x) for each in (compiled(x), F.cross_entropy(x * 2, t) * 3))
    torch.testing.assert_close(got, want)


def test_opcheck() -> None:
    op = all_ops()["cross_entropy"]
    args = op.inputs((4, 5, 3), torch.float32, generator=generator(6))
    torch.library.opcheck(torch.ops.portkern.cross_entropy.default, args, test_utils="test_faketensor")


def test_the_reference_is_judged() -> None:
    op = all_ops()["cross_entropy"]
    args = op.inputs((40, 300), torch.float32, generator=generator(7))
    loss, statistics, total, gradient = op.reference(*args)
    assert judge(op, args, (loss, statistics, total, gradient)).right
    assert not judge(op, args, (loss * 1.0001, statistics, total, gradient)).right
    assert not judge(op, args, (loss, statistics, total, gradient + 1e-5)).right
    x = args[0].clone()
    x[:, 7] = -1e9  # what no target is does not excuse a loss
    args = (x, args[1].where(args[1] != 7, 8), *args[2:])
    loss, *rest = op.reference(*args)
    assert judge(op, args, (loss, *rest)).right and not judge(op, args, (loss + 1, *rest)).right


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.2, "weight": True}], ids=str)
def test_what_all_logits_share_counts_nowhere(options: dict[str, Any]) -> None:
    """Logits moved by any number, as those of a masked row are, have the loss and the gradient that they had."""
    kwargs = given(options, 50, torch.float32)
    t = torch.randint(0, 50, (64,), generator=generator(9))
    for moved in (1e4, 1e6, -1e9, torch.finfo(torch.float32).min):
        x = torch.randn(64, 50, generator=generator(8)) if abs(moved) < 1e9 else torch.zeros(64, 50)
        x = (x + moved).requires_grad_()
        exact = x.detach().double().requires_grad_()
        wide = {**kwargs, "weight": None if kwargs["weight"] is None else kwargs["weight"].double()}
        got, want = portkern.cross_entropy(x, t, **kwargs), F.cross_entropy(exact, t, **wide)
        torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6)
        first, again = (torch.autograd.grad(got, x, retain_graph=True)[0] for _ in range(2))
        expected = torch.autograd.grad(want, exact)[0].float()
        for each in (first, again):  # made by the forward, and anew from what it saved
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-8)
