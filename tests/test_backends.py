"""Every architecture plugin: its defaults, for any work."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

from portkern.backends._rows import VARIANTS
from portkern.backends._rows_model import footprint, row_blocks
from portkern.backends._shared import CommonBackend
from portkern.config import Config
from portkern.errors import Infeasible
from portkern.integers import next_power_of_2, power_of_2_below
from portkern.plan import metas_of
from portkern.plugins import backend_for, parse_arch, plugin_manager
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.registry import all_ops
from portkern.target import Device

PM = plugin_manager(entry_points=False)
MAIN = ("sm80", "sm90", "gfx942")
ARCHS = (*MAIN, "sm86", "sm89", "sm100", "sm103", "sm120", "gfx950", "gfx90a")
LAYOUTS = ("n16", "n", "m16", "m", "s")
SIZES = tuple(itertools.product((0, 1, 7, 131, 4096, 1_000_003), (0, 1, 2, 63, 1000, 4095, 16_384, 50_000, 2**20)))
LIVE = {
    "packed_rows": 1.4,
    "resident_row": 1.4,
    "cached_row": 0.6,
    "looped_row": 2.8,
    "split_row": 2.8,
    "coresident_row": 1.4,
}


def backend(arch: str) -> CommonBackend:
    found = backend_for(PM, parse_arch(PM, arch))
    assert isinstance(found, CommonBackend)
    return found


def rows(
    m: int, n: int, layout: str = "n16", size: int = 2, variants: tuple[str, ...] = VARIANTS, live: float = 1.0
) -> Work:
    """The Work of something that reads and writes M rows of N elements."""
    return Work(
        kind="row_reduction",
        sizes=FrozenMap(M=m, N=n),
        dtypes=FrozenMap(x=f"{size}"),
        layout=FrozenMap(x=layout, y=layout),
        live=FrozenMap({variant: LIVE.get(variant, 1.4) * live for variant in variants}),
        reads=m * n * size,
        writes=m * n * size,
        variants=variants,
        waiting=tuple(v for v in variants if v == "coresident_row") if len(variants) > 1 else (),
        element_bytes=size,
        compute_bytes=8 if size == 8 else 4,
    )


def why_not(rules: CommonBackend, device: Device, work: Work, config: Config) -> str | None:
    return rules.refuse(device, work, config, row_blocks(work, config))


@pytest.mark.parametrize(
    ("n", "up", "down"), [(0, 1, 1), (1, 1, 1), (2, 2, 2), (3, 4, 2), (4096, 4096, 4096), (4097, 8192, 4096)]
)
def test_powers_of_two(n: int, up: int, down: int) -> None:
    assert (next_power_of_2(n), power_of_2_below(n)) == (up, down)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_default_is_never_refused(arch: str) -> None:
    rules = backend(arch)
    device = rules.reference_device()
    for (m, n), layout, size, live in itertools.product(SIZES, LAYOUTS, (2, 4, 8), (1.0, 5.0)):
        work = rows(m, n, layout, size, live=live)
        config = rules.default(device, work)
        assert config.variant in work.variants
        assert config.num_warps * device.target.warp_size <= 1024
        assert why_not(rules, device, work, config) is None, (work, config)


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_a_default_or_a_reason(arch: str, variant: str) -> None:
    rules, held = backend(arch), 0
    device = rules.reference_device()
    for (m, n), layout in itertools.product(SIZES, LAYOUTS):
        work = rows(m, n, layout)
        try:
            config = rules.default(device, work, variant)
        except Infeasible as error:
            assert device.name in str(error)
            assert re.search(r"over the \d|but about 0 fit|at most 32|gains nothing", str(error))
        else:
            held += 1
            assert config.variant == variant
            assert why_not(rules, device, work, config) is None
        alone = rules.default(device, rows(m, n, layout, variants=(variant,)))
        assert alone.variant == variant  # never fails, even where refuse() then says why
    if variant == "cached_row":  # for few of these; gfx942 offers none
        assert (held > 0) == (arch != "gfx942")
    else:
        assert held >= len(SIZES)


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize(
    ("m", "n", "layout", "expected"),
    [
        (8192, 128, "n16", "packed_rows"),
        (4096, 4096, "n16", "resident_row"),
        (4096, 8192, "n16", "resident_row"),
        (4096, 32_000, "n", "coresident_row"),
        (1, 2**20, "n16", "split_row"),
        (16, 2**18, "n16", "coresident_row"),
        (4096, 2**17, "n16", "coresident_row"),
        (4096, 100, "m16", "packed_rows"),
        (65_536, 4096, "m16", "looped_row"),
        (8, 2**20, "m16", "split_row"),
    ],
)
def test_which_variant_is_the_default(arch: str, m: int, n: int, layout: str, expected: str) -> None:
    rules = backend(arch)
    assert rules.default(rules.reference_device(), rows(m, n, layout)).variant == expected


def test_a_row_is_read_again_where_the_cache_keeps_it() -> None:
    """4,096 rows of 32,768 16-bit elements on an H200: 131 us, from registers 165."""
    rules = backend("sm90")
    device = rules.reference_device()
    config = rules.default(device, rows(4096, 32_768))
    assert (config.variant, config.num_warps, dict(config.options)) == ("cached_row", 32, {"maxnreg": 32})
    assert rules.default(device, rows(4096, 16_384)).variant == "cached_row"
    assert rules.default(device, rows(4096, 32_768, size=4)).variant == "resident_row"
    assert rules.default(device, rows(4096, 8192)).variant == "resident_row"
    amd = backend("gfx942")
    assert amd.default(amd.reference_device(), rows(4096, 32_768)).variant == "resident_row"


@pytest.mark.parametrize("arch", MAIN)
def test_without_cooperation_wide_rows_loop_and_few_split(arch: str) -> None:
    rules = backend(arch)
    device = dataclasses.replace(rules.reference_device(), cooperative=False)
    assert rules.default(device, rows(4096, 2**17)).variant == "looped_row"
    assert rules.default(device, rows(1, 2**20)).variant == "split_row"
    with pytest.raises(Infeasible, match="waits for other programs.*use packed_rows or"):
        rules.default(device, rows(1, 2**20), "coresident_row")


@pytest.mark.parametrize(
    ("name", "n", "dtype", "programs", "more"),
    [
        ("softmax", 131_072, "bfloat16", 4, {"LAG": 1, "PAIRS": 1}),
        ("log_softmax", 131_072, "bfloat16", 4, {"LAG": 1, "PAIRS": 1}),
        ("softmax", 131_072, "float32", 3, {"LAG": 1}),
        ("log_softmax", 131_072, "float32", 3, {"LAG": 1}),
        ("cross_entropy", 128_256, "float16", 7, {"LAG": 0, "PAIRS": 1}),
        ("softmax_backward", 131_072, "bfloat16", 6, {}),
        ("log_softmax_backward", 131_072, "bfloat16", 3, {"LAG": 1}),
        ("softmax_backward", 131_072, "float32", 3, {}),
        ("log_softmax_backward", 131_072, "float32", 3, {}),
        ("softmax_backward", 32_768, "float32", 3, {}),
        ("log_softmax_backward", 32_768, "float32", 3, {}),
    ],
)
def test_measured_defaults_of_contiguous_rows(
    name: str, n: int, dtype: str, programs: int, more: dict[str, int]
) -> None:
    """What won on an H200 (docs/measurements.md): a change of the model's constants shall not move these."""
    op = all_ops()[name]
    work = op.work(op.problem(*metas_of(op.inputs((4096, n), getattr(torch, dtype), device="meta"))))
    rules = backend("sm90")
    found = rules.default(rules.reference_device(), work)
    params = FrozenMap({"BLOCK_N": 4096, "PROGRAMS_PER_UNIT": programs, **more})
    assert found == Config("coresident_row", params, num_warps=4, num_stages=1)


@pytest.mark.parametrize(
    ("layouts", "each"),
    [(("n16", "n16"), 0.0), (("n16", "n"), 1.6), (("n", "n"), 1.6), (("n", "n", "n"), 2.4), (("n16", "s"), 4.0),
     (("m16", "m"), 8.0), (("m16", "n", "s"), 8.8)],
)  # fmt: skip
def test_waiting_programs_keep_addresses_of_each_loose_operand(layouts: tuple[str, ...], each: float) -> None:
    """They hold a part and load the next one: each operand whose elements lie apart takes its own registers."""
    rules = backend("sm90")
    device = rules.reference_device()
    config = Config("coresident_row", FrozenMap(BLOCK_N=4096, PROGRAMS_PER_UNIT=1), num_warps=4)
    tight, loose = (
        dataclasses.replace(rows(512, 8192), layout=FrozenMap({str(i): name for i, name in enumerate(names)}))
        for names in (("n16", "n16"), layouts)
    )
    needs = [footprint(rules, device, work, config, row_blocks(work, config)).registers for work in (tight, loose)]
    assert needs[1] - needs[0] == pytest.approx(32 * each)


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("layout", ["n16", "n", "m16"])
def test_programs_that_keep_sums_walk_many_rows(arch: str, layout: str) -> None:
    """Where an op sums over rows, no default and no fair candidate has a program a tile."""
    rules = backend(arch)
    device = rules.reference_device()
    for m, n in ((32_768, 256), (8192, 8192), (4096, 32_768), (4096, 2**17), (1, 2**20)):
        work = dataclasses.replace(rows(m, n, layout, live=3.0), partials=8 * n)
        for config in (rules.default(device, work), *rules.candidates(device, work)):
            if why_not(rules, device, work, config) is None and config.params["PROGRAMS_PER_UNIT"]:
                assert {"SUM_BLOCK_M", "SUM_BLOCK_N", "SUM_WARPS"} <= set(config.params)
        assert rules.default(device, work).params["PROGRAMS_PER_UNIT"] >= 1
        fair = [c for c in rules.candidates(device, work) if why_not(rules, device, work, c) is None]
        assert sum(config.params["PROGRAMS_PER_UNIT"] > 0 for config in fair) >= 8


@pytest.mark.parametrize("arch", MAIN)
def test_every_unit_gets_a_part_of_a_single_long_row(arch: str) -> None:
    rules = backend(arch)
    device, work = rules.reference_device(), rows(1, 2**21)
    split = rules.default(device, work, "split_row")
    assert split.params["SPLITS"] >= device.units
    waiting = rules.default(device, rows(4, 2**19), "coresident_row")
    parts = 2**19 / waiting.params["BLOCK_N"]
    assert 16 <= parts <= 32
    assert device.units / 3 < 4 * parts
    assert parts <= device.units * waiting.params["PROGRAMS_PER_UNIT"]


@pytest.mark.parametrize("arch", MAIN)
def test_more_registers_for_each_element_make_smaller_tiles(arch: str) -> None:
    rules = backend(arch)
    device = rules.reference_device()
    light, heavy = (rules.default(device, rows(4096, 1024, live=live), "packed_rows") for live in (1, 30))
    held = [c.params["BLOCK_M"] / c.num_warps for c in (light, heavy)]
    assert held[1] < held[0]
    with pytest.raises(Infeasible, match=r"about \d+ registers a lane .*over the \d+ there are: use"):
        rules.default(device, rows(4096, 32_768, live=30), "resident_row")
