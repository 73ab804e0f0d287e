"""bincount on the CPU route, and its kernels' independence of order in the interpreter's tests."""

from __future__ import annotations

import pytest
import torch

import portkern

NOTHING = torch.tensor([], dtype=torch.int64)


def test_of_nothing_the_weights_do_not_count() -> None:
    for weights in (None, torch.ones(0), torch.ones(1), torch.ones(2, 2)):
        got, want = (f(NOTHING, weights, minlength=3) for f in (portkern.bincount, torch.bincount))
        assert torch.equal(got, want) and got.dtype == want.dtype


def test_as_torch() -> None:
    x = torch.randint(0, 50, (1000,))
    for weights in (
        None,
        torch.randn(1000),
        torch.randn(1000).double(),
        torch.randint(0, 9, (1000,)),
        torch.ones(1000).half(),
    ):
        for minlength in (0, 80):
            got, want = portkern.bincount(x, weights, minlength), torch.bincount(x, weights, minlength)
            assert got.dtype == want.dtype and got.shape == want.shape
            torch.testing.assert_close(got, want)
    assert torch.equal(
        portkern.bincount(torch.tensor([], dtype=torch.int64), minlength=4), torch.zeros(4, dtype=torch.int64)
    )
    assert portkern.bincount(x.to(torch.uint8)[::2]).dtype == torch.int64


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: portkern.bincount(torch.tensor([1, -2])), RuntimeError, "input has -2"),
        (lambda: portkern.bincount(torch.ones(2, 2, dtype=torch.int64)), RuntimeError, r"shape \(2, 2\)"),
        (lambda: portkern.bincount(torch.ones(3)), NotImplementedError, "float32"),
        (lambda: portkern.bincount(torch.ones(3, dtype=torch.int64), torch.ones(4)), RuntimeError, "one real weight"),
        (lambda: portkern.bincount(torch.ones(3, dtype=torch.int64), minlength=-1), RuntimeError, "from 0 on"),
        (lambda: portkern.bincount(torch.tensor([1]), minlength=2**60), ValueError, r"minlength is .* 2\^60 - 1 bins"),
        (lambda: portkern.bincount(torch.tensor([1]), minlength=2**63), ValueError, r"minlength is .* 2\^60 - 1 bins"),
        (
            lambda: portkern.bincount(torch.tensor([1]), minlength=2**70),
            RuntimeError,
            r"minlength is .* 2\^60 - 1 bins",
        ),
        (lambda: portkern.bincount(NOTHING, minlength=2**63), ValueError, r"minlength is .* 2\^60 - 1 bins"),
        (
            lambda: portkern.bincount(torch.tensor([2**63 - 1])),
            RuntimeError,
            r"input has 9223372036854775807; .* smaller",
        ),
        (lambda: portkern.bincount(torch.tensor([2**60 - 1])), RuntimeError, "give smaller values"),
        (lambda: portkern.bincount(torch.ones(3).long(), minlength=2.0), TypeError, "must be an int, not float"),
    ],
)
def test_errors(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()
