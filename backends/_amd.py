"""What all AMD architectures share: names, the driver's numbers, the compiler's report."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portkern.backend import Resources
from portkern.backends._gemm_table import SharedMemory, tile_bytes
from portkern.backends._shared import PRECISION, CommonBackend, Knob, Part, pci_address, queried, queried_gbps
from portkern.config import Blocks, Config
from portkern.errors import CompileFailed
from portkern.integers import cdiv
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device, Target, device_slug

KIB = 1024
LANES = 64
SIMDS = 4  # of a unit; a wave's registers lie in one of them
REGISTER_GRANULE = 8  # vector registers are handed out in blocks of this many a lane
ENVIRONMENT = FrozenMap(
    {
        "ROCR_VISIBLE_DEVICES": "indices or UUIDs of the GPUs that the ROCm runtime shows at all",
        "HIP_VISIBLE_DEVICES": "indices, among those, of the GPUs that HIP shows, in this order",
        "CUDA_VISIBLE_DEVICES": "read by HIP too; set it or HIP_VISIBLE_DEVICES, not both",
        "GPU_DEVICE_ORDINAL": "indices, as HIP_VISIBLE_DEVICES, for every runtime of this vendor",
    }
)
KNOBS: FrozenMap[Knob] = FrozenMap(
    waves_per_eu=Knob(tuple(range(9))),
    matrix_instr_nonkdim=Knob((0, 4, 16, 32)),
    kpack=Knob((1, 2)),
    input_precision=PRECISION,
    # How programs look for what others wrote. Without the modifier Triton 3.6 keeps such loads in the cache of one
    # unit, and takes them out of the loop.
    poll_cache=Knob(("", ".cv"), launch=False),
)
# Units of whole parts: a driver that shows fewer has divided the part.
WHOLE = FrozenMap(mi300x=304, mi325x=304, mi300a=228, mi308x=80, mi350x=256, mi355x=256)


def parse(text: str, parts: Mapping[str, Part]) -> Target | None:
    """``gfx942``, ``hip:gfx942`` or ``gfx942:sramecc+:xnack-``, if among ``parts``."""
    arch = text.strip().lower().removeprefix("hip:").split(":")[0]
    return Target("hip", arch, LANES) if arch in parts else None


def device_of(properties: Any, index: int, parts: Mapping[str, Part], system: Path = Path("/sys")) -> Device | None:
    """The Device behind torch's ``properties``, if its architecture is among ``parts``."""
    target = parse(str(getattr(properties, "gcnArchName", "")), parts)
    if target is None:
        return None
    part = parts[target.arch]
    units = queried(properties, "multi_processor_count", part.units)
    name = _name(properties, target, units)
    address = pci_address(properties)
    threads = queried(properties, "max_threads_per_multi_processor", part.max_warps_per_unit * LANES)
    return Device(
        target=target,
        name=name,
        slug=device_slug(name, _partition(name, units)),
        units=units,
        memory_bytes=queried(properties, "total_memory", part.memory_bytes),
        max_threads=queried(properties, "max_threads_per_block", 1024),
        # torch states 64 KiB, or nothing, for parts that have more.
        shared_bytes=max(queried(properties, "shared_memory_per_block"), part.shared_bytes),
        shared_bytes_per_unit=max(queried(properties, "shared_memory_per_multiprocessor"), part.shared_bytes_per_unit),
        registers_per_unit=part.registers_per_unit,  # the driver leaves out half of the file
        max_registers=part.max_registers,
        max_warps_per_unit=threads // LANES,
        max_programs_per_unit=part.max_programs_per_unit,
        # torch states the L2 of one die; behind all of them lies a larger cache.
        cache_bytes=max(queried(properties, "L2_cache_size"), part.cache_bytes),
        memory_gbps=queried_gbps(properties, part),
        matrix_tflops=part.matrix_tflops * units / part.units,
        cooperative=True,
        driver=_read(system / "module/amdgpu/version"),
        identity=_identity(properties, address),
        index=index,
        extra=FrozenMap(_provenance(properties, address, system)),
    )


def _name(properties: Any, target: Target, units: int) -> str:
    """The marketing name; drivers without their list of names give none, or a common one."""
    name = str(getattr(properties, "name", "")).strip()
    nameless = not name or name.lower() in ("amd radeon graphics", "amd instinct")
    return f"AMD {target.arch} {units} CU" if nameless else name


def _partition(name: str, units: int) -> str:
    for word, whole in WHOLE.items():
        if word in name.lower():
            return f"{units}cu" if units < whole else ""
    return ""


def _identity(properties: Any, address: str) -> str:
    """The UUID, with the PCI address where both are known: parts of one GPU share a UUID."""
    uuid = str(getattr(properties, "uuid", "") or "")
    known = f"GPU-{uuid}" if re.search("[1-9a-f]", uuid) else ""
    return "@".join(filter(None, (known, address)))


def _provenance(properties: Any, address: str, system: Path) -> dict[str, str]:
    extra = {"clock_khz": str(queried(properties, "clock_rate"))}
    for cap in sorted((system / "bus/pci/devices" / address / "hwmon").glob("*/power1_cap")):
        microwatts = _read(cap)
        if microwatts.isdigit():
            extra["power_limit_mw"] = str(int(microwatts) // 1000)
    return extra


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class LocalDataShare(SharedMemory):
    """Stages of blocks that lie between registers and the matrix unit. Figures of Triton 3.6 and 3.9.

    Without stages, and where both read lone 16-bit elements, A and B use the same memory in turn.
    """

    def bytes_of(self, work: Work, config: Config, blocks: Blocks) -> int:
        a, b, _ = tile_bytes(work, blocks)
        staged = [work.element_bytes >= 4 or work.layout[name].endswith(("16", "0")) for name in ("a", "b")]
        if config.num_stages == 1 or not any(staged):
            return max(a, b)
        copies = [config.num_stages - 1 if each else 1 for each in staged]
        return copies[0] * a + copies[1] * b


class AmdBackend(CommonBackend, ABC):
    """The rules of occupancy and the compiler's report, for every AMD architecture."""

    knobs = KNOBS
    stages_in_shared = False  # prefetched rows wait in registers: seen in Triton 3.6 and 3.9
    register_margin = 1.35  # 1.0 to 1.5 seen, 1.3 where rows of 64 elements a lane spilled

    def compile_target(self) -> tuple[str, int | str, int]:
        return "hip", self.target.arch, LANES

    def stage_registers(self, element_bytes: int) -> float:
        # Data, addresses and masks: 16 to 20 at 16 16-bit elements a lane, 24 to 32 at fp32.
        return 0.25 * element_bytes + 0.75

    def register_cap(self, device: Device, config: Config) -> int:
        # The other half of a lane's registers are accumulators: code that needs more than the
        # first half spilled long before both were full.
        cap = min(super().register_cap(device, config), device.max_registers // 2)
        waves = int(config.options.get("waves_per_eu", 0))
        return min(cap, device.max_registers // waves) if waves else cap

    def programs_per_unit(self, device: Device, registers: int, shared_bytes: int, num_warps: int) -> int:
        lane = cdiv(max(1, registers), REGISTER_GRANULE) * REGISTER_GRANULE
        slots = device.max_warps_per_unit // SIMDS
        waves = min(slots, device.registers_per_unit // (SIMDS * LANES) // lane) * SIMDS
        by_shared = device.shared_bytes_per_unit // shared_bytes if shared_bytes else waves
        return min(device.max_programs_per_unit, waves // num_warps, by_shared)

    def resources(self, device: Device, compiled: Any, num_warps: int) -> Resources:
        text = compiled.asm["amdgcn"]
        registers = _count(text, "vgpr_count")  # accumulation registers are counted in
        scratch = _count(text, "private_segment_fixed_size")
        shared = int(compiled.metadata.shared)  # the text itself says 0
        programs = self.programs_per_unit(device, registers, shared, num_warps)
        found = re.search(r"\bv_s?mfmac?_\w+", text)
        return Resources(
            registers=registers,
            spills=max(scratch, 4 * _count(text, "vgpr_spill_count")),
            shared_bytes=shared,
            occupancy=programs * num_warps / device.max_warps_per_unit,
            programs_per_unit=programs,
            matrix_instruction=found[0] if found else "",
        )


def _count(text: str, name: str) -> int:
    found = re.findall(rf"^\s*\.{name}:\s+(\d+)", text, re.MULTILINE)
    if not found:
        raise CompileFailed(
            f"the compiler's assembly has no .{name}: this Triton's text is unknown to portkern; use Triton 3.6 to 3.9"
        )
    return max(map(int, found))
