"""Packed operands of matrix products: copies that lie well, made by a launch before the product's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from portkern.config import Blocks
from portkern.gemm import PACKS, packed_layout
from portkern.layout import VECTOR_BYTES
from portkern.plan import Argument, In, Scratch
from portkern.product import Product
from portkern.record import FrozenMap

DIMS = {"a": "mk", "b": "kn"}  # of a matrix, rows first
_SPAN = 2**31 - 1  # the last offset inside a tile that 32 bits hold


@dataclass(frozen=True)
class Copy:
    """The copy of one operand, all of its matrices: those that a batch dim of stride 0 repeats are copied once."""

    buffer: Scratch
    numel: int
    strides: tuple[int, ...]  # as Product gives those of an operand
    counts: tuple[int, ...]  # matrices along each batch and summed dim
    rows: int
    columns: int  # which lie one after another in the copy
    pitch: int  # from one row of the copy to the next: whole 16 bytes, filled with zeros
    source: tuple[int, ...]  # strides of the operand along those dims, rows and columns
    unit: int  # what all of these but a 1 are multiples of
    vector: int  # elements in 16 bytes

    @staticmethod
    def of(product: Product, name: str, value: int, position: int, itemsize: int) -> Copy:
        """That of operand ``name`` which ``value`` of its parameter asks for, in scratch buffer ``position``."""
        layout = product.layouts[name]
        inner = DIMS[name].index(packed_layout(name, value)[0])
        strides: tuple[int, ...] = getattr(product, name)
        sizes = [getattr(product, dim) for dim in DIMS[name]]
        vector = VECTOR_BYTES // itemsize
        pitch = -(-sizes[inner] // vector) * vector
        counts = [
            1 if stride == 0 else size for size, stride in zip((*product.batch, *product.r), strides[:-2], strict=True)
        ]
        step, steps = sizes[1 - inner] * pitch, [0] * len(counts)
        for axis in reversed(range(len(counts))):
            if counts[axis] != 1:
                steps[axis], step = step, step * counts[axis]
        matrix = (pitch, 1) if inner == 1 else (1, pitch)
        return Copy(
            buffer=Scratch(position),
            numel=step,
            strides=(*steps, *matrix),
            counts=tuple(counts),
            rows=sizes[1 - inner],
            columns=sizes[inner],
            pitch=pitch,
            source=(*strides[:-2], strides[-2:][1 - inner], strides[-2:][inner]),
            unit=vector if layout.endswith("16") else 1,
            vector=vector,
        )

    def launched(self, operand: In, block: int) -> tuple[int, tuple[Argument, ...], dict[str, Any]]:
        """The grid, the arguments and the constexprs of the kernel ``pack`` that copies ``operand``."""
        far, near = self.source[-2:]
        matrices, tiles = 1, -(-self.rows // block) * -(-self.columns // block)
        for count in self.counts:
            matrices *= count
        return (
            matrices * tiles,
            (operand, self.buffer, self.rows, self.columns, *self.counts[1:], *self.source, self.pitch),
            {
                "BLOCK": block,
                "EVEN": self.rows % block == 0 and self.columns % block == 0,
                "WIDE": block * (max(abs(far), self.pitch) + abs(near)) > _SPAN,
                "UNIT_FAR": self.unit if near == 1 else 1,
                "UNIT_NEAR": self.unit if far == 1 else 1,
                "UNIT_PITCH": self.vector,
            },
        )


def packed_product(product: Product, blocks: Blocks, itemsize: int) -> tuple[Product, Mapping[str, Copy]]:
    """``product`` of its operands' copies, and these, which take the first scratch buffers."""
    asked = {name: blocks[pack] for name, pack in PACKS.items() if blocks[pack]}
    copies = {
        name: Copy.of(product, name, value, position, itemsize) for position, (name, value) in enumerate(asked.items())
    }
    if not copies:
        return product, copies
    layouts = {name: packed_layout(name, value) for name, value in asked.items()}
    strides = {name: copy.strides for name, copy in copies.items()}
    return replace(product, layouts=FrozenMap({**product.layouts, **layouts}), **strides), copies  # type: ignore[arg-type]
