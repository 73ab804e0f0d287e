"""Matrix products of packed operands compiled for each target: no spills, and loads of 16 bytes whatever the sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from portkern.gemm import copies
from tests.crosscompile.test_gemm import ARCHS, ORDERS, compiled, product

LOADS = r"\b(cp\.async\.c[ag]\.[^;]*|ld\.global[^;]*|(?:global|buffer)_load_\w+)"  # with the bytes of each
OF_16_BYTES = r", (?:0x10|16)\b|\.v4\.[bf]32|\.v2\.[bf]64|_dwordx4$|_b128$"
PRODUCTS = (("bfloat16", False), ("float32", False), ("float32", True), ("float64", False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(2048, 2048, 2048), (1028, 1004, 1012)])
def test_packed_operands_spill_nothing(sizes: tuple[int, ...], order: str) -> None:
    """Each operand in the order in which the dot reads it well; tf32 by the instruction that takes no other order."""
    for arch in ("sm80", "sm90"):
        (a, b, _) = product(sizes, "float32", order)
        each = compiled(arch, (a, b, False), what=order)
        assert each.config.params.get("PACK_B", 0) == (2 if order[1] == "t" else 0), each.what
        assert "PACK_A" not in each.config.params, each.what
        assert each.needs.spills == 0 and each.needs.shared_bytes <= each.rule, each.what
        for value in (1, 2):
            both = each.config.replace(params={"PACK_A": value, "PACK_B": 2})
            assert compiled(arch, (a, b, False), both).needs.spills == 0
    each = compiled("sm90", (a, b, True), what=order)
    packing = (each.config.params.get("PACK_A", 0), each.config.params.get("PACK_B", 0))
    assert packing == (int(order[0] == "t"), int(order[1] == "n")), each.what
    assert each.needs.matrix_instruction.startswith("wgmma") and each.needs.spills == 0, each.what


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_loose_operands_are_packed_and_read_16_bytes_at_a_time(arch: str, kind: tuple[str, bool]) -> None:
    """Results that cannot be stored so among them, which takes more registers."""
    dtype, tf32 = kind
    for sizes, order in (((4095, 4095, 4095), "nn"), ((8191, 1023, 4097), "tt"), ((2047, 4096, 4103), "nt")):
        a, b, _ = product(sizes, dtype, order)
        kernels: list[Any] = []
        each = compiled(arch, (a, b, tf32), what=order, kernels=kernels)
        packed = (arch, dtype) != ("sm90", "float64")  # which took less time as they lay
        assert copies(each.config) == packed, each.what
        assert each.needs.spills == 0 and each.needs.shared_bytes <= each.rule, each.what
        if arch == "sm90" and (dtype == "bfloat16" or tf32):
            assert "PROGRAMS_PER_UNIT" in each.config.params, each.what
            assert each.needs.matrix_instruction.startswith("wgmma"), each.what
            continue
        if not packed:
            continue
        (text,) = (
            kernel.asm["amdgcn" if arch == "gfx942" else "ptx"]
            for kernel in kernels
            if kernel.metadata.name == "_matmul_tiles_kernel"
        )
        loads = re.findall(LOADS, text)
        assert loads and all(re.search(OF_16_BYTES, load) for load in loads), (each.what, loads)
