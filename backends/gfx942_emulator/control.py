"""Decoding of a whole kernel: every instruction becomes a step, a function of ``Waves``.

A step gives None to go on, the position to jump to, or an outcome that the machine handles: waves that part, a
barrier, the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portkern.backends.gfx942_emulator import (
    access,
    buffers,
    local,
    matrix,
    scalar,
    scalar_loads,
    scalar_steps,
    special,
)
from portkern.backends.gfx942_emulator.numbers import I32, U32, U64, Array
from portkern.backends.gfx942_emulator.operands import Decoder, scalar_writer
from portkern.backends.gfx942_emulator.state import Waves
from portkern.backends.gfx942_emulator.text import Instruction, Program
from portkern.errors import UnmodelledInstruction

Step = Callable[[Waves], Any]
DECODERS = (
    scalar_steps.decode,
    special.decode,
    matrix.decode,
    local.decode,
    access.decode,
    buffers.decode,
    scalar_loads.decode,
)
XCC_ID = 20  # the hardware register that says which die a wave runs on


@dataclass(frozen=True)
class Parting:
    """Some waves jump to ``target``, the others go on. ``polls``: as in Poll."""

    jumping: Array
    target: int
    polls: bool = False


@dataclass(frozen=True)
class Poll:
    """All waves jump back to look again at memory that others write: the others go first."""

    target: int


class Barrier:
    """The waves wait for the others of their workgroups."""


class End:
    """The waves are done."""


BARRIER, END = Barrier(), End()


def decode(program: Program, vgprs: int, symbols: dict[str, int], checked: bool = False) -> list[Step]:
    """One step for each instruction. Raises UnmodelledInstruction with kernel, instruction and line."""
    decoder = Decoder(vgprs, symbols, checked)
    steps: list[Step] = []
    for position, instruction in enumerate(program.code):
        try:
            step = _step(program, position, decoder)
            if step is None:
                raise UnmodelledInstruction("this instruction")
        except UnmodelledInstruction as error:
            raise UnmodelledInstruction(f"{describe(program, instruction)}: {error} is not modelled") from None
        except (ValueError, KeyError, IndexError, StopIteration) as error:
            raise UnmodelledInstruction(
                f"{describe(program, instruction)}: this form is not modelled ({type(error).__name__}: {error})"
            ) from error
        steps.append(step)
    return steps


def describe(program: Program, instruction: Instruction) -> str:
    """Kernel, instruction and where it stands, for messages."""
    source = f", from {instruction.source}" if instruction.source else ""
    return f"{program.kernel}: '{instruction.text}' (line {instruction.line} of its amdgcn{source})"


def _step(program: Program, position: int, decoder: Decoder) -> Step | None:
    instruction = program.code[position]
    name = instruction.name
    if name == "s_endpgm":
        return lambda w: END
    if name == "s_barrier":
        return lambda w: BARRIER
    if name == "s_branch":
        target = _target(program, instruction)
        return lambda w: target
    if name in scalar.BRANCHES:
        target = _target(program, instruction)
        return _branch(*scalar.BRANCHES[name], target, _polls(program, target, position))
    if name == "s_getpc_b64":  # constants are given by their own addresses: see Decoder
        write = scalar_writer(decoder.operand(instruction.operands[0]), "b64")
        return lambda w: write(w, np.zeros(1, U64))
    if name == "s_setreg_imm32_b32":
        return _mode(instruction)
    if name == "s_getreg_b32":
        return _hardware_register(instruction, decoder)
    if name in ("s_memtime", "s_memrealtime"):
        write = scalar_writer(decoder.operand(instruction.operands[0]), "b64")
        return lambda w: write(w, np.full(1, w.machine.clock(), U64))
    for decode_one in DECODERS:
        step = decode_one(instruction, decoder)
        if step is not None:
            return step
    return None


def _target(program: Program, instruction: Instruction) -> int:
    label = instruction.operands[0]
    if label not in program.labels:
        raise UnmodelledInstruction(f"a jump to {label}")
    return program.labels[label]


def _polls(program: Program, target: int, position: int) -> bool:
    """Whether a jump back repeats a load that looks past the caches, or an atomic operation: it waits for others."""
    body = program.code[target:position]
    return any("sc1" in each.modifiers or "_atomic_" in each.name for each in body)


def _branch(register: int | None, wanted: bool, target: int, polls: bool) -> Step:
    everyone: Any = Poll(target) if polls else target

    def step(w: Waves) -> Any:
        found = w.scc[w.rows] if register is None else w.S64[w.rows, register >> 1] != 0
        jumping = np.count_nonzero(found)
        if not wanted:
            jumping = w.count - jumping
        if jumping == 0:
            return None
        if jumping == w.count:
            return everyone
        return Parting(found.copy() if wanted else ~found, target, polls)

    return step


def _mode(instruction: Instruction) -> Step:
    """``s_setreg_imm32_b32``: only the mode bit by which overflowing conversions are clamped is modelled."""
    where, value = instruction.operands
    if where.replace(" ", "") not in ("hwreg(HW_REG_MODE,23,1)", "hwreg(1,23,1)"):
        raise UnmodelledInstruction(f"hardware register {where}")
    clamps = bool(int(value, 0) & 1)

    def step(w: Waves) -> None:
        w.machine.clamps[w.rows] = clamps

    return step


def _hardware_register(instruction: Instruction, decoder: Decoder) -> Step:
    """``s_getreg_b32``: only the number of the die is modelled, dies taking workgroups in turn."""
    text = instruction.operands[1]
    if "XCC_ID" not in text and f"hwreg({XCC_ID}" not in text:
        raise UnmodelledInstruction(f"hardware register {text}")
    write = scalar_writer(decoder.operand(instruction.operands[0]), "u32")
    return lambda w: write(w, (w.machine.workgroups(w) % 8).astype(I32).view(U32))
