"""Operands: from their text to functions that read or write a type, made once when a kernel is decoded.

Types are named as the ISA manual names them: b32 u32 i32 f32, b64 u64 i64 f64, b16 u16 i16 f16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator.numbers import F16, F32, F64, I32, I64, U16, U32, U64, Array
from portkern.backends.gfx942_emulator.state import EXEC, M0, VCC, Waves
from portkern.errors import UnmodelledInstruction

Read = Callable[[Waves], Array]
Write = Callable[[Waves, Array], None]
I16 = np.int16
DTYPES: dict[str, Any] = {
    "b16": U16, "u16": U16, "i16": I16, "f16": F16,
    "b32": U32, "u32": U32, "i32": I32, "f32": F32,
    "b64": U64, "u64": U64, "i64": I64, "f64": F64,
}  # fmt: skip
NAMED = {
    "vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1, "m0": M0,
    "flat_scratch": 102, "flat_scratch_lo": 102, "flat_scratch_hi": 103, "xnack_mask": 104, "xnack_mask_lo": 104,
    "xnack_mask_hi": 105,
}  # fmt: skip
# Upper halves of the flat addresses that mean shared and private memory.
SHARED_APERTURE, PRIVATE_APERTURE = 0x10000, 0x20000
APERTURES = {"src_shared_base": SHARED_APERTURE << 32, "src_private_base": PRIVATE_APERTURE << 32}
_REGISTER = re.compile(r"([vsa])(\d+)|([vsa])\[(\d+)(?::(\d+))?\]")
_INVERSE_TAU = "0.15915494"


@dataclass(frozen=True)
class Operand:
    """What an operand names: registers of a file (``v``, ``s``) from ``number`` on, or a constant (file ``c``)."""

    file: str
    number: int = 0
    width: int = 1
    value: int | float = 0
    negate: bool = False
    absolute: bool = False
    extend: bool = False  # sext(): of a selected byte or word
    checked: bool = False  # reading what nothing wrote is an error


class Decoder:
    """Makes operands of one kernel: its accumulation registers lie after ``vgprs`` ordinary ones."""

    def __init__(self, vgprs: int, symbols: dict[str, int] | None = None, checked: bool = False) -> None:
        self.vgprs, self.checked = vgprs, checked
        self.symbols = symbols or {}

    def operand(self, text: str) -> Operand:
        """Raises UnmodelledInstruction for what is no register and no number."""
        negate = absolute = extend = False
        while True:
            if text.startswith("-") and not re.match(r"-[\d.]", text):
                text, negate = text[1:], not negate
            elif text.startswith("neg(") and text.endswith(")"):
                text, negate = text[4:-1], not negate
            elif text.startswith("|") and text.endswith("|"):
                text, absolute = text[1:-1], True
            elif text.startswith("abs(") and text.endswith(")"):
                text, absolute = text[4:-1], True
            elif text.startswith("sext(") and text.endswith(")"):
                text, extend = text[5:-1], True
            else:
                break
        found = _REGISTER.fullmatch(text)
        if found:
            file, first = found[1] or found[3], int(found[2] or found[4])
            width = int(found[5]) - first + 1 if found[5] else 1
            if file == "a":
                file, first = "v", first + self.vgprs
            return Operand(file, first, width, 0, negate, absolute, extend, self.checked)
        if text in NAMED:
            return Operand(
                "s", NAMED[text], 1 if text[-3:] in ("_lo", "_hi") or text == "m0" else 2, 0, negate, absolute
            )
        if text in ("scc", "src_scc"):
            return Operand("scc")
        value = APERTURES.get(text)
        return Operand("c", 0, 1, self._number(text) if value is None else value, negate, absolute)

    def _number(self, text: str) -> int | float:
        try:
            return int(text, 0)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            pass
        # Relative to the program counter, which reads as 0 here; the addend makes up for where it was read.
        found = re.fullmatch(r"([\w.$]+)@rel32@(lo|hi)(?:\+\d+)?", text)
        if found and found[1] in self.symbols:
            return self.symbols[found[1]] >> 32 if found[2] == "hi" else self.symbols[found[1]] & 0xFFFFFFFF
        raise UnmodelledInstruction(f"operand {text!r}")


def constant(value: int | float, kind: str) -> Array:
    """The constant as the operand type ``kind`` sees it, [1, 1]."""
    dtype = DTYPES[kind]
    bits = np.dtype(dtype).itemsize * 8
    if isinstance(value, float):
        exact = {16: F16, 32: F32, 64: F64}[bits](_inline(value, bits))
        return np.array([[exact]]).view(dtype)
    if kind == "f64" and not -16 <= value <= 64:
        return np.array([[(value & 0xFFFFFFFF) << 32]], U64).view(F64)  # a literal is the upper half
    return np.array([[value & ((1 << bits) - 1)]], {16: U16, 32: U32, 64: U64}[bits]).view(dtype)


def _inline(value: float, bits: int) -> float:
    if f"{value:.8f}" != _INVERSE_TAU:
        return value
    # 1 / (2 pi), as the hardware holds it in each width.
    return {16: float(F16(0.15915494309189535)), 32: float(F32(0.15915494309189535))}.get(bits, 0.15915494309189535)


def words(operand: Operand, offset: int = 0) -> Read:
    """Reads one 32-bit register, or a constant, as u32."""
    number = operand.number + offset
    if operand.file == "v":
        return (lambda w: w.vector(number)) if operand.checked else (lambda w: w.V[number, w.rows])
    if operand.file == "s":
        return lambda w: w.S[w.rows, number, None]
    if operand.file == "scc":
        return lambda w: w.scc[w.rows, None].astype(U32)
    value = constant(operand.value, "b32")
    return lambda w: value


def reader(operand: Operand, kind: str, transform: Callable[[Read], Read] | None = None, half: int = 0) -> Read:
    """Reads ``operand`` as ``kind``: [n, 64], [n, 1] or [1, 1].

    ``transform`` changes the 32-bit words first (lanes, bytes); ``half`` 1 takes the upper 16 bits.
    """
    dtype = DTYPES[kind]
    size = np.dtype(dtype).itemsize
    if operand.file == "c" and transform is None and not half:
        value = _modified(constant(operand.value, kind), operand, kind)
        return lambda w: value
    if size == 8:
        return _signed(_read64(operand, dtype, transform), operand, kind)
    read = words(operand)
    if transform:
        read = transform(read)
    if size == 4:
        return _signed(read if kind in ("b32", "u32") else lambda w: read(w).view(dtype), operand, kind)
    if half:
        return _signed(lambda w: (read(w) >> U32(16)).astype(U16).view(dtype), operand, kind)
    return _signed(lambda w: read(w).astype(U16).view(dtype), operand, kind)


def _read64(operand: Operand, dtype: Any, transform: Callable[[Read], Read] | None) -> Read:
    if operand.file == "s":
        number = operand.number >> 1
        return lambda w: w.S64[w.rows, number, None].view(dtype)
    low, high = words(operand), words(operand, 1)
    if transform:
        low, high = transform(low), transform(high)

    def read(w: Waves) -> Array:
        lower = low(w)
        both = np.empty((*lower.shape, 2), U32)
        both[..., 0] = lower
        both[..., 1] = high(w)
        return both.view(dtype)[..., 0]

    return read


def _signed(read: Read, operand: Operand, kind: str) -> Read:
    if not operand.negate and not operand.absolute:
        return read
    return lambda w: _modified(read(w), operand, kind)


def _modified(value: Array, operand: Operand, kind: str) -> Array:
    """|x| and -x, which change the sign bit alone."""
    if not operand.negate and not operand.absolute:
        return value
    size = value.dtype.itemsize
    unsigned = {2: U16, 4: U32, 8: U64}[size]
    top = unsigned(1 << (8 * size - 1))
    bits = value.view(unsigned)
    if operand.absolute:
        bits = bits & ~top
    if operand.negate:
        bits = bits ^ top
    return bits.view(value.dtype)


def bits32(value: Array) -> Array:
    """A result of 16 or 32 bits as u32, the upper half zero."""
    if value.dtype.itemsize == 4:
        return value.view(U32)
    return value.view(U16).astype(U32)


def halves(value: Array) -> tuple[Array, Array]:
    """A 64-bit result as two u32."""
    pair = np.ascontiguousarray(value).view(U32).reshape(*value.shape, 2)
    return pair[..., 0], pair[..., 1]


def writer(operand: Operand, kind: str, upper: bool = False, keep: bool = False) -> Write:
    """Writes a vector result of ``kind``. 16-bit ones clear the other half, keep it (``keep``), or are the ``upper``.

    Raises UnmodelledInstruction where the operand is no vector register.
    """
    number, size = operand.number, np.dtype(DTYPES[kind]).itemsize
    if operand.file != "v":
        raise UnmodelledInstruction(f"a vector result in file {operand.file}")
    if size == 8:

        def write64(w: Waves, value: Array) -> None:
            low, high = halves(value)
            w.put(number, low)
            w.put(number + 1, high)

        return write64
    if size == 4:
        return lambda w, value: w.put(number, bits32(value))
    if upper:
        return lambda w, value: w.put(number, (w.V[number, w.rows] & U32(0xFFFF)) | (bits32(value) << U32(16)))
    if keep:
        return lambda w, value: w.put(number, (w.V[number, w.rows] & U32(0xFFFF0000)) | bits32(value))
    return lambda w, value: w.put(number, bits32(value))


def scalar_reader(operand: Operand, kind: str) -> Read:
    """Reads a scalar operand as ``kind``, [n] or [1]. Raises UnmodelledInstruction for a vector register."""
    dtype, number = DTYPES[kind], operand.number
    if operand.file == "c":
        value = _modified(constant(operand.value, kind), operand, kind)[0]
        return lambda w: value
    if operand.file == "scc":
        return lambda w: w.scc[w.rows].astype(dtype)
    if operand.file != "s":
        raise UnmodelledInstruction("a vector register where a scalar one belongs")
    if np.dtype(dtype).itemsize == 8:
        pair = number >> 1
        return lambda w: w.S64[w.rows, pair].view(dtype)
    return lambda w: w.S[w.rows, number].view(dtype)


def scalar_writer(operand: Operand, kind: str) -> Write:
    """Writes a scalar result of ``kind`` ([n], or what broadcasts).

    Raises UnmodelledInstruction where the operand is no scalar register.
    """
    if operand.file != "s":
        raise UnmodelledInstruction(f"a scalar result in file {operand.file}")
    number = operand.number
    if np.dtype(DTYPES[kind]).itemsize == 8:
        return lambda w, value: w.put_pair(number, value.view(U64))
    return lambda w, value: w.put_scalar(number, value.view(U32))


def mask_writer(operand: Operand) -> Callable[[Waves, Array], None]:
    """Writes booleans [n, 64] as a lane mask in a pair of scalar registers; disabled lanes give 0."""
    from portkern.backends.gfx942_emulator.state import pack

    number = operand.number

    def write(w: Waves, lanes: Array) -> None:
        lanes = np.broadcast_to(lanes, (w.count, 64))
        w.put_pair(number, pack(lanes if w.mask is None else lanes & w.mask))

    return write
