"""``portkern.emulate``: kernels of a user, against torch; its errors; the fixture; the page for users."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import portkern
from portkern.emulation import emulate
from portkern.errors import (
    BadArgument,
    BadType,
    DeviceMismatch,
    EmulationError,
    MemoryFault,
    NoProgress,
    UnknownName,
)
from tests.emulation import kernels

PAGE = Path(__file__).parents[2] / "docs" / "emulate-amd.md"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, ulps: float = 4) -> None:
    error = (got.double() - wanted.double()).abs()
    limit = ulps * torch.finfo(got.dtype).eps * wanted.double().abs().clamp(min=float(wanted.abs().max()) / 16)
    assert bool((error <= limit).all()), float((error / limit).max())


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(dtype: torch.dtype, seed: int | None) -> None:
    x = random(5, 700, dtype=dtype, scale=20)
    y = torch.full_like(x, float("nan"))
    counters = emulate(kernels.softmax_kernel, (5,), x, y, 700, 700, BLOCK=1024, num_warps=4, seed=seed)
    close(y, torch.softmax(x.double(), -1))
    assert counters.programs == 5 and counters.warps == 20 and counters.matrix == 0
    assert counters.bytes_touched == 2 * x.numel() * x.element_size()
    assert counters.by_class["shared"] > 0 and counters.by_class["control"] >= 20
    assert sum(counters.by_class.values()) == sum(counters.by_instruction.values()) == counters.instructions


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype) -> None:
    x, w, b = random(4, 300, dtype=dtype, scale=3), random(300, seed=1, dtype=dtype), random(300, seed=2, dtype=dtype)
    y = torch.empty_like(x)
    emulate(kernels.layer_norm_kernel, (4,), x, w, b, y, 300, 1e-5, BLOCK=512, num_warps=2)
    close(y, torch.nn.functional.layer_norm(x.double(), (300,), w.double(), b.double()), ulps=16)


@pytest.mark.parametrize("nonkdim", [16, 32])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_matmul(dtype: torch.dtype, nonkdim: int) -> None:
    if dtype == torch.float64 and nonkdim == 32:
        nonkdim = 0  # there is no such instruction: the compiler's choice
    a, b = random(70, 90, dtype=dtype), random(90, 50, dtype=dtype, seed=1)
    c = torch.full((70, 50), float("nan"), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}
    counters = emulate(
        kernels.matmul_kernel, lambda meta: (3, 1), a, b, c, 70, 50, 90,
        ACC=tl.float64 if dtype == torch.float64 else tl.float32, **blocks, num_warps=4, matrix_instr_nonkdim=nonkdim,
    )  # fmt: skip
    close(c, a.double() @ b.double(), ulps=32)
    assert counters.matrix > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention(dtype: torch.dtype) -> None:
    q, k, v = (random(100, 32, dtype=dtype, seed=i) for i in range(3))
    o = torch.empty_like(q)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32, "D": 32}
    emulate(kernels.attention_kernel, (2,), q, k, v, o, 100, 100, 0.25, **blocks, num_warps=4)
    mask = torch.ones(100, 100, dtype=torch.bool).tril()
    scores = (q.double() @ k.double().T * 0.25).masked_fill(~mask, -float("inf"))
    close(o, torch.softmax(scores, -1) @ v.double(), ulps=16)


def test_what_other_ops_bring() -> None:
    n = 500
    x = random(n, scale=2)
    i = torch.arange(1, n + 1, dtype=torch.int32)
    o, c = torch.empty(n), torch.zeros(8, dtype=torch.int32)
    emulate(kernels.exotic_kernel, (1,), x, i, o, c, n, BLOCK=512, num_warps=4)
    assert c[:7].tolist() == torch.bincount(i % 7, minlength=7).tolist() and int(c[7]) == n
    d = x.double()
    y = d.cumsum(0) + torch.erf(d) + d.sin() + d.cos() + d.abs().sqrt() + d.floor()
    y += x.to(torch.float8_e4m3fnuz).double() + x.to(torch.float8_e5m2fnuz).double() + i // 3 + i % 5
    assert float((o.double() - y - int(x.argmax())).abs().max()) < 1e-3


def test_descriptors_programs_along_axes_and_numpy() -> None:
    x, y = random(64, 96), torch.zeros(64, 96)
    descriptors = [TensorDescriptor(t, [64, 96], [96, 1], [32, 32]) for t in (x, y)]
    emulate(kernels.descriptor_kernel, (2, 3), *descriptors, BLOCK=32)
    assert torch.equal(y, 2 * x)
    data, out = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    counters = emulate(kernels.persistent_kernel, (2, 2), data, out, 1000, BLOCK=64, num_warps=1)
    assert (out == data + np.arange(1000) // 64).all() and counters.programs == 4


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("programs", [2, 600])
def test_programs_that_wait_for_each_other_end(programs: int, seed: int | None) -> None:
    """Also where they are not all advanced together."""
    flags, out = torch.zeros(2, dtype=torch.int32), torch.zeros(programs, dtype=torch.int32)
    emulate(kernels.handshake_kernel, programs, flags, out, num_warps=1, seed=seed)
    assert out.tolist() == list(range(programs)) and flags.tolist() == [7, 5]
    with pytest.raises(NoProgress, match="handshake_kernel ran past the instruction budget"):
        emulate(kernels.handshake_kernel, 1, flags * 0, out, num_warps=1, seed=seed, budget=3_000)


def softmax_of(**changes: Any) -> Any:
    x = changes.pop("x", random(2, 64))
    y = changes.pop("y", torch.empty(2, 64))
    return emulate(kernels.softmax_kernel, changes.pop("grid", (2,)), x, y, 64, 64, BLOCK=64, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grid": 0}, BadArgument, "the grid is .0,., expected one to three counts"),
        ({"grid": (2, 0)}, BadArgument, "each 1 or more"),
        ({"grid": (1, 1, 1, 1)}, BadArgument, "one to three counts"),
        ({"grid": 2.0}, BadArgument, "the grid is .2.0,., expected"),
        ({"x": np.zeros((64, 2), np.float32).T}, BadArgument, "x_ptr is an array that is not contiguous"),
        ({"x": np.zeros(64, np.complex64)}, BadType, "x_ptr has dtype complex64"),
        ({"x": np.zeros(64, "S4")}, BadType, "x_ptr has dtype"),
        ({"x": object()}, BadType, "x_ptr is object; pass a CPU tensor"),
        ({"x": torch.zeros(2, 64, device="meta")}, DeviceMismatch, "x_ptr lies on meta"),
        ({"x": torch.zeros(2, 64, dtype=torch.complex64)}, BadType, "complex64"),
        ({"N": 3}, BadArgument, "N by position and by name"),
        ({"target": "sm90"}, UnknownName, "no plugin has an emulator for sm90"),
        ({"target": "gfx9000"}, UnknownName, "no plugin knows the architecture"),
        ({"nonsense": 3}, BadArgument, "nonsense"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        softmax_of(**changes)


def test_wrong_arguments_and_kernels() -> None:
    x = random(64)
    with pytest.raises(BadArgument, match="lacks the argument stride, BLOCK"):
        emulate(kernels.softmax_kernel, (1,), x, x, 64)
    with pytest.raises(BadArgument, match="takes 5 arguments .* and got 6"):
        emulate(kernels.softmax_kernel, (1,), x, x, 64, 64, 64, 64)
    with pytest.raises(BadType, match="is no @triton.jit function"):
        emulate(len, (1,), x)
    wrapped = triton.heuristics({"BLOCK": lambda given: 64})(kernels.softmax_kernel)
    with pytest.raises(BadType, match="is no @triton.jit function; pass the function below any autotuning or heuris"):
        emulate(wrapped, (1,), x, x, 64, 64)
    read_only = np.zeros(64, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(BadArgument, match="read-only"):
        softmax_of(x=read_only)


def compiled_for(arch: str) -> Any:
    from portkern.executors.emulate import compile_for
    from portkern.plugins import parse_arch
    from portkern.runtime import current

    backend = current().backend(parse_arch(current().plugins, arch))
    words = {"x_ptr": random(2, 64), "y_ptr": random(2, 64), "N": 64, "stride": 64, "BLOCK": 64, "num_warps": 1}
    return compile_for(backend, kernels.softmax_kernel, [], (2,), words | {"enable_fp_fusion": True})


def test_compiled_kernels_run_and_those_of_another_arch_are_refused() -> None:
    x, y = random(2, 64), torch.empty(2, 64)
    emulate(compiled_for("gfx942"), (2,), x, y, 64, 64)
    close(y, torch.softmax(x.double(), -1))
    with pytest.raises(BadArgument, match="compiled for 90, not for gfx942"):
        emulate(compiled_for("sm90"), (2,), x, y, 64, 64)
    from portkern.backends.gfx942_emulator.launch import prepare

    text = compiled_for("gfx942").asm["amdgcn"].replace("gfx942", "gfx1100")
    with pytest.raises(EmulationError, match="is compiled for .*gfx1100; this emulator runs gfx942"):
        prepare(text, 0, 1)


def test_stray_accesses_name_kernel_line_program_and_address() -> None:
    x = random(2, 64)
    what = r"softmax_kernel: '\w*load_dword.* from kernels.py:\d+\) in workgroup \(1, 0, 0\), warp 0, lane \d+ "
    with pytest.raises(MemoryFault, match=what + r"touches address 0x\w+: \d+ bytes past the end of x_ptr \(508 bytes"):
        softmax_of(x=x.view(-1)[:127], num_warps=1)
    whole = torch.zeros(3, 64)
    with pytest.raises(MemoryFault, match="y_ptr"):  # the memory behind belongs to another tensor
        softmax_of(y=whole[:1], num_warps=1)


def test_registers_on_request() -> None:
    softmax_of(check_registers=True)
    x, y = torch.ones(64), torch.empty(64)
    emulate(kernels.unwritten_kernel, (1,), x, y, num_warps=1)
    assert not torch.equal(y, x), "what nothing wrote is never 0"
    with pytest.raises(EmulationError, match=r"v_add_f32 .*reads vector register \d+, which nothing wrote"):
        emulate(kernels.unwritten_kernel, (1,), x, y, num_warps=1, check_registers=True)


def test_fixture(emulated: Any) -> None:
    x, y = random(2, 64), torch.empty(2, 64)
    counters = emulated(kernels.softmax_kernel, (2,), x, y, 64, 64, BLOCK=64)
    close(y, torch.softmax(x.double(), -1))
    assert counters.kernel == "softmax_kernel" and emulated is portkern.emulate


def test_the_page_for_users_does_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its code runs, and prints what the page says that it prints."""
    code, shown = (re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL) for kind in ("python", "text"))
    script = tmp_path / "page.py"
    script.write_text("\n".join(code[:1]))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == shown[0]
