"""Core types: frozen, validated where made, and equal after a JSON round trip."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portkern.backend import Resources
from portkern.config import Config
from portkern.errors import InvalidRecord
from portkern.fact import Fact
from portkern.problem import Problem, Work
from portkern.record import FrozenMap, Record, canonical
from portkern.target import Device, Target, device_slug

TARGET = Target("cuda", "sm90", 32)
DEVICE = Device(
    target=TARGET, name="NVIDIA H200", slug="nvidia_h200", units=132, memory_bytes=1 << 37, max_threads=1024,
    shared_bytes=232448, shared_bytes_per_unit=233472, registers_per_unit=65536, max_registers=255,
    max_warps_per_unit=64, max_programs_per_unit=32, cache_bytes=1 << 26, memory_gbps=4800.0,
    matrix_tflops=989.0, cooperative=True, extra=FrozenMap(power_limit="700 W"),
)  # fmt: skip
PROBLEM = Problem("softmax", {"M": 4, "N": 8}, {"x": "bfloat16"}, {"causal": True}, {"x": "n16"})
CONFIG = Config("resident_row", {"PROGRAMS_PER_UNIT": 2}, 8, 3, {"maxnreg": 64})
WORK = Work(
    "row_reduction", {"M": 4}, {"x": "float32"}, {"x": "n"}, {"a": 1.5, "b": 2.0}, 16, 16, ("a", "b"), ("b",)
)  # fmt: skip
FACT = Fact(
    "nvidia_h200", "sm90", "softmax", "abc", "3.6", PROBLEM, CONFIG, "measured", time_us=1.5, spread_us=0.1,
    samples=9, error=0.5, provenance={"torch": "2.11"},
)  # fmt: skip
RESOURCES = Resources(32, 0, 0, 0.5, 4, "wgmma")


@pytest.mark.parametrize(
    "record", [TARGET, DEVICE, PROBLEM, CONFIG, WORK, FACT, RESOURCES], ids=lambda r: type(r).__name__
)
def test_round_trip_and_frozen(record: Record) -> None:
    again = type(record).from_json(json.loads(json.dumps(record.to_json())))
    assert again == record and hash(again) == hash(record)
    assert canonical(again) == canonical(record)
    field = dataclasses.fields(record)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)
    with pytest.raises(InvalidRecord, match="unknown keys"):
        type(record).from_json({**record.to_json(), "surprise": 1})
    with pytest.raises(InvalidRecord):
        type(record).from_json({})
    with pytest.raises(InvalidRecord):
        type(record).from_json([1, 2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Target("cuda", "SM 90", 32),
        lambda: Target("cuda", "sm90", 33),
        lambda: Config("", {}),
        lambda: Config("a", {"BLOCK_M": 3}),
        lambda: Config("a", {"SPLITS": -1}),
        lambda: Config("a", {"BLOCK_M": True}),
        lambda: Config("a", {}, num_warps=3),
        lambda: Config("a", {}, num_stages=0),
        lambda: Config("a", {}, options={"maxnreg": [1]}),
        lambda: Problem("", {}, {}),
        lambda: Problem("a", {"M": -1}, {}),
        lambda: Problem("a", {"M": "4"}, {}),
        lambda: dataclasses.replace(WORK, waiting=("a", "b")),
        lambda: dataclasses.replace(WORK, live={"a": 1.0}),
        lambda: dataclasses.replace(WORK, variants=()),
        lambda: dataclasses.replace(DEVICE, units=0),
        lambda: dataclasses.replace(DEVICE, slug="../etc"),
        lambda: dataclasses.replace(FACT, outcome="guessed"),
        lambda: dataclasses.replace(FACT, time_us=None),
        lambda: dataclasses.replace(FACT, time_us=float("inf")),
        lambda: dataclasses.replace(FACT, outcome="predicted"),
        lambda: dataclasses.replace(FACT, schema=99),
        lambda: dataclasses.replace(FACT, device=""),
    ],
)
def test_what_does_not_validate(make: Any) -> None:
    with pytest.raises(InvalidRecord):
        make()


@given(st.dictionaries(st.text(max_size=8), st.integers(), max_size=5))
def test_frozen_map_ignores_order(items: dict[str, int]) -> None:
    backwards = dict(reversed(items.items()))
    assert FrozenMap(items) == FrozenMap(backwards) and hash(FrozenMap(items)) == hash(FrozenMap(backwards))


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia_h100"),
        ("NVIDIA H100", "nvidia_h100"),
        ("NVIDIA H100 PCIe", "nvidia_h100_pcie"),
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100"),
        ("AMD Instinct MI300X", "amd_mi300x"),
        ("NVIDIA GeForce RTX 4090", "nvidia_rtx_4090"),
        ("../../etc/passwd", "etc_passwd"),
        ("", "unknown"),
    ],
)
def test_slugs_are_normalised_once(name: str, slug: str) -> None:
    assert device_slug(name) == slug
    assert device_slug(slug) == slug


def test_partition_is_part_of_the_slug() -> None:
    slug = device_slug("NVIDIA H200", "MIG 1g.18gb")
    assert slug == "nvidia_h200_mig1g18gb" and device_slug(slug) == slug


def test_keys_hold_sizes_and_families_do_not() -> None:
    other = dataclasses.replace(PROBLEM, sizes=FrozenMap(M=4, N=16))
    assert other.key != PROBLEM.key and other.family == PROBLEM.family
    assert dataclasses.replace(PROBLEM, flags=FrozenMap(causal=False)).family != PROBLEM.family
