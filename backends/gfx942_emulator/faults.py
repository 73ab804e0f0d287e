"""The errors of running code: each names kernel, instruction, line, workgroup, warp, lane and address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portkern.backends.gfx942_emulator.control import describe
from portkern.backends.gfx942_emulator.memory import Outside
from portkern.backends.gfx942_emulator.shared import Race, Unwritten
from portkern.backends.gfx942_emulator.state import LANES, Waves
from portkern.errors import EmulationError, MemoryFault, NoProgress, RaceDetected

if TYPE_CHECKING:
    from portkern.backends.gfx942_emulator.machine import Machine
    from portkern.backends.gfx942_emulator.reach import Lanes

ALL_BITS = (1 << 64) - 1


def outside(machine: Machine, w: Waves, chosen: Any, fault: Outside) -> MemoryFault:
    """The error of an access that no buffer holds."""
    return memory_fault(machine, w, chosen, fault.position, fault.address, fault.remark)


def memory_fault(machine: Machine, w: Waves, chosen: Any, position: int, address: int, remark: str) -> MemoryFault:
    """The error of an access to ``address``, whose lane is at ``position`` among those ``chosen``."""
    return MemoryFault(f"{place(machine, w, chosen, position)} touches address {address & ALL_BITS:#x}: {remark}")


def shared_problem(machine: Machine, w: Waves, lanes: Lanes, problem: Race | Unwritten) -> EmulationError:
    """The error of a race, or of a read of shared memory that nobody wrote."""
    assert machine.shared is not None
    offset = problem.offset % machine.shared.stride
    where = f"{place(machine, w, lanes.chosen, problem.position)}, shared address {offset:#x}"
    if isinstance(problem, Unwritten):
        return MemoryFault(f"{where}: {problem}")
    if not problem.others:
        return RaceDetected(f"{where}: it {problem.what} at once, with another value")
    waves = ", ".join(str(slot) for slot in range(16) if problem.others >> slot & 1)
    return RaceDetected(f"{where}: it {problem.what} (warp {waves}) with no barrier between")


def place(machine: Machine, w: Waves, chosen: Any, position: int) -> str:
    """Instruction, workgroup, warp and lane, for messages."""
    lane = ""
    if isinstance(chosen, str):
        wave = position
    else:
        spots = np.argwhere(np.ones((w.count, LANES), bool) if chosen is None else chosen)
        wave = int(spots[position][0])
        lane = f", lane {int(spots[position][1])}"
    number = int(w.numbers()[wave])
    group = machine.launch.coordinates(machine.first + int(machine.group_of[number]))
    program = machine.launch.kernel.program
    what = describe(program, program.code[w.pc])
    return f"{what} in workgroup {group}, warp {int(machine.slot_of[number])}{lane}"


def located(machine: Machine, w: Waves, error: Exception) -> EmulationError:
    """``error`` with the instruction that it happened at."""
    program = machine.launch.kernel.program
    text = str(error)
    if isinstance(error, EmulationError) and text.startswith(program.kernel):
        return error
    kind = type(error) if isinstance(error, EmulationError) else EmulationError
    remark = text if isinstance(error, EmulationError) else f"{type(error).__name__}: {text}"
    return kind(f"{describe(program, program.code[w.pc])}: {remark}")


def stuck(machine: Machine) -> NoProgress:
    """The error of a barrier that some warps never reach."""
    w = machine.waiting[0]
    group = machine.launch.coordinates(machine.first + int(machine.group_of[w.numbers()[0]]))
    program = machine.launch.kernel.program
    place = describe(program, program.code[w.pc - 1])
    return NoProgress(f"{place}: workgroup {group} waits at the barrier for ever: not all of its warps come there")
