"""Masked softmax through its public function, by kernels: broadcast masks, causal rows of any strides."""

from __future__ import annotations

import pytest
import torch

import portkern
from tests.spine import generator


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_causal_rows_of_any_strides(order: tuple[int, ...]) -> None:
    """Positions are those of the last two dims, however these lie."""
    sizes = (2, 2, 5, 6)
    memory = torch.randn([sizes[axis] for axis in order], generator=generator(1))
    x = memory.permute([order.index(axis) for axis in range(4)]).requires_grad_()
    keep = torch.rand(2, 1, 1, 6, generator=generator(2)) > 0.3
    got = portkern.masked_softmax(x, keep, scale=0.5, causal=True)
    triangle = torch.ones(5, 6, dtype=torch.bool).tril() & keep
    z = (0.5 * x).masked_fill(~triangle, -torch.inf)
    want = torch.where(triangle.any(-1, keepdim=True), torch.softmax(z, -1), 0.0)
    torch.testing.assert_close(got, want)
    g = torch.randn(sizes, generator=generator(3))
    (ours,) = torch.autograd.grad(got, x, g)
    y = want.detach()
    torch.testing.assert_close(ours, 0.5 * y * (g - (y * g).sum(-1, keepdim=True)), rtol=1e-4, atol=1e-6)
    full = portkern.logsumexp(x, (1, 3), True)
    torch.testing.assert_close(full, torch.logsumexp(x, (1, 3), True))
