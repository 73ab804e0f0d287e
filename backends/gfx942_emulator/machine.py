"""The machine: some workgroups of a launch, their registers and shared memory, and who advances next.

All waves that stand at one instruction advance as one. Where a branch parts them, those at the lowest position go
first, so that they meet again; a group that runs long without parting or ending gives way, so that a program that waits
for another ends. A seed deals the waves into two cohorts that never merge and draws whose turn it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from portkern.backends.gfx942_emulator import faults
from portkern.backends.gfx942_emulator.control import BARRIER, END, Parting, Poll
from portkern.backends.gfx942_emulator.memory import Block, Outside
from portkern.backends.gfx942_emulator.numbers import U8, U16, Array
from portkern.backends.gfx942_emulator.shared import Race, SharedMemory, Unwritten, conflicts
from portkern.backends.gfx942_emulator.state import LANES, Registers, Waves
from portkern.errors import EmulationError

if TYPE_CHECKING:
    from portkern.backends.gfx942_emulator.launch import Launch
    from portkern.backends.gfx942_emulator.reach import Lanes

QUANTUM = 2_000  # steps after which a group gives way


@dataclass
class Tally:
    """What was executed: waves and enabled lanes by instruction, parted branches, extra LDS cycles."""

    waves: list[int]
    lanes: list[int]
    parted: int = 0
    conflicts: int = 0
    steps: int = 0
    seen: set[int] = field(default_factory=set)


class Machine:
    """Workgroups ``first`` to ``first + count`` of a launch."""

    def __init__(self, launch: Launch, first: int, count: int, random: np.random.Generator | None) -> None:
        self.launch, self.first, self.space, self.random = launch, first, launch.space, random
        kernel = launch.kernel
        per_group = kernel.num_warps
        waves = count * per_group
        order = np.arange(waves)
        cohorts = np.zeros(waves, int)
        if random is not None and waves > 1:
            cohorts = random.integers(0, 2, waves)
            order = np.argsort(cohorts, kind="stable")
            cohorts = cohorts[order]
        self.group_of, self.slot_of = order // per_group, order % per_group
        self.bits = (1 << self.slot_of).astype(U16)
        self.registers = Registers(waves, kernel.vgprs, kernel.agprs)
        if launch.checks.unwritten_registers:
            self.registers.written = np.zeros(self.registers.V.shape, bool)
            self.registers.written[0] = True
        self.shared: SharedMemory | None = None
        if kernel.shared_bytes:
            races = launch.checks.races and per_group > 1
            self.shared = SharedMemory(count, kernel.shared_bytes, kernel.cell, races, launch.checks.unwritten_shared)
        self.private_bytes = kernel.private_bytes
        self.private = Block(np.full(waves * LANES * self.private_bytes, 0xA5, U8))
        self.clamps = np.zeros(waves, bool)  # a bit of the MODE register
        self.arrived, self.ended = np.zeros(waves, bool), np.zeros(waves, bool)
        launch.start(self)
        self.runnable = [
            Waves(self, np.flatnonzero(cohorts == cohort), 0, cohort) for cohort in (0, 1) if (cohorts == cohort).any()
        ]
        self.waiting: list[Waves] = []

    # --- who advances -----------------------------------------------------------------------------------------

    def run(self, steps: int) -> bool:
        """Advance by about ``steps`` steps; True when all waves ended."""
        left = steps
        while self.runnable:
            if left <= 0 or all(each.polled for each in self.runnable):
                for each in self.runnable:
                    each.polled = False
                return False
            left -= self._advance(self._next())
        if self.waiting:
            raise faults.stuck(self)
        return True

    def _next(self) -> Waves:
        """The group to advance, merged with those of its cohort that stand at the same place."""
        if len(self.runnable) == 1:
            return self.runnable[0]
        if self.random is None:
            chosen = min(self.runnable, key=lambda each: (each.polled, each.steps // QUANTUM, each.pc))
        else:
            cohort = int(self.random.integers(0, 2))
            chosen = min(
                self.runnable, key=lambda each: (each.polled, each.steps // QUANTUM, each.cohort ^ cohort, each.pc)
            )
        same = [each for each in self.runnable if each.pc == chosen.pc and each.cohort == chosen.cohort]
        if len(same) > 1:
            rows = np.sort(np.concatenate([each.numbers() for each in same]))
            merged = Waves(self, rows, chosen.pc, chosen.cohort)
            merged.steps = min(each.steps for each in same)
            self.runnable = [each for each in self.runnable if each not in same] + [merged]
            chosen = merged
        return chosen

    def _advance(self, w: Waves) -> int:
        """Run one group until it parts, waits, ends, meets another or has had its turn; give the steps taken."""
        others = [each.pc for each in self.runnable if each is not w and each.cohort == w.cohort]
        lowest, stops = min(others, default=1 << 60), frozenset(others)
        steps, tally, pc = self.launch.kernel.steps, self.launch.tally, w.pc
        waves, lanes, counting = tally.waves, tally.lanes, self.launch.counting
        taken, outcome = 0, None
        limit = QUANTUM if self.random is None else int(self.random.integers(QUANTUM // 4, QUANTUM))
        try:
            while taken < limit:
                w.pc = pc
                taken += 1
                waves[pc] += w.count
                if counting:
                    lanes[pc] += w.count * LANES if w.mask is None else int(np.count_nonzero(w.mask))
                outcome = steps[pc](w)
                if outcome is None:
                    pc += 1
                    if pc in stops:
                        break
                elif outcome.__class__ is int:
                    pc, outcome = outcome, None
                    if pc >= lowest:
                        break
                else:
                    break
        except (EmulationError, IndexError, ValueError, TypeError) as error:
            raise faults.located(self, w, error) from error
        w.steps += taken
        w.pc = pc
        tally.steps += taken
        self.launch.spend(taken)
        if outcome is not None:
            self._handle(w, outcome)
        return taken

    def _handle(self, w: Waves, outcome: Any) -> None:
        if isinstance(outcome, Poll):
            w.pc, w.polled = outcome.target, True
            return
        for each in self.runnable:  # something else happened: look again
            each.polled = False
        if isinstance(outcome, Parting):
            self.launch.tally.parted += w.count
            numbers = w.numbers()
            jumping = Waves(self, numbers[outcome.jumping], outcome.target, w.cohort)
            staying = Waves(self, numbers[~outcome.jumping], w.pc + 1, w.cohort)
            jumping.steps = staying.steps = w.steps
            jumping.polled = outcome.polls
            self._replace(w, jumping, staying)
            return
        numbers = w.numbers()
        if outcome is BARRIER:
            self.arrived[numbers] = True
            w.pc += 1
            w.steps = 0
            self.waiting.append(w)
        elif outcome is END:
            self.ended[numbers] = True
        self._replace(w)
        self._release(numbers)

    def _replace(self, w: Waves, *others: Waves) -> None:
        self.runnable = [each for each in self.runnable if each is not w]
        self.runnable += others

    def _release(self, numbers: Array) -> None:
        """Let workgroups go on all of whose waves have arrived at the barrier, or ended."""
        if not self.waiting:
            return
        here = self.arrived | self.ended
        counts = np.bincount(self.group_of[here], minlength=self.group_of.max() + 1)
        complete = counts == self.launch.kernel.num_warps
        complete &= np.bincount(self.group_of[self.arrived], minlength=len(complete)) > 0
        if not complete.any():
            return
        if self.shared is not None:
            self.shared.barrier(np.flatnonzero(complete))
        self.arrived &= ~complete[self.group_of]
        still = []
        for w in self.waiting:
            freed = complete[self.group_of[w.numbers()]]
            if freed.all():
                self.runnable.append(w)
                continue
            if freed.any():
                self.runnable.append(Waves(self, w.numbers()[freed], w.pc, w.cohort))
                w = Waves(self, w.numbers()[~freed], w.pc, w.cohort)
            still.append(w)
        self.waiting = still

    def outside(self, w: Waves, chosen: Any, fault: Outside) -> EmulationError:
        """The error of an access that no buffer holds."""
        return faults.outside(self, w, chosen, fault)

    # --- what instructions ask --------------------------------------------------------------------------------

    def clock(self) -> int:
        return self.launch.tally.steps

    def workgroups(self, w: Waves) -> Array:
        """The number of each wave's workgroup in the launch."""
        found: Array = self.first + self.group_of[w.rows]
        return found

    def _shared_offsets(self, w: Waves, lanes: Lanes, size: int) -> tuple[Array, Array]:
        """Offsets into the block of all workgroups, and the bits of the waves, of the lanes that take part."""
        if self.shared is None:
            raise faults.memory_fault(self, w, lanes.chosen, 0, 0, "the kernel has no shared memory")
        bad = (lanes.addresses < 0) | (lanes.addresses + size > self.shared.size)
        if bad.any():
            position = int(np.argmax(bad))
            limit = f"shared memory has {self.shared.size:,} bytes"
            raise faults.memory_fault(self, w, lanes.chosen, position, int(lanes.addresses[position]), limit)
        start = np.broadcast_to((self.group_of[w.rows] * self.shared.stride)[:, None], (w.count, LANES))
        bits = np.broadcast_to(self.bits[w.rows][:, None], (w.count, LANES))
        if self.launch.counting:
            where = np.broadcast_to(np.arange(LANES), (w.count, LANES))
            wave = np.broadcast_to(np.arange(w.count)[:, None], (w.count, LANES))
            self.launch.tally.conflicts += conflicts(lanes.addresses, lanes.pick(w, wave), lanes.pick(w, where), size)
        return lanes.addresses + lanes.pick(w, start), lanes.pick(w, bits)

    def shared_load(self, w: Waves, lanes: Lanes, size: int, count: int) -> list[Array]:
        offsets, bits = self._shared_offsets(w, lanes, size * count)
        assert self.shared is not None
        try:
            return self.shared.load(offsets, size, count, bits)
        except (Race, Unwritten) as problem:
            raise faults.shared_problem(self, w, lanes, problem) from None

    def shared_store(self, w: Waves, lanes: Lanes, size: int, values: list[Array]) -> None:
        offsets, bits = self._shared_offsets(w, lanes, size * len(values))
        assert self.shared is not None
        try:
            self.shared.store(offsets, size, values, bits)
        except Race as problem:
            raise faults.shared_problem(self, w, lanes, problem) from None

    def shared_atomic(self, w: Waves, lanes: Lanes, size: int, function: Any, values: list[Array]) -> Array:
        from portkern.backends.gfx942_emulator.atomics import apply

        offsets, bits = self._shared_offsets(w, lanes, size)
        assert self.shared is not None
        try:
            self.shared.note_atomic(offsets, size, bits)
        except (Race, Unwritten) as problem:
            raise faults.shared_problem(self, w, lanes, problem) from None
        return apply(self.shared.block, offsets, size, function, *values)

    def check_private(self, w: Waves, chosen: Any, offsets: Array) -> None:
        bad = (offsets < 0) | (offsets >= self.private_bytes)
        if bad.any():
            position = int(np.argmax(bad))
            limit = f"private memory has {self.private_bytes:,} bytes a lane"
            raise faults.memory_fault(self, w, chosen, position, int(offsets[position]), limit)
