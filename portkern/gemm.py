"""The kind ``gemm``: what matrix products share on the host side.

    C[b, m, n] = sum over (r, k) of A[b, r, m, k] B[b, r, k, n]        (see ``portkern.product``)

Variants, and the free parameters that each takes:

    tiles        one program computes one tile of C                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M
    persistent   PROGRAMS_PER_UNIT programs a unit walk the tiles  the same, PROGRAMS_PER_UNIT,
                 and read by tensor descriptors                    SLICES, FLATTEN
    split_k      SPLITS programs share the sum of a tile; their    as tiles, or with PROGRAMS_PER_UNIT
                 parts are added by a second launch                as persistent; SPLITS

Each variant takes PACK_A and PACK_B: a launch before copies the operand, with rows of whole 16 bytes,
and the product reads the copy, which lies along k (1) or across it (2: A along m, B along n).

A tile of one row, or of one column, is summed without the matrix instruction, which takes 16 of them at the least.

GROUP_M blocks of rows go through all columns together, so that tiles that run at once share what
they read. SLICES cuts a tile of C for its store, FLATTEN makes one loop of tiles and k.

A descriptor needs a base and strides that are multiples of 16 bytes, and one batch dim at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portkern.config import Blocks, Config
from portkern.errors import Infeasible
from portkern.layout import VECTOR_BYTES
from portkern.plan import Buffer
from portkern.problem import Problem, Work
from portkern.product import Product
from portkern.target import Device

KIND = "gemm"
VARIANTS = ("tiles", "persistent", "split_k")
LEAST_BLOCK = 16  # that a matrix instruction takes
MAX_GRID = 2**31 - 1  # programs of one launch
PACKS = {"a": "PACK_A", "b": "PACK_B"}
COPIES = {"a": {1: "k", 2: "m"}, "b": {1: "k", 2: "n"}}  # along which dim the copy lies
BLOCK_PACK = 64  # rows and columns of the tiles that are copied: 128 bytes of each line at the least, and few registers


def gemm_problem(op: str, out: Buffer, product: Product, **flags: Any) -> Problem:
    """The Problem of ``product``; ``out`` is its output, of the dtype of both operands.

    BATCH counts the products of one launch; BATCH_INNER, where there are two batch dims, the inner
    one; R a summed dim apart from K.
    """
    sizes = {"M": product.m, "N": product.n, "K": product.k, "BATCH": product.batches}
    if product.batch[1] != 1:
        sizes["BATCH_INNER"] = product.batch[1]
    if product.r != (1, 1):
        sizes["R"] = product.r[0] * product.r[1]
    dtype = str(out.dtype).removeprefix("torch.")
    return Problem(
        op=op,
        sizes=sizes,  # type: ignore[arg-type]
        dtypes={"a": dtype, "b": dtype, "c": dtype},  # type: ignore[arg-type]
        flags=flags,  # type: ignore[arg-type]
        layout=product.layouts,
    )


def gemm_work(problem: Problem) -> Work:
    """The Work of a product; the flag ``tf32`` of its problem permits rounding fp32 operands."""
    import torch

    sizes, (name, *_) = problem.sizes, problem.dtypes.values()
    dtype: torch.dtype = getattr(torch, name)
    m, n, k = sizes["M"], sizes["N"], sizes["K"] * sizes.get("R", 1)
    products = sizes["BATCH"]
    dot = "tf32" if problem.flags.get("tf32") else name
    return Work(
        kind=KIND,
        sizes=sizes,
        dtypes={**problem.dtypes, "dot": dot},  # type: ignore[arg-type]
        layout=problem.layout,
        live=dict.fromkeys(VARIANTS, dtype.itemsize / 4 if dtype.itemsize > 4 else 1.0),  # type: ignore[arg-type]
        reads=products * (m + n) * k * dtype.itemsize,
        writes=products * m * n * dtype.itemsize,
        flops=2 * products * m * n * k,
        variants=VARIANTS,
        element_bytes=dtype.itemsize,
        compute_bytes=max(4, dtype.itemsize),
    )


def fit_gemm(config: Config, work: Work, device: Device) -> Blocks:
    """The blocks of ``config``, no larger than the problem, and PROGRAMS (0: one a tile).

    Raises Infeasible with the limit that the config passes.
    """
    sizes, params = work.sizes, config.params
    found = {pack: params.get(pack, 0) for pack in PACKS.values()}
    seen = packed(work, params)
    for name in ("M", "N", "K"):
        block = params.get(f"BLOCK_{name}")
        if block is None:
            raise Infeasible(f"variant {config.variant!r} needs the parameter BLOCK_{name}")
        whole = 1 << max(sizes[name] - 1, 0).bit_length()
        found[f"BLOCK_{name}"] = 1 if block == 1 and name != "K" else max(LEAST_BLOCK, min(block, whole))
    found["SPLITS"] = _splits(config, sizes["K"], found["BLOCK_K"])
    parts = found["SPLITS"] * sizes["BATCH"]
    tiles = parts * math.prod(-(-sizes[name] // found[f"BLOCK_{name}"]) for name in ("M", "N"))
    if tiles > MAX_GRID:
        raise Infeasible(
            f"{tiles:,} tiles of {found['BLOCK_M']} x {found['BLOCK_N']} pass the {MAX_GRID:,} programs of a launch: "
            "take larger blocks, or split the batch over several calls"
        )
    found["GROUP_M"] = max(1, params.get("GROUP_M", 1))
    found["SLICES"], found["FLATTEN"], programs = 1, 0, 0
    if by_descriptors(config):
        reason = descriptor_obstacle(seen)
        if reason:
            raise Infeasible(f"[{config}] reads by tensor descriptors: {reason}: use tiles")
        found["SLICES"], found["FLATTEN"] = params.get("SLICES", 1), params.get("FLATTEN", 0)
        least = LEAST_BLOCK * found["SLICES"]
        if found["SLICES"] not in (1, 2) or found["BLOCK_N"] < least:
            raise Infeasible(f"SLICES is {found['SLICES']}: it must be 1 or 2, with BLOCK_N of {least} or more")
        programs = min(tiles, device.units * max(1, params.get("PROGRAMS_PER_UNIT", 1)))
    # Of the second launch of split_k: each lane loads 16 bytes of each part.
    found["BLOCK_SUM"] = config.num_warps * device.target.warp_size * VECTOR_BYTES // work.compute_bytes
    return Blocks({**found, "PROGRAMS": programs, "BLOCK_PACK": BLOCK_PACK})


def by_descriptors(config: Config) -> bool:
    """Whether the programs of ``config`` walk tiles and read by tensor descriptors."""
    return config.variant == "persistent" or config.variant == "split_k" and "PROGRAMS_PER_UNIT" in config.params


def copies(config: Config) -> bool:
    """Whether launches before the product's copy an operand."""
    return any(config.params.get(pack) for pack in PACKS.values())


def packed(work: Work, params: Mapping[str, int]) -> Work:
    """``work`` as the product reads it: with the layouts of the copies. Raises Infeasible."""
    copied = {name: packed_layout(name, params[pack]) for name, pack in PACKS.items() if params.get(pack)}
    return replace(work, layout={**work.layout, **copied}) if copied else work  # type: ignore[arg-type]


def packed_layout(name: str, value: int) -> str:
    """The layout of the copy of operand ``name`` that ``value`` of its parameter asks for. Raises Infeasible."""
    letter = COPIES[name].get(value)
    if letter is None:
        across = COPIES[name][2]
        raise Infeasible(
            f"{PACKS[name]} is {value!r}: it must be 0 (the operand as it lies), 1 (a copy along k) or 2 (a copy along "
            f"{across})"
        )
    return f"{letter}16"


def _splits(config: Config, k: int, block: int) -> int:
    """Parts of each sum: no more than there are blocks. Raises Infeasible."""
    if config.variant != "split_k":
        return 1
    splits = min(config.params.get("SPLITS", 1), -(-k // block))
    if splits < 2:
        raise Infeasible(
            f"split_k cuts a sum of {k} in blocks of {block} into {splits} parts: it needs SPLITS of 2 or more, and as "
            "many blocks; use tiles"
        )
    return splits


def descriptor_obstacle(work: Work) -> str | None:
    """Why no tensor descriptor can describe an operand of ``work``, or None."""
    for name in ("a", "b"):
        layout = work.layout[name]
        if layout == "s":
            return f"no dim of operand {name} is contiguous"
        if not layout.endswith("16"):
            return f"the base or a stride of operand {name} (layout {layout}) is no multiple of {VECTOR_BYTES} bytes"
    if "BATCH_INNER" in work.sizes:
        return "there are two batch dims that do not merge"
    return "a summed batch dim does not merge with k" if "R" in work.sizes else None
