"""What ``verify`` asks of one child process, and what it learns of one op, dtype and variant."""

from __future__ import annotations

from dataclasses import dataclass

from portkern.record import Record


@dataclass(frozen=True)
class Request(Record):
    """What one child does. ``done`` names the rows that an earlier child finished."""

    op: str
    dtype: str
    device: str
    route: str
    ops_files: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    thin: bool = False  # one input of each case where an emulator takes two
    emulated: str = ""  # the architecture whose emulator runs the kernels
    first: int = 0  # of the op's cases this one, and every ``step``-th after it
    step: int = 1

    def __post_init__(self) -> None:
        self._set(ops_files=tuple(self.ops_files), done=tuple(self.done))


@dataclass(frozen=True)
class Row(Record):
    """One op, dtype and variant (or ``gradient``, or ``reference``). ``worst`` is the largest error
    in units of the budget; ``refused`` counts the cases that the variant cannot take, ``why`` says
    why the first was."""

    op: str
    dtype: str
    variant: str
    cases: int = 0
    refused: int = 0
    why: str = ""
    worst: float = 0.0
    failures: int = 0
    first_failure: str = ""

    @property
    def label(self) -> str:
        return f"{self.op} {self.dtype} {self.variant}"
