"""Plans of matrix products: how each variant of ``portkern.gemm`` becomes launches.

The kernels of an op follow one calling convention. Positional: A, B, C (pointers for ``tiles``;
for ``persistent`` descriptors of A and B, and of C where C_BY_DESCRIPTOR), then sizes and strides
as their docstrings say. Constexprs: those of ``fit_gemm`` that the kernel takes, WIDE (an offset
inside a tile passes 32 bits), and by variant EVEN_MN, EVEN_K (no tile ends early), UNIT_* (what a
size or stride is a multiple of, 1 or as many elements as 16 bytes hold) and PAD_* (up to a multiple of
what the lines of a copy are read), or what the descriptors are like.

``split_k`` runs either of them with SPLITS matrices of the accumulator's dtype in the place of C, which
the kernel ``sum`` then adds up. Where an operand is packed, the kernel ``pack`` copies it before, and
the product is that of the copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from portkern.config import Blocks, Config
from portkern.gemm import PACKS, by_descriptors
from portkern.gemm_pack import DIMS, packed_product
from portkern.layout import VECTOR_BYTES
from portkern.plan import Argument, Buffer, Desc, In, Launch, Out, Plan, Scratch
from portkern.product import Product
from portkern.record import FrozenMap

ACCUMULATOR_BYTES = 4  # of an element at least
_SPAN = 2**31 - 1  # the last offset inside a tile that 32 bits hold


@dataclass(frozen=True)
class GemmKernels:
    """The kernels of one op, by variant."""

    tiles: Any
    persistent: Any
    sum: Any
    pack: Any


def gemm_plan(
    kernels: GemmKernels, config: Config, blocks: Blocks, product: Product, output: Buffer, **constexprs: Any
) -> Plan:
    """The plan of ``product``: the op's arguments 0 and 1 are its left and right operand.

    ``constexprs`` are the op's own. An ``output`` that is a sum of nothing says ``init=0`` itself.
    """
    if product.empty:
        return Plan((output,))
    build = _persistent if by_descriptors(config) else _tiles
    compute = torch.float64 if output.dtype == torch.float64 else torch.float32
    split, itemsize = config.variant == "split_k", output.dtype.itemsize
    read, copies = packed_product(product, blocks, itemsize)
    scratch = [Buffer.flat(copy.numel, output.dtype) for copy in copies.values()]
    parts = Scratch(len(scratch))
    if split:
        read = _parts(read, blocks, compute)
        scratch.append(Buffer.flat(product.batches * blocks["SPLITS"] * read.c[1], compute))
    launches: list[Launch] = []
    copied: dict[str, In] = {}
    for starts in product.offsets:  # one after the other, so that all have the same scratch
        a, b = (In(each, start) for each, start in zip((1, 0) if product.swapped else (0, 1), starts, strict=False))
        for name, operand in (("a", a), ("b", b)):
            if name in copies and copied.get(name) != operand:
                copied[name] = operand
                grid, args, given = copies[name].launched(operand, blocks["BLOCK_PACK"])
                launches.append(_launch(kernels.pack, grid, args, config, given))
        c = Out(0, starts[2])
        operands = (copies["a"].buffer if "a" in copies else a, copies["b"].buffer if "b" in copies else b)
        launches.append(build(kernels, config, blocks, read, (*operands, parts if split else c), itemsize, constexprs))
        if split:
            launches.append(_sum(kernels, config, blocks, product, read.c[1], parts, c))
    return Plan((output,), tuple(scratch), tuple(launches))


def _parts(product: Product, blocks: Blocks, compute: torch.dtype) -> Product:
    """``product`` with C replaced by one matrix for each part of each sum, of whole blocks of the second launch."""
    step = -(-product.m * product.n // blocks["BLOCK_SUM"]) * blocks["BLOCK_SUM"]
    vectors = "n16" if product.n * compute.itemsize % VECTOR_BYTES == 0 else "n"
    layouts = FrozenMap({**product.layouts, "c": vectors})
    return replace(product, c=(step, step, product.n, 1), layouts=layouts)


def _sum(
    kernels: GemmKernels, config: Config, blocks: Blocks, product: Product, part: int, parts: Scratch, out: Out
) -> Launch:
    """The launch that adds the ``parts``, ``part`` elements each."""
    size, block = product.m * product.n, blocks["BLOCK_SUM"]
    far, near = product.c[2:]
    return _launch(
        kernels.sum,
        product.batches * -(-size // block),
        (parts, out, size, product.n, product.batch[1], part, *product.c),
        config,
        {
            "DENSE": near == 1 and (product.m == 1 or far == product.n),
            "EVEN": size % block == 0,
            "WIDE": max(size + block, product.m * abs(far) + product.n * abs(near)) > _SPAN,
            "SPLITS": blocks["SPLITS"],
            "BLOCK": block,
        },
    )


def _tiles(
    kernels: GemmKernels, config: Config, blocks: Blocks, product: Product,
    operands: tuple[In | Scratch, In | Scratch, Out | Scratch], itemsize: int, constexprs: Mapping[str, Any],
) -> Launch:  # fmt: skip
    m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
    even_mn, even_k = product.m % m == 0 and product.n % n == 0, product.k % k == 0
    vector, layout = VECTOR_BYTES // itemsize, product.layouts
    sizes = (product.m, product.n, product.k, *product.r, product.batch[1])
    return _launch(
        kernels.tiles,
        blocks["SPLITS"] * product.batches * -(-product.m // m) * -(-product.n // n),
        (*operands, *sizes, *product.a, *product.b, *product.c),
        config,
        {
            **constexprs,
            **blocks,
            "WIDE": _wide(product, blocks),
            "EVEN_MN": even_mn,
            "EVEN_K": even_k,
            "UNIT_M": 1 if even_mn or product.m % vector else vector,
            "UNIT_N": 1 if even_mn or product.n % vector else vector,
            "UNIT_K": 1 if even_k or product.k % vector else vector,
            "UNIT_AM": vector if layout["a"] == "k16" else 1,
            "UNIT_AK": vector if layout["a"] == "m16" else 1,
            "UNIT_BK": vector if layout["b"] == "n16" else 1,
            "UNIT_BN": vector if layout["b"] == "k16" else 1,
            "UNIT_CM": VECTOR_BYTES // _stored(blocks, itemsize) if layout["c"] == "n16" else 1,
            **_pads(product, blocks, vector),
        },
    )


def _pads(product: Product, blocks: Blocks, vector: int) -> dict[str, int]:
    """Up to a multiple of what each operand is read along each of its dims: of ``vector`` along the lines of a copy,
    which end in zeros, so that no load of 16 bytes is masked in part."""
    return {
        f"PAD_{name}{dim}".upper(): vector if blocks[PACKS[name]] and product.layouts[name].startswith(dim) else 1
        for name, dims in DIMS.items()
        for dim in dims
    }


def _stored(blocks: Blocks, itemsize: int) -> int:
    """Bytes of an element that a program stores: of a part, those of the accumulator."""
    return itemsize if blocks["SPLITS"] == 1 else max(itemsize, ACCUMULATOR_BYTES)


def _wide(product: Product, blocks: Blocks) -> bool:
    """Whether an offset inside a tile, or a step along k, can pass 31 bits."""
    m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
    spans = (
        m * abs(product.a[-2]) + 2 * k * abs(product.a[-1]),
        2 * k * abs(product.b[-2]) + n * abs(product.b[-1]),
        m * abs(product.c[2]) + n * abs(product.c[3]),
    )
    return max(spans) > _SPAN


def _persistent(
    kernels: GemmKernels, config: Config, blocks: Blocks, product: Product,
    operands: tuple[In | Scratch, In | Scratch, Out | Scratch], itemsize: int, constexprs: Mapping[str, Any],
) -> Launch:  # fmt: skip
    m, n, k, batches = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"], product.batches
    a, b, c = operands
    batched = batches > 1
    a_desc, a_batched, a_turned = _descriptor(a, (product.m, product.k), product.a, (m, k), batches)
    b_desc, b_batched, b_turned = _descriptor(b, (product.k, product.n), product.b, (k, n), batches)
    steps = (product.c[0] * batched, product.c[2])
    # A tile of a part would wait in shared memory of its own: stored by pointers it takes that of the stages.
    # And the hardware stores whole 16 bytes, past the end of a row that is no multiple of them (Triton issue 11583).
    whole = blocks["SPLITS"] == 1 and product.c[3] == 1 and product.n * itemsize % VECTOR_BYTES == 0
    by_descriptor = whole and all(step * itemsize % VECTOR_BYTES == 0 for step in (*steps, c.offset))
    c_given: Argument = c
    if by_descriptor:
        block = (m, n // blocks["SLICES"])
        c_given = _descriptor(c, (product.m, product.n), product.c, block, batches)[0]
    return _launch(
        kernels.persistent,
        blocks["PROGRAMS"],
        (a_desc, b_desc, c_given, product.m, product.n, product.k, batches, product.c[0], product.c[2], product.c[3]),
        config,
        {
            **constexprs,
            **blocks,
            "A_BATCHED": a_batched,
            "B_BATCHED": b_batched,
            "C_BATCHED": batched,
            "A_TURNED": a_turned,
            "B_TURNED": b_turned,
            "C_BY_DESCRIPTOR": by_descriptor,
            "FLATTEN": bool(blocks["FLATTEN"]),
            "WIDE": not by_descriptor and _wide(product, blocks),
        },
    )


def _descriptor(
    buffer: In | Out | Scratch, sizes: tuple[int, int], strides: Sequence[int], block: tuple[int, int], batches: int
) -> tuple[Desc, bool, bool]:
    """The descriptor of one operand, whether it has a batch dim, and whether rows and columns are
    exchanged in it, since the rows are what is contiguous."""
    first, far, near = strides[0], strides[-2], strides[-1]
    shape, steps = sizes, (far, near)
    turned = near != 1
    if turned:
        shape, steps, block = shape[::-1], steps[::-1], block[::-1]
    batched = batches > 1 and first != 0
    if batched:
        return Desc(buffer, (batches, *shape), (first, *steps), (1, *block)), True, turned
    return Desc(buffer, shape, steps, block), False, turned


def _launch(
    kernel: Any, grid: int, args: tuple[Argument, ...], config: Config, constexprs: Mapping[str, Any]
) -> Launch:
    names = inspect.signature(kernel.fn).parameters
    return Launch(
        kernel=kernel,
        grid=(grid,),
        args=args,
        constexprs={name: value for name, value in constexprs.items() if name in names},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
