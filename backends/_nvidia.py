"""What all NVIDIA architectures share: names, the driver's numbers, the compiler's report."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portkern.backend import Resources
from portkern.backends._gemm_table import SharedMemory, precision, tile_bytes, vectors
from portkern.backends._shared import PRECISION, CommonBackend, Knob, Part, pci_address, queried, queried_gbps
from portkern.config import Blocks, Config
from portkern.errors import CompileFailed, MissingTriton
from portkern.gemm import by_descriptors
from portkern.integers import cdiv
from portkern.problem import Work
from portkern.record import FrozenMap
from portkern.target import Device, Target, device_slug

KIB = 1024
RESERVED_SHARED = KIB  # of each program, taken by the driver on sm80 and later
REGISTER_GRANULE = 256  # registers are handed to a warp in blocks of this many
WAITING = "coresident_row"  # whose programs wait for one another
LEAST_REGISTERS = 16  # that the assembler takes as a limit
QUARTERS = 4  # a unit's registers lie in four parts, and a warp takes all of its from one
ENVIRONMENT = FrozenMap(
    {
        "CUDA_VISIBLE_DEVICES": "indices or UUIDs of the GPUs that CUDA shows, in this order",
        "CUDA_DEVICE_ORDER": "whether CUDA counts GPUs by speed (default) or by PCI address",
        "NVIDIA_VISIBLE_DEVICES": "the GPUs that a container runtime passes in",
    }
)
_SPELLING = re.compile(r"(?:cuda:)?(?:(?:sm_?|compute_?)?(\d{2,3})[af]?|(\d{1,2})\.(\d))")
_MIG = re.compile(r"\s+MIG\s+(\S+)\s*$")


def parse(text: str, parts: Mapping[str, Part]) -> Target | None:
    """``sm90``, ``sm_90a``, ``compute_90``, ``cuda:90``, ``9.0`` or ``90``, if among ``parts``."""
    found = _SPELLING.fullmatch(text.strip().lower())
    if found is None:
        return None
    arch = "sm" + (found[1] or found[2] + found[3])
    return Target("cuda", arch, 32) if arch in parts else None


def device_of(properties: Any, index: int, parts: Mapping[str, Part]) -> Device | None:
    """The Device behind torch's ``properties``, if its architecture is among ``parts``.

    ROCm builds of torch state a compute capability too (gfx90a gives 9.0), hence the first test.
    """
    if str(getattr(properties, "gcnArchName", "")).startswith("gfx"):
        return None
    arch = f"sm{queried(properties, 'major')}{queried(properties, 'minor')}"
    if arch not in parts:
        return None
    part, full_name = parts[arch], str(properties.name)
    mig = _MIG.search(full_name)
    name = full_name[: mig.start()] if mig else full_name
    units = queried(properties, "multi_processor_count", part.units)
    identity = _identity(properties, "MIG" if mig else "GPU")
    driver, extra = _management(identity)
    threads = queried(properties, "max_threads_per_multi_processor", part.max_warps_per_unit * 32)
    return Device(
        target=Target("cuda", arch, queried(properties, "warp_size", 32)),
        name=full_name,
        slug=device_slug(name, mig[1] if mig else ""),
        units=units,
        memory_bytes=queried(properties, "total_memory", part.memory_bytes),
        max_threads=queried(properties, "max_threads_per_block", 1024),
        shared_bytes=queried(properties, "shared_memory_per_block_optin", part.shared_bytes),
        shared_bytes_per_unit=queried(properties, "shared_memory_per_multiprocessor", part.shared_bytes_per_unit),
        registers_per_unit=queried(properties, "regs_per_multiprocessor", part.registers_per_unit),
        max_registers=part.max_registers,
        max_warps_per_unit=threads // 32,
        max_programs_per_unit=part.max_programs_per_unit,
        cache_bytes=queried(properties, "L2_cache_size", part.cache_bytes),
        memory_gbps=queried_gbps(properties, part),
        matrix_tflops=part.matrix_tflops * units / part.units,
        cooperative=True,  # every GPU from sm60 on
        driver=driver,
        identity=identity,
        index=index,
        extra=FrozenMap({**extra, "clock_khz": str(queried(properties, "clock_rate"))}),
    )


def _identity(properties: Any, prefix: str) -> str:
    """The UUID as the driver's own tools print it, else the PCI address: never the index."""
    uuid = str(getattr(properties, "uuid", "") or "")
    return f"{prefix}-{uuid}" if re.search("[1-9a-f]", uuid) else pci_address(properties)


def _management(identity: str) -> tuple[str, dict[str, str]]:
    """Driver version and power limit by the management library; empty where it does not answer."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "", {}
    if library.nvmlInit_v2() != 0:
        return "", {}
    try:
        version, handle, limit = ctypes.create_string_buffer(80), ctypes.c_void_p(), ctypes.c_uint()
        known = library.nvmlSystemGetDriverVersion(version, ctypes.c_uint(80)) == 0
        extra = {}
        if (
            library.nvmlDeviceGetHandleByUUID(identity.encode(), ctypes.byref(handle)) == 0
            and library.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(limit)) == 0
        ):
            extra["power_limit_mw"] = str(limit.value)
        return version.value.decode() if known else "", extra
    finally:
        library.nvmlShutdown()


class NvidiaBackend(CommonBackend, ABC):
    """The rules of occupancy and the compiler's report, for every NVIDIA architecture."""

    stages_in_shared = True
    register_margin = 1.02  # a co-resident part of 128 elements a lane came out at 1.03, and spilled

    def compile_target(self) -> tuple[str, int | str, int]:
        return "cuda", int(self.target.arch.removeprefix("sm")), 32

    def stage_registers(self, element_bytes: int) -> float:
        # Addresses of asynchronous copies: 8 to 12 at 32 16-bit elements a lane, 13 to 25 at fp32.
        return 0.16 * element_bytes

    def register_cap(self, device: Device, config: Config) -> int:
        cap = super().register_cap(device, config)
        return min(cap, int(config.options.get("maxnreg", cap)))

    def launch_options(self, config: Config) -> Mapping[str, Any]:
        options, device = super().launch_options(config), self.reference_device()
        if "maxnreg" not in options and config.variant != WAITING:
            return options
        # A limit above what a program's threads can have is taken at its word: 16 warps of 242 registers do not launch.
        cap = self.register_cap(device, config)
        if config.variant == WAITING:  # its programs wait for one another: as many have to fit as are asked for
            # Each quarter of a unit has registers of its own, for whole warps: 14 warps are four in two of them.
            each = cdiv(config.num_warps * max(1, config.params.get("PROGRAMS_PER_UNIT", 1)), QUARTERS)
            most = device.registers_per_unit // QUARTERS // (each * device.target.warp_size)
            cap = min(cap, max(LEAST_REGISTERS, most // 8 * 8))
        return {**options, "maxnreg": cap}

    def programs_per_unit(self, device: Device, registers: int, shared_bytes: int, num_warps: int) -> int:
        warp = cdiv(max(1, registers) * 32, REGISTER_GRANULE) * REGISTER_GRANULE
        warps = device.registers_per_unit // QUARTERS // warp * QUARTERS
        return min(
            device.max_programs_per_unit,
            device.max_warps_per_unit // num_warps,
            warps // num_warps,
            device.shared_bytes_per_unit // (shared_bytes + RESERVED_SHARED),
        )

    def fp8(self) -> tuple[str, bool]:
        return "float8_e4m3fn", int(self.target.arch.removeprefix("sm")) >= 89

    def tools(self) -> Mapping[str, str]:
        try:
            return {"cuobjdump": _cuobjdump()}
        except MissingTriton:
            return {"cuobjdump": ""}

    def resources(self, device: Device, compiled: Any, num_warps: int) -> Resources:
        registers, spills = resource_usage(compiled.asm["cubin"])
        shared = int(compiled.metadata.shared)
        programs = self.programs_per_unit(device, registers, shared, num_warps)
        return Resources(
            registers=registers,
            spills=spills,
            shared_bytes=shared,
            occupancy=programs * num_warps / device.max_warps_per_unit,
            programs_per_unit=programs,
            matrix_instruction=matrix_instruction(compiled.asm.get("ptx", "")),
        )


@dataclass(frozen=True)
class TensorCores(SharedMemory):
    """Stages of blocks that asynchronous copies fill; or the tile of C on its way to the store, if that is larger.

    With ``warp_groups`` (sm90 and later) the matrix instruction of 64 rows reads both operands from shared memory, so
    that a stage more is in use. Figures of Triton 3.6 and 3.9, which are exact but for a tile of C that is larger than
    the stages: that may go in parts.
    """

    warp_groups: bool

    def bytes_of(self, work: Work, config: Config, blocks: Blocks) -> int:
        sizes, stages = tile_bytes(work, blocks), config.num_stages
        narrow = precision(work) in ("half", "tf32")
        grouped = self.warp_groups and narrow and blocks["BLOCK_M"] >= 64 and config.num_warps >= 4
        copies = stages if grouped and stages > 1 else max(1, stages - 1)
        part = blocks["BLOCK_M"] * blocks["BLOCK_N"] * work.compute_bytes if blocks["SPLITS"] > 1 else 0
        if by_descriptors(config):  # descriptors are copied by stages of their own, with a barrier each
            stored = sizes[2] // blocks["SLICES"] if work.layout["c"].endswith("16") and not part else 0
            turned = work.layout["a"] != "k16" or precision(work) == "tf32" and work.layout["b"] != "k16"
            again = cdiv(8 * copies, 16) * 16 if turned else 0  # a second set of barriers
            return max(copies * (sizes[0] + sizes[1] + 8) + stored + again, part)
        taken = 0
        for name, size, whole in zip("ab", sizes, vectors(work), strict=False):
            # Lone 16-bit elements are no asynchronous copy: they go by registers, unless a line repeats (``k0``).
            by_copies = whole or work.element_bytes >= 4 or work.layout[name].endswith("0")
            taken += size * (copies if by_copies else 1)
        return max(taken, part or sizes[2])


def knobs(max_ctas: int) -> FrozenMap[Knob]:
    """The options of Triton's NVIDIA backend that a Config may set."""
    ctas = tuple(2**power for power in range(max_ctas.bit_length()))
    return FrozenMap(
        maxnreg=Knob(tuple(range(16, 256))),
        num_ctas=Knob(ctas),
        warp_specialize=Knob((False, True), launch=False),
        input_precision=PRECISION,
    )


def matrix_instruction(ptx: str) -> str:
    """The matrix instruction that a kernel uses, with its shape; empty if it has none."""
    found = re.search(r"\b(wgmma\.mma_async|tcgen05\.mma|mma)\b\.(?:sync|cta_group)[\w.:]*", ptx)
    if found is None:
        return ""
    shape = re.search(r"\bm\d+n\d+k\d+\b", found[0])
    return " ".join(filter(None, (found[1], shape[0] if shape else "")))


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack and local memory, where spills go. Raises CompileFailed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [_cuobjdump(), "-res-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    if done.returncode != 0 or not found:
        raise CompileFailed(
            f"{' '.join(command)} gave no resource usage (exit {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[:300]}"
        )
    return max(int(row[0]) for row in found), max(int(row[1]) + int(row[2]) for row in found)


def _cuobjdump() -> str:
    try:
        from triton import knobs as settings
    except ImportError as error:
        raise MissingTriton("reading a kernel's registers needs Triton: install it") from error
    try:
        return str(settings.nvidia.cuobjdump.path)
    except RuntimeError as error:
        raise MissingTriton(
            f"Triton finds no cuobjdump ({error}): reinstall Triton's wheel, which brings one, or "
            "name one in TRITON_CUOBJDUMP_PATH"
        ) from error
