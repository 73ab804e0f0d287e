"""``emulate``: any ``@triton.jit`` kernel, executed on the CPU as the GPU of an absent target would execute it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portkern.backend import Backend
from portkern.emulator import NAME, Counters, Settings
from portkern.errors import BadArgument, BadType, CompileFailed, DeviceMismatch, UnknownName
from portkern.executors.emulate import compile_for, emulator_of, run
from portkern.plugins import parse_arch, targets
from portkern.runtime import Runtime, current
from portkern.target import Target
from portkern.toolchain import require_triton

Grid = int | Sequence[int] | Callable[[Mapping[str, Any]], Any]


def emulate(
    kernel: Any,
    grid: Grid,
    /,
    *args: Any,
    target: str | None = None,
    num_warps: int = 4,
    num_stages: int | None = None,
    seed: int | None = 0,
    budget: int = 20_000_000,
    check_registers: bool = False,
    **words: Any,
) -> Counters:
    """Compile ``kernel`` for ``target``, execute its machine code on the CPU, and count what it did.

    Args:
        kernel: a ``@triton.jit`` function, or what Triton compiled from one for ``target``.
        grid: programs along one to three axes, or a function of the constants that gives them, as for a launch.
        args: the kernel's arguments in order. CPU tensors and contiguous numpy arrays are written in place; memory
            outside of them must not be touched.
        target: an architecture whose plugin has an emulator; the first that has one where None.
        num_warps, num_stages: as for a launch; the target's own default of stages where None.
        seed: draws the order in which warps advance; None advances them in step.
        budget: steps of groups of warps after which a kernel counts as looping.
        check_registers: also fail where a register is read that nothing wrote.
        words: further arguments by name, constants among them, and options of Triton for the target.

    Raises MemoryFault, RaceDetected, NoProgress, UnmodelledInstruction (all EmulationError), CompileFailed, and
    BadArgument, BadType, DeviceMismatch or UnknownName for what cannot be launched.
    """
    require_triton()
    runtime = current()
    backend = runtime.backend(parse_arch(runtime.plugins, target) if target else _first_emulated(runtime))
    emulator = emulator_of(backend)
    settings = Settings(seed=seed, budget=budget, count=True, registers=check_registers)
    if hasattr(kernel, "asm"):
        _check_arch(kernel, backend.compile_target()[1])
        values = dict(zip((name for name in kernel.src.fn.arg_names), args, strict=False)) | words
        checked = {name: _argument(name, value) for name, value in values.items()}
        return run(emulator, kernel, _grid(grid, checked), checked, _tensors(checked), settings)
    if not hasattr(kernel, "warmup") or not inspect.isfunction(getattr(kernel, "fn", None)):
        raise BadType(
            f"{kernel!r} is no @triton.jit function; pass the function below any autotuning or heuristics, as kernel.fn"
        )
    values, options = _bind(kernel, args, words)
    options |= {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
    whole = _grid(grid, values)
    # Set here as for portkern's own ops: Triton's default changes from one version to the next.
    compiled = _compile(backend, kernel, whole, values, {"enable_fp_fusion": True} | options)
    return run(emulator, compiled, whole, values, _tensors(values), settings)


def _first_emulated(runtime: Runtime) -> Target:
    for target in targets(runtime.plugins):
        if NAME in runtime.backend(target).executors():
            return target
    raise UnknownName("no plugin has an emulator: install a package that offers one")


def _compile(backend: Backend, kernel: Any, grid: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    try:
        return compile_for(backend, kernel, [], grid, {**values, **options})
    except CompileFailed as error:
        if isinstance(error.__cause__, KeyError) and "Keyword argument" in str(error):
            taken = ", ".join(kernel.arg_names)
            raise BadArgument(f"{error}: it is neither an argument of the kernel ({taken}) nor an option") from error
        raise


def _check_arch(compiled: Any, arch: Any) -> None:
    found = getattr(getattr(compiled.metadata, "target", None), "arch", None)
    if found != arch:
        raise BadArgument(
            f"this kernel was compiled for {found}, not for {arch}: compile it for the target that it runs on"
        )


def _bind(kernel: Any, args: Sequence[Any], words: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of ``kernel`` by name, and what is left: options for Triton."""
    names, name = list(kernel.arg_names), kernel.fn.__name__
    if len(args) > len(names):
        raise BadArgument(f"{name} takes {len(names)} arguments ({', '.join(names)}) and got {len(args)}")
    values = dict(zip(names, args, strict=False))
    twice = sorted(set(values) & set(words))
    if twice:
        raise BadArgument(f"{name} got {twice[0]} by position and by name: pass it once")
    values |= {key: value for key, value in words.items() if key in names}
    defaults = inspect.signature(kernel.fn).parameters
    for each in names:
        if each not in values and defaults[each].default is not inspect.Parameter.empty:
            values[each] = defaults[each].default
    missing = [each for each in names if each not in values]
    if missing:
        raise BadArgument(f"{name} lacks the argument {', '.join(missing)}")
    options = {key: value for key, value in words.items() if key not in names}
    return {each: _argument(each, values[each]) for each in names}, options


def _argument(name: str, value: Any) -> Any:
    """A value as the compiler takes it: tensors for arrays."""
    if isinstance(value, torch.Tensor):
        if value.dtype.is_complex or value.dtype.is_floating_point is False and value.is_quantized:
            raise BadType(
                f"argument {name} has dtype {value.dtype}, which no kernel takes: pass a view of another type"
            )
        if value.device.type != "cpu":
            raise DeviceMismatch(
                f"argument {name} lies on {value.device}; the emulator works on CPU tensors: use .cpu()"
            )
        return value.detach()
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__") and getattr(value, "ndim", None):
        if not value.flags["C_CONTIGUOUS"]:
            raise BadArgument(
                f"argument {name} is an array that is not contiguous; pass a tensor view, or copy it first"
            )
        if not value.flags["WRITEABLE"]:
            raise BadArgument(f"argument {name} is a read-only array; pass a copy")
        try:
            return _argument(name, torch.from_numpy(value))
        except TypeError as error:
            raise BadType(f"argument {name} has dtype {value.dtype}, which no kernel takes: {error}") from error
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    known = (bool, int, float, str, tuple, type(None))
    if isinstance(value, known) or type(value).__module__.startswith(("triton", "torch")) or callable(value):
        return value
    raise BadType(f"argument {name} is {type(value).__name__}; pass a CPU tensor, a numpy array or a number")


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in values.items():
        base = getattr(value, "base", None)  # of a tensor descriptor
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(base, torch.Tensor):
            found[name] = base
    return found


def _grid(grid: Grid, values: Mapping[str, Any]) -> tuple[int, int, int]:
    found = grid(values) if callable(grid) else grid
    counts = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    good = 1 <= len(counts) <= 3 and all(isinstance(each, int) and not isinstance(each, bool) for each in counts)
    if not good or min(counts) < 1:
        raise BadArgument(f"the grid is {counts}, expected one to three counts of programs, each 1 or more")
    x, y, z = (*counts, 1, 1)[:3]
    return x, y, z
