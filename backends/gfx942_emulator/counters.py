"""What a launch really did: instructions by class, matrix products, bytes, conflicts, parted waves. Never a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portkern.backends.gfx942_emulator import scalar
from portkern.backends.gfx942_emulator.state import LANES
from portkern.backends.gfx942_emulator.text import Program
from portkern.emulator import Counters
from portkern.record import FrozenMap

if TYPE_CHECKING:
    from portkern.backends.gfx942_emulator.machine import Tally
    from portkern.backends.gfx942_emulator.memory import AddressSpace


def classify(name: str) -> str:
    """The class of an instruction, by its mnemonic."""
    if name.startswith(("v_mfma", "v_smfmac")):
        return "matrix"
    if name in scalar.NO_EFFECT:
        return "wait"
    if name in scalar.BRANCHES or name in ("s_branch", "s_endpgm", "s_barrier"):
        return "control"
    if name in scalar.LOADS:
        return "scalar memory"
    for prefix, kind in (("v_", "vector"), ("s_", "scalar"), ("ds_", "shared"), ("scratch_", "private")):
        if name.startswith(prefix):
            return kind
    return "global"


def count(program: Program, tally: Tally, space: AddressSpace, programs: int, warps: int) -> Counters:
    """Sum up what was executed."""
    by_class: dict[str, int] = {}
    by_name: dict[str, int] = {}
    vector, lanes = 0, 0
    for instruction, executed, enabled in zip(program.code, tally.waves, tally.lanes, strict=True):
        if executed:
            kind = classify(instruction.name)
            by_class[kind] = by_class.get(kind, 0) + executed
            by_name[instruction.name] = by_name.get(instruction.name, 0) + executed
            if kind == "vector":
                vector, lanes = vector + executed, lanes + enabled
    return Counters(
        kernel=program.kernel,
        programs=programs,
        warps=programs * warps,
        instructions=sum(by_class.values()),
        by_class=FrozenMap(by_class),
        matrix=by_class.get("matrix", 0),
        bytes_requested=space.requested,
        bytes_touched=sum(region.count_touched() for region in space.regions if region.name != "the argument block"),
        shared_conflicts=tally.conflicts,
        parted=tally.parted,
        lane_use=round(lanes / (vector * LANES), 4) if vector and lanes else 0.0,
        by_instruction=FrozenMap(by_name),
    )
