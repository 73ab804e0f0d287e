"""Moves between lanes, and bytes and words of registers, against lists written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulation.bench import Bench

LANE = list(range(64))
VALUES = np.arange(64) * 3 + 1000
Source = Callable[[int], "int | None"]  # the lane that a lane reads, None where there is none


def _in_row(move: Callable[[int], int]) -> Source:
    def source(lane: int) -> int | None:
        place = move(lane % 16)
        return lane // 16 * 16 + place if 0 <= place < 16 else None

    return source


DPP: dict[str, Source] = {
    "quad_perm:[3,0,2,1]": lambda lane: lane // 4 * 4 + [3, 0, 2, 1][lane % 4],
    "row_shl:3": _in_row(lambda place: place + 3),
    "row_shr:1": _in_row(lambda place: place - 1),
    "row_shr:8": _in_row(lambda place: place - 8),
    "row_ror:5": _in_row(lambda place: (place - 5) % 16),
    "row_mirror": _in_row(lambda place: 15 - place),
    "row_half_mirror": _in_row(lambda place: place // 8 * 8 + 7 - place % 8),
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_newbcast:6": _in_row(lambda place: 6),
    "wave_shr:1": lambda lane: lane - 1 if lane else None,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
}


@pytest.mark.parametrize("mask", [2**64 - 1, 0x0FF0_FFFF_1234_FFFE])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(("rows", "banks"), [(15, 15), (0xA, 15), (15, 0x5)])
@pytest.mark.parametrize("move", DPP)
def test_dpp(move: str, rows: int, banks: int, bound: bool, mask: int) -> None:
    """In place: all lanes are read before any is written."""
    line = f"v_add_u32_dpp v1, v1, v0 {move} row_mask:{rows:#x} bank_mask:{banks:#x}" + " bound_ctrl:1" * bound
    bench = Bench(line).set({0: np.full(64, 7), 1: VALUES}).mask(mask).run()
    for lane in LANE:
        source = DPP[move](lane)
        valid = source is not None and mask >> source & 1
        written = mask >> lane & 1 and rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1 and (valid or bound)
        read = int(VALUES[source]) if valid and source is not None else 0
        assert int(bench.words(1)[lane]) == (read + 7 if written else int(VALUES[lane])), (move, lane)


@pytest.mark.parametrize("part", ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"])
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
def test_sdwa(part: str, unused: str) -> None:
    width = {"B": 8, "W": 16, "D": 32}[part[0]]
    shift = int(part[-1]) * width if "_" in part else 0
    data = np.random.default_rng(0).integers(0, 2**32, (3, 64)).astype(np.uint32)
    lines = [
        f"v_or_b32_sdwa v3, v0, v1 dst_sel:{part} dst_unused:{unused} src0_sel:{part} src1_sel:WORD_1",
        f"v_or_b32_sdwa v4, sext(v0), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{part} src1_sel:BYTE_0",
    ]
    bench = Bench(lines).set({0: data[0], 1: data[1], 3: data[2], 4: data[2]}).run()
    ones = (1 << width) - 1
    for lane in LANE:
        a, b, old = (int(each[lane]) for each in data)
        selected = a >> shift & ones
        result = (selected | b >> 16) & ones
        if unused == "UNUSED_PRESERVE":
            wanted = old & ~(ones << shift) | result << shift
        elif unused == "UNUSED_SEXT":
            signed = result - (1 << width) if result >> (width - 1) else result
            wanted = signed << shift
        else:
            wanted = result << shift
        assert int(bench.words(3)[lane]) == wanted % 2**32
        signed = selected - (1 << width) if selected >> (width - 1) else selected
        assert int(bench.words(4)[lane]) == (signed | b & 0xFF) % 2**32


def test_byte_compare_and_select() -> None:
    a, b = (np.random.default_rng(i).integers(0, 2**32, 64).astype(np.uint32) for i in (0, 1))
    b[::2] = a[::2] & 0xFF
    lines = ["v_cmp_ne_u16_sdwa s[8:9], v0, v1 src0_sel:BYTE_0 src1_sel:DWORD",
             "v_cndmask_b32_sdwa v2, v0, v1, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
             "v_cndmask_b32_e64 v3, 1.0, -v0, s[8:9]", "v_cndmask_b32_e32 v4, v0, v1, vcc"]  # fmt: skip
    bench = Bench(lines).set({0: a, 1: b}, {106: 0x0F0F0F0F, 107: 0x33333333}).run()
    vcc = 0x33333333_0F0F0F0F
    differs = [int(x) & 0xFF != int(y) & 0xFFFF for x, y in zip(a, b, strict=True)]
    assert bench.scalar64(8) == sum(bit << lane for lane, bit in enumerate(differs))
    for lane in LANE:
        x, y = int(a[lane]), int(b[lane])
        assert int(bench.words(2)[lane]) == (y >> 16 if vcc >> lane & 1 else x)
        assert int(bench.words(3)[lane]) == (x ^ 1 << 31 if differs[lane] else 0x3F800000)
        assert int(bench.words(4)[lane]) == (y if vcc >> lane & 1 else x)


def test_single_lanes() -> None:
    lines = ["v_readlane_b32 s4, v0, 63", "v_readlane_b32 s5, v0, s8", "v_readfirstlane_b32 s6, v0",
             "v_writelane_b32 v1, s4, 5", "s_mov_b64 exec, 0", "v_readfirstlane_b32 s7, v0"]  # fmt: skip
    bench = Bench(lines).set({0: VALUES, 1: np.zeros(64)}, {8: 64 + 12}).mask(0xFF00).run()
    assert [bench.scalar(i) for i in (4, 5, 6, 7)] == [int(VALUES[i]) for i in (63, 12, 8, 0)]
    assert list(np.flatnonzero(bench.words(1))) == [5] and int(bench.words(1)[5]) == int(VALUES[63])


def test_lane_counts() -> None:
    lines = ["v_mbcnt_lo_u32_b32 v1, s4, 0", "v_mbcnt_hi_u32_b32 v1, s5, v1"]
    bench = Bench(lines).set(scalar={4: 0xDEADBEEF, 5: 0x12345678}).run()
    mask = 0x12345678DEADBEEF
    assert [int(each) for each in bench.words(1)] == [(mask & ((1 << lane) - 1)).bit_count() for lane in LANE]


def test_permutations() -> None:
    order = np.random.default_rng(3).permutation(64)
    bench = Bench(["ds_bpermute_b32 v2, v1, v0", "ds_permute_b32 v3, v1, v0", "ds_bpermute_b32 v4, v1, v0 offset:8"])
    bench.set({0: VALUES, 1: order * 4}).run()
    assert [int(each) for each in bench.words(2)] == [int(VALUES[each]) for each in order]
    assert [int(bench.words(3)[each]) for each in order] == [int(each) for each in VALUES]
    assert [int(each) for each in bench.words(4)] == [int(VALUES[(each + 2) % 64]) for each in order]
    bench = Bench("ds_bpermute_b32 v2, v1, v0").set({0: VALUES, 1: order * 4, 2: np.full(64, 9)}).mask(0xFFFFFFFF).run()
    for lane in LANE:
        source = int(order[lane])
        assert int(bench.words(2)[lane]) == ((int(VALUES[source]) if source < 32 else 0) if lane < 32 else 9)


SWIZZLES: dict[str, Callable[[int], int]] = {
    "swizzle(SWAP,16)": lambda lane: lane ^ 16,
    "swizzle(REVERSE,8)": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "swizzle(BROADCAST,8,3)": lambda lane: lane // 8 * 8 + 3,
    "swizzle(QUAD_PERM,1,0,3,2)": lambda lane: lane ^ 1,
    'swizzle(BITMASK_PERM,"01pip")': lambda lane: lane // 32 * 32 + (lane & 0b00111 | 0b01000) ^ 0b00010,
    "0x401f": lambda lane: lane ^ 16,
    "0x8055": lambda lane: lane // 4 * 4 + 1,
}


@pytest.mark.parametrize("mode", SWIZZLES)
def test_swizzle(mode: str) -> None:
    bench = Bench(f"ds_swizzle_b32 v1, v0 offset:{mode}").set({0: VALUES}).run()
    assert [int(each) for each in bench.words(1)] == [int(VALUES[SWIZZLES[mode](lane)]) for lane in LANE]


def test_accumulation_registers_and_swaps() -> None:
    lines = ["v_accvgpr_write_b32 a3, v0", "v_accvgpr_read_b32 v1, a3", "v_swap_b32 v0, v2", "v_mov_b32_e32 v3, v90"]
    bench = Bench(lines).set({0: VALUES, 2: np.zeros(64), 90: VALUES}).run()
    assert (bench.words(1) == VALUES).all() and (bench.words(0) == 0).all() and (bench.words(2) == VALUES).all()
    assert (bench.words(3) == VALUES).all()


def test_packed_moves() -> None:
    line = "v_pk_mov_b32 v[4:5], v[0:1], v[2:3] op_sel:[1,0]"
    bench = Bench(line).set({i: np.full(64, i + 10) for i in range(4)}).run()
    assert int(bench.words(4)[0]) == 11 and int(bench.words(5)[0]) == 12
