"""Every architecture plugin: its numbers hold for any work, its refusals say why, its ranking ranks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern.backends._amd import AmdBackend, parse
from portkern.backends._nvidia import NvidiaBackend, matrix_instruction
from portkern.backends._rows import VARIANTS
from portkern.backends._rows_model import footprint, row_blocks
from portkern.backends._shared import CommonBackend, next_power_of_2, power_of_2_below
from portkern.backends.amd_gfx942 import PARTS as CDNA_PARTS
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
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
    ("name", "n", "dtype", "programs"),
    [
        ("softmax", 131_072, "bfloat16", 7),
        ("log_softmax", 131_072, "bfloat16", 7),
        ("softmax", 131_072, "float32", 5),
        ("log_softmax", 131_072, "float32", 4),
        ("softmax_backward", 131_072, "bfloat16", 6),
        ("log_softmax_backward", 131_072, "bfloat16", 4),
        ("softmax_backward", 131_072, "float32", 3),
        ("log_softmax_backward", 131_072, "float32", 3),
        ("softmax_backward", 32_768, "float32", 3),
        ("log_softmax_backward", 32_768, "float32", 3),
    ],
)
def test_measured_defaults_of_contiguous_rows(name: str, n: int, dtype: str, programs: int) -> None:
    """What won on an H200 (docs/measurements.md): a change of the model's constants shall not move these."""
    op = all_ops()[name]
    work = op.work(op.problem(*metas_of(op.inputs((4096, n), getattr(torch, dtype), device="meta"))))
    rules = backend("sm90")
    found = rules.default(rules.reference_device(), work)
    params = FrozenMap(BLOCK_N=4096, PROGRAMS_PER_UNIT=programs)
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


@pytest.mark.parametrize(("layout", "expected"), [("n16", 12 + 1.4 * 32), ("n", 12 + 3.0 * 32), ("s", 12 + 3.0 * 32)])
def test_the_register_model(layout: str, expected: float) -> None:
    rules, work = backend("sm90"), rows(4096, 4096, layout)
    config = Config("resident_row", FrozenMap(PROGRAMS_PER_UNIT=0), num_warps=4)
    use = footprint(rules, rules.reference_device(), work, config, row_blocks(work, config))
    assert use.elements == 32
    assert use.registers == pytest.approx(expected)


def test_register_caps() -> None:
    def cap(arch: str, num_warps: int, **options: int) -> int:
        rules = backend(arch)
        config = Config("resident_row", num_warps=num_warps, options=FrozenMap(options))
        return rules.register_cap(rules.reference_device(), config)

    assert [cap("sm90", warps) for warps in (4, 8, 16, 32)] == [255, 255, 128, 64]
    assert [cap("gfx942", warps) for warps in (4, 8, 16)] == [256, 256, 128]  # half of a lane's 512 are accumulators
    assert cap("sm80", 4, maxnreg=96) == 96
    for warps, limit in ((8, 255), (16, 128), (32, 64)):  # more would compile, and not launch
        options = backend("sm90").launch_options(Config("x", num_warps=warps, options=FrozenMap(maxnreg=255)))
        assert options["maxnreg"] == limit
    assert [cap("gfx942", 4, waves_per_eu=waves) for waves in (0, 2, 4)] == [256, 256, 128]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120"])
def test_waiting_programs_fit_under_their_cap(arch: str) -> None:
    """As many as are asked for, whatever part of a unit's registers their warps come to lie in."""
    rules = backend(arch)
    device, asked = rules.reference_device(), 0
    for warps in (1, 2, 4, 8, 16):
        for programs in range(1, device.max_warps_per_unit // warps + 1):
            config = Config("coresident_row", FrozenMap(PROGRAMS_PER_UNIT=programs), warps)
            cap = rules.launch_options(config)["maxnreg"]
            if programs <= device.max_programs_per_unit and cap > 32:
                assert rules.programs_per_unit(device, cap, 0, warps) >= programs, (warps, programs, cap)
                asked += 1
    assert asked > 40


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("gfx942", {"num_warps": 32}, ("num_warps=32", "2048 threads", "1024", "at most 16")),
        ("sm90", {"num_warps": 64}, ("2048 threads", "1024", "at most 32")),
        ("sm90", {"variant": "diagonal_row"}, ("diagonal_row", "resident_row")),
        ("sm90", {"num_warps": 1}, ("registers", "over the 255", "num_warps=1")),
        ("gfx942", {"options": {"maxnreg": 64}}, ("maxnreg", "gfx942", "waves_per_eu", "kpack", "leave")),
        ("sm90", {"options": {"waves_per_eu": 2}}, ("waves_per_eu", "sm90", "maxnreg", "num_ctas", "leave")),
        ("sm80", {"options": {"num_ctas": 2}}, ("num_ctas is 2", "sm80", "one of 1")),
        ("sm90", {"options": {"num_ctas": 3}}, ("num_ctas is 3", "1, 2, 4, 8, 16")),
        ("gfx942", {"options": {"kpack": True}}, ("kpack is True", "1, 2")),
        ("gfx942", {"options": {"waves_per_eu": 12}}, ("waves_per_eu is 12", "0 to 8")),
        ("sm90", {"options": {"maxnreg": 16}}, ("registers", "over the 16")),
        ("sm90", {"options": {"enable_fp_fusion": False}}, ("enable_fp_fusion", "unknown")),
    ],
)
def test_refusals_name_value_limit_and_remedy(arch: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    rules = backend(arch)
    device, work = rules.reference_device(), rows(4096, 8192)
    config = rules.default(device, work, "resident_row")
    assert why_not(rules, device, work, config) is None
    reason = why_not(rules, device, work, config.replace(**changes))
    assert reason is not None
    assert all(word in reason for word in words), reason


def test_prefetched_rows_take_shared_memory_of_the_device_itself() -> None:
    """sm89 borrows sm80's choices, not its 163 KB."""
    work = rows(100_000, 8192, size=4)
    config = Config("resident_row", FrozenMap(PROGRAMS_PER_UNIT=1), num_warps=16, num_stages=5)
    reasons = {}
    for arch in ("sm80", "sm89"):
        rules = backend(arch)
        reasons[arch] = why_not(rules, rules.reference_device(), work, config)
    assert reasons["sm80"] is None
    assert reasons["sm89"] is not None
    assert all(word in reasons["sm89"] for word in ("num_stages=5", "101,376", "fewer stages"))
    amd = backend("gfx942")  # where prefetched rows wait in registers
    use = footprint(amd, amd.reference_device(), work, config, row_blocks(work, config))
    assert use.shared_bytes < 4096
    assert use.registers > 12 + 1.4 * 8 + 4 * 8


def test_waiting_programs_must_all_run_at_once() -> None:
    rules = backend("sm90")
    device = rules.reference_device()

    def reason(n: int, num_warps: int = 4, **params: int) -> str:
        config = Config("coresident_row", FrozenMap(params), num_warps=num_warps)
        found = why_not(rules, device, rows(4, n), config)
        assert found is not None
        return found

    narrow = reason(2**20, BLOCK_N=1024, PROGRAMS_PER_UNIT=1)
    assert all(word in narrow for word in ("1024 parts", "at most 32", "BLOCK_N of 32768"))
    crowded = reason(2**18, num_warps=16, BLOCK_N=16_384, PROGRAMS_PER_UNIT=4)
    assert "PROGRAMS_PER_UNIT=4 waiting programs, but about 1 fit" in crowded
    slice_of_it = dataclasses.replace(device, units=14)
    config = Config("coresident_row", FrozenMap(BLOCK_N=4096, PROGRAMS_PER_UNIT=1), num_warps=4)
    few = why_not(rules, slice_of_it, rows(4, 2**16), config)
    assert few is not None
    assert all(word in few for word in ("16 parts", "14 programs", "larger BLOCK_N"))


@pytest.mark.parametrize("arch", MAIN)
def test_blocks_of_the_op_decide_not_the_config(arch: str) -> None:
    """A record made for short rows is refused for long ones: ``fit`` made its row longer."""
    rules = backend(arch)
    device, config = rules.reference_device(), Config("resident_row", FrozenMap(PROGRAMS_PER_UNIT=0), num_warps=4)
    work = rows(4096, 4096)
    assert rules.refuse(device, work, config, Blocks(BLOCK_M=1, BLOCK_N=4096)) is None
    assert rules.refuse(device, work, config, Blocks(BLOCK_M=1, BLOCK_N=131_072)) is not None


@pytest.mark.parametrize("arch", ARCHS)
def test_launch_options_fix_contraction_and_filter(arch: str) -> None:
    rules = backend(arch)
    assert rules.launch_options(Config("resident_row")) == {"enable_fp_fusion": True}
    knob = {"maxnreg": 128} if rules.target.backend == "cuda" else {"waves_per_eu": 2}
    config = Config("resident_row", options=FrozenMap(knob))
    assert rules.launch_options(config) == {**knob, "enable_fp_fusion": True}
    with pytest.raises(Infeasible, match="'turbo' is unknown"):
        rules.launch_options(Config("resident_row", options=FrozenMap(turbo=1)))


def test_an_option_for_the_plan_is_not_passed_to_triton() -> None:
    config = Config("tiles", options=FrozenMap(warp_specialize=True))
    assert backend("sm90").refuse_options(config.options) is None
    assert backend("sm90").launch_options(config) == {"enable_fp_fusion": True}


@pytest.mark.parametrize("arch", MAIN)
def test_an_unknown_kind_is_named_and_left_to_the_op(arch: str) -> None:
    rules = backend(arch)
    device = rules.reference_device()
    work = dataclasses.replace(rows(64, 64), kind="butterfly")
    with pytest.raises(UnknownName, match="'butterfly'.*row_reduction.*candidates of its own"):
        rules.default(device, work)
    with pytest.raises(UnknownName, match="butterfly"):
        rules.candidates(device, work)
    config = Config("resident_row", num_warps=4)
    assert rules.refuse(device, work, config, Blocks()) is None
    assert rules.estimate(device, work, config, Blocks()) > 0
    too_many = rules.refuse(device, work, config.replace(num_warps=64), Blocks())
    assert too_many is not None
    assert "threads" in too_many


def test_unknown_variants_are_named() -> None:
    rules = backend("sm90")
    device = rules.reference_device()
    with pytest.raises(UnknownName, match="'diagonal'.*packed_rows, resident_row"):
        rules.default(device, rows(8, 8), "diagonal")
    foreign = rows(8, 8, variants=("diagonal",))
    with pytest.raises(UnknownName, match="diagonal.*row_reduction"):
        rules.default(device, foreign)


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize(
    ("m", "n", "layout"), [(8192, 128, "n16"), (4096, 4096, "n"), (16, 2**18, "n16"), (4096, 512, "m16")]
)
def test_candidates_begin_with_the_default_then_the_best(arch: str, m: int, n: int, layout: str) -> None:
    rules = backend(arch)
    device, work = rules.reference_device(), rows(m, n, layout)
    found = list(rules.candidates(device, work))
    assert found[0] == rules.default(device, work)
    assert len(found) == len(set(found))
    refused = [why_not(rules, device, work, config) is not None for config in found[1:]]
    assert refused == sorted(refused)  # what is sure to fail comes last, and is there to be told why
    times = [rules.estimate(device, work, config, row_blocks(work, config)) for config in found[1:]]
    fair = times[: refused.count(False)]
    assert fair == sorted(fair)
    assert refused.count(False) >= 12
    assert {config.variant for config in found} >= {"looped_row", "split_row"}


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_some_candidate_fits_for_each_width_of_element(arch: str, size: int) -> None:
    """B89."""
    rules = backend(arch)
    device = rules.reference_device()
    for m, n in ((4096, 200), (4096, 32_768), (3, 2**21)):
        work = rows(m, n, size=size)
        assert sum(why_not(rules, device, work, config) is None for config in rules.candidates(device, work)) >= 8


def test_the_known_worst_does_not_rank_first() -> None:
    """B97: fp32 rows of 4,096 on MI300X, one wave to a row, one program to a unit."""
    rules = backend("gfx942")
    device, work = rules.reference_device(), rows(4096, 4096, size=4)
    assert device.cache_bytes == 256 * 1024**2
    worst = Config("resident_row", FrozenMap(PROGRAMS_PER_UNIT=1), num_warps=1)
    score = rules.estimate(device, work, worst, row_blocks(work, worst))
    default = rules.default(device, work)
    assert score > 1.3 * rules.estimate(device, work, default, row_blocks(work, default))


@pytest.mark.parametrize("arch", MAIN)
def test_the_model_ranks_what_is_known(arch: str) -> None:
    rules = backend(arch)
    device = rules.reference_device()

    def time(work: Work, variant: str, **changes: Any) -> float:
        config = rules.default(device, work, variant).replace(**changes)
        return rules.estimate(device, work, config, row_blocks(work, config))

    long_row = rows(1, 2**22)
    assert time(long_row, "split_row") < time(long_row, "looped_row") / 3
    many = rows(65_536, 4096)
    assert time(many, "resident_row") < time(many, "looped_row")
    assert time(many, "resident_row") < time(many, "split_row")
    assert time(rows(4096, 4096, "n16"), "resident_row") < time(rows(4096, 4096, "s"), "resident_row")
    short = rows(100_000, 64)
    assert time(short, "packed_rows") < time(short, "resident_row")
    column = rows(65_536, 1024, "m16")
    assert time(column, "looped_row") < time(column, "looped_row", params={"BLOCK_M": 1}) / 2
    floor = (many.reads + many.writes) / (device.memory_gbps * 1e3)
    assert floor < time(many, "resident_row") < 3 * floor


@pytest.mark.parametrize(
    ("arch", "lender", "triton", "shared_kb"),
    [
        ("sm86", "sm80", ("cuda", 86, 32), 99),
        ("sm89", "sm80", ("cuda", 89, 32), 99),
        ("sm100", "sm90", ("cuda", 100, 32), 227),
        ("sm103", "sm90", ("cuda", 103, 32), 227),
        ("sm120", "sm90", ("cuda", 120, 32), 99),
        ("gfx950", "gfx942", ("hip", "gfx950", 64), 160),
        ("gfx90a", "gfx942", ("hip", "gfx90a", 64), 64),
    ],
)
def test_neighbours(arch: str, lender: str, triton: tuple[Any, ...], shared_kb: int) -> None:
    rules = backend(arch)
    assert rules.note == f"{arch} borrows the choices of {lender}; limits are the device's own"
    assert rules.compile_target() == triton
    device = rules.reference_device()
    assert (device.target.arch, device.shared_bytes) == (arch, shared_kb * 1024)
    assert backend(lender).note == ""


@pytest.mark.parametrize(
    ("arch", "slug", "units", "shared"),
    [
        ("sm80", "nvidia_a100", 108, 166_912),
        ("sm90", "nvidia_h200", 132, 232_448),
        ("gfx942", "amd_mi300x", 304, 65_536),
    ],
)
def test_reference_devices(arch: str, slug: str, units: int, shared: int) -> None:
    device = backend(arch).reference_device()
    assert (device.slug, device.units, device.shared_bytes) == (slug, units, shared)
    assert not device.present
    assert device.identity == ""


def test_architectures_that_triton_cannot_compile_for_are_unknown() -> None:
    assert parse("gfx940", CDNA_PARTS) is None
    with pytest.raises(UnknownName, match="gfx1100"):
        parse_arch(PM, "gfx1100")


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "num_warps", "programs"),
    [
        ("sm90", 32, 0, 4, 16),
        ("sm90", 128, 0, 4, 4),
        ("sm90", 168, 0, 4, 3),
        ("sm90", 255, 0, 8, 1),
        ("sm90", 32, 100_000, 4, 2),
        ("sm90", 32, 116_736, 4, 1),  # twice that fits, but not with the 1 KB of each program
        ("sm89", 32, 0, 1, 24),
        ("gfx942", 170, 0, 4, 2),  # ROCm's own example: 176 registers, two waves
        ("gfx942", 128, 0, 8, 2),
        ("gfx942", 64, 40_000, 4, 1),
        ("gfx942", 512, 0, 8, 0),
    ],
)
def test_occupancy(arch: str, registers: int, shared: int, num_warps: int, programs: int) -> None:
    rules = backend(arch)
    assert rules.programs_per_unit(rules.reference_device(), registers, shared, num_warps) == programs


def test_no_plugin_names_an_op() -> None:
    root = Path(__file__).parents[1]
    ops = {path.stem for path in (root / "kernels").glob("[a-z]*.py")} | {"softmax", "matmul", "layer_norm"}
    for path in (root / "backends").glob("*.py"):
        found = [op for op in ops if re.search(rf"\b{op}\b", path.read_text())]
        assert not found, (path, found)


def test_vendors_keep_to_themselves() -> None:
    assert set(AmdBackend.knobs) & set(backend("sm90").knobs) == {"input_precision"}  # a word of Triton's own
    assert isinstance(backend("sm80"), NvidiaBackend)


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        ("  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}", "mma m16n8k16"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {", "wgmma.mma_async m64n128k16"),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1]", "tcgen05.mma"),
        ("ldmatrix.sync.aligned.m8n8.x4 fma.rn.f32", ""),
    ],
)
def test_matrix_instructions(ptx: str, expected: str) -> None:
    assert matrix_instruction(ptx) == expected


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_rows_that_more_programs_share_than_a_warp_has_lanes(arch: str) -> None:
    """Of works that take SPLITS: up to 128 parts, each kept, ahead of its turn, or walked; of others 32."""
    rules = backend(arch)
    device = rules.reference_device()
    wide = dataclasses.replace(rows(64, 1 << 20), takes=("AHEAD", "SPLITS"))
    default = rules.default(device, wide)
    assert default.variant == "coresident_row" and why_not(rules, device, wide, default) is None
    parts = (1 << 20) // default.params["BLOCK_N"]
    assert 32 < parts <= 128
    assert "can wait" in str(why_not(rules, device, rows(64, 1 << 20), default))
    found = [each for each in rules.candidates(device, wide) if each.variant == "coresident_row"]
    modes = {(each.params["AHEAD"], each.params.get("SPLITS", 0) > 0) for each in found}
    assert modes == {(0, False), (1, False), (0, True)}
    assert sum(why_not(rules, device, wide, each) is None for each in found) >= 10


def test_a_lane_that_meets_several_weights_takes_more_registers() -> None:
    """12 for each weight beyond the first: one program less on a unit."""
    rules, programs = backend("sm90"), []
    device = rules.reference_device()
    for places in (8_192, 4_096, 256):
        work = rows(256, 65_536)
        sizes, live = FrozenMap({**work.sizes, "PLACES": places}), FrozenMap({**work.live, "coresident_row": 1.25})
        work = dataclasses.replace(work, takes=("AHEAD", "SPLITS"), sizes=sizes, live=live)
        programs.append(rules.default(device, work).params["PROGRAMS_PER_UNIT"])
    assert programs[0] >= programs[1] > programs[2]
