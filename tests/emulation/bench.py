"""A test bench for single instructions: lines of assembly, registers before, registers after; and exact rounding."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import text
from portkern.backends.gfx942_emulator.control import BARRIER, END
from portkern.backends.gfx942_emulator.launch import Checks, Launch, ready
from portkern.backends.gfx942_emulator.machine import Machine
from portkern.backends.gfx942_emulator.memory import AddressSpace
from portkern.backends.gfx942_emulator.state import Waves

HEAD = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
bench:
"""
TAIL = """\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel bench
\t\t.amdhsa_next_free_vgpr 128
\t\t.amdhsa_accum_offset 96
\t\t.amdhsa_private_segment_fixed_size 64
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
"""
LANES = 64


class Bench:
    """One workgroup that runs ``lines``. Memory: ``space`` may be given regions before ``run``."""

    def __init__(self, lines: str | Sequence[str], warps: int = 1, shared: int = 1024, groups: int = 1) -> None:
        lines = [lines] if isinstance(lines, str) else list(lines)
        body = "".join(line if line.endswith(":") else f"\t{line}" for line in (f"{each}\n" for each in lines))
        body = "".join(f"{each}\n" if each.endswith(":") else f"\t{each}\n" for each in lines)
        self.kernel = ready(text.parse(HEAD + body + TAIL), shared, warps)
        self.space = AddressSpace()
        kernarg = self.space.add("the argument block", np.zeros(64, np.uint8))
        self.launch = Launch(self.kernel, (groups, 1, 1), self.space, kernarg, Checks(), False, 100_000)
        with np.errstate(all="ignore"):
            self.machine = Machine(self.launch, 0, groups, None)
        self.V, self.S = self.machine.registers.V, self.machine.registers.S

    def set(self, vector: Mapping[int, Any] | None = None, scalar: Mapping[int, int] | None = None) -> Bench:
        """Registers: 64 values (bits, or floats of numpy) each, and 32-bit numbers; the same in every wave."""
        for number, values in (vector or {}).items():
            array = np.asarray(values)
            self.V[number] = array.view(np.uint32) if array.dtype.itemsize == 4 else array.astype(np.uint32)
        for number, value in (scalar or {}).items():
            self.S[:, number] = value & 0xFFFFFFFF
        return self

    def pair(self, number: int, values: Any) -> Bench:
        """A pair of vector registers from 64 numbers of 8 bytes."""
        bits = np.ascontiguousarray(np.asarray(values)).view(np.uint64)
        self.V[number], self.V[number + 1] = bits & 0xFFFFFFFF, bits >> 32
        return self

    def mask(self, bits: int) -> Bench:
        """EXEC."""
        self.S[:, 126], self.S[:, 127] = bits & 0xFFFFFFFF, bits >> 32
        for each in self.machine.runnable:
            each.refresh()
        return self

    def run(self) -> Bench:
        """Run to the end."""
        with np.errstate(all="ignore"):
            assert self.machine.run(100_000)
        return self

    def words(self, number: int, wave: int = 0) -> np.ndarray:
        return self.V[number, wave].copy()

    def longs(self, number: int, wave: int = 0) -> np.ndarray:
        return self.V[number, wave].astype(np.uint64) | (self.V[number + 1, wave].astype(np.uint64) << np.uint64(32))

    def scalar(self, number: int, wave: int = 0) -> int:
        return int(self.S[wave, number])

    def scalar64(self, number: int, wave: int = 0) -> int:
        return self.scalar(number, wave) | self.scalar(number + 1, wave) << 32


class Form:
    """A binary floating format by its precision and exponents: exact rounding, without numpy."""

    def __init__(self, precision: int, smallest: int, largest: float, width: int) -> None:
        self.precision, self.smallest, self.largest, self.width = precision, smallest, largest, width

    def round(self, exact: Fraction) -> float:
        """To nearest, ties to even, subnormals kept, infinity beyond the largest."""
        if exact == 0:
            return 0.0
        exponent = _exponent(abs(exact))
        unit = Fraction(2) ** (max(exponent, self.smallest) - self.precision + 1)
        steps = exact / unit
        whole = math.floor(steps)
        rest = steps - whole
        if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
            whole += 1
        value = whole * unit
        if abs(value) > Fraction(self.largest):
            return math.inf if value > 0 else -math.inf
        return float(value) if value else 0.0 if exact > 0 else -0.0


def _exponent(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


HALF = Form(11, -14, 65504.0, 16)
SINGLE = Form(24, -126, (2 - 2.0**-23) * 2.0**127, 32)
DOUBLE = Form(53, -1022, 1.7976931348623157e308, 64)
FORMS = {"f16": HALF, "f32": SINGLE, "f64": DOUBLE}
CODES = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}


def to_float(bits: int, kind: str) -> float:
    value, raw = CODES[kind]
    found: float = struct.unpack(value, struct.pack(raw, bits))[0]
    return found


def to_bits(x: float, kind: str) -> int:
    value, raw = CODES[kind]
    found: int = struct.unpack(raw, struct.pack(value, x))[0]
    return found


def same(got: float, wanted: float) -> bool:
    """Equal with signs of zero; any NaN equals any other."""
    if math.isnan(wanted):
        return math.isnan(got)
    return got == wanted and math.copysign(1, got) == math.copysign(1, wanted)


def interesting(kind: str, seed: int = 0) -> np.ndarray:
    """64 bit patterns: zeros, subnormals, the smallest and largest, infinities, a NaN, ones, and random ones."""
    rng = np.random.default_rng(seed)
    width, form = FORMS[kind].width, FORMS[kind]
    tiny = math.ldexp(1.0, form.smallest)
    values = [0.0, -0.0, tiny, -tiny, tiny / 4, -tiny / 2, form.largest, -form.largest, math.inf, -math.inf, math.nan,
              1.0, -1.0, 1.5, 0.1, -3.0]  # fmt: skip
    bits = [to_bits(each, kind) for each in values]
    bits += [int(each) for each in rng.integers(0, 2**width, 24, dtype=np.uint64)]
    while len(bits) < LANES:
        bits.append(to_bits(float(FORMS[kind].round(Fraction(float(rng.normal() * 4)))), kind))
    order = rng.permutation(LANES)
    return np.array(bits, np.uint64)[order]


def integers(seed: int = 0, width: int = 32) -> np.ndarray:
    """64 whole numbers: edges and random ones."""
    rng = np.random.default_rng(seed)
    edges = [0, 1, 2, 31, 32, 63, 0x7FFF, 0x8000, 0xFFFF, (1 << (width - 1)) - 1, 1 << (width - 1), (1 << width) - 1]
    bits = edges + [int(each) for each in rng.integers(0, 2**width, LANES - len(edges), dtype=np.uint64)]
    return np.array(bits, np.uint64)[rng.permutation(LANES)]


__all__ = ["BARRIER", "END", "Bench", "Waves"]
