"""Which ops exist, and the public function of each. Op files load at first use."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from portkern import hot, library, sharded
from portkern.errors import MissingTriton, PluginError, UnknownName
from portkern.op import NAMESPACE, Op, Result, visible
from portkern.plugins import plugin_ops
from portkern.runtime import Runtime, current

KERNELS = "portkern.kernels"


def register(op: Op) -> Callable[..., Any]:
    """Make ``op`` known to this process and give its public function.

    An op may be registered again, changed, as in a notebook; a changed schema raises PluginError, and so does a name
    that an op of portkern has, whether that is loaded or not.
    """
    if not isinstance(op, Op):
        raise PluginError(f"register() takes a portkern.Op, got {type(op).__name__}")
    if _shipped_as(op.name) is not op:
        refuse_taken(op.name)
    _enter(op)
    return function_of(op)


def refuse_taken(name: str) -> None:
    """Raise PluginError for the name of an op of portkern, which nobody else may give."""
    bare = name.removeprefix(f"{NAMESPACE}::")  # to torch they are one
    if bare != name or _shipped_as(name) is not None:
        raise PluginError(f"op {name} is taken: use a namespace, as in 'mine::{bare}'")


def _shipped_as(name: str) -> Op | None:
    """The op of portkern's own that is called ``name``. A name in another namespace is none, and needs no look; another
    loads every op file, since no list says what each defines."""
    return None if "::" in name else _shipped().get(name)


@functools.cache
def _shipped() -> dict[str, Op]:
    return {op.name: op for module in _kernel_modules() for op in _import(module).OPS}


def _enter(op: Op) -> None:
    """Make ``op`` known, whatever its name."""
    runtime = current()
    with runtime.lock:
        known = runtime.ops.get(op.name)
        if known is not None and known is not op and known.schema != op.schema:
            raise PluginError(
                f"op {op.name!r} is registered with the schema {known.schema!r}; "
                f"give the other one a namespace of its own, as in 'mine::{op.name}'"
            )
        library.define(op)
        runtime.ops[op.name] = op
        altering = library.altered_by(op)
        runtime.functions[op.name] = functools.partial(library.call, op.name) if altering else hot.canonical(op)
        if known is not None and known is not op:
            runtime.calls.clear()  # those of the op before are not asked for again
            runtime.bad.clear()  # and a kernel that was too large may have been mended


def get(name: str) -> Op:
    """The op called ``name``. Raises UnknownName with the nearest names."""
    runtime = current()
    if name not in runtime.ops:
        _load(runtime, name)
    op = runtime.ops.get(name)
    if op is None:
        known = sorted(all_ops())
        named = [each for each in known if each.rpartition("::")[2] == name]  # of another namespace
        close = named or difflib.get_close_matches(name, known, 3, 0.5)
        advice = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise UnknownName(f"no op {name!r}; {advice}")
    return op


def all_ops() -> dict[str, Op]:
    """Every op: shipped, brought by plugins, registered. Loads every op file."""
    runtime = current()
    with runtime.lock:
        for module in _kernel_modules():
            _register_all(_import(module), runtime)
        _register_plugins(runtime)
    return dict(runtime.ops)


def function(name: str) -> Callable[..., Any]:
    """The public function of the op called ``name``, as in ``function("mine::scale")``. Raises UnknownName."""
    op = get(name)
    if op.signature is None:
        raise UnknownName(f"op {name!r} has no public function: it serves as a backward")
    return function_of(op)


def public_names() -> tuple[str, ...]:
    """Names that ``portkern.<name>`` answers to."""
    return tuple(name for name, op in all_ops().items() if op.signature is not None and "::" not in name)


def public_function(name: str) -> Callable[..., Any]:
    """What ``portkern.<name>`` is; AttributeError where there is no such op."""
    try:
        return function(name)
    except UnknownName as error:
        raise AttributeError(f"module 'portkern' has no attribute {name!r}: {error}") from None


def load_file(path: str | os.PathLike[str]) -> tuple[Op, ...]:
    """Import the Python file at ``path`` and register the ops in its ``OPS``.

    The module is named after the file, and its folder is not put on the import path. Raises
    UnknownName where there is no such file, PluginError where it gives no ops or does not import.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UnknownName(f"no file {file}; --ops takes a Python file that defines OPS")
    name = f"portkern_ops_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # the command line and the tuner may both be told of one file
        known = tuple(sys.modules[name].OPS)
        _add(known, current(), str(file))  # another Runtime may not know it yet
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{file} is no Python file; --ops takes one that defines OPS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and pickle look the module of a function up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(f"{file} does not import: {type(error).__name__}: {error}") from error
    ops = getattr(module, "OPS", ())
    if not isinstance(ops, (tuple, list)) or not ops:
        del sys.modules[name]
        raise PluginError(f"{file} must define OPS as a tuple of portkern.Op, and has {ops!r}")
    taken = sorted(op.name for op in ops if isinstance(op, Op) and op.name in all_ops())
    if taken:
        del sys.modules[name]
        raise PluginError(f"{file} defines {', '.join(taken)}, which is taken: use a namespace, as in 'mine::softmax'")
    _add(ops, current(), str(file))
    return tuple(ops)


def function_of(op: Op) -> Callable[..., Any]:
    """The public function of ``op``, which must be registered before it is called; without one, that of its canonical
    arguments."""
    signature = op.signature
    if signature is None:
        return current().functions[op.name]

    def by_library(*args: Any, **kwargs: Any) -> Any:
        if sharded.is_distributed((*args, *kwargs.values())):
            return sharded.call(op, signature, by_library, args, kwargs)
        canonical = signature(*args, **kwargs)
        if isinstance(canonical, Result):
            return canonical.value
        library.refuse_transforms(op, canonical)
        return visible(op, library.call(op.name, *canonical), args, kwargs)

    slow = op.reads_values or library.altered_by(op)
    public = functools.wraps(signature)(by_library if slow else hot.function(op, signature, by_library, visible))
    public.__module__ = "portkern"
    public.__qualname__ = public.__name__
    # The signature function gives arguments; what the public one gives is in the schema.
    returns = public_result(op)
    public.__annotations__ = {**signature.__annotations__, "return": returns}
    shown = inspect.signature(signature)
    public.__signature__ = shown.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return public


def public_result(op: Op) -> str:
    """What the public function of ``op`` gives, as its schema spells it."""
    result = op.schema.rpartition("->")[2].strip()
    if not op.saved:
        return result
    parts = [part.strip() for part in result.strip("()").split(",")][: -op.saved]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _load(runtime: Runtime, name: str) -> None:
    """Load the file named like the op, or else all of them."""
    if name in _kernel_modules():
        with runtime.lock:
            _register_all(_import(name), runtime)
    if name not in runtime.ops:
        all_ops()


def _kernel_modules() -> list[str]:
    package = importlib.import_module(KERNELS)
    found = pkgutil.iter_modules(package.__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"{KERNELS}.{module}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingTriton(
            "portkern's ops need Triton 3.6 to 3.9. torch's GPU builds bring it; on a CPU-only "
            "machine install it with: pip install 'portkern[cpu]'"
        ) from error


def _register_all(module: ModuleType, runtime: Runtime) -> None:
    _add(module.OPS, runtime, module.__name__, _enter)


def _register_plugins(runtime: Runtime) -> None:
    _add(plugin_ops(runtime.plugins), runtime, "a plugin's portkern_ops()")


def _add(ops: Iterable[Op], runtime: Runtime, origin: str, enter: Callable[[Op], object] = register) -> None:
    for op in ops:
        if not isinstance(op, Op):
            raise PluginError(f"{origin} gives {op!r}, expected portkern.Op")
        if op.name not in runtime.ops:
            enter(op)
