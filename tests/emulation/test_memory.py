"""Loads, stores and atomic operations of every kind of memory, and what must not be touched."""

from __future__ import annotations

import re

import numpy as np
import pytest

from portkern.backends.gfx942_emulator.memory import Region
from portkern.errors import MemoryFault, NoProgress, RaceDetected, UnmodelledInstruction
from tests.emulation.bench import Bench

LANE = np.arange(64)
DATA = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)


def with_buffer(lines: str | list[str], data: np.ndarray = DATA, alignment: int = 0) -> tuple[Bench, Region]:
    """A bench with one buffer, its address in s[4:5] and, with 16 bytes a lane, in v[0:1]; the offset alone in v2."""
    bench = Bench(lines)
    region = bench.space.add("x", data.copy(), alignment)
    bench.set({2: LANE * 16}, {4: region.start & 0xFFFFFFFF, 5: region.start >> 32})
    bench.pair(0, (region.start + 16 * LANE).astype(np.uint64))
    return bench, region


LOADS = {"ubyte": ("u1", 1), "sbyte": ("i1", 1), "ushort": ("u2", 1), "sshort": ("i2", 1), "dword": ("u4", 1),
         "dwordx2": ("u4", 2), "dwordx3": ("u4", 3), "dwordx4": ("u4", 4)}  # fmt: skip


@pytest.mark.parametrize("kind", ["global", "flat", "buffer"])
@pytest.mark.parametrize("width", LOADS)
def test_loads(width: str, kind: str) -> None:
    dtype, count = LOADS[width]
    target = f"v[8:{7 + count}]" if count > 1 else "v8"
    line = {
        "global": f"global_load_{width} {target}, v2, s[4:5] offset:4",
        "flat": f"flat_load_{width} {target}, v[0:1] offset:4",
        "buffer": f"buffer_load_{width} {target}, v2, s[4:7], 0 offen offset:4",
    }[kind]
    bench, _ = with_buffer(line)
    bench.set(scalar={6: 4096, 7: 0x27000}).mask(2**63 - 1).run()
    for lane in range(63):
        start = 16 * lane + 4
        for number in range(count):
            size = int(dtype[1])
            wanted = int(DATA[start + size * number : start + size * (number + 1)].view(f"<{dtype}")[0]) % 2**32
            assert int(bench.words(8 + number)[lane]) == wanted
    assert int(bench.words(8)[63]) == 0x7FC1A5A5  # as it was


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_unaligned_loads_and_stores(phase: int) -> None:
    lines = [f"global_load_dwordx2 v[8:9], v2, s[4:5] offset:{phase}",
             f"global_store_dwordx2 v2, v[8:9], s[4:5] offset:{phase + 2000}"]  # fmt: skip
    bench, region = with_buffer(lines)
    bench.run()
    for lane in range(64):
        start = 16 * lane + phase
        assert int(bench.longs(8)[lane]) == int.from_bytes(bytes(DATA[start : start + 8]), "little")
        assert (region.data[start + 2000 : start + 2008] == DATA[start : start + 8]).all()


def test_halves_of_registers() -> None:
    lines = ["global_load_short_d16 v8, v2, s[4:5]", "global_load_short_d16_hi v8, v2, s[4:5] offset:6",
             "global_load_ubyte_d16_hi v9, v2, s[4:5]", "global_store_short_d16_hi v2, v8, s[4:5] offset:2000",
             "global_store_byte_d16_hi v2, v8, s[4:5] offset:2003",
             "global_store_short v2, v8, s[4:5] offset:2008"]  # fmt: skip
    bench, region = with_buffer(lines)
    bench.run()
    for lane in range(64):
        at = 16 * lane
        low, high = (int(DATA[at + i : at + i + 2].view("<u2")[0]) for i in (0, 6))
        assert int(bench.words(8)[lane]) == high << 16 | low
        assert int(bench.words(9)[lane]) == int(DATA[at]) << 16 | 0xA5A5
        stored = region.data[at + 2000 : at + 2010]
        assert int(stored[:2].view("<u2")[0]) == high and int(stored[3]) == high & 0xFF
        assert int(stored[8:10].view("<u2")[0]) == low


def test_buffer_bounds() -> None:
    """Beyond the descriptor's size loads give 0 and stores nothing, each word by itself."""
    lines = ["buffer_load_dwordx4 v[8:11], v2, s[4:7], 0 offen", "buffer_store_dword v3, v2, s[4:7], s10 offen"]
    bench, region = with_buffer(lines)
    bench.set({3: np.full(64, 0x11223344)}, {6: 504, 7: 0x27000, 10: 8}).run()
    for lane in range(64):
        for number in range(4):
            at = 16 * lane + 4 * number
            wanted = int(DATA[at : at + 4].view("<u4")[0]) if at + 4 <= 504 else 0
            assert int(bench.words(8 + number)[lane]) == wanted
        at = 16 * lane + 8
        assert int(region.data[at : at + 4].view("<u4")[0]) == (
            0x11223344 if at + 4 <= 504 else int(DATA[at : at + 4].view("<u4")[0])
        )


def test_scalar_loads_and_private_memory() -> None:
    lines = ["s_load_dwordx4 s[12:15], s[4:5], 0x20", "s_load_dword s16, s[4:5], s9", "v_lshlrev_b32_e32 v5, 2, v4",
             "scratch_store_dword off, v4, off offset:8", "scratch_load_dword v6, off, off offset:8",
             "scratch_store_dword v7, v5, off", "scratch_load_dword v8, off, s17"]  # fmt: skip
    bench, _ = with_buffer(lines)
    bench.set({4: LANE, 7: np.full(64, 12)}, {9: 100, 17: 12}).run()
    assert [bench.scalar(12 + i) for i in range(4)] == [int(each) for each in DATA[32:48].view("<u4")]
    assert bench.scalar(16) == int(DATA[100:104].view("<u4")[0])
    assert (bench.words(6) == LANE).all() and (bench.words(8) == 4 * LANE).all()


ATOMICS = {
    "add": lambda old, x: old + x, "sub": lambda old, x: old - x, "umin": min, "umax": max,
    "and": lambda old, x: old & x, "or": lambda old, x: old | x, "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x, "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}  # fmt: skip


@pytest.mark.parametrize("wide", ["", "_x2"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str, wide: str) -> None:
    """Lanes that meet at one address go one after another, and each gets what it found."""
    size = 8 if wide else 4
    target, data = ("v[8:9]", "v[6:7]") if wide else ("v8", "v6")
    lines = [f"global_atomic_{name}{wide} {target}, v2, {data}, s[4:5] sc0", "s_waitcnt vmcnt(0)"]
    bench, region = with_buffer(lines)
    values = np.random.default_rng(1).integers(0, 2**31, 64)
    bench.set({2: LANE % 5 * 8})
    bench.pair(6, values.astype(np.uint64)).run()
    state = {k: int.from_bytes(bytes(DATA[8 * k : 8 * k + size]), "little") for k in range(5)}
    for lane in range(64):
        key = lane % 5
        got = int(bench.longs(8)[lane] if wide else bench.words(8)[lane])
        assert got == state[key]
        state[key] = ATOMICS[name](state[key], int(values[lane])) % (1 << 8 * size)
    for key, wanted in state.items():
        assert int.from_bytes(bytes(region.data[8 * key : 8 * key + size]), "little") == wanted


def test_float_atomics_and_exchange() -> None:
    lines = ["global_atomic_add_f32 v2, v6, s[4:5]", "global_atomic_pk_add_f16 v2, v7, s[4:5] offset:64",
             "global_atomic_cmpswap v8, v2, v[10:11], s[4:5] offset:128 sc0",
             "global_atomic_smax v2, v12, s[4:5] offset:192",
             "buffer_atomic_add_f32 v6, v2, s[4:7], 0 offen offset:256"]  # fmt: skip
    bench, region = with_buffer(lines, np.zeros(512, np.uint8))
    region.data[192:196] = np.frombuffer((-5 & 0xFFFFFFFF).to_bytes(4, "little"), np.uint8)
    halves = np.full((64, 2), 0.5, np.float16)
    bench.set({2: np.zeros(64), 6: LANE.astype(np.float32), 7: halves.view(np.uint32)[:, 0], 10: LANE + 1, 11: LANE,
               12: (LANE - 40).astype(np.int32).view(np.uint32)}, {6: 512, 7: 0x27000}).run()  # fmt: skip
    assert region.data[:4].view(np.float32)[0] == LANE.sum() and region.data[256:260].view(np.float32)[0] == LANE.sum()
    assert (region.data[64:68].view(np.float16) == 32).all()
    assert int(region.data[128:132].view("<u4")[0]) == 64 and list(bench.words(8)) == list(LANE)
    assert int(region.data[192:196].view("<i4")[0]) == 23


SHARED = ["b8", "b16", "b32", "b64", "b96", "b128"]


@pytest.mark.parametrize("width", SHARED)
def test_shared(width: str) -> None:
    size = int(width[1:]) // 8
    count = max(1, size // 4)
    registers = f"v[8:{7 + count}]" if count > 1 else "v8"
    back = f"v[16:{15 + count}]" if count > 1 else "v16"
    read = {1: "u8", 2: "u16"}.get(size, width)
    lines = [f"ds_write_{width} v2, {registers} offset:4", f"ds_read_{read} {back}, v2 offset:4"]
    data = np.random.default_rng(2).integers(0, 2**32, (count, 64)).astype(np.uint32)
    bench = Bench(lines, shared=2048).set({2: LANE * 16, **{8 + i: each for i, each in enumerate(data)}}).run()
    for number in range(count):
        assert (bench.words(16 + number) == (data[number] & (2 ** min(32, 8 * size) - 1))).all()


def test_shared_pairs_and_signs() -> None:
    lines = ["ds_write2_b32 v2, v4, v5 offset1:1", "ds_write2st64_b32 v2, v4, v5 offset0:4 offset1:8",
             "ds_read2_b32 v[8:9], v2 offset1:1", "ds_read2st64_b32 v[10:11], v2 offset0:4 offset1:8",
             "ds_write2_b64 v3, v[4:5], v[6:7] offset1:64", "ds_read2_b64 v[12:15], v3 offset0:64 offset1:0",
             "ds_write_b8 v2, v4", "ds_read_i8 v16, v2", "ds_read_u8_d16_hi v17, v2",
             "ds_write_b16_d16_hi v2, v5", "ds_read_i16 v18, v2"]  # fmt: skip
    a, b, c, d = (np.random.default_rng(i).integers(0, 2**32, 64).astype(np.uint32) for i in range(4))
    bench = Bench(lines, shared=8192).set({2: LANE * 16, 3: LANE * 8 + 4096, 4: a, 5: b, 6: c, 7: d, 17: LANE}).run()
    for register, wanted in zip(range(8, 16), (a, b, a, b, c, d, a, b), strict=True):
        assert (bench.words(register) == wanted).all(), register
    assert (bench.words(16).view(np.int32) == (a & 0xFF).astype(np.uint8).view(np.int8)).all()
    assert (bench.words(17) == (LANE | (a & 0xFF) << 16)).all()
    assert (bench.words(18).view(np.int32) == (b >> 16).astype(np.uint16).view(np.int16)).all()


def test_shared_atomics() -> None:
    lines = ["ds_write_b32 v3, v3", "ds_add_u32 v3, v4", "ds_max_rtn_u32 v8, v3, v5", "ds_read_b32 v9, v3",
             "ds_write_b32 v3, v6 offset:64", "ds_add_f32 v3, v7 offset:64", "ds_read_b32 v10, v3 offset:64",
             "ds_cmpst_rtn_b32 v11, v3, v9, v4", "ds_read_b32 v12, v3"]  # fmt: skip
    zero, ones = np.zeros(64), np.ones(64, np.float32)
    bench = Bench(lines).set({3: zero, 4: LANE, 5: LANE * 100, 6: zero, 7: ones}).run()
    assert int(bench.words(9)[0]) == 6300 and int(bench.words(8)[0]) == 2016 and int(bench.words(8)[63]) == 6200
    assert (bench.words(10).view(np.float32) == 64).all()
    assert int(bench.words(11)[0]) == 6300 and (bench.words(12) == 0).all()


def fault(lines: str | list[str], kind: type[Exception] = MemoryFault, **set_: object) -> str:
    bench, _ = with_buffer(lines, DATA[:1020])
    with pytest.raises(kind) as caught:
        bench.run()
    return str(caught.value)


def test_an_access_outside_names_everything() -> None:
    text = fault(["v_mov_b32_e32 v8, 1", "global_load_dwordx2 v[8:9], v2, s[4:5] offset:8"])
    assert re.search(r"bench: 'global_load_dwordx2 v\[8:9\], v2, s\[4:5\] offset:8' \(line 4 ", text)
    assert "workgroup (0, 0, 0), warp 0, lane 63" in text and "4 bytes past the end of x (1,020 bytes)" in text
    assert f"{16 * 63 + 8 + (1 << 36) + 0x7000_0000_0000:#x}" in text
    assert "bytes before x" in fault("global_store_dword v2, v2, s[4:5] offset:-16")
    assert "buffer_load" in fault(["s_mov_b32 s7, 0x27000", "buffer_load_dword v8, v2, s[4:7], s5 offen"])  # s6: poison
    assert "scratch" in fault("scratch_load_dword v8, v2, off offset:4000")
    assert "s_load_dword" in fault("s_load_dword s8, s[4:5], 0x3fc")


def test_shared_memory_is_checked() -> None:
    bench = Bench("ds_read_b32 v1, v0", shared=512).set({0: LANE * 4})
    with pytest.raises(
        MemoryFault, match="warp 0, lane 0, shared address 0x0: read of shared memory that nobody wrote"
    ):
        bench.run()
    bench = Bench("ds_write_b64 v0, v[2:3]", shared=508).set({0: LANE * 8})
    with pytest.raises(MemoryFault, match="lane 63 touches address 0x1f8: shared memory has 508 bytes"):
        bench.run()


EXCHANGE = ["v_lshlrev_b32_e32 v1, 2, v0", "ds_write_b32 v1, v0", "s_barrier", "v_xor_b32_e32 v2, 0x1fc, v1",
            "ds_read_b32 v3, v2", "s_barrier", "ds_write_b32 v1, v0"]  # fmt: skip


def test_barriers_make_exchanges_right() -> None:
    bench = Bench(EXCHANGE, warps=2, groups=3).run()
    for wave in range(6):
        assert (bench.words(3, wave) == 127 - (LANE + 64 * (wave % 2))).all()


@pytest.mark.parametrize("barrier", [2, 5])
def test_a_missing_barrier_is_a_race(barrier: int) -> None:
    lines = [line for number, line in enumerate(EXCHANGE) if number != barrier]
    what = "reads what another wave writes|nobody wrote" if barrier == 2 else "writes what another wave reads"
    with pytest.raises((RaceDetected, MemoryFault), match=what):
        Bench(lines, warps=2, groups=2).run()


def test_redundant_stores_are_no_race_and_others_are() -> None:
    lines = ["v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v2, 7", "ds_write_b32 v1, v2", "ds_read_b32 v3, v1"]
    assert (Bench(lines, warps=4).run().words(3, 3) == 7).all()
    lines[1] = "v_mov_b32_e32 v2, v0"
    with pytest.raises(RaceDetected, match="writes what another wave writes"):
        Bench(lines, warps=4).run()


def test_waves_part_and_meet() -> None:
    """Each wave loops as often as its number says; wave 2 skips the barrier by ending, which frees the others."""
    lines = ["v_readfirstlane_b32 s4, v0", "s_lshr_b32 s4, s4, 6", "s_mov_b32 s5, 0", "s_cmp_eq_u32 s4, 2",
             "s_cbranch_scc1 .LEND", "s_mov_b32 s6, s4", ".LOOP:", "s_add_u32 s5, s5, 3", "s_sub_u32 s6, s6, 1",
             "s_cmp_lt_i32 s6, 0", "s_cbranch_scc0 .LOOP", "s_barrier", "v_mov_b32_e32 v1, s5", ".LEND:"]  # fmt: skip
    bench = Bench(lines, warps=4).run()
    assert [int(bench.words(1, wave)[0]) for wave in (0, 1, 3)] == [3, 6, 12]
    assert bench.launch.tally.parted > 0


def test_a_barrier_that_some_never_reach_and_loops_without_end() -> None:
    lines = ["v_readfirstlane_b32 s4, v0", "s_cmp_eq_u32 s4, 0", "s_cbranch_scc1 .LTWICE", "s_barrier",
             "s_branch .LEND",
             ".LTWICE:", "s_barrier", "s_mov_b32 s5, 1", ".LWAIT:", "s_nop 0", "s_branch .LWAIT", ".LEND:"]  # fmt: skip
    bench = Bench(lines, warps=2)
    with pytest.raises(NoProgress, match="instruction budget"):
        while not bench.machine.run(10_000):
            pass


def test_unknown_instructions_are_refused_by_name() -> None:
    for line in ("v_dot8_i32_i4 v0, v1, v2, v3", "s_sendmsg sendmsg(MSG_INTERRUPT)", "v_add_f32_e32 v0, v1, foo",
                 "image_load v0, v1, s[0:7]", "v_mul_lo_u32 v0, v1, v2 clamp"):  # fmt: skip
        with pytest.raises(UnmodelledInstruction, match=f"bench: '{re.escape(line)}' .line 3 "):
            Bench(line)
