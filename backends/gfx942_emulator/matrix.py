"""Matrix instructions (MFMA): where each lane's registers lie in A, B and D, and the product.

A lane holds consecutive elements along k of one row of A (or column of B). D is spread over registers in groups of
four rows, in float64 in single rows. Products of narrow floats are summed in float64 and rounded once, those of
float32 and float64 are fused one after another along k: how the hardware rounds inside is not documented.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from portkern.backends.gfx942_emulator.numbers import (
    BF8,
    F16,
    F32,
    F64,
    FP8,
    I32,
    U8,
    U16,
    U32,
    U64,
    Array,
    fma32,
    fma64,
    from_bf16,
    from_fp8,
    xf32,
)
from portkern.backends.gfx942_emulator.operands import Decoder, Operand, constant
from portkern.backends.gfx942_emulator.state import LANES, Waves
from portkern.backends.gfx942_emulator.text import Instruction
from portkern.errors import UnmodelledInstruction

_NAME = re.compile(r"v_mfma_(f32|f64|i32)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w+?)(_1k)?$")


def _bytes(words: Array) -> Array:
    return np.ascontiguousarray(words).view(U8)


# Element type: bits, and how [.., registers] of u32 become [.., elements] of numbers.
ELEMENTS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "f16": (16, lambda words: words.view(F16).astype(F64)),
    "bf16": (16, lambda words: from_bf16(words.view(U16)).astype(F64)),
    "xf32": (32, lambda words: xf32(words.view(F32)).astype(F64)),
    "f32": (32, lambda words: words.view(F32)),
    "f64": (64, lambda words: words.view(F64)),
    "i8": (8, lambda words: words.view(np.int8).astype(I32)),
    "fp8": (8, lambda words: from_fp8(words.view(U8), FP8).astype(F64)),
    "bf8": (8, lambda words: from_fp8(words.view(U8), BF8).astype(F64)),
}


@dataclass(frozen=True)
class Shape:
    """``rows`` x ``columns`` x ``depth`` in each of ``blocks`` independent products."""

    rows: int
    columns: int
    depth: int
    blocks: int
    result: str
    left: str
    right: str

    @property
    def per_lane(self) -> int:
        """Elements of A that one lane holds."""
        return self.rows * self.depth * self.blocks // LANES

    @property
    def results(self) -> int:
        """Elements of D that one lane holds."""
        return self.rows * self.columns * self.blocks // LANES


def shape_of(name: str) -> Shape | None:
    """The shape in a mnemonic, None where it is no matrix instruction."""
    found = _NAME.match(name)
    if not found:
        return None
    rows, columns, depth = (int(found[i]) for i in (2, 3, 4))
    kinds = found[6].split("_") if found[6].count("8") == 2 else [found[6], found[6]]
    if any(kind not in ELEMENTS for kind in kinds):
        return None
    bits = ELEMENTS[kinds[0]][0]
    # Without a count of blocks, 64 lanes are filled by one product, or by as many as fit one register a lane.
    blocks = int(found[5] or 0) or max(1, LANES * max(32, bits) // bits // (rows * depth))
    if kinds[0] == "bf16" and rows * depth * blocks // LANES != 4:
        return None  # the older form, with two elements a lane
    return Shape(rows, columns, depth, blocks, found[1], kinds[0], kinds[1])


def decode(instruction: Instruction, decoder: Decoder) -> Callable[[Waves], None] | None:
    """The step of a matrix instruction; None for another. Raises UnmodelledInstruction for its rarer modifiers."""
    shape = shape_of(instruction.name.removesuffix("_e64"))
    if shape is None:
        return None
    modifiers = dict(instruction.modifiers)
    broadcast, which = int(modifiers.pop("cbsz", "0")), int(modifiers.pop("abid", "0"))
    if modifiers or (shape.result == "f64" and shape.rows != 16):
        raise UnmodelledInstruction(f"{instruction.name} with {', '.join(modifiers) or 'this shape'}")
    target, left, right, accumulator = (decoder.operand(text) for text in instruction.operands)
    read_c = _accumulator(shape, accumulator)

    def step(w: Waves) -> None:
        a, b = operands(shape, _registers(w, left, shape.left, shape), _registers(w, right, shape.right, shape))
        if broadcast:
            block = np.arange(shape.blocks)
            a = a[:, (block >> broadcast << broadcast) + which]
        store(shape, w, target.number, multiply(shape, a, b, read_c(w)))

    return step


def _registers(w: Waves, operand: Operand, kind: str, shape: Shape) -> Array:
    """The words of an operand, [n, 64, registers]; EXEC is not looked at."""
    count = shape.per_lane * ELEMENTS[kind][0] // 32
    registers = w.V[operand.number : operand.number + count, w.rows]
    return np.ascontiguousarray(np.moveaxis(registers, 0, 2))


def operands(shape: Shape, left: Array, right: Array) -> tuple[Array, Array]:
    """A [n, block, row, k] and B [n, block, k, column] of the words of all lanes, [n, 64, registers]."""
    found = []
    for words, kind, extent in ((left, shape.left, shape.rows), (right, shape.right, shape.columns)):
        values = ELEMENTS[kind][1](words)
        groups = LANES // extent // shape.blocks
        values = values.reshape(len(values), shape.blocks, groups, extent, shape.per_lane)
        found.append(values.transpose(0, 1, 3, 2, 4).reshape(len(values), shape.blocks, extent, shape.depth))
    return found[0], found[1].swapaxes(2, 3)


def multiply(shape: Shape, a: Array, b: Array, c: Array) -> Array:
    """A B + C, each [n, block, .., ..], in the dtype of the result."""
    if shape.result == "i32":
        return (a @ b + c).astype(I32)
    if shape.left in ("f32", "f64"):
        fused = fma32 if shape.left == "f32" else fma64
        total = c
        for k in range(shape.depth):
            total = fused(a[..., k, None], b[:, :, k, None, :], total)
        return total
    return (a @ b + c).astype(F32)


def _accumulator(shape: Shape, operand: Operand) -> Callable[[Waves], Array]:
    """Reads C as [n, block, row, column]."""
    dtype = {"f32": F32, "f64": F64, "i32": I32}[shape.result]
    if operand.file == "c":
        value = constant(operand.value, shape.result).astype(dtype)
        return lambda w: np.broadcast_to(value, (w.count, shape.blocks, shape.rows, shape.columns))
    wide = 2 if shape.result == "f64" else 1

    def read(w: Waves) -> Array:
        registers = w.V[operand.number : operand.number + shape.results * wide, w.rows]
        if wide == 2:
            pairs = np.ascontiguousarray(np.moveaxis(registers.reshape(-1, 2, w.count, LANES), 1, 3))
            return gather(shape, pairs.view(F64)[..., 0])
        return gather(shape, registers.view(dtype))

    return read


def gather(shape: Shape, registers: Array) -> Array:
    """D or C as [n, block, row, column] from [register, n, 64]."""
    count = registers.shape[1]
    if shape.rows == 4:  # each lane has a column of its block
        parts = registers.reshape(4, count, shape.blocks, 4)
        return parts.transpose(1, 2, 0, 3)
    if shape.result == "f64":  # row = 4 * register + lane / 16
        parts = registers.reshape(4, count, 4, 16)
        return parts.transpose(1, 0, 2, 3).reshape(count, 1, 16, 16)
    # Rows in fours: row = 4 * (lane / columns) + register % 4, and again every 4 * 64 / columns rows.
    high = shape.rows * shape.columns // (4 * LANES)
    parts = registers.reshape(shape.blocks, high, 4, count, LANES // shape.columns, shape.columns)
    return parts.transpose(3, 0, 1, 4, 2, 5).reshape(count, shape.blocks, shape.rows, shape.columns)


def scatter(shape: Shape, values: Array) -> Array:
    """[register, n, 64] from D as [n, block, row, column]."""
    count = len(values)
    if shape.rows == 4:
        return values.transpose(2, 0, 1, 3).reshape(4, count, LANES)
    if shape.result == "f64":
        return values.reshape(count, 4, 4, 16).transpose(1, 0, 2, 3).reshape(4, count, LANES)
    high = shape.rows * shape.columns // (4 * LANES)
    parts = values.reshape(count, shape.blocks, high, LANES // shape.columns, 4, shape.columns)
    return parts.transpose(1, 2, 4, 0, 3, 5).reshape(-1, count, LANES)


def store(shape: Shape, w: Waves, register: int, values: Array) -> None:
    """Write D to its registers, in all lanes."""
    if w.machine.registers.written is not None:
        w.machine.registers.written[
            register : register + shape.results * (2 if shape.result == "f64" else 1), w.rows
        ] = True
    registers = np.ascontiguousarray(scatter(shape, values))
    if shape.result == "f64":
        pairs = registers.view(U64)
        low, high = (pairs & U64(0xFFFFFFFF)).astype(U32), (pairs >> U64(32)).astype(U32)
        w.V[register : register + 8 : 2, w.rows] = low
        w.V[register + 1 : register + 8 : 2, w.rows] = high
        return
    w.V[register : register + shape.results, w.rows] = registers.view(U32)
