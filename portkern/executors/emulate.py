"""Executor: compile a plan's kernels for a target that is not here, and execute their machine code on the CPU.

The target's plugin supplies the emulator. Like the compiling executor it makes a stand-in driver active while it
compiles, so use it only in processes that never launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from portkern.backend import Backend
from portkern.emulator import NAME, Address, Counters, Emulator, Settings, Span
from portkern.errors import BadArgument, BadType, CompileFailed, UnknownName
from portkern.executors.binding import bind, keywords, named
from portkern.executors.compile import standing_in
from portkern.executors.keys import keyed
from portkern.executors.launch import allocate, at
from portkern.plan import Buffer, Plan

Observer = Callable[[Counters], None]


def emulator_of(backend: Backend) -> Emulator:
    """The emulator of the target of ``backend``. Raises UnknownName where its plugin has none."""
    found = backend.executors().get(NAME)
    if not isinstance(found, Emulator):
        raise UnknownName(f"no plugin has an emulator for {backend.target.arch}: it can be compiled for, not run here")
    return found


def execute(
    plan: Plan,
    args: Sequence[Any],
    device: torch.device,
    options: Mapping[str, Any],
    allocate: Callable[[Buffer, torch.device], torch.Tensor] = allocate,
    *,
    backend: Backend,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    observe: Observer | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run ``plan`` on CPU tensors as the target of ``backend`` would; give its outputs.

    ``observe`` hears the Counters of each launch. Raises EmulationError and its kinds where the code touches what it
    must not, CompileFailed.
    """
    emulator = emulator_of(backend)
    outputs = [allocate(buffer, device) for buffer in plan.outputs]
    scratch = [allocate(buffer, device) for buffer in plan.scratch]
    buffers = {f"argument {i}": arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    buffers.update({f"output {i}": each for i, each in enumerate(outputs)})
    buffers.update({f"scratch {i}": each for i, each in enumerate(scratch)})
    for launch in plan.launches:
        kernel_args = bind(launch, args, outputs, scratch, at)
        compiled = compile_for(backend, launch.kernel, kernel_args, launch.grid, keywords(launch, options))
        counters = run(emulator, compiled, launch.grid, named(launch, kernel_args), buffers, settings)
        if observe:
            observe(counters)
    return tuple(outputs)


def compile_for(backend: Backend, kernel: Any, args: Sequence[Any], grid: Sequence[int], words: Any) -> Any:
    """One kernel, compiled for the very tensors of this call. Raises CompileFailed."""
    with standing_in(backend):
        try:
            return keyed(kernel, words.values()).warmup(*args, grid=tuple(grid), **words)
        except Exception as error:  # the compiler raises whatever its passes raise
            lines = (str(error).strip() or type(error).__name__).splitlines()
            name = getattr(getattr(kernel, "fn", kernel), "__name__", "kernel")
            raise CompileFailed(f"{name} does not compile for {backend.target}: {lines[0]}") from error


def run(
    emulator: Emulator,
    compiled: Any,
    grid: Sequence[int],
    values: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    settings: Settings,
) -> Counters:
    """Execute ``compiled`` on ``grid``. ``values`` are its parameters by name; it may touch ``buffers`` only."""
    spans, starts = spans_of(buffers)
    arguments: list[tuple[str, Any]] = []
    for name, kind in compiled.src.signature.items():
        arguments += _typed(name, kind, values.get(name), starts)
    whole = (*map(int, grid), 1, 1)[:3]
    return emulator.launch(emulator.prepare(compiled, settings), whole, spans, arguments, settings)


def _typed(name: str, kind: Any, value: Any, starts: Mapping[int, list[tuple[int, int, int]]]) -> Iterable[Any]:
    """A parameter as the values that the kernel receives: none for a constant, several for a descriptor."""
    if kind == "constexpr":
        return []
    if isinstance(kind, tuple):
        return [each for part, item in zip(kind, value, strict=True) for each in _typed(name, part, item, starts)]
    if isinstance(kind, str) and kind.startswith("*"):
        return [(kind, _address(name, value, starts))]
    if isinstance(kind, str) and kind.startswith("tensordesc"):
        base = _address(name, value.base, starts)
        shape, strides = [int(each) for each in value.shape], [int(each) for each in value.strides]
        wide, narrow = [("i64", each) for each in (*shape, *strides)], [("i32", each) for each in shape]
        flags = [("i1", getattr(value, "padding", "zero") == "nan")]
        if hasattr(value, "round_f32_to_tf32"):  # later versions of Triton pass it on
            flags.append(("i1", bool(value.round_f32_to_tf32)))
        return [("*", base), *wide, *flags, *narrow, *[("i64", each) for each in strides]]
    return [(kind, value)]


def _address(name: str, value: Any, starts: Mapping[int, list[tuple[int, int, int]]]) -> Address:
    if value is None:
        return Address(None)
    if not isinstance(value, torch.Tensor):
        raise BadType(f"parameter {name} wants a tensor and got {type(value).__name__}")
    offset = int(value.storage_offset()) * value.element_size()
    spans = starts.get(value.untyped_storage().data_ptr(), [])
    inside = [each for each in spans if each[1] <= offset <= each[2]]
    if not inside:
        raise BadArgument(f"parameter {name} points into memory that the launch was not given")
    span, start, _ = min(inside, key=lambda each: (each[2] == offset, offset - each[1]))
    return Address(span, offset - start)


def spans_of(buffers: Mapping[str, torch.Tensor]) -> tuple[list[Span], dict[int, list[tuple[int, int, int]]]]:
    """The memory of ``buffers``: one span for those that overlap; and for each storage the spans in it, as
    (number, first byte, last byte)."""
    by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in buffers.items():
        first, last = _extent(tensor)
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((first, last, name, tensor))
    spans: list[Span] = []
    starts: dict[int, list[tuple[int, int, int]]] = {}
    for pointer, members in by_storage.items():
        members.sort(key=lambda each: each[:2])
        groups: list[list[Any]] = []
        for first, last, name, tensor in members:
            if groups and first < groups[-1][1]:
                groups[-1][1] = max(groups[-1][1], last)
                groups[-1][2] += f" and {name}"
            else:
                groups.append([first, last, name, tensor])
        for first, last, name, tensor in groups:
            octets = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[first:last]
            starts.setdefault(pointer, []).append((len(spans), first, last))
            spans.append(Span(name, octets.numpy(), (pointer + first) % 256))
    return spans, starts


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor's elements in its storage, and the one after the last."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return first, first
    reach: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()
