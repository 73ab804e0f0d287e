"""GPUs are described from what their driver states, and named by what they are, not by an index."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portkern import discovery
from portkern.backends import _amd
from portkern.backends.amd_gfx942 import PARTS
from portkern.errors import UnknownName
from portkern.plugins import backend_for, plugin_manager
from portkern.target import Device

PM = plugin_manager(entry_points=False)
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# As torch states them on CUDA and on ROCm.
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    gcnArchName="NVIDIA H200",
    multi_processor_count=132,
    total_memory=150_109_880_320,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    regs_per_multiprocessor=65_536,
    L2_cache_size=62_914_560,
    clock_rate=1_980_000,
    memory_clock_rate=3_201_000,
    memory_bus_width=6144,
    uuid="5f1c3a2e-0000-4b7d-9c55-aa0102030405",
    pci_domain_id=0,
    pci_bus_id=0x3B,
    pci_device_id=0,
)
MI300X = SimpleNamespace(
    name="AMD Instinct MI300X",
    major=9,
    minor=4,
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    total_memory=206_141_652_992,
    warp_size=64,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=65_536,
    shared_memory_per_multiprocessor=65_536,
    regs_per_multiprocessor=65_536,
    L2_cache_size=4_194_304,
    clock_rate=2_100_000,
    memory_clock_rate=1_300_000,
    memory_bus_width=8192,
    uuid="00000000-0000-0000-0000-000000000000",
    pci_domain_id=0,
    pci_bus_id=0x05,
    pci_device_id=0,
)


def changed(properties: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(properties), **changes})


def show(monkeypatch: pytest.MonkeyPatch, *gpus: Any) -> None:
    """Let torch see these GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])


def only(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> Device:
    show(monkeypatch, gpu)
    (device,) = discovery.devices(PM)
    return device


def test_no_gpu_is_an_empty_tuple_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("asked for properties")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", never)
    assert discovery.devices(PM) == ()
    assert discovery.unserved(PM) == ()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("index", [0, -1, 3])
def test_a_missing_gpu_says_how_many_there_are_and_what_hides_them(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    show(monkeypatch)
    with pytest.raises(UnknownName, match=rf"no GPU {index}: torch sees 0; .*driver"):
        discovery.device_at(PM, index)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    with pytest.raises(UnknownName, match="torch sees 0 with HIP_VISIBLE_DEVICES=''"):
        discovery.device_at(PM, index)


def test_limits_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = only(monkeypatch, H200)
    assert device.target.arch == "sm90"
    assert (device.slug, device.units, device.index) == ("nvidia_h200", 132, 0)
    assert (device.shared_bytes, device.shared_bytes_per_unit) == (232_448, 233_472)
    assert (device.registers_per_unit, device.max_registers) == (65_536, 255)
    assert (device.max_threads, device.max_warps_per_unit) == (1024, 64)
    assert device.cache_bytes == 62_914_560
    assert device.memory_gbps == pytest.approx(4917, rel=1e-3)
    assert device.identity == "GPU-5f1c3a2e-0000-4b7d-9c55-aa0102030405"
    assert device.extra["clock_khz"] == "1980000"
    smaller = changed(H200, multi_processor_count=114, shared_memory_per_block_optin=101_376)
    device = only(monkeypatch, smaller)
    assert (device.units, device.shared_bytes) == (114, 101_376)


def test_a_device_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (H200, MI300X):
        device = only(monkeypatch, gpu)
        again = Device.from_json(device.to_json())
        assert again.index is None
        assert again.identity == device.identity
        assert again.to_json() == device.to_json()


def test_a_neighbour_keeps_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    l40s = changed(
        H200,
        name="NVIDIA L40S",
        major=8,
        minor=9,
        shared_memory_per_block_optin=101_376,
        max_threads_per_multi_processor=1536,
    )
    device = only(monkeypatch, l40s)
    assert device.target.arch == "sm89"
    assert (device.shared_bytes, device.max_warps_per_unit) == (101_376, 48)
    assert device.max_programs_per_unit == 24
    backend = backend_for(PM, device.target)
    assert backend.note == "sm89 borrows the choices of sm80; limits are the device's own"


def test_a_mig_slice_has_a_slug_and_an_identity_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    device = only(monkeypatch, changed(H200, name=name, major=8, minor=0, multi_processor_count=14))
    assert device.slug == "nvidia_a100_1g5gb"
    assert device.identity.startswith("MIG-")
    assert device.matrix_tflops == pytest.approx(312 * 14 / 108)


@pytest.mark.parametrize(("arch", "minor"), [("gfx90a", 0), ("gfx942", 4), ("gfx950", 5)])
def test_rocm_is_not_taken_for_a_capability(monkeypatch: pytest.MonkeyPatch, arch: str, minor: int) -> None:
    """torch on ROCm says major=9, minor=0 for gfx90a: the same as for sm90."""
    device = only(monkeypatch, changed(MI300X, gcnArchName=f"{arch}:sramecc+:xnack-", minor=minor))
    assert (device.target.backend, device.target.arch, device.target.warp_size) == ("hip", arch, 64)


def test_what_rocm_leaves_out_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    device = only(monkeypatch, MI300X)
    assert device.slug == "amd_mi300x"
    assert device.cache_bytes == 256 * 1024**2  # B97: a flush has to cover all of it
    assert device.registers_per_unit == 131_072
    assert device.max_warps_per_unit == 32
    assert device.memory_gbps == pytest.approx(5300, rel=0.01)
    bare = changed(MI300X, gcnArchName="gfx950", name="AMD Instinct MI355X", multi_processor_count=256)
    del bare.shared_memory_per_multiprocessor, bare.memory_clock_rate
    device = only(monkeypatch, bare)
    assert (device.shared_bytes, device.shared_bytes_per_unit) == (163_840, 163_840)
    assert device.memory_gbps == 8_000


@pytest.mark.parametrize(
    ("name", "units", "slug"),
    [
        ("AMD Instinct MI300X", 38, "amd_mi300x_38cu"),
        ("AMD Instinct MI300X VF", 304, "amd_mi300x"),
        ("AMD Instinct MI308X", 80, "amd_mi308x"),
        ("AMD Instinct MI325X OAM", 304, "amd_mi325x"),
        ("", 304, "amd_gfx942_304_cu"),
        ("AMD Radeon Graphics", 228, "amd_gfx942_228_cu"),
    ],
)
def test_divided_and_nameless_parts(monkeypatch: pytest.MonkeyPatch, name: str, units: int, slug: str) -> None:
    assert only(monkeypatch, changed(MI300X, name=name, multi_processor_count=units)).slug == slug


@pytest.mark.parametrize("gpu", [H200, MI300X], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("hidden", [{}, {"CUDA": "1,0"}, {"HIP": "1,0"}, {"ROCR": "GPU-a,GPU-b", "HIP": "1,0"}])
def test_identity_does_not_follow_the_index(
    monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace, hidden: dict[str, str]
) -> None:
    """B95: however the variables order the GPUs, each keeps its identity."""
    for name, value in hidden.items():
        monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    first = changed(gpu, uuid=f"a{gpu.uuid[1:]}", pci_bus_id=5)
    second = changed(gpu, uuid=f"b{gpu.uuid[1:]}", pci_bus_id=6)
    show(monkeypatch, first, second)
    forward = discovery.devices(PM)
    show(monkeypatch, second, first)
    backward = discovery.devices(PM)
    assert [device.index for device in backward] == [0, 1]
    assert [device.identity for device in forward] == [device.identity for device in reversed(backward)]
    assert forward[0].identity != forward[1].identity


@pytest.mark.parametrize("gpu", [H200, MI300X], ids=lambda gpu: gpu.name)
def test_without_a_uuid_the_pci_address_identifies(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    zero = changed(gpu, uuid="00000000-0000-0000-0000-000000000000", pci_domain_id=1, pci_bus_id=0xC3)
    assert only(monkeypatch, zero).identity == "0001:c3:00.0"
    del zero.uuid
    assert only(monkeypatch, zero).identity == "0001:c3:00.0"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "0,1"},
        {"ROCR_VISIBLE_DEVICES": "GPU-3a5b", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""},
    ],
)
def test_variables_that_are_set_are_reported(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = {variable.name: variable for variable in discovery.visibility(PM)}
    assert {name: found[name].value for name in VARIABLES if name in found} == values
    assert all(remark for variable in found.values() for remark in variable.remarks)


def test_a_gpu_that_nobody_serves_is_named_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = changed(H200, name="NVIDIA T4", major=7, minor=5)
    navi = changed(MI300X, name="AMD Radeon RX 7900 XTX", gcnArchName="gfx1100", major=11)
    show(monkeypatch, turing, H200, navi)
    assert [(device.name, device.index) for device in discovery.devices(PM)] == [("NVIDIA H200", 1)]
    assert discovery.unserved(PM) == ("NVIDIA T4", "AMD Radeon RX 7900 XTX")
    with pytest.raises(UnknownName, match=r"GPU 0 \(NVIDIA T4\).*sm80, sm90, gfx942"):
        discovery.device_at(PM, 0)
    assert discovery.device_at(PM, 1).slug == "nvidia_h200"


def test_power_limit_and_driver_are_read_from_the_system(tmp_path: Path) -> None:
    hwmon = tmp_path / "bus/pci/devices/0000:05:00.0/hwmon/hwmon3"
    hwmon.mkdir(parents=True)
    hwmon.joinpath("power1_cap").write_text("750000000\n")
    tmp_path.joinpath("module/amdgpu").mkdir(parents=True)
    tmp_path.joinpath("module/amdgpu/version").write_text("6.10.5\n")
    device = _amd.device_of(MI300X, 0, PARTS, tmp_path)
    assert device is not None
    assert (device.driver, device.extra["power_limit_mw"]) == ("6.10.5", "750000")
    elsewhere = _amd.device_of(MI300X, 0, PARTS, tmp_path / "nothing")
    assert elsewhere is not None
    assert (elsewhere.driver, "power_limit_mw" in elsewhere.extra) == ("", False)


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    found = discovery.devices(PM)
    assert len(found) + len(discovery.unserved(PM)) == torch.cuda.device_count()
    for device in found:
        assert device == discovery.device_at(PM, device.index or 0)
        assert device.identity
        assert device.driver
        reference = backend_for(PM, device.target).reference_device()
        assert device.shared_bytes == reference.shared_bytes
        assert device.max_warps_per_unit == reference.max_warps_per_unit
        assert 0.2 < device.memory_gbps / reference.memory_gbps < 2
