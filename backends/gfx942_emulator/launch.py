"""A launch: the kernel made ready, its arguments laid out as the ABI wants them, the workgroups run.

Scalar registers at the start: the address of the arguments, the workgroup's numbers. v0 holds the thread's number in
the workgroup.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import local, text
from portkern.backends.gfx942_emulator.control import Step, decode
from portkern.backends.gfx942_emulator.counters import count
from portkern.backends.gfx942_emulator.machine import Machine, Tally
from portkern.backends.gfx942_emulator.memory import AddressSpace, Region
from portkern.backends.gfx942_emulator.numbers import U8, Array
from portkern.backends.gfx942_emulator.state import LANES
from portkern.emulator import Counters
from portkern.errors import BadArgument, EmulationError, NoProgress

WAVES_AT_ONCE = 512  # so that the registers of one instruction stay in a cache
REGISTER_BYTES = 1 << 29  # the most that the register files of one machine may take
STEPS_A_TURN = 20_000
FORMATS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I",
    "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d", "fp16": "<e",
}  # fmt: skip
# User registers that come before the preloaded arguments, by directive, with their number of registers.
USER_REGISTERS = (
    ("user_sgpr_private_segment_buffer", 4), ("user_sgpr_dispatch_ptr", 2), ("user_sgpr_queue_ptr", 2),
    ("user_sgpr_kernarg_segment_ptr", 2), ("user_sgpr_dispatch_id", 2), ("user_sgpr_flat_scratch_init", 2),
    ("user_sgpr_private_segment_size", 1),
)  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """An argument that points ``offset`` bytes into ``region``, or nowhere."""

    region: Region | None
    offset: int = 0

    @property
    def address(self) -> int:
        return self.region.start + self.offset if self.region else 0


@dataclass(frozen=True)
class Checks:
    """What is looked at beside addresses, which always are."""

    races: bool = True
    unwritten_shared: bool = True
    unwritten_registers: bool = False


@dataclass(frozen=True)
class Kernel:
    """A decoded kernel."""

    program: text.Program
    steps: list[Step]
    num_warps: int
    shared_bytes: int
    private_bytes: int
    vgprs: int
    agprs: int
    cell: int
    constants: tuple[tuple[str, bytes, int], ...] = ()


def prepare(amdgcn: str, shared_bytes: int, num_warps: int, arch: str = "gfx942", checked: bool = False) -> Kernel:
    """Decode a kernel. Raises EmulationError for another architecture, UnmodelledInstruction."""
    program = text.parse(amdgcn)
    if not program.target.endswith(f"-{arch}") and f"-{arch}:" not in program.target:
        raise EmulationError(f"{program.kernel} is compiled for {program.target}; this emulator runs {arch} only")
    return ready(program, shared_bytes, num_warps, checked)


def ready(program: text.Program, shared_bytes: int, num_warps: int, checked: bool = False) -> Kernel:
    """Decode a parsed program (also one that a test altered).

    Raises EmulationError for floating-point modes other than the usual, UnmodelledInstruction.
    """
    for name, wanted in (("float_denorm_mode_32", 3), ("float_denorm_mode_16_64", 3), ("float_round_mode_32", 0)):
        if program.directives.get(name, wanted) != wanted:
            raise EmulationError(
                f"{program.kernel}: .amdhsa_{name} {program.directive(name)} is not modelled, only {wanted}"
            )
    total = program.directive("next_free_vgpr")
    offset = program.directive("accum_offset") or total
    vgprs = max(1, min(total, offset))
    address, symbols, constants = 1 << 40, {}, []
    for name, data in program.constants.items():
        symbols[name] = address
        constants.append((name, data, address))
        address += 1 << 20
    return Kernel(
        program, decode(program, vgprs, symbols, checked), num_warps, shared_bytes,
        (program.directive("private_segment_fixed_size") + 15) // 16 * 16, vgprs, max(0, total - offset) + 4,
        local.narrowest({each.name for each in program.code}), tuple(constants),
    )  # fmt: skip


def without(kernel: Kernel, position: int) -> Kernel:
    """``kernel`` with the instruction at ``position`` replaced by one that does nothing."""
    steps = list(kernel.steps)
    steps[position] = lambda w: None
    return replace(kernel, steps=steps)


class Launch:
    """One launch of ``kernel``: state that all its workgroups share."""

    def __init__(
        self, kernel: Kernel, grid: Sequence[int], space: AddressSpace, kernarg: Region, checks: Checks, counting: bool,
        budget: int,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.space, self.checks, self.counting = kernel, tuple(grid), space, checks, counting
        self.kernarg, self.budget = kernarg, budget
        size = len(kernel.steps)
        self.tally = Tally([0] * size, [0] * size)

    def coordinates(self, number: int) -> tuple[int, int, int]:
        """Workgroup ``number`` as its three indices."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def spend(self, steps: int) -> None:
        self.budget -= steps
        if self.budget < 0:
            raise NoProgress(
                f"{self.kernel.program.kernel} ran past the instruction budget: it loops, or raise the budget"
            )

    def start(self, machine: Machine) -> None:
        """Give the waves of ``machine`` their first values."""
        program, S = self.kernel.program, machine.registers.S
        register = 0
        for name, size in USER_REGISTERS:
            if program.directive(name):
                if name == "user_sgpr_kernarg_segment_ptr":
                    S[:, register] = self.kernarg.start & 0xFFFFFFFF
                    S[:, register + 1] = self.kernarg.start >> 32 & 0xFFFFFFFF
                register += size
        # Arguments are not preloaded: the code at the entry loads them, for firmware that cannot, and so is tested too.
        register = program.directive("user_sgpr_count")
        numbers = machine.first + machine.group_of
        for axis, values in zip("xyz", self.coordinates_of(numbers), strict=True):
            if program.directive(f"system_sgpr_workgroup_id_{axis}"):
                S[:, register] = values
                register += 1
        threads = machine.slot_of[:, None] * LANES + np.arange(LANES)
        machine.registers.V[0] = threads

    def coordinates_of(self, numbers: Array) -> tuple[Array, Array, Array]:
        x, y, _ = self.grid
        return numbers % x, numbers // x % y, numbers // (x * y)


def layout(kernel: Kernel, grid: Sequence[int], arguments: Sequence[tuple[str, Any]]) -> Array:
    """The argument block. ``arguments`` are (Triton's type, value), pointers as Pointer, in order.

    Raises BadArgument where their number or size is not what the kernel takes.
    """
    program = kernel.program
    block = np.full(max(program.kernarg_bytes, 4), 0xA5, U8)  # between arguments may lie anything
    explicit = [each for each in program.arguments if not each.kind.startswith("hidden")]
    missing = len(explicit) - len(arguments)
    if not 0 <= missing <= 2:  # the compiler appends pointers to scratch memory
        raise BadArgument(f"{program.kernel} takes {len(explicit)} values and got {len(arguments)}")
    for entry, (kind, value) in zip(explicit, [*arguments, *[("*", Pointer(None))] * missing], strict=True):
        data = pack(kind, value)
        if len(data) != entry.size:
            raise BadArgument(
                f"{program.kernel}: an argument of type {kind} has {len(data)} bytes, expected {entry.size}"
            )
        block[entry.offset : entry.offset + entry.size] = np.frombuffer(data, U8)
    hidden = {
        **{f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)},
        "hidden_group_size_x": kernel.num_warps * LANES, "hidden_group_size_y": 1, "hidden_group_size_z": 1,
        "hidden_grid_dims": max((i + 1 for i, each in enumerate(grid) if each > 1), default=1),
    }  # fmt: skip
    for entry in program.arguments:
        if entry.kind.startswith("hidden"):
            value = int(hidden.get(entry.kind, 0))
            block[entry.offset : entry.offset + entry.size] = np.frombuffer(value.to_bytes(entry.size, "little"), U8)
    return block


def pack(kind: str, value: Any) -> bytes:
    """A value as bytes, by Triton's name of its type. Raises BadArgument for one that does not fit."""
    if isinstance(value, Pointer):
        return struct.pack("<q", value.address)
    if kind == "bf16":
        (bits,) = struct.unpack("<I", struct.pack("<f", float(value)))
        return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    if kind not in FORMATS:
        raise BadArgument(f"no value can be passed as {kind}")
    number = float(value) if "f" in FORMATS[kind] or kind[0] == "f" else int(value)
    try:
        return struct.pack(FORMATS[kind], number)
    except struct.error as error:
        raise BadArgument(f"{value} does not fit {kind}: {error}") from None


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    space: AddressSpace,
    arguments: Sequence[tuple[str, Any]],
    *,
    checks: Checks = Checks(),  # noqa: B008 - frozen
    seed: int | None = 0,
    budget: int = 20_000_000,
    counting: bool = False,
    waves_at_once: int = WAVES_AT_ONCE,
) -> Counters:
    """Run all workgroups of ``grid`` (three counts above 0). What was counted, in full only if ``counting``.

    ``seed`` deals waves into cohorts and draws whose turn it is; None keeps them in step.
    """
    block = layout(kernel, grid, arguments)
    kernarg = space.add("the argument block", block)
    for name, data, address in kernel.constants:
        region = Region(name, np.frombuffer(data, U8).copy(), address)
        space.regions.insert(0, region)
    if kernel.constants:
        space.reorder()
    running = Launch(kernel, grid, space, kernarg, checks, counting, budget)
    programs = math.prod(grid)
    per_machine = _programs_at_once(kernel, waves_at_once)
    random = None if seed is None else np.random.default_rng(seed)
    starts = list(range(0, programs, per_machine))
    if random is not None:
        random.shuffle(starts)
    pending: list[Machine | int] = list(starts)
    with np.errstate(all="ignore"):
        while pending:
            # Each machine has its turn, so that programs which wait for others end.
            each = pending.pop(0)
            machine = (
                each if isinstance(each, Machine) else Machine(running, each, min(per_machine, programs - each), random)
            )
            if not machine.run(STEPS_A_TURN):
                pending.append(machine)
    return count(kernel.program, running.tally, space, programs, kernel.num_warps)


def _programs_at_once(kernel: Kernel, waves: int) -> int:
    by_bytes = REGISTER_BYTES // ((kernel.vgprs + kernel.agprs) * LANES * 4)
    return max(1, min(waves, by_bytes) // kernel.num_warps)
