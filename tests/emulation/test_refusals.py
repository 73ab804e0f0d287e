"""What the emulator refuses beside plain faults: odd descriptors, unlike values of one store; and upper addresses."""

from __future__ import annotations

import numpy as np
import pytest

from portkern.backends.gfx942_emulator.memory import UPPER_BASE
from portkern.errors import MemoryFault, RaceDetected, UnmodelledInstruction
from tests.emulation.bench import Bench
from tests.emulation.test_memory import DATA, LANE, with_buffer


@pytest.mark.parametrize(
    ("word", "value"),
    [(1, 0x10000), (1, 1 << 31), (3, 0), (3, 0x20000), (3, 0x7000), (3, 0x27000 | 1 << 23), (3, 0x27000 | 1 << 30)],
)
def test_descriptors_of_other_than_plain_bytes_are_refused(word: int, value: int) -> None:
    """A stride, swizzling, no format (an unbound buffer), the lane's number added, another type."""
    bench, _ = with_buffer("buffer_load_dword v8, v2, s[4:7], 0 offen")
    bench.set(scalar={6: 4096, 7: 0x27000})
    bench.set(scalar={4 + word: bench.scalar(4 + word) | value if word == 1 else value})
    with pytest.raises(UnmodelledInstruction, match=f"a buffer descriptor .*word {word} is 0x"):
        bench.run()


def test_a_size_that_nothing_wrote_lets_masked_lanes_through() -> None:
    bench, _ = with_buffer(
        ["v_bfrev_b32_e32 v2, 1", "s_mov_b32 s7, 0x27000", "buffer_load_dword v8, v2, s[4:7], 0 offen"]
    )
    with pytest.raises(MemoryFault, match="touches address 0x"):
        bench.run()


@pytest.mark.parametrize("kind", ["global", "flat", "buffer", "scalar"])
def test_buffers_in_the_upper_half_of_the_addresses(kind: str) -> None:
    lines = {
        "global": ["global_load_dword v8, v2, s[4:5] offset:4", "global_store_dword v2, v8, s[4:5] offset:2048"],
        "flat": ["flat_load_dword v8, v[0:1] offset:4", "flat_store_dword v[0:1], v8 offset:2048"],
        "buffer": ["s_and_b32 s5, s5, 0xffff", "buffer_load_dword v8, v2, s[4:7], 0 offen offset:4",
                   "buffer_store_dword v8, v2, s[4:7], 0 offen offset:2048"],
        "scalar": ["s_load_dword s8, s[4:5], 0x4", "s_and_b32 s5, s5, 0xffff", "s_buffer_load_dword s9, s[4:7], 0x14"],
    }[kind]  # fmt: skip
    bench = Bench(lines)
    bench.space.base = UPPER_BASE
    bench.space.regions.clear()
    region = bench.space.add("x", DATA.copy())
    assert region.start < 0
    bench.set({2: LANE * 16}, {4: region.start & 0xFFFFFFFF, 5: region.start >> 32 & 0xFFFFFFFF, 6: 4096, 7: 0x27000})
    bench.pair(0, (region.start + 16 * LANE).astype(np.int64)).run()
    if kind == "scalar":
        words = DATA[4:24].copy().view("<u4")
        assert (bench.scalar(8), bench.scalar(9)) == (int(words[0]), int(words[4]))
        return
    for lane in range(64):
        assert (region.data[16 * lane + 2048 :][:4] == DATA[16 * lane + 4 :][:4]).all()


def test_lanes_that_write_unlike_values_to_one_place_are_a_race() -> None:
    """Which of them stays, the manual does not say; a NaN is as good as another, and so is one sum in another order."""
    lines = ["ds_write_b32 v1, v2", "ds_read_b32 v3, v1"]
    one, tiny, infinity = 0x3F800000, 0x00800000, 0x7F800000
    sums = [np.where(LANE < 9, start, start + 4) for start in (one, one | 1 << 31, tiny)]
    for values in (np.full(64, 7), np.where(LANE < 9, 0x7FC00000, 0xFFC00001), *sums):
        Bench(lines).set({1: np.zeros(64), 2: values}).run()
    for low, high in ((one, one + 5), (one, one | 1 << 31), (tiny - 1, tiny), (infinity - 1, infinity), (7, 8)):
        with pytest.raises(RaceDetected, match="writes what another lane writes"):
            Bench(lines).set({1: np.zeros(64), 2: np.where(LANE < 9, low, high)}).run()
    double = ["ds_write_b64 v1, v[2:3]", "ds_read_b64 v[4:5], v1"]
    for first, apart in ((one << 32 | one, 0), (one << 32 | one, 1), (one << 32 | 0xFFFFFFFF, 2)):  # the last carries
        low, high = (
            np.where(LANE < 9, first >> shift & 0xFFFFFFFF, first + apart >> shift & 0xFFFFFFFF) for shift in (0, 32)
        )
        Bench(double).set({1: np.zeros(64), 2: low, 3: high}).run()
    with pytest.raises(RaceDetected, match="writes what another lane writes"):
        Bench(double).set({1: np.zeros(64), 2: np.where(LANE < 9, 5, 900), 3: np.full(64, 3)}).run()
    for warps in (1, 4):
        own = ["v_lshrrev_b32_e32 v1, 1, v0", "v_lshlrev_b32_e32 v1, 2, v1", *lines]
        bench = Bench(own, warps=warps).set({2: np.where(LANE == 12, 5, 7)})
        with pytest.raises(RaceDetected, match="lane 12, shared address 0x18: it writes what another lane writes"):
            bench.run()
