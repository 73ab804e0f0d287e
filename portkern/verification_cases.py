"""The cases of ``verify``: each variant on every case, layout and style, judged against fp64."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portkern import dispatch
from portkern.dispatch import Situation
from portkern.errors import PluginError, PortkernError
from portkern.judging import examine
from portkern.library import altered_by
from portkern.lookup import Choice
from portkern.memory import Guarded, Kept
from portkern.op import Case, Op, unpack
from portkern.registry import get
from portkern.runtime import current
from portkern.target import Device
from portkern.testing import LAYOUTS, Verdict, lay_out
from portkern.variants import run_fitting, variant_default
from portkern.verification_gradients import differentiable, differentiated, gradients, random_like, stride_zero
from portkern.verification_public import NotCalled, check_public
from portkern.verification_row import Request, Row

STYLES = ("normal", "wide", "nonfinite")
PUBLIC = "public function"
GRADIENT_LAYOUTS = ("contiguous", "transposed")
MAX_INTERPRETED = 64  # programs of one launch: the interpreter takes about 2 ms for each
WAITING = "its programs wait for one another, and the interpreter runs them one after another"

Tell = Callable[[str, str], None]
Input = tuple[Case, str, str]  # case, layout, style


class Refused(Exception):
    """This variant does not run this case, for a reason to print."""


@dataclass
class _Tally:
    """A row in the making."""

    cases: int = 0
    refused: int = 0
    why: str = ""
    worst: float = 0.0
    failures: int = 0
    first_failure: str = ""

    def add(self, label: str, verdict: Verdict) -> None:
        self.cases += 1
        if verdict.right:
            self.worst = max(self.worst, verdict.ratio)
            return
        self.failures += 1
        self.first_failure = self.first_failure or f"{label}: {verdict.reason}"

    def refuse(self, reason: str) -> None:
        self.refused += 1
        self.why = self.why or reason


@dataclass(frozen=True)
class _Session:
    """One op and dtype on one device."""

    request: Request
    op: Op
    dtype: torch.dtype
    where: torch.device
    device: Device | None  # None on the reference route

    @property
    def interpreted(self) -> bool:
        return self.request.route == "interpreted"

    @property
    def stood_in(self) -> bool:
        return self.request.route in ("emulated", "translated")

    def args(self, case: Case, layout: str, style: str) -> tuple[Any, ...]:
        """The same values in every run, in memory surrounded by NaN."""
        seed = zlib.crc32(f"{case} {style}".encode())
        generator = torch.Generator(self.where).manual_seed(seed)
        args = self.op.inputs(
            case.sizes, self.dtype, device=self.where, generator=generator, style=style, **case.options
        )
        found = list(lay_out(args, layout))
        for position in altered_by(self.op):  # what is written has to have a place for each element
            if 0 in found[position].stride():
                (found[position],) = lay_out((args[position],), "contiguous")
        return tuple(found)

    def inputs(self) -> Iterator[Input]:
        """Every case in every layout and style; the interpreter gets other styles in one layout, an emulator two
        of each case, which rotate, or one (``thin``)."""
        if self.stood_in:
            yield from self._rotated()
            return
        for _, case in self.cases():
            for layout in LAYOUTS:
                for style in STYLES:
                    if not self.interpreted or style == "normal" or layout == "contiguous":
                        yield case, layout, style

    def _rotated(self) -> Iterator[Input]:
        names, turn = list(LAYOUTS), list(self.op.dtypes).index(self.request.dtype)
        for position, (number, case) in enumerate(self.cases()):
            other = names[1 + number % (len(names) - 1)], STYLES[(number + number // len(STYLES) + 1) % len(STYLES)]
            both = ((names[0], STYLES[number % len(STYLES)]), other)
            for layout, style in both[(position + turn) % 2 :][:1] if self.request.thin else both:
                yield case, layout, style

    def cases(self) -> list[tuple[int, Case]]:
        """Those that are asked for, with their numbers."""
        return list(enumerate(self.op.cases))[self.request.first :: self.request.step]


def rows(request: Request, tell: Tell) -> Iterator[Row]:
    """The rows of ``request``, each as it is finished; ``tell`` hears of every case before it runs."""
    where = torch.device(request.device)
    op = get(request.op)
    device = None if request.route == "reference" else dispatch.target_device(current(), where)
    session = _Session(request, op, getattr(torch, request.dtype), where, device)
    checks: dict[str, Callable[[Input], Verdict]] = {}
    if device is None:
        checks["reference"] = lambda each: _check_reference(session, each)
    else:
        for variant in _variants(session):
            checks[variant] = lambda each, name=variant: _check_variant(session, name, each)  # type: ignore[misc]
    for variant, check in checks.items():
        if variant not in request.done:
            yield _row(session, variant, session.inputs(), check, tell)
    if op.backwards and "gradient" not in request.done:
        inputs = ((case, layout, "normal") for _, case in session.cases() for layout in GRADIENT_LAYOUTS)
        if session.stood_in:  # three gradients a case: one layout each, in turn
            inputs = ((case, GRADIENT_LAYOUTS[i % 2], "normal") for i, (_, case) in enumerate(session.cases()))
        yield _row(session, "gradient", inputs, lambda each: _check_gradient(session, each), tell)
    public = op.signature is not None and not altered_by(op)
    if public and not session.stood_in and PUBLIC not in request.done:
        yield _row(session, PUBLIC, _few(session), lambda each: _check_public(session, each), tell)


def _few(session: _Session) -> Iterator[Input]:
    """What the public function is called with: it is the host's part, which the interpreter need not see twice."""
    cases = [case for _, case in session.cases()]
    if session.interpreted:
        cases = [max(cases, key=lambda case: (min(case.sizes, default=0) > 1, -math.prod(case.sizes)))]
    return ((case, layout, "normal") for case in cases for layout in GRADIENT_LAYOUTS)


def _variants(session: _Session) -> list[str]:
    """Every variant that some case allows."""
    found: dict[str, None] = {}
    for case in session.op.cases:
        metas = dispatch.input_key(session.op, session.args(case, "contiguous", "normal"))
        found |= dict.fromkeys(session.op.work(session.op.problem(*metas)).variants)
    return list(found)


def _row(
    session: _Session, variant: str, inputs: Iterator[Input], check: Callable[[Input], Verdict], tell: Tell
) -> Row:
    tally = _Tally()
    for each in inputs:
        case, layout, style = each
        label = f"{case} {layout} {style}"
        tell(variant, label)
        try:
            tally.add(label, check(each))
        except Refused as reason:
            tally.refuse(str(reason))
        except Exception as error:  # whatever Triton raises: this case is wrong, others may be right
            if _device_is_gone():
                raise
            text = " ".join(str(error).split())[:500]
            tally.add(label, Verdict(math.inf, f"{type(error).__name__}: {text}"))
    request = session.request
    return Row(request.op, request.dtype, variant, **vars(tally))


def _device_is_gone() -> bool:
    """After some errors a GPU answers nothing in this process: a new one has to go on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _check_reference(session: _Session, each: Input) -> Verdict:
    inputs = Kept(session.args(*each))
    return examine(session.op, inputs, unpack(dispatch.run(session.op, inputs.args)))


def _check_variant(session: _Session, variant: str, each: Input) -> Verdict:
    inputs, memory = Kept(session.args(*each)), Guarded()
    situation, choice = _planned(session, variant, inputs.args)
    outputs = run_fitting(
        situation,
        choice,
        lambda plan, options: dispatch.executor(situation.backend, session.where)(
            plan, inputs.args, session.where, options, memory
        ),
    )
    return examine(session.op, inputs, outputs, memory)


def _planned(session: _Session, variant: str, args: Sequence[Any]) -> tuple[Situation, Choice]:
    """The variant's default for ``args``. Raises Refused."""
    assert session.device is not None
    try:
        situation = dispatch.situate(current(), session.op, dispatch.input_key(session.op, args), session.device)
        if session.interpreted and (wrong := dispatch.not_interpreted(situation)):
            raise Refused(wrong)
        if variant not in situation.work.variants:
            raise Refused("the problem does not allow it")
        if session.interpreted and variant in situation.work.waiting:
            raise Refused(WAITING)
        found = variant_default(situation, variant)
        if found.choice is None:
            raise Refused(found.reason)
        plan = situation.plan(found.choice)
    except PluginError:
        raise  # a fault in the op itself
    except PortkernError as error:
        raise Refused(str(error)) from error
    programs = max((math.prod(launch.grid) for launch in plan.launches), default=0)
    if session.interpreted and programs > MAX_INTERPRETED:
        raise Refused(f"{programs} programs; the interpreter is given at most {MAX_INTERPRETED}")
    return situation, found.choice


def _check_gradient(session: _Session, each: Input) -> Verdict:
    """Autograd through the registered op against autograd through the fp64 reference."""
    op, args = session.op, session.args(*each)
    if session.interpreted and _largest_grid(session, args) > MAX_INTERPRETED:
        raise Refused(f"more programs than the {MAX_INTERPRETED} that the interpreter is given")
    positions = differentiable(op, args)
    if any(args[position].dtype != session.dtype for position in positions):
        raise Refused("an argument that is converted first has another gradient in fp64")
    buffers = op.outputs(*dispatch.input_key(session.op, args))
    grads = [random_like(buffer, session.where) for buffer in buffers[: len(buffers) - op.saved]]
    inputs = Kept((*args, *grads))
    found = gradients(op, args, grads)
    verdict = examine(differentiated(op, len(args)), inputs, found)
    return stride_zero(op, args, grads, found) if verdict.right else verdict


def _check_public(session: _Session, each: Input) -> Verdict:
    args = session.args(*each)
    if session.interpreted and _largest_grid(session, args) > MAX_INTERPRETED:
        raise Refused(f"more programs than the {MAX_INTERPRETED} that the interpreter is given")
    try:
        return check_public(session.op, args)
    except NotCalled as reason:
        raise Refused(str(reason)) from reason


def _largest_grid(session: _Session, args: Sequence[Any]) -> int:
    assert session.device is not None
    situation = dispatch.situate(current(), session.op, dispatch.input_key(session.op, args), session.device)
    if session.interpreted and (wrong := dispatch.not_interpreted(situation)):
        raise Refused(wrong)
    plan = situation.plan(dispatch.resolve(current(), situation))
    return max((math.prod(launch.grid) for launch in plan.launches), default=0)
