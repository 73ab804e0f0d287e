"""Executor: replay a plan that has run once, as one prepared Python function.

The first call goes through Triton's own ``kernel[grid]``, which compiles and specialises. What it launched is bound
here once: grids, constants, the compiled kernels. A replay allocates the outputs, reads the pointers and launches.
All that depends on what lies under ``kernel[grid]`` in Triton is in this file, in three forms:

    direct   the C function of a launcher whose form is known, given integers for pointers
    run      ``compiled.run(grid, stream, function, ...)``, the same in Triton 3.6 to 3.9
    jit      ``kernel[grid]`` each time: this version of Triton is unknown
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from portkern.executors.binding import descriptor, named
from portkern.executors.launch import at
from portkern.plan import Argument, Buffer, Desc, In, Launch, Out, Plan, Scratch, Value
from portkern.sizes import is_traced

Call = Callable[..., Any]  # from a call's arguments, a sequence, to its outputs: None, one, or a tuple

RUN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")  # whose ``compiled.run`` takes what _RUN says
DIRECT_VERSIONS = ("3.6",)  # whose launcher has been called as _DIRECT says, on a GPU
FORMS = {
    "direct": "direct: by the C function of this Triton's launcher",
    "run": "run: by Triton's compiled kernel, about 1 us slower than directly",
    "jit": "jit: by kernel[grid], about 13 us slower than directly, since this Triton's launcher is unknown",
}

# What comes before the kernel's own arguments; {i} is the number of the launch.
_RUN = "X{i}, Y{i}, Z{i}, stream, F{i}, M{i}, None, None, None"
_DIRECT = "X{i}, Y{i}, Z{i}, stream, F{i}, W{i}, P{i}, None, None, M{i}, None, None, None"


@dataclass(frozen=True)
class Driver:
    """What a replay asks of torch about the device with an index; tests put their own in its place."""

    stream_of: Callable[[int], int]  # the current stream
    empty: Callable[[Any, Any, torch.dtype], torch.Tensor]  # on the current device: shape, strides, dtype
    current: Callable[[], int]  # the current device
    count: int  # of devices
    guard: Callable[[int], Any]  # makes a device the current one for a block

    @staticmethod
    @functools.cache
    def of_torch() -> Driver:
        # torch.empty_strided takes 4.3 us (docs/measurements.md), this function of torch's compiled code 2.3.
        return Driver(
            stream_of=torch._C._cuda_getCurrentRawStream,
            empty=torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]
            current=torch._C._cuda_getDevice,
            count=torch.cuda.device_count(),
            guard=torch.cuda.device,
        )


def form(version: str) -> str:
    """How calls are replayed with Triton ``version``: ``direct``, ``run`` or ``jit``."""
    short = ".".join(version.split(".")[:2])
    return "direct" if short in DIRECT_VERSIONS else "run" if short in RUN_VERSIONS else "jit"


def prepare(
    plan: Plan,
    kernels: Sequence[Any],
    index: int,
    args: Sequence[Any],
    places: Mapping[int, int],
    otherwise: Call,
    driver: Driver | None = None,
    listed: bool = False,
    hidden: int = 0,
    sink: torch.Tensor | None = None,
    sizes: Sequence[str] = (),
) -> Call | None:
    """``plan`` as a function of a sequence of arguments, or None where this Triton's launcher is unknown.

    Args:
        kernels: what each launch of ``plan`` launched when it ran, on the device with ``index``.
        args: the op's arguments.
        places: for each tensor argument its place in the sequence, and for each number that changes per call; what
            is not in it stays as it is in ``args``.
        listed: give the outputs as a list, however many.
        hidden: how many of the last outputs are not given.
        sink: memory that anybody may write and nobody reads: hidden outputs lie there where they fit.
        sizes: names of the traced numbers in ``plan``. The function then takes ``values`` as well, the numbers of a
            call in their order.
        otherwise: called with the same where a profiler has set launch hooks, which Triton's own launch honours.
    """
    import triton

    how = form(triton.__version__)
    if how == "jit" or not all(hasattr(kernel, "packed_metadata") for kernel in kernels):
        return None
    driver = driver or Driver.of_torch()
    code = _Code(plan, args, places)
    parameters = "args, values" if sizes else "args"
    code.say(f"if {_hooks(code)}:", f"    return {code.name('otherwise', otherwise)}({parameters})")
    if sizes:
        code.say(f"{', '.join(sizes)}, = values")
    code.name("empty", driver.empty)
    shown = len(plan.outputs) - hidden
    for letter, buffers in (("o", plan.outputs), ("s", plan.scratch)):
        for number, buffer in enumerate(buffers):
            if letter == "o" and number >= shown and sink is not None and _sinks(plan, number, sink):
                code.pointers[Out, number] = code.name(f"sink{number}", sink.data_ptr())
            else:
                code.say(f"{letter}{number} = {code.allocation(buffer)}")
    if plan.launches:
        code.say(f"stream = {code.name('stream_of', driver.stream_of)}({code.name('index', index)})")
    for number, (launch, kernel) in enumerate(zip(plan.launches, kernels, strict=True)):
        _launch(code, number, launch, kernel, how)
    outputs = ", ".join(f"o{number}" for number in range(shown))
    code.say(f"return [{outputs}]" if listed else f"return {outputs or None}")
    return _on_device(code.function(parameters), index, driver)


def _sinks(plan: Plan, number: int, sink: torch.Tensor) -> bool:
    """Whether the output may lie in ``sink``: it fits, is not zeroed before, and is given to kernels by its address."""
    buffer = plan.outputs[number]
    if not buffer.unread or buffer.init is not None or buffer.extent > sink.numel() * sink.element_size():
        return False
    described = [each.buffer for launch in plan.launches for each in launch.args if isinstance(each, Desc)]
    return not any(isinstance(each, Out) and each.position == number for each in described)


@dataclass
class _Code:
    """The source of a prepared call, and the values that it closes over. Calls of one structure share their compiled
    source, so that a new shape costs a closure only."""

    plan: Plan
    args: Sequence[Any]
    places: Mapping[int, int]
    lines: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    pointers: dict[tuple[Any, int], str] = field(default_factory=dict)

    def say(self, *lines: str) -> None:
        self.lines += lines

    def name(self, name: str, value: Any) -> str:
        """A name for ``value`` in the source."""
        self.values[name] = value
        return name

    def constant(self, value: Any) -> str:
        if value is None:
            return "None"
        if is_traced(value):
            return str(value.name)
        if type(value) is tuple and any(map(is_traced, value)):
            return "(" + "".join(f"{self.constant(each)}, " for each in value) + ")"
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def allocation(self, buffer: Buffer) -> str:
        zeroed = "" if buffer.init is None else ".zero_()"
        constants = map(self.constant, (buffer.shape, buffer.strides, buffer.dtype))
        return f"empty({', '.join(constants)}){zeroed}"

    def is_fixed(self, argument: Argument) -> bool:
        """Whether each call gives the kernel this very value."""
        return not is_traced(argument) and not isinstance(argument, (In, Out, Scratch, Value, Desc, tuple))

    def argument(self, argument: Argument) -> str:
        """What the kernel is given for ``argument``."""
        if type(argument) is int:  # of a kernel's twenty arguments nearly all are
            return self.constant(argument)
        if isinstance(argument, tuple):
            return "(" + "".join(f"{self.argument(each)}, " for each in argument) + ")"
        if isinstance(argument, (In, Out, Scratch)):
            return self._pointer(argument)
        if isinstance(argument, Value):
            place = self.places.get(argument.position)
            return self.constant(self.args[argument.position]) if place is None else f"args[{place}]"
        if isinstance(argument, Desc):
            start = f"{self.name('at', at)}({self._tensor(argument.buffer)}, {argument.buffer.offset})"
            return f"{self.constant(functools.partial(descriptor, argument))}({start})"
        return self.constant(argument)

    def _tensor(self, argument: In | Out | Scratch) -> str:
        if isinstance(argument, In):
            return f"args[{self.places[argument.position]}]"
        return f"{'o' if isinstance(argument, Out) else 's'}{argument.position}"

    def _pointer(self, argument: In | Out | Scratch) -> str:
        """The address of a buffer, which each call reads once."""
        key = (type(argument), argument.position)
        if key not in self.pointers:
            self.pointers[key] = f"p{len(self.pointers)}"
            self.say(f"{self.pointers[key]} = {self._tensor(argument)}.data_ptr()")
        found, offset = self.pointers[key], argument.offset
        if is_traced(offset):
            return f"{found} + {self.constant(offset)} * {self._itemsize(argument)}"
        return f"{found} + {self.constant(offset * self._itemsize(argument))}" if offset else found

    def _itemsize(self, argument: In | Out | Scratch) -> int:
        where = self.args if isinstance(argument, In) else self.plan.outputs
        where = self.plan.scratch if isinstance(argument, Scratch) else where
        size: int = where[argument.position].dtype.itemsize
        return size

    def function(self, parameters: str) -> Call:
        return _compiled(tuple(self.values), tuple(self.lines), parameters)(*self.values.values())


@functools.lru_cache(maxsize=512)
def _compiled(names: tuple[str, ...], lines: tuple[str, ...], parameters: str) -> Callable[..., Call]:
    body = "\n        ".join(lines)
    source = f"def make({', '.join(names)}):\n    def call({parameters}):\n        {body}\n    return call\n"
    found: dict[str, Any] = {}
    exec(compile(source, "<portkern prepared call>", "exec"), found)  # made of the names above
    make: Callable[..., Call] = found["make"]
    return make


def _launch(code: _Code, number: int, launch: Launch, kernel: Any, how: str) -> None:
    run = kernel.run
    direct = how == "direct" and _is_direct(run)
    for letter, size in zip("XYZ", (*launch.grid, 1, 1), strict=False):
        if is_traced(size):
            code.say(f"{letter}{number} = {code.constant(size)}")
        else:
            code.name(f"{letter}{number}", size)
    code.name(f"L{number}", run.launch if direct else run)
    code.name(f"F{number}", kernel.function)
    code.name(f"M{number}", kernel.packed_metadata)
    if direct:
        code.name(f"W{number}", run.launch_cooperative_grid)
        code.name(f"P{number}", run.launch_pdl)
    named_given = named(launch, launch.args)
    # Constexprs stand among the others, and no launcher reads them.
    given = [named_given.get(name) for name in launch.kernel.arg_names]
    changing = max((place for place, each in enumerate(given, 1) if not code.is_fixed(each)), default=0)
    # Of thirty strides and constexprs at the end one tuple is made here. A call that joins it to the rest passes the
    # launcher the very tuple that it parses.
    code.name(f"T{number}", tuple(given[changing:]))
    arguments = "".join(f", {code.argument(each)}" for each in given[:changing])
    code.say(f"L{number}(*(({(_DIRECT if direct else _RUN).format(i=number)}{arguments}) + T{number}))")


def _is_direct(run: Any) -> bool:
    """Whether ``run.launch`` takes what _DIRECT says: Triton's launchers differ between backends, and one that has to
    allocate memory for its kernel does so in Python."""
    names = run.__call__.__code__.co_varnames[: run.__call__.__code__.co_argcount]
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    return (
        hasattr(run, "launch_pdl")
        and names == ("self", "gridX", "gridY", "gridZ", "stream", "function")
        and not scratch
    )


def _hooks(code: _Code) -> str:
    """A test whether launch hooks are set: others than when this call was prepared, or functions in their chains; or
    hooks of a kernel itself."""
    from triton import knobs

    kernels = {id(launch.kernel): launch.kernel for launch in code.plan.launches}
    tests = [code.constant(kernel.pre_run_hooks) for kernel in kernels.values()]
    settings = code.name("settings", knobs.runtime)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(knobs.runtime, name)
        if hasattr(hook, "calls"):
            tests += [f"{settings}.{name} is not {code.constant(hook)}", code.constant(hook.calls)]
        else:  # none, or a function that somebody put in the place of Triton's chain
            tests.append(f"{settings}.{name} is not None")
    return " or ".join(tests)


def _on_device(call: Call, index: int, driver: Driver) -> Call:
    """``call`` with the device of its tensors as the current one, as memory and launches need it."""
    if driver.count == 1:
        return call

    def guarded(*given: Any) -> Any:
        if driver.current() == index:
            return call(*given)
        with driver.guard(index):
            return call(*given)

    return guarded
