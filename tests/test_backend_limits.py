"""What a plugin refuses and says why: registers, shared memory, programs that wait; and the options of a launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from portkern.backends._rows_model import footprint, row_blocks
from portkern.config import Blocks, Config
from portkern.errors import Infeasible, UnknownName
from portkern.record import FrozenMap
from tests.test_backends import ARCHS, MAIN, backend, rows, why_not


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
