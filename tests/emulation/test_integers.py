"""Integer vector and scalar instructions against Python's own whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulation.bench import Bench, integers

U32 = 0xFFFFFFFF
U64 = 0xFFFFFFFFFFFFFFFF


def s(x: int, width: int = 32) -> int:
    """As a signed number."""
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def field(a: int, offset: int, size: int) -> int:
    return a >> offset & ((1 << size) - 1)


def perm(a: int, b: int, selector: int) -> int:
    octets = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    found = []
    for each in selector.to_bytes(4, "little"):
        if each < 8:
            found.append(octets[each])
        elif each < 12:
            found.append(0xFF if octets[2 * (each - 8) + 1] & 0x80 else 0)
        else:
            found.append(0 if each == 12 else 0xFF)
    return int.from_bytes(bytes(found), "little")


def middle(*three: int) -> int:
    return sorted(three)[1]


VECTOR: dict[str, Callable[..., int]] = {
    "v_mov_b32_e32": lambda a: a,
    "v_not_b32_e32": lambda a: ~a,
    "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32_e32": lambda a: 32 - a.bit_length() if a else U32,
    "v_ffbl_b32_e32": lambda a: (a & -a).bit_length() - 1 if a else U32,
    "v_ffbh_i32_e32": lambda a: 32 - (a if s(a) >= 0 else ~a & U32).bit_length() if a not in (0, U32) else U32,
    "v_add_u32_e32": lambda a, b: a + b,
    "v_sub_u32_e32": lambda a, b: a - b,
    "v_subrev_u32_e32": lambda a, b: b - a,
    "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b,
    "v_xor_b32_e32": lambda a, b: a ^ b,
    "v_xnor_b32_e32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32_e32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32_e32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32_e32": lambda a, b: s(b) >> (a & 31),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: s(a) * s(b) >> 32,
    "v_mul_u32_u24_e32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24_e32": lambda a, b: s(a, 24) * s(b, 24),
    "v_min_u32_e32": min,
    "v_max_u32_e32": max,
    "v_min_i32_e32": lambda a, b: min(s(a), s(b)),
    "v_max_i32_e32": lambda a, b: max(s(a), s(b)),
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & U32) << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": lambda a, b, c: field(a, b & 31, c & 31),
    "v_bfe_i32": lambda a, b, c: (
        s(field(a, b & 31, min(c & 31, 32 - (b & 31))), min(c & 31, 32 - (b & 31)) or 1) if c & 31 else 0
    ),
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: s(a, 24) * s(b, 24) + s(c),
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_min3_u32": min,
    "v_max3_u32": max,
    "v_med3_u32": middle,
    "v_min3_i32": lambda *x: min(map(s, x)),
    "v_max3_i32": lambda *x: max(map(s, x)),
    "v_med3_i32": lambda *x: middle(*map(s, x)),
    "v_perm_b32": perm,
    "v_mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_i32_i16": lambda a, b, c: s(a, 16) * s(b, 16) + s(c),
    "v_add_u16_e32": lambda a, b: a + b & 0xFFFF,
    "v_sub_u16_e32": lambda a, b: a - b & 0xFFFF,
    "v_mul_lo_u16_e32": lambda a, b: a * b & 0xFFFF,
    "v_max_u16_e32": lambda a, b: max(a & 0xFFFF, b & 0xFFFF),
    "v_min_i16_e32": lambda a, b: min(s(a, 16), s(b, 16)) & 0xFFFF,
    "v_lshlrev_b16_e32": lambda a, b: (b & 0xFFFF) << (a & 15) & 0xFFFF,
    "v_lshrrev_b16_e32": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16_e32": lambda a, b: s(b, 16) >> (a & 15) & 0xFFFF,
    "v_pack_b32_f16": lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16,
    "v_dot4_i32_i8": lambda a, b, c: sum(s(a >> i, 8) * s(b >> i, 8) for i in (0, 8, 16, 24)) + c,
}


@pytest.mark.parametrize("name", VECTOR)
def test_vector(name: str) -> None:
    function = VECTOR[name]
    count = (
        function.__code__.co_argcount
        if hasattr(function, "__code__") and function.__code__.co_argcount
        else (3 if "3" in name.split("_")[1] else 2)
    )
    sources = [integers(i) for i in range(count)]
    if name == "v_perm_b32":
        sources[2] = np.random.default_rng(9).integers(0, 14, (64, 4)).astype(np.uint8).view(np.uint32)[:, 0]
    bench = Bench(f"{name} v9, {', '.join(f'v{i}' for i in range(count))}")
    bench.set(dict(enumerate(sources))).mask(0xF0F0F0F0F0F0F0FF).set({9: np.full(64, 77)}).run()
    for lane in range(64):
        on = 0xF0F0F0F0F0F0F0FF >> lane & 1
        wanted = function(*(int(each[lane]) for each in sources)) & U32 if on else 77
        assert int(bench.words(9)[lane]) == wanted, (name, lane, [hex(int(each[lane])) for each in sources])


WIDE: dict[str, tuple[str, Callable[..., int]]] = {
    "v_lshl_add_u64": ("v[20:21], v[0:1], v2, v[4:5]", lambda a, b, c: (a << (b & 7)) + c),
    "v_lshlrev_b64": ("v[20:21], v2, v[0:1]", lambda a, b, c: a << (b & 63)),
    "v_lshrrev_b64": ("v[20:21], v2, v[0:1]", lambda a, b, c: a >> (b & 63)),
    "v_ashrrev_i64": ("v[20:21], v2, v[0:1]", lambda a, b, c: s(a, 64) >> (b & 63)),
    "v_mad_u64_u32": ("v[20:21], s[4:5], v2, v6, v[4:5]", lambda a, b, c: b * 12345 + c),
    "v_mad_i64_i32": ("v[20:21], s[4:5], v2, v6, v[4:5]", lambda a, b, c: s(b) * 12345 + c),
    "v_mov_b64_e32": ("v[20:21], v[0:1]", lambda a, b, c: a),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide(name: str) -> None:
    operands, function = WIDE[name]
    a, b, c = integers(1, 64), integers(2), integers(3, 64)
    bench = Bench(f"{name} {operands}").pair(0, a).pair(4, c).set({2: b, 6: np.full(64, 12345)}).run()
    for lane in range(64):
        assert int(bench.longs(20)[lane]) == function(int(a[lane]), int(b[lane]), int(c[lane])) & U64, lane


def test_carries_chain() -> None:
    """128-bit addition and subtraction in four parts."""
    a, b = [integers(i) for i in range(4)], [integers(i + 4) for i in range(4)]
    for add in (True, False):
        first, more = ("v_add_co_u32_e32", "v_addc_co_u32_e32") if add else ("v_sub_co_u32_e32", "v_subb_co_u32_e32")
        lines = [f"{first} v20, vcc, v0, v4"]
        lines += [f"{more} v{20 + i}, vcc, v{i}, v{4 + i}, vcc" for i in (1, 2, 3)]
        bench = Bench(lines).set({i: each for i, each in enumerate((*a, *b))}).run()
        for lane in range(64):
            x, y = (sum(int(part[lane]) << 32 * i for i, part in enumerate(parts)) for parts in (a, b))
            wanted = (x + y if add else x - y) % (1 << 128)
            got = sum(int(bench.words(20 + i)[lane]) << 32 * i for i in range(4))
            assert got == wanted
            assert bench.scalar64(106) >> lane & 1 == ((x + y) >> 128 if add else int(x < y))


COMPARE = {"lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
           "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b}  # fmt: skip


@pytest.mark.parametrize("kind", ["i32", "u32", "i16", "u16", "i64", "u64"])
@pytest.mark.parametrize("word", COMPARE)
def test_compare(word: str, kind: str) -> None:
    width = int(kind[1:])
    a, b = integers(1, max(width, 32)), integers(2, max(width, 32))
    b[::3] = a[::3]
    operands = "v[0:1], v[2:3]" if width == 64 else "v0, v2"
    bench = Bench([f"v_cmp_{word}_{kind}_e64 s[4:5], {operands}", f"v_cmp_{word}_{kind}_e32 vcc, {operands}"])
    (bench.pair(0, a).pair(2, b) if width == 64 else bench.set({0: a, 2: b})).mask(0x00FFFFFFFFFFFFFF).run()
    read = (lambda x: s(int(x), width)) if kind[0] == "i" else (lambda x: int(x) & ((1 << width) - 1))
    wanted = sum(COMPARE[word](read(a[i]), read(b[i])) << i for i in range(56))
    assert bench.scalar64(4) == wanted and bench.scalar64(106) == wanted


# name: function of the sources, and what SCC becomes (of the result as 32 or 64 bits)
SCALAR: dict[str, tuple[Callable[..., int], Callable[..., bool] | None]] = {
    "s_add_u32": (lambda a, b: a + b, lambda r, a, b: a + b > U32),
    "s_sub_u32": (lambda a, b: a - b, lambda r, a, b: b > a),
    "s_add_i32": (lambda a, b: a + b, lambda r, a, b: not -(2**31) <= s(a) + s(b) < 2**31),
    "s_sub_i32": (lambda a, b: a - b, lambda r, a, b: not -(2**31) <= s(a) - s(b) < 2**31),
    "s_mul_i32": (lambda a, b: a * b, None),
    "s_mul_hi_u32": (lambda a, b: a * b >> 32, None),
    "s_mul_hi_i32": (lambda a, b: s(a) * s(b) >> 32, None),
    "s_min_i32": (lambda a, b: min(s(a), s(b)), lambda r, a, b: s(a) < s(b)),
    "s_max_u32": (lambda a, b: max(a, b), lambda r, a, b: a > b),
    "s_max_i32": (lambda a, b: max(s(a), s(b)), lambda r, a, b: s(a) > s(b)),
    "s_min_u32": (lambda a, b: min(a, b), lambda r, a, b: a < b),
    "s_and_b32": (lambda a, b: a & b, lambda r, a, b: r != 0),
    "s_or_b32": (lambda a, b: a | b, lambda r, a, b: r != 0),
    "s_xor_b32": (lambda a, b: a ^ b, lambda r, a, b: r != 0),
    "s_andn2_b32": (lambda a, b: a & ~b, lambda r, a, b: r != 0),
    "s_orn2_b32": (lambda a, b: a | ~b, lambda r, a, b: r != 0),
    "s_nand_b32": (lambda a, b: ~(a & b), lambda r, a, b: r != 0),
    "s_lshl_b32": (lambda a, b: a << (b & 31), lambda r, a, b: r != 0),
    "s_lshr_b32": (lambda a, b: a >> (b & 31), lambda r, a, b: r != 0),
    "s_ashr_i32": (lambda a, b: s(a) >> (b & 31), lambda r, a, b: r != 0),
    "s_bfe_u32": (lambda a, b: field(a, b & 31, b >> 16 & 127), lambda r, a, b: r != 0),
    "s_bfm_b32": (lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), None),
    "s_pack_ll_b32_b16": (lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": (lambda a, b: a & 0xFFFF | b >> 16 << 16, None),
    "s_pack_hh_b32_b16": (lambda a, b: a >> 16 | b >> 16 << 16, None),
    "s_lshl2_add_u32": (lambda a, b: (a << 2) + b, lambda r, a, b: (a << 2) + b > U32),
    "s_lshl3_add_u32": (lambda a, b: (a << 3) + b, lambda r, a, b: (a << 3) + b > U32),
    "s_absdiff_i32": (lambda a, b: abs(s(a - b)), lambda r, a, b: r != 0),
    "s_mov_b32": (lambda a: a, None),
    "s_not_b32": (lambda a: ~a, lambda r, a: r != 0),
    "s_brev_b32": (lambda a: int(f"{a:032b}"[::-1], 2), None),
    "s_bcnt1_i32_b32": (lambda a: a.bit_count(), lambda r, a: r != 0),
    "s_ff1_i32_b32": (lambda a: (a & -a).bit_length() - 1 if a else U32, None),
    "s_flbit_i32_b32": (lambda a: 32 - a.bit_length() if a else U32, None),
    "s_sext_i32_i8": (lambda a: s(a, 8), None),
    "s_sext_i32_i16": (lambda a: s(a, 16), None),
    "s_abs_i32": (lambda a: abs(s(a)), lambda r, a: r != 0),
}


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(name: str) -> None:
    function, condition = SCALAR[name]
    count = function.__code__.co_argcount
    for lane in range(0, 64, 2):
        values = [int(integers(i)[lane]) for i in range(count)]
        if name == "s_bfe_u32":
            values[1] = values[1] & 0x1F | (values[1] >> 8 & 31) << 16
        bench = Bench([f"{name} s9, {', '.join(f's{4 + i}' for i in range(count))}", "s_cselect_b32 s10, 1, 0"])
        bench.set(scalar={4 + i: value for i, value in enumerate(values)}).run()
        wanted = function(*values) & U32
        assert bench.scalar(9) == wanted, (name, values)
        if condition:
            assert bench.scalar(10) == int(condition(wanted, *values)), (name, values)


@pytest.mark.parametrize("word", ["eq", "lg", "gt", "ge", "lt", "le"])
@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_scalar_compare(kind: str, word: str) -> None:
    function = COMPARE["ne" if word == "lg" else word]
    for a, b in ((1, 2), (2, 2), (U32, 1), (1 << 31, (1 << 31) - 1)):
        bench = Bench([f"s_cmp_{word}_{kind} s4, s5", "s_cselect_b32 s6, 1, 0"]).set(scalar={4: a, 5: b}).run()
        wanted = function(s(a), s(b)) if kind == "i32" else function(a, b)
        assert bench.scalar(6) == wanted
    bench = Bench([f"s_cmpk_{word}_{kind} s4, 0xff00", "s_cselect_b32 s6, 1, 0"]).set(scalar={4: 0xFFFFFF00}).run()
    assert bench.scalar(6) == (function(-256, -256) if kind == "i32" else function(0xFFFFFF00, 0xFF00))


def test_scalar_wide() -> None:
    a, b = 0xF0F0F0F012345678, 0x0FF00FF0AAAA5555
    lines = [
        "s_and_b64 s[8:9], s[4:5], s[6:7]", "s_andn2_b64 s[10:11], s[4:5], s[6:7]", "s_lshl_b64 s[12:13], s[4:5], 36",
        "s_ashr_i64 s[14:15], s[4:5], 8", "s_not_b64 s[16:17], s[4:5]", "s_bfe_u64 s[18:19], s[4:5], 0x240010",
        "s_movk_i32 s20, 0x8000", "s_add_u32 s21, s4, s6", "s_addc_u32 s22, s5, s7", "s_sub_u32 s23, s6, s4",
        "s_subb_u32 s24, s7, s5", "s_bcnt1_i32_b64 s25, s[4:5]", "s_ff1_i32_b64 s26, s[4:5]", "s_mov_b64 s[28:29], -2",
    ]  # fmt: skip
    bench = Bench(lines).set(scalar={4: a & U32, 5: a >> 32, 6: b & U32, 7: b >> 32}).run()
    assert bench.scalar64(8) == a & b and bench.scalar64(10) == a & ~b & U64
    assert bench.scalar64(12) == a << 36 & U64 and bench.scalar64(14) == s(a, 64) >> 8 & U64
    assert bench.scalar64(16) == ~a & U64 and bench.scalar64(18) == field(a, 16, 36)
    assert bench.scalar(20) == 0xFFFF8000
    assert bench.scalar(21) | bench.scalar(22) << 32 == a + b & U64
    assert bench.scalar(23) | bench.scalar(24) << 32 == b - a & U64
    assert bench.scalar(25) == a.bit_count() and bench.scalar(26) == 3 and bench.scalar64(28) == U64 - 1


def test_saving_exec() -> None:
    lines = ["s_and_saveexec_b64 s[8:9], s[4:5]", "v_mov_b32_e32 v1, 5", "s_mov_b64 exec, s[8:9]",
             "s_andn2_saveexec_b64 s[10:11], s[4:5]", "s_cselect_b32 s12, 1, 0"]  # fmt: skip
    bench = Bench(lines).set({1: np.zeros(64)}, {4: 0xFF, 5: 0}).mask(0xFFFF).run()
    assert bench.scalar64(8) == 0xFFFF and bench.scalar64(10) == 0xFFFF and bench.scalar64(126) == 0
    assert bench.scalar(12) == 0 and list(bench.words(1)) == [5] * 8 + [0] * 56


@pytest.mark.parametrize("name", ["v_add_u32", "v_sub_u32", "v_subrev_u32", "v_add_i32", "v_sub_i32", "v_sub_u16"])
def test_clamped(name: str) -> None:
    width, signed = int(name[-2:]), name[-3] == "i"
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    a, b = integers(1), integers(2)
    bench = Bench(f"{name}_e64 v9, v0, v1 clamp").set({0: a, 1: b}).run()
    for lane in range(64):
        x, y = (s(int(each[lane])) if signed else int(each[lane]) & ((1 << width) - 1) for each in (a, b))
        exact = x + y if "add" in name else y - x if "rev" in name else x - y
        assert int(bench.words(9)[lane]) == min(max(exact, low), high) & U32
