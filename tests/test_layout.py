"""Row views: whatever the strides, the rows found are exactly the rows that are there."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import portkern
from portkern.layout import needs_wide_offsets, readable, row_layout, rows_of
from portkern.plan import Meta, like


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@settings(deadline=None)
def test_rows_are_the_rows(data: st.DataObject, shape: list[int]) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    steps = [data.draw(st.sampled_from((1, 1, 2))) for _ in shape]
    order = data.draw(st.permutations(range(len(shape))))
    memory = torch.arange(torch.Size(shape[a] * steps[a] for a in order).numel())
    x = memory.view([shape[a] * steps[a] for a in order]).permute([order.index(a) for a in range(len(shape))])
    x = x[tuple(slice(None, None, step) for step in steps)]
    other = torch.arange(x.numel()).view(shape)
    rows = rows_of((Meta.of(other), Meta.of(x)), dim)
    assert rows.n == shape[dim] and rows.m * len(rows.offsets) == x.numel() // shape[dim]
    seen = {}
    for offsets in rows.offsets:
        for i in range(rows.sizes[0]):
            for j in range(rows.sizes[1]):
                for k in range(rows.sizes[2]):
                    starts = [
                        offset + i * s0 + j * s1 + k * s2
                        for offset, (s0, s1, s2, _) in zip(offsets, rows.strides, strict=True)
                    ]
                    seen[starts[0]] = [memory[starts[1] + n * rows.strides[1][3]] for n in range(rows.n)]
    want = {int(o[0]): list(r) for o, r in zip(_rows(other, dim), _rows(x, dim), strict=True)}
    assert seen == want


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def test_contiguous_rows_collapse_to_one_dim() -> None:
    x = Meta.of(torch.empty(2, 3, 4, 8, device="meta"))
    assert rows_of((x,), 3).sizes == (1, 1, 24)


def test_layout_classes() -> None:
    for tensor, dim, expected in (
        (torch.empty(4, 16, device="meta"), 1, "n16"),
        (torch.empty(4, 15, device="meta"), 1, "n"),
        (torch.empty(4, 16, device="meta")[:, 1:], 1, "n"),
        (torch.empty(4, 16, device="meta"), 0, "m16"),
        (torch.empty(4, 15, device="meta"), 0, "m"),
        (torch.empty(8, 32, device="meta")[::2, ::2], 1, "s"),
        (torch.empty(4, 16, device="meta").expand(3, 4, 16), 2, "n16"),
        (torch.empty((), device="meta"), 0, "n16"),
    ):
        meta = Meta.of(tensor)
        assert row_layout(meta, rows_of((meta,), dim), 0) == expected, (tuple(tensor.shape), dim)


def test_wide_offsets_only_where_a_tile_passes_31_bits() -> None:
    narrow = Meta((4, 1 << 20), (1 << 20, 1), torch.int8)
    wide = Meta((4, 1 << 20), (1, 1 << 13), torch.int8)
    assert not needs_wide_offsets(rows_of((narrow,), 1), 1)
    assert needs_wide_offsets(rows_of((wide,), 1), 1)


def test_like_is_torchs_preserve_format() -> None:
    base = torch.empty(4, 6, 8)
    for x in (base, base.permute(2, 0, 1), base[:, ::2], base[:, 1:3], base[:1].expand(4, 6, 8), base[0, 0, 0]):
        assert like(Meta.of(x)).strides == torch.empty_like(x).stride()
    for sizes in itertools.product((1, 2, 3), repeat=3):
        for strides in itertools.product((0, 1, 2, 3, 9), repeat=3):
            for rank in range(4):
                x = torch.empty_strided(
                    sizes[:rank], strides[:rank]
                )  # with memory: on a meta device torch answers by other rules
                assert like(Meta.of(x)).strides == torch.empty_like(x).stride(), (sizes[:rank], strides[:rank])


def test_dims_that_do_not_merge_are_copied_before_there_are_too_many_launches() -> None:
    x = torch.randn([4] * 8)
    reversed_dims = torch.randn_like(x).permute(*reversed(range(8)))
    laid = readable(reversed_dims, x, 7)
    assert laid.stride() == x.stride() and torch.equal(laid, reversed_dims)
    assert len(rows_of([like(Meta.of(x)), Meta.of(laid), Meta.of(x)], 7).offsets) == 1
    few = torch.randn(2, 2, 2, 2, 2, 2)
    turned = few.permute(5, 4, 3, 2, 1, 0)
    assert readable(turned, few, 5) is turned
    assert len(rows_of([Meta.of(few), Meta.of(turned)], 5).offsets) <= 4


def test_many_dims_still_give_the_right_gradient() -> None:
    x = torch.randn([4] * 8, requires_grad=True)
    gradient = torch.randn([4] * 8).permute(*reversed(range(8)))
    (got,) = torch.autograd.grad(portkern.softmax(x, 5), x, gradient)
    (want,) = torch.autograd.grad(torch.softmax(x, 5), x, gradient)
    torch.testing.assert_close(got, want)
