"""What the compiler says of a kernel, read from real binaries of Triton for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from portkern.backends import _nvidia
from portkern.errors import CompileFailed, MissingTriton
from portkern.plugins import backend_for, parse_arch, plugin_manager

PM = plugin_manager(entry_points=False)
ARCHS = ("sm80", "sm90", "gfx942")


@triton.jit
def _rows(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + tl.program_id(0) * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    exp_x = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + tl.program_id(0) * N + offs_n, exp_x / tl.sum(exp_x, axis=0), mask=offs_n < N)


@triton.jit
def _square(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.dot(x, x))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(arch: str, kernel: Any, num_warps: int, **constexprs: int) -> Any:
    rules = backend_for(PM, parse_arch(PM, arch))
    signature = {"x_ptr": "*bf16", "y_ptr": "*fp32"}
    if "N" in kernel.arg_names:
        signature["N"] = "i32"
    source = ASTSource(
        kernel,
        signature={**signature, **dict.fromkeys(constexprs, "constexpr")},
        constexprs=constexprs,
        attrs={(position,): [["tt.divisibility", 16]] for position in range(len(signature))},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(*rules.compile_target()), options=options)


def resources(arch: str, kernel: Any, num_warps: int, **constexprs: int) -> Any:
    rules = backend_for(PM, parse_arch(PM, arch))
    return rules.resources(rules.reference_device(), compiled(arch, kernel, num_warps, **constexprs), num_warps)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_kernel(arch: str) -> None:
    needs = resources(arch, _rows, 4, BLOCK_N=4096)
    assert 16 <= needs.registers <= 100
    assert needs.spills == 0
    assert 0 < needs.shared_bytes <= 8192
    slots = 64 if arch.startswith("sm") else 32
    assert needs.programs_per_unit >= 4
    assert needs.occupancy == needs.programs_per_unit * 4 / slots
    assert needs.matrix_instruction == ""


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_a_row_that_does_not_fit_spills(arch: str) -> None:
    assert resources(arch, _rows, 4, BLOCK_N=32_768).spills > 1000


def test_a_row_that_fills_the_accumulators() -> None:
    needs = resources("gfx942", _rows, 4, BLOCK_N=65_536)
    assert needs.registers > 256
    assert needs.programs_per_unit == 1


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [("sm80", "mma m16n8k16"), ("sm89", "mma m16n8k16"), ("sm90", "wgmma.mma_async m64n"), ("gfx942", "v_mfma_f32_")],
)
def test_the_matrix_instruction(arch: str, instruction: str) -> None:
    needs = resources(arch, _square, 4, BLOCK=64)
    assert needs.matrix_instruction.startswith(instruction)
    assert needs.shared_bytes >= 64 * 64 * 2


@pytest.mark.parametrize(
    ("text", "registers", "spills"),
    [
        (".vgpr_count: 48\n.vgpr_spill_count: 0\n.private_segment_fixed_size: 0", 48, 0),
        (".vgpr_count: 512\n.vgpr_spill_count: 44\n.private_segment_fixed_size: 180", 512, 180),
        (".vgpr_count: 256\n.vgpr_spill_count: 2\n.private_segment_fixed_size: 0", 256, 8),
    ],
)
def test_spills_of_the_other_vendor(text: str, registers: int, spills: int) -> None:
    rules = backend_for(PM, parse_arch(PM, "gfx942"))
    binary = SimpleNamespace(asm={"amdgcn": text}, metadata=SimpleNamespace(shared=0))
    needs = rules.resources(rules.reference_device(), binary, 4)
    assert (needs.registers, needs.spills) == (registers, spills)


def test_assembly_that_we_cannot_read_is_an_error() -> None:
    rules = backend_for(PM, parse_arch(PM, "gfx942"))
    binary = SimpleNamespace(asm={"amdgcn": "s_endpgm"}, metadata=SimpleNamespace(shared=0))
    with pytest.raises(CompileFailed, match=r"no \.vgpr_count.*Triton 3.6 to 3.9"):
        rules.resources(rules.reference_device(), binary, 4)
    with pytest.raises(CompileFailed, match="cuobjdump.*no resource usage"):
        _nvidia.resource_usage(b"no cubin")


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(triton, "knobs", SimpleNamespace(nvidia=_Lazy(absent)))
    with pytest.raises(MissingTriton, match="no cuobjdump.*reinstall.*TRITON_CUOBJDUMP_PATH"):
        _nvidia.resource_usage(b"anything")


class _Lazy:
    """Triton's settings look the tool up when asked for it."""

    def __init__(self, find: Any) -> None:
        self._find = find

    @property
    def cuobjdump(self) -> Any:
        return self._find()
