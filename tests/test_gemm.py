"""The kind ``gemm``: which operands are packed, in which order, and when; what no launch counts. Nothing is compiled
or run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from portkern import dispatch
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.gemm import PACKS, copies
from portkern.lookup import fits
from portkern.op import Case
from portkern.plan import Meta, metas_of
from portkern.product import Matrix, product_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.situation import Situation
from portkern.testing import lay_out
from portkern.tuner.questions import Place, ask

DTYPES = {"half": "bfloat16", "tf32": "float32", "float32": "float32", "float64": "float64"}
TILES = Config("tiles", {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 8}, 4, 3)


def situation(
    sizes: tuple[int, ...], kind: str = "half", order: str = "nn", arch: str = "sm90", layout: str = ""
) -> Situation:
    op = all_ops()["matmul"]
    dtype, device = getattr(torch, DTYPES[kind]), "cpu" if layout else "meta"
    a, b, _ = op.inputs(sizes, dtype, device=device, order=order)
    if layout:
        a, b = lay_out((a, b), layout)
    return of((*metas_of((a, b)), kind == "tf32"), arch)


def of(args: tuple[Any, ...], arch: str = "sm90", name: str = "matmul") -> Situation:
    runtime = current()
    return dispatch.situate(runtime, all_ops()[name], args, dispatch.reference_device(runtime, arch))


def refusal(found: Situation, config: Config) -> str:
    return fits(found.op, found.work, found.device, found.backend, config)[1]


def packing(config: Config) -> tuple[int, ...]:
    return tuple(config.params.get(pack, 0) for pack in PACKS.values())


def offered(*args: str, **options: str) -> set[tuple[int, ...]]:
    return {packing(config) for config in dispatch.candidates(situation(*args, **options))}


def default(*args: str, **options: str) -> Config:
    found = situation(*args, **options)
    return found.backend.default(found.device, found.work)


ODD = (1001, 1003, 1005)


@pytest.mark.parametrize(
    ("kind", "order", "sizes", "expected"),
    [
        ("half", "nn", ODD, {(1, 2)}),
        ("half", "nt", ODD, {(1, 1)}),
        ("half", "tn", ODD, {(2, 2)}),
        ("half", "tt", ODD, {(2, 1)}),
        ("float64", "tn", ODD, {(2, 2)}),
        # One operand alone is packed where the other lies well, or in an order that is read badly.
        ("half", "nn", (1001, 1024, 1003), {(1, 0)}),
        ("half", "nn", (1001, 1003, 1024), {(0, 2)}),
        ("float32", "nn", ODD, {(2, 2)}),
        ("float32", "nt", ODD, {(0, 2), (2, 2)}),
        ("float32", "nt", (1024, 1024, 1024), {(0, 2)}),
        ("tf32", "nn", ODD, {(0, 1), (1, 1)}),
        ("tf32", "nt", ODD, {(1, 1)}),
        ("tf32", "tn", (1024, 1024, 1024), {(0, 1), (1, 0), (1, 1)}),
        # A copy of B serves the rows of A, which have to be 64, and A's alone would leave B as it is.
        ("half", "nn", (64, 1003, 1005), {(1, 2)}),
        ("half", "nn", (63, 1003, 1005), set()),
        ("half", "nn", (1003, 63, 1005), set()),
        ("half", "nn", (63, 1024, 1005), {(1, 0)}),
        ("half", "nn", (1003, 56, 1005), set()),
        ("half", "tn", (1003, 64, 1024), {(2, 0)}),
        ("half", "nn", (1024, 1024, 1024), set()),
    ],
)
def test_which_packings_are_offered(
    kind: str, order: str, sizes: tuple[int, ...], expected: set[tuple[int, ...]]
) -> None:
    assert offered(sizes, kind, order) == {(0, 0), *expected}


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_operands_without_a_contiguous_dim_are_copied_along_k(arch: str) -> None:
    assert offered((128, 128, 128), "half", "nn", arch, "sliced") == {(0, 0), (1, 1)}
    assert offered((128, 128, 128), "half", "nn", arch, "offset") == {(0, 0), (1, 2)}


@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_operands_of_16_bits_that_lie_well_are_not_packed(arch: str, order: str) -> None:
    assert offered((2048, 2048, 2048), "half", order, arch) == {(0, 0)}


@pytest.mark.parametrize("kind", [kind for kind in DTYPES if kind != "float64"])
@pytest.mark.parametrize("sizes", [(4095, 4095, 4095), (1000, 999, 1001), (8192, 50257, 768), (8192, 768, 50257)])
def test_large_loose_products_are_packed_and_read_by_descriptors(sizes: tuple[int, ...], kind: str) -> None:
    config = default(sizes, kind)
    assert copies(config)
    if kind == "half" or kind == "tf32" and sizes[0] != 1000:
        assert "PROGRAMS_PER_UNIT" in config.params, config


@pytest.mark.parametrize("sizes", [(4095, 4095, 4095), (1001, 1001, 1001), (255, 255, 255)])
def test_loose_operands_of_64_bits_are_read_in_place(sizes: tuple[int, ...]) -> None:
    """An element is half a vector: 1001^3 took an H200 60 us so, and packed 66."""
    assert not copies(default(sizes, "float64"))


@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_lone_row_or_column_is_summed_without_dots(kind: str, order: str) -> None:
    for sizes in ((1, 4096, 4096), (1, 4095, 4095)):
        assert default(sizes, kind, order).params["BLOCK_M"] == 1
    for sizes in ((4096, 1, 4096), (4095, 1, 4095)):
        assert default(sizes, kind, order).params["BLOCK_N"] == 1
    for sizes in ((2, 4096, 4096), (4096, 2, 4096)):
        assert 1 not in (default(sizes, kind, order).params[name] for name in ("BLOCK_M", "BLOCK_N"))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("sizes", [(16, 4095, 4095), (4095, 16, 4095), (1, 4095, 4095), (33, 35, 37)])
def test_few_rows_or_columns_are_not_packed(sizes: tuple[int, ...], kind: str) -> None:
    assert not copies(default(sizes, kind))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("sizes", [(4095, 4095, 4095), (1000, 999, 1001), (64, 4095, 4095), (255, 255, 255)])
def test_the_best_with_and_without_copies_are_tried_first(sizes: tuple[int, ...], kind: str) -> None:
    """By candidates, and by the tuner, which tries four before any other and ranks by estimate."""
    found = situation(sizes, kind)
    listed = [*dispatch.candidates(found)]
    best = {}
    for config in listed:
        blocks = found.op.fit(config, found.work, found.device)
        if not found.backend.refuse(found.device, found.work, config, blocks):
            taken = found.backend.estimate(found.device, found.work, config, blocks)
            best[copies(config)] = min(taken, best.get(copies(config), taken))
    assert {*best} == {False, True} and copies(listed[0]) != copies(listed[1])
    if kind == "tf32":
        return  # the tuner asks for no tf32
    place = Place(found.device, found.device.slug, "sm90", measured=False)
    asked = ask(current(), place, found.op, Case(sizes), DTYPES[kind])
    first, second, *_ = asked.admitted
    assert first == listed[0] and copies(second) != copies(first)
    assert asked.candidates.scores[second] == best[copies(second)]


def test_a_value_that_names_no_order_is_refused() -> None:
    found = situation(ODD)
    for pack, across in (("PACK_A", "m"), ("PACK_B", "n")):
        with pytest.raises(Infeasible, match=rf"{pack} is 3: it must be 0 .*, 1 .*along k.* or 2 .*along {across}"):
            found.op.fit(TILES.replace(params={pack: 3}), found.work, found.device)


@pytest.mark.parametrize("order", ["nn", "tt"])
def test_copies_lie_as_asked(order: str) -> None:
    """Whatever the operands' own order: A of 17 x 37 elements, B of 37 x 35, in rows of a multiple of 4."""
    found = situation((17, 35, 37), "float32", order)
    for value, numel, lines in ((1, (17 * 40, 35 * 40), (37, 37)), (2, (37 * 20, 37 * 36), (17, 35))):
        config = TILES.replace(params={"PACK_A": value, "PACK_B": value})
        plan = found.op.plan(config, found.op.fit(config, found.work, found.device), found.device, *found.args)
        assert tuple(buffer.shape[0] for buffer in plan.scratch) == numel
        *packs, product = plan.launches
        assert tuple(launch.args[3] for launch in packs) == lines
        pads = {name: pad for name, pad in product.constexprs.items() if name.startswith("PAD_") and pad != 1}
        assert pads == ({"PAD_AK": 4, "PAD_BK": 4} if value == 1 else {"PAD_AM": 4, "PAD_BN": 4})
        units = {name for name in ("UNIT_AM", "UNIT_AK", "UNIT_BK", "UNIT_BN") if product.constexprs[name] == 4}
        assert units == ({"UNIT_AM", "UNIT_BN"} if value == 1 else {"UNIT_AK", "UNIT_BK"})


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((1, 40), (40, 24)), "k16 n16"),
        (((24, 40), (40, 1)), "k16 k16"),
        (((24, 1), (1, 40)), "m16 n16"),
        (((1, 1), (1, 40)), "k16 n16"),
        (((24, 1), (1, 1)), "m16 n16"),
        (((5, 1, 40), (5, 40, 24)), "k16 n16"),
        (((5, 24, 40), (5, 40, 1)), "k16 k16"),
    ],
)
def test_the_stride_of_a_unit_dim_decides_nothing(shapes: tuple[tuple[int, ...], ...], expected: str) -> None:
    """torch gives such a dim 1 as often as not, by which two dims of a vector would be contiguous."""
    for stride in (0, 1, 3, 16, 40):
        operands = []
        for shape in shapes:
            steps = torch.empty(shape).stride()
            given = (stride if size == 1 else step for size, step in zip(shape[-2:], steps[-2:], strict=True))
            operands.append(Matrix(shape, (*steps[:-2], *given), 2))
        out = (*shapes[0][:-2], shapes[0][-2], shapes[1][-1])
        product = product_of(*operands, Matrix(out, torch.empty(out).stride(), 2))
        assert f"{product.layouts['a']} {product.layouts['b']}" == expected, stride


@pytest.mark.parametrize("kind", ["half", "float64"])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_contiguous_vectors_are_not_packed(arch: str, kind: str) -> None:
    """As an operand of one dim, or as a matrix of one row or one column."""
    matrix, vector = (torch.empty(shape, dtype=getattr(torch, DTYPES[kind])) for shape in ((1024, 1024), (1024,)))
    for a, b in ((vector, matrix), (matrix, vector), (vector[None], matrix), (matrix, vector[:, None]),
                 (vector[:, None], vector[None])):  # fmt: skip
        found = of((*metas_of((a, b)), False), arch)
        assert {packing(config) for config in dispatch.candidates(found)} == {(0, 0)}, found.problem


def test_the_largest_batch_dims_share_a_launch() -> None:
    """Whatever their order: the others take one for each index."""
    for batch in ((40, 2, 3), (2, 40, 3), (3, 2, 40), (1, 5, 2, 3, 40, 1)):
        a = torch.empty(*(2 * size for size in batch), 16, 24, device="meta")
        a = a[tuple(slice(0, size) for size in batch)]
        found = of((*metas_of((a, torch.empty(*batch, 24, 32, device="meta"))), False))
        plan = found.plan(dispatch.resolve(current(), found))
        assert len(plan.launches) == (6 if 5 in batch else 2), batch


def test_no_descriptor_has_coordinates_past_32_bits() -> None:
    for m, n, k in ((64, 64, 2**31), (64, 2**31 + 64, 64), (2**31 + 64, 64, 64)):
        found = of((Meta((m, k), (k, 1), torch.float16), Meta((k, n), (n, 1), torch.float16), False))
        config = found.backend.default(found.device, found.work)
        assert "PROGRAMS_PER_UNIT" not in config.params and not refusal(found, config)
        walking = Config("persistent", {**TILES.params, "PROGRAMS_PER_UNIT": 1}, 4, 3)
        assert "coordinates have 32 bits" in refusal(found, walking)


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_copies_leave_most_of_the_memory(arch: str) -> None:
    """An operand that fills half of it has a product without them; asked for, they are refused with their bytes."""
    units = dispatch.reference_device(current(), arch).memory_bytes // 2**20
    for rows, expected in ((units * 2**20 // 20_000, True), (units * 2**20 // 10_000, False)):
        args = (Meta((rows, 1001), (1001, 1), torch.float16), Meta((1001, 1024), (1024, 1), torch.float16), False)
        found = of(args, arch)
        config = found.backend.default(found.device, found.work)
        assert copies(config) == expected and not refusal(found, config)
        if not expected:
            taken = rows * 1008 * 2
            assert f"would take {taken:,} bytes" in refusal(found, TILES.replace(params={"PACK_A": 1}))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("columns", [1, 8, 16, 17])
def test_few_columns_are_offered_no_more_slices_than_they_fill(columns: int, kind: str) -> None:
    for sizes in ((4096, columns, 256), (64, columns, 255)):
        found = situation(sizes, kind)
        for config in dispatch.candidates(found):
            assert "SLICES" not in refusal(found, config), f"{sizes} [{config}]"


def test_numbers_that_no_launch_counts_are_refused() -> None:
    """Programs that copy many small matrices, and tiles of a group."""
    count = 2**31
    left = Meta((count, 64, 3), (200, 3, 1), torch.float16)
    found = of(
        (left, Meta((count, 3, 64), (200, 64, 1), torch.float16), (64, 64), False, False), name="matmul_backward"
    )
    assert not refusal(found, TILES)
    for pack in PACKS.values():
        with pytest.raises(
            Infeasible, match=f"takes {count:,} programs, over the 2,147,483,647 of a launch: leave out"
        ):
            found.op.fit(TILES.replace(params={pack: 1}), found.work, found.device)
    found = situation((64, 4096, 64))
    for rows, refused in ((2**23, False), (2**24, True)):  # of 128 tiles
        assert ("tiles of a group" in refusal(found, TILES.replace(params={"GROUP_M": rows}))) == refused
