"""Rotary embedding on the CPU route: against the usual formulas, gradients, what passes through, what is refused."""

from __future__ import annotations

import pytest
import torch

import portkern
from portkern.errors import BadArgument, Mismatch


def tables(rows: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As Hugging Face writes it, for x of (B, S, H, D)."""
    cos, sin = (torch.cat((each, each), -1)[:, None] for each in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By complex numbers."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None]
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_formulas_offsets_and_what_passes(interleaved: bool) -> None:
    q, k = torch.randn(2, 5, 4, 80), torch.randn(2, 5, 2, 80)
    before = q.clone()
    cos, sin = tables(12, 10)
    wanted = pairs if interleaved else halves
    for offset in (0, 7, torch.tensor([3, 6])):
        got = portkern.rope(q, k, cos, sin, interleaved=interleaved, offset=offset, rotary_dim=20)
        for x, y in zip((q, k), got, strict=True):
            assert torch.equal(y[..., 20:], x[..., 20:])
            for batch in range(2):
                start = int(offset[batch]) if isinstance(offset, torch.Tensor) else offset
                rows = slice(start, start + 5)
                torch.testing.assert_close(
                    y[batch, ..., :20], wanted(x[batch, None, ..., :20], cos[rows], sin[rows])[0]
                )
    assert torch.equal(q, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    q = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 3, 1, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(4, 3, torch.float64)

    def f(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(portkern.rope(q, k, cos, sin, interleaved=interleaved, offset=1))

    assert torch.autograd.gradcheck(f, (q, k)) and torch.autograd.gradgradcheck(f, (q, k))


def test_compiles_without_a_break() -> None:
    cos, sin = tables(16, 8)
    compiled = torch.compile(
        lambda q, k: portkern.rope(q, k, cos, sin), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (3, 5):
        q, k = torch.randn(2, length, 4, 16, requires_grad=True), torch.randn(2, length, 2, 16)
        for got, want in zip(compiled(q, k), portkern.rope(q, k, cos, sin), strict=True):
            torch.testing.assert_close(got, want)


Q, K = torch.ones(2, 3, 4, 16), torch.ones(2, 3, 2, 16)
TABLE = torch.ones(5, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: portkern.rope(Q, K, TABLE, TABLE, rotary_dim=15), ValueError, "rotary_dim is 15; it must be even"),
        (lambda: portkern.rope(Q, K, torch.ones(5, 9), torch.ones(5, 9)), RuntimeError, "rotate 18 of a head"),
        (lambda: portkern.rope(Q, K, TABLE, TABLE, offset=3), ValueError, "rows 3 to 5"),
        (lambda: portkern.rope(Q, K, TABLE, TABLE, offset=torch.ones(2)), BadArgument, "int32 or int64"),
        (lambda: portkern.rope(Q, K[:, 1:], TABLE, TABLE), Mismatch, "equal B, S and D"),
        (lambda: portkern.rope(Q, K, TABLE, TABLE[1:]), Mismatch, "both take"),
        (lambda: portkern.rope(Q, K, TABLE.clone().requires_grad_(), TABLE), BadArgument, "no gradient flows"),
        (lambda: portkern.rope(Q, K, TABLE, TABLE, rotary_dim="a"), TypeError, "'rotary_dim' must be an int, not str"),
        (lambda: portkern.rope(Q.long(), K, TABLE, TABLE), NotImplementedError, "int64"),
    ],
)
def test_errors(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def test_what_nothing_trained_is_in_has_no_gradient() -> None:
    q, k, table = torch.randn(1, 2, 1, 4, requires_grad=True), torch.randn(1, 2, 1, 4), torch.randn(2, 2)
    turned, other = portkern.rope(q, k, table, table)
    assert turned.requires_grad and not other.requires_grad
    (gradient,) = torch.autograd.grad(turned.sum(), q)
    assert gradient.shape == q.shape
