"""The candidates of every architecture plugin, the best first; and which architectures there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from portkern.backends._amd import AmdBackend, parse
from portkern.backends._nvidia import NvidiaBackend, matrix_instruction
from portkern.backends._rows_model import row_blocks
from portkern.backends.amd_gfx942 import PARTS as CDNA_PARTS
from portkern.config import Config
from portkern.errors import UnknownName
from portkern.plugins import parse_arch
from portkern.problem import Work
from portkern.record import FrozenMap
from tests.test_backends import MAIN, PM, backend, rows, why_not


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize(
    ("m", "n", "layout"), [(8192, 128, "n16"), (4096, 4096, "n"), (16, 2**18, "n16"), (4096, 512, "m16")]
)
def test_candidates_begin_with_the_default_then_the_best(arch: str, m: int, n: int, layout: str) -> None:
    rules = backend(arch)
    device, work = rules.reference_device(), rows(m, n, layout)
    found = list(rules.candidates(device, work))
    assert found[0] == rules.default(device, work)
    assert len(found) == len(set(found))
    refused = [why_not(rules, device, work, config) is not None for config in found[1:]]
    assert refused == sorted(refused)  # what is sure to fail comes last, and is there to be told why
    times = [rules.estimate(device, work, config, row_blocks(work, config)) for config in found[1:]]
    fair = times[: refused.count(False)]
    assert fair == sorted(fair)
    assert refused.count(False) >= 12
    assert {config.variant for config in found} >= {"looped_row", "split_row"}


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_some_candidate_fits_for_each_width_of_element(arch: str, size: int) -> None:
    """B89."""
    rules = backend(arch)
    device = rules.reference_device()
    for m, n in ((4096, 200), (4096, 32_768), (3, 2**21)):
        work = rows(m, n, size=size)
        assert sum(why_not(rules, device, work, config) is None for config in rules.candidates(device, work)) >= 8


def test_the_known_worst_does_not_rank_first() -> None:
    """B97: fp32 rows of 4,096 on MI300X, one wave to a row, one program to a unit."""
    rules = backend("gfx942")
    device, work = rules.reference_device(), rows(4096, 4096, size=4)
    assert device.cache_bytes == 256 * 1024**2
    worst = Config("resident_row", FrozenMap(PROGRAMS_PER_UNIT=1), num_warps=1)
    score = rules.estimate(device, work, worst, row_blocks(work, worst))
    default = rules.default(device, work)
    assert score > 1.3 * rules.estimate(device, work, default, row_blocks(work, default))


@pytest.mark.parametrize("arch", MAIN)
def test_the_model_ranks_what_is_known(arch: str) -> None:
    rules = backend(arch)
    device = rules.reference_device()

    def time(work: Work, variant: str, **changes: Any) -> float:
        config = rules.default(device, work, variant).replace(**changes)
        return rules.estimate(device, work, config, row_blocks(work, config))

    long_row = rows(1, 2**22)
    assert time(long_row, "split_row") < time(long_row, "looped_row") / 3
    many = rows(65_536, 4096)
    assert time(many, "resident_row") < time(many, "looped_row")
    assert time(many, "resident_row") < time(many, "split_row")
    assert time(rows(4096, 4096, "n16"), "resident_row") < time(rows(4096, 4096, "s"), "resident_row")
    short = rows(100_000, 64)
    assert time(short, "packed_rows") < time(short, "resident_row")
    column = rows(65_536, 1024, "m16")
    assert time(column, "looped_row") < time(column, "looped_row", params={"BLOCK_M": 1}) / 2
    floor = (many.reads + many.writes) / (device.memory_gbps * 1e3)
    assert floor < time(many, "resident_row") < 3 * floor


@pytest.mark.parametrize(
    ("arch", "lender", "triton", "shared_kb"),
    [
        ("sm86", "sm80", ("cuda", 86, 32), 99),
        ("sm89", "sm80", ("cuda", 89, 32), 99),
        ("sm100", "sm90", ("cuda", 100, 32), 227),
        ("sm103", "sm90", ("cuda", 103, 32), 227),
        ("sm120", "sm90", ("cuda", 120, 32), 99),
        ("gfx950", "gfx942", ("hip", "gfx950", 64), 160),
        ("gfx90a", "gfx942", ("hip", "gfx90a", 64), 64),
    ],
)
def test_neighbours(arch: str, lender: str, triton: tuple[Any, ...], shared_kb: int) -> None:
    rules = backend(arch)
    assert rules.note == f"{arch} borrows the choices of {lender}; limits are the device's own"
    assert rules.compile_target() == triton
    device = rules.reference_device()
    assert (device.target.arch, device.shared_bytes) == (arch, shared_kb * 1024)
    assert backend(lender).note == ""


@pytest.mark.parametrize(
    ("arch", "slug", "units", "shared"),
    [
        ("sm80", "nvidia_a100", 108, 166_912),
        ("sm90", "nvidia_h200", 132, 232_448),
        ("gfx942", "amd_mi300x", 304, 65_536),
    ],
)
def test_reference_devices(arch: str, slug: str, units: int, shared: int) -> None:
    device = backend(arch).reference_device()
    assert (device.slug, device.units, device.shared_bytes) == (slug, units, shared)
    assert not device.present
    assert device.identity == ""


def test_architectures_that_triton_cannot_compile_for_are_unknown() -> None:
    assert parse("gfx940", CDNA_PARTS) is None
    with pytest.raises(UnknownName, match="gfx1100"):
        parse_arch(PM, "gfx1100")


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "num_warps", "programs"),
    [
        ("sm90", 32, 0, 4, 16),
        ("sm90", 128, 0, 4, 4),
        ("sm90", 168, 0, 4, 3),
        ("sm90", 255, 0, 8, 1),
        ("sm90", 32, 100_000, 4, 2),
        ("sm90", 32, 116_736, 4, 1),  # twice that fits, but not with the 1 KB of each program
        ("sm89", 32, 0, 1, 24),
        ("gfx942", 170, 0, 4, 2),  # ROCm's own example: 176 registers, two waves
        ("gfx942", 128, 0, 8, 2),
        ("gfx942", 64, 40_000, 4, 1),
        ("gfx942", 512, 0, 8, 0),
    ],
)
def test_occupancy(arch: str, registers: int, shared: int, num_warps: int, programs: int) -> None:
    rules = backend(arch)
    assert rules.programs_per_unit(rules.reference_device(), registers, shared, num_warps) == programs


def test_no_plugin_names_an_op() -> None:
    root = Path(__file__).parents[1]
    ops = {path.stem for path in (root / "kernels").glob("[a-z]*.py")} | {"softmax", "matmul", "layer_norm"}
    for path in (root / "backends").glob("*.py"):
        found = [op for op in ops if re.search(rf"\b{op}\b", path.read_text())]
        assert not found, (path, found)


def test_vendors_keep_to_themselves() -> None:
    assert set(AmdBackend.knobs) & set(backend("sm90").knobs) == {"input_precision"}  # a word of Triton's own
    assert isinstance(backend("sm80"), NvidiaBackend)


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        ("  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}", "mma m16n8k16"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {", "wgmma.mma_async m64n128k16"),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1]", "tcgen05.mma"),
        ("ldmatrix.sync.aligned.m8n8.x4 fma.rn.f32", ""),
    ],
)
def test_matrix_instructions(ptx: str, expected: str) -> None:
    assert matrix_instruction(ptx) == expected
