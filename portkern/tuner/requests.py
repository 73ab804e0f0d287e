"""The arguments of ``tune``, understood: each mistake is an error that says what is taken."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from portkern import dispatch, registry
from portkern.errors import BadArgument, BadType, UnknownName, UnsupportedDtype
from portkern.op import Case, Op
from portkern.plugins import parse_arch, targets
from portkern.runtime import Runtime
from portkern.target import Device
from portkern.tuner.questions import Place

INTERPRETER = "interpreter"
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
MAX_ELEMENTS = 1 << 48
FIRST_DTYPES = ("bfloat16", "float16", "float32")  # the order of importance
LEFT_OUT = "float64"  # nobody tunes for it, and it takes longest

Shape = str | tuple[int, ...]


def ops_of(names: Sequence[str]) -> list[Op]:
    """The named ops, or all, each followed by those that differentiate it."""
    found: dict[str, Op] = {}
    for name in names or registry.all_ops():
        op = registry.get(name)
        found[op.name] = op
        for part in (part for part in op.backwards if part.op):
            found.setdefault(part.op, registry.get(part.op))
    return list(found.values())


def cases_of(ops: Sequence[Op], shapes: Sequence[Shape] | None) -> dict[str, tuple[Case, ...]]:
    """The cases of each op: those of ``shapes`` where given. Raises BadArgument."""
    shapes = [shapes] if isinstance(shapes, str) else shapes
    if shapes is not None and not isinstance(shapes, Iterable):
        raise BadArgument(f"shapes is {shapes!r}, expected a list, as in ['4096x8192', (4096, 8192)]")
    if shapes is None:
        return {op.name: op.tune_cases or op.cases for op in ops}
    cases = tuple(dict.fromkeys(Case(_sizes(shape)) for shape in shapes))
    if not cases:
        raise BadArgument("shapes is empty; leave it out for those that each op proposes")
    return dict.fromkeys((op.name for op in ops), cases)


def dtypes_of(ops: Sequence[Op], dtypes: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """The dtypes of each op, most important first. Raises BadArgument, UnsupportedDtype."""
    dtypes = [dtypes] if isinstance(dtypes, (str, torch.dtype)) else dtypes
    asked = None if dtypes is None else [_dtype(name) for name in dtypes]
    unknown = [name for name in asked or () if not any(name in op.dtypes for op in ops)]
    if unknown or asked == []:
        takes = "; ".join(f"{op.name} takes {', '.join(op.dtypes)}" for op in ops)
        raise UnsupportedDtype(f"no op here takes {' or '.join(unknown) or 'an empty list'}: {takes}")
    return {op.name: _of_op(op, asked) for op in ops}


def places_of(runtime: Runtime, device: str, timer: str | None) -> list[Place]:
    """Where ``device`` means. Raises UnknownName, BadArgument, BadType."""
    if not isinstance(device, str):
        raise BadType(f"device is {device!r}, expected a string: 'auto', 'all', 'cuda:N', or architectures, as 'sm90'")
    found: dict[str, Place] = {}
    for part in (text.strip() for text in device.split(",")):
        for place in _places(runtime, part, timer):
            before = found.setdefault(place.label, place)
            indices = dict.fromkeys((*before.indices, *place.indices))
            found[place.label] = replace(before, indices=tuple(indices))
    return list(found.values())


def _places(runtime: Runtime, device: str, timer: str | None) -> list[Place]:
    if device in ("auto", "all"):
        present = _present(runtime.devices)
        if present and device == "auto":
            return present
        known = targets(runtime.plugins)
        return [*present, *(_absent(runtime.backend(each).reference_device()) for each in known)]
    if device == INTERPRETER:
        return [_interpreted(runtime, timer)]
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match:
        return _present([_gpu(runtime, int(match[1] or 0))])
    try:
        target = parse_arch(runtime.plugins, device)
    except UnknownName as error:
        raise UnknownName(
            f"device {device!r} is none that can be tuned: 'auto', 'all', {_gpus(runtime)}, or an "
            f"architecture to predict for: {error}"
        ) from None
    return [_absent(runtime.backend(target).reference_device())]


def _present(devices: Iterable[Device]) -> list[Place]:
    """One place for each model: GPUs of one slug share its questions."""
    found: dict[str, Place] = {}
    for device in devices:
        index = () if device.index is None else (device.index,)
        place = Place(device, device.slug, device.target.arch, True, index)
        before = found.get(device.slug)
        found[device.slug] = place if before is None else replace(before, indices=(*before.indices, *index))
    return list(found.values())


def _absent(device: Device) -> Place:
    """The architecture of ``device``: its predictions are filed under the arch."""
    return Place(device, device.target.arch, device.target.arch, False)


def _interpreted(runtime: Runtime, timer: str | None) -> Place:
    """The tuner's whole way on CPU tensors, for its tests and those of a plugin: the choices are
    those of the architecture in PORTKERN_ARCH, and facts are filed where no dispatch looks."""
    if timer is None:
        raise BadArgument(
            f"device {INTERPRETER!r} has no clock that means anything: give timer='file.py:NAME', a "
            "portkern.timing.Timer, or tune on a GPU"
        )
    device = dispatch.target_device(runtime, torch.device("cpu"))
    return Place(device, INTERPRETER, INTERPRETER, True)


def _gpu(runtime: Runtime, index: int) -> Device:
    try:
        return runtime.device(index)
    except UnknownName as error:
        raise UnknownName(f"device 'cuda:{index}': {error}; this machine has {_gpus(runtime)}") from None


def _gpus(runtime: Runtime) -> str:
    names = [f"'cuda:{device.index}' ({device.name})" for device in runtime.devices]
    return ", ".join(names) or "no GPU"


def _sizes(shape: Shape) -> tuple[int, ...]:
    if shape == "scalar":
        return ()
    try:
        sizes = tuple(map(int, shape.lower().split("x")) if isinstance(shape, str) else map(operator.index, shape))
    except (TypeError, ValueError):
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise BadArgument(f"shape {shape!r} is none; write sizes from 0, as in '4096x8192' or (4096, 8192)")
    if max(*sizes, math.prod(sizes), 0) > MAX_ELEMENTS:
        raise BadArgument(f"shape {shape!r} has more than 2^48 elements, the limit; use a smaller one")
    return sizes


def _dtype(name: str) -> str:
    text = str(name).lower().removeprefix("torch.")
    found = getattr(torch, ALIASES.get(text, text), None)
    if not isinstance(found, torch.dtype):
        close = difflib.get_close_matches(name, [*ALIASES, *ALIASES.values()], 1)
        advice = f"did you mean {close[0]}?" if close else f"write one as in {', '.join(ALIASES)}, float8_e4m3fn"
        raise BadArgument(f"dtype {name!r} is none of torch's; {advice}")
    return str(found).removeprefix("torch.")  # torch's own name of it: half is float16


def _of_op(op: Op, asked: Sequence[str] | None) -> tuple[str, ...]:
    if asked is not None:
        return tuple(name for name in dict.fromkeys(asked) if name in op.dtypes)
    known = [name for name in FIRST_DTYPES if name in op.dtypes]
    rest = [name for name in op.dtypes if name not in (*known, LEFT_OUT)]
    return tuple([*known, *rest] or op.dtypes)
