"""``verify``: every op, variant and dtype on a device, against the fp64 reference.

What a user runs first on a new card. Each op and dtype runs in a child process, so that a variant
that crashes or hangs the device costs itself only; it is then named, and the rest goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from portkern import toolchain
from portkern.arguments import seconds
from portkern.dispatch import interpreting
from portkern.emulator import NAME
from portkern.errors import BadArgument, MissingTriton, UnknownName, UnsupportedDtype
from portkern.executors.translate import translator_of
from portkern.op import Op
from portkern.plugins import parse_arch, targets
from portkern.record import Record
from portkern.registry import all_ops, get
from portkern.runtime import Runtime, current
from portkern.target import Device
from portkern.verification_child import Children, in_child, reference_rows
from portkern.verification_row import Request, Row

MAX_JOBS = 12
STATEMENTS = {
    "launched": "Every kernel ran on {name}.",
    "interpreted": "Kernels ran in Triton's interpreter: this checks their mathematics, not the compiler "
    "and no device.",
    "emulated": "Machine code for {name} was executed by an emulator on the CPU: this checks the numbers, the "
    "addresses and the barriers, never the speed, and nothing was compared with the hardware.",
    "translated": "Code for {arch} was translated by the driver and ran on {name}: this checks its numbers, never its "
    "speed, and not the hardware that it is for.",
    "reference": "No kernel ran: on CPU tensors this checks the reference route only. "
    "Use --device interpreter to run the kernels without a GPU.",
}
SKIPPED_BF16 = (
    "bfloat16 arithmetic is wrong in Triton's interpreter; name the dtype to run kernels that widen it at the load"
)

Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Report(Record):
    """What ``verify`` found. ``route`` is a key of STATEMENTS."""

    device: str
    route: str
    statement: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    left: tuple[str, ...]  # ops and dtypes that the budget left out
    seconds: float
    versions: dict[str, Any]

    @property
    def failures(self) -> int:
        return sum(row.failures for row in self.rows)

    @property
    def cases(self) -> int:
        return sum(row.cases for row in self.rows)


def verify(
    ops: Iterable[str] | None = None,
    *,
    device: str = "auto",
    translate: str | None = None,
    dtypes: Sequence[str] | None = None,
    thin: bool = False,
    jobs: int | None = None,
    budget: float | str | None = None,
    ops_files: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Run every case, layout and style of input of ``ops`` (all by default) and judge the results.

    Args:
        ops: names; an op that is defined in ``__main__`` cannot be verified, since children run it.
        device: ``auto`` (the first GPU, else the CPU), ``cuda:N``, ``cpu`` (the reference route),
            ``interpreter``, or an architecture whose plugin has an emulator.
        translate: an architecture whose code the GPU's driver can translate: its defaults run in the place of the
            GPU's own.
        dtypes: torch's names; every dtype of each op by default.
        thin: one input of each case where an emulator takes two, another one for each dtype.
        jobs: how many child processes run at once.
        budget: seconds, or ``"90s"``, ``"5m"``, ``"1h"``, after which children are ended; the report names what is
            left. Refused on the reference route.
        ops_files: Python files with ``OPS`` that the children load too.
        progress: called with cases done and a word on where, from several threads.

    Raises BadArgument, UnknownName, UnsupportedDtype, MissingTriton.
    """
    runtime, start = current(), time.monotonic()
    where, route, part = _place(runtime, device)
    limit_s = _limit(budget, route)
    ops = (ops,) if isinstance(ops, str) else ops
    found = [get(name) for name in ops] if ops else [op for _, op in sorted(all_ops().items())]
    pairs, notes = _pairs(found, dtypes, route)
    arch = part.target.arch if part and route == "emulated" else ""
    if translate is not None:
        route, arch = "translated", _translated(runtime, translate, route, device)
    requests = [
        Request(op.name, dtype, where, route, tuple(ops_files), thin=thin, emulated=arch) for op, dtype in pairs
    ]
    if route == "reference" and not interpreting():
        rows = [row for request in requests for row in reference_rows(request, progress)]
        left: list[str] = []
    else:
        rows, left = _in_children(requests, jobs or _jobs(), limit_s, progress)
    return Report(
        device=part.slug if part else where,
        route=route,
        statement=STATEMENTS[route].format(name=part.name if part else where, arch=arch),
        rows=tuple(rows),
        notes=tuple(notes),
        left=tuple(left),
        seconds=round(time.monotonic() - start, 1),
        versions=_versions(),
    )


def place(device: str) -> Device | None:
    """The GPU that ``verify(device=device)`` uses; None if it uses none. Raises UnknownName."""
    return _place(current(), device)[2]


def _place(runtime: Runtime, text: str) -> tuple[str, str, Device | None]:
    """Where tensors lie, how kernels run there, and the GPU."""
    if text == "auto":
        text = f"cuda:{runtime.devices[0].index}" if runtime.devices else "cpu"
    if text == "cpu":
        return "cpu", "reference", None
    if text == "interpreter":
        toolchain.require_triton()
        return "cpu", "interpreted", None
    kind, _, index = text.partition(":")
    if kind == "cuda" and (not index or index.isdecimal()):
        toolchain.require_triton()
        part = runtime.device(int(index or 0))
        return f"cuda:{part.index}", "launched", part
    for part in runtime.devices:
        if text in (part.slug, part.identity):
            return f"cuda:{part.index}", "launched", part
    absent = _emulated(runtime, text)
    if absent is not None:
        return "cpu", "emulated", absent
    emulated = [target.arch for target in targets(runtime.plugins) if NAME in runtime.backend(target).executors()]
    raise UnknownName(
        f"cannot verify on {text!r}: take auto, cuda:N, cpu, interpreter, or an architecture that a plugin emulates "
        f"({', '.join(emulated) or 'none does'}); kernels for other absent architectures can be compiled (portkern "
        "compile), not run"
    )


def _limit(budget: float | str | None, route: str) -> float | None:
    """Seconds. Raises BadArgument."""
    if budget is not None and route == "reference":
        raise BadArgument(
            f"budget {budget!r} is for runs on a device; the reference on the CPU takes none: leave it out"
        )
    return None if budget is None else seconds(budget)


def _translated(runtime: Runtime, text: str, route: str, device: str) -> str:
    """The architecture ``text``, if its code can run on the GPU that is ``device``. Raises BadArgument, UnknownName."""
    if route != "launched":
        raise BadArgument(f"code for {text} is translated by a GPU's driver, and {device!r} is no GPU: take cuda:N")
    target = parse_arch(runtime.plugins, text)
    translator_of(runtime.backend(target))
    return target.arch


def _emulated(runtime: Runtime, text: str) -> Device | None:
    """The reference device of the architecture ``text``, if its plugin has an emulator."""
    try:
        target = parse_arch(runtime.plugins, text)
    except UnknownName:
        return None
    backend = runtime.backend(target)
    if NAME not in backend.executors():
        return None
    toolchain.require_triton()
    return backend.reference_device()


def _pairs(ops: Sequence[Op], dtypes: Sequence[str] | None, route: str) -> tuple[list[tuple[Op, str]], list[str]]:
    """Op and dtype of each child, and remarks on what is left out."""
    notes = []
    pairs = [(op, dtype) for op in ops for dtype in dtypes or op.dtypes if dtype in op.dtypes]
    known = sorted({dtype for op in ops for dtype in op.dtypes})
    unknown = [repr(dtype) for dtype in dtypes or () if dtype not in known]
    if unknown or not pairs:
        raise UnsupportedDtype(f"none of these ops takes {' or '.join(unknown)}; they take {', '.join(known)}")
    if route == "interpreted" and not dtypes:
        kept = [(op, dtype) for op, dtype in pairs if dtype != "bfloat16"]
        notes += [SKIPPED_BF16] if len(kept) < len(pairs) else []
        pairs = kept
    return pairs, notes


def _jobs() -> int:
    return max(1, min(MAX_JOBS, (os.cpu_count() or 2) * 3 // 4))


def _in_children(
    requests: Sequence[Request], jobs: int, limit_s: float | None, progress: Progress | None
) -> tuple[list[Row], list[str]]:
    """The rows of what was finished within the limit, and the ops and dtypes that were not."""
    if jobs < 1:
        raise BadArgument(f"jobs is {jobs}, expected 1 or more")
    pool, children = ThreadPoolExecutor(jobs), Children()
    try:
        futures = [pool.submit(in_child, request, children, progress) for request in requests]
        done, _ = wait(futures, limit_s, FIRST_EXCEPTION)
        rows = [row for future in futures if future in done for row in future.result()]
        return rows, [
            f"{request.op} {request.dtype}"
            for request, future in zip(requests, futures, strict=True)
            if future not in done
        ]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        children.stop()
        pool.shutdown()


def _versions() -> dict[str, Any]:
    try:
        return toolchain.provenance()
    except MissingTriton:
        import torch

        from portkern import __version__

        return {"portkern": __version__, "torch": torch.__version__, "triton": "none"}


def bundle(report: Report) -> dict[str, Any]:
    """One JSON object that an owner of a card can send back: results, machine, device, records."""
    from portkern.doctor import diagnose

    runtime = current()
    device = next((each for each in runtime.devices if each.slug == report.device), None)
    return {
        "report": report.to_json(),
        "device": device.to_json() if device else None,
        "checks": [check.to_json() for check in diagnose()],
        "facts": [fact.to_json() for fact in runtime.database.facts(device.slug)] if device else [],
    }
