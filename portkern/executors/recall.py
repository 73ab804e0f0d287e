"""Start a kernel by Triton's own launch, with what an earlier process compiled found without Triton's key.

Before the first compile of a process Triton hashes itself, 415 MB in version 3.6, and asks its assembler for its
version. A process whose kernels all lie in Triton's cache needs neither. So each compiled kernel gets a second entry
in that cache, under a key that holds what Triton's does but tells the files of Triton by size and time. All that
depends on how Triton keeps compiled kernels is in this file; a Triton of another version starts kernels as ever.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VERSIONS = ("3.6",)  # whose ``JITFunction.run`` does what ``_identify`` says
ENTRY = "portkern.json"
# Of Triton's package, what a compiled kernel depends on.
PARTS = ("_C", "backends", "compiler", "language", "runtime", "knobs.py")
SUFFIXES = (".py", ".so", ".bc")


class _Code(NamedTuple):
    """One kernel with one specialisation, as far as its compiler is told of it."""

    source: Any
    decides: str  # what else the code depends on, in words

    @property
    def entry(self) -> str:
        """The key of the second entry."""
        return hashlib.sha256(f"{_fingerprint()} {_settings()} {self.decides}".encode()).hexdigest()


class _Asked(NamedTuple):
    """A launch, as ``JITFunction.run`` looks it up in what this process has compiled of the kernel for this device."""

    memory: dict[str, Any]
    key: str  # in it
    bound: Mapping[str, Any]  # the kernel's parameters, with what each is given
    code: Callable[[], _Code]  # takes a millisecond, which a new shape of known code need not pay


def start(kernel: Any, grid: Sequence[int], args: Sequence[Any], words: Mapping[str, Any], known: set[str]) -> Any:
    """Do what ``kernel[grid](*args, **words)`` does, and give the compiled kernel. ``known`` holds the hashes of those
    that have their second entry."""
    if not _is_known(kernel):
        return kernel[tuple(grid)](*args, **words)
    asked = None if kernel.pre_run_hooks or _has_changed(kernel) else _ask(kernel, args, words)
    if asked is not None and (compiled := _of_this_process(asked, known)) is not None:
        _launch(compiled, grid, asked.bound)
        return compiled
    serves = _serves()
    if serves and not _has_hashed_itself():
        _recall(asked or _ask(kernel, args, words), known)
    compiled = kernel[tuple(grid)](*args, **words)
    if serves and compiled.hash not in known:
        known.add(compiled.hash)
        _keep(_ask(kernel, args, words).code(), compiled)
    return compiled


def _is_known(kernel: Any) -> bool:
    """Whether this Triton is known, and the kernel one that it compiles."""
    return _version() in VERSIONS and hasattr(kernel, "device_caches")


@functools.cache
def _version() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def _of_this_process(asked: _Asked, known: set[str]) -> Any:
    """What this process has compiled or found before: a new shape of known code. None for what ``start`` has still to
    look for or to keep, and for what is still being compiled."""
    compiled = asked.memory.get(asked.key)
    return compiled if getattr(compiled, "hash", None) in known else None


def _has_changed(kernel: Any) -> bool:
    """Whether a global value that the kernel was compiled with is another by now: Triton's own launch raises for it."""
    values = kernel.used_global_vals.items()
    return any(found.get(name, values) != value for (name, _), (value, found) in values)


def _launch(compiled: Any, grid: Sequence[int], bound: Mapping[str, Any]) -> None:
    """What ``JITFunction.run`` does with a kernel that is compiled; asking it would bind all arguments once more."""
    from triton import knobs
    from triton.runtime import driver

    stream = driver.active.get_current_stream(driver.active.get_current_device())
    metadata = compiled.launch_metadata(grid, stream, *bound.values())
    x, y, z = (*grid, 1, 1)[:3]
    run, settings = compiled.run, knobs.runtime  # ``run`` loads the kernel: only then is ``function`` there
    hooks = (settings.launch_enter_hook, settings.launch_exit_hook)
    run(x, y, z, stream, compiled.function, compiled.packed_metadata, metadata, *hooks, *bound.values())


def _serves() -> bool:
    """Whether nobody watches or changes what Triton compiles."""
    from triton import knobs

    runtime, compilation = knobs.runtime, knobs.compilation
    hooks = (runtime.jit_cache_hook, runtime.jit_post_compile_hook, runtime.add_stages_inspection_hook)
    changes = (compilation.always_compile, compilation.override, compilation.dump_ir, compilation.listener)
    # A cache of another kind may be remote: what is told by times of files here says nothing to others.
    return not any(hook is not None for hook in (*hooks, knobs.cache.manager_class)) and not any(changes)


def _has_hashed_itself() -> bool:
    """Whether Triton has made its key in this process: from then on it is as fast as this file."""
    from triton.runtime.cache import triton_key

    made: int = triton_key.cache_info().currsize
    return made > 0


def _ask(kernel: Any, args: Sequence[Any], words: Mapping[str, Any]) -> _Asked:
    """What ``JITFunction.run`` finds out before it launches."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import compute_cache_key

    memory, keys, target, backend, binder = kernel.device_caches[driver.active.get_current_device()]
    words = {
        **words,
        "debug": words.get("debug", kernel.debug) or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, specialization, options = binder(*args, **words)
    key = compute_cache_key(keys, specialization, options)
    code = functools.partial(_identify, kernel, target, backend, words, bound, specialization, options)
    return _Asked(memory, key, bound, code)


def _identify(
    kernel: Any, target: Any, backend: Any, words: Mapping[str, Any], bound: Any, specialization: Any, options: Any
) -> _Code:
    """What ``JITFunction.run`` finds out before it compiles."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    options, signature, constexprs, attrs = kernel._pack_args(backend, words, bound, specialization, options)
    source = kernel.ASTSource(kernel, signature, constexprs, attrs)
    environment = sorted(get_cache_invalidating_env_vars().items())
    # Triton's own backends are files of Triton, and asking them starts their assembler. Another one tells for itself.
    foreign = "" if type(backend).__module__.startswith("triton.") else backend.hash()
    return _Code(source, f"{(source.hash(), target, options.hash(), environment, foreign)}")


def _recall(asked: _Asked, known: set[str]) -> None:
    """Give this process what an earlier one compiled, if it is still there.

    A cache that cannot be written is asked all the same, and so is one that somebody clears meanwhile. Whatever is
    missing or damaged is left to Triton's own look-up, which follows, and says what it cannot mend.
    """
    if asked.key in asked.memory:
        return
    try:
        compiled = _kept(asked.code())
    except (OSError, ValueError, TypeError, LookupError):
        return
    if compiled is not None:
        asked.memory[asked.key] = compiled
        known.add(compiled.hash)


def _kept(code: _Code) -> Any:
    """What the second entry leads to, or None."""
    from triton.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(code.entry).get_file(ENTRY)
    if path is None:
        return None
    of_triton = json.loads(Path(path).read_text())["hash"]
    name = f"{code.source.name[:150]}.json"
    group = get_cache_manager(of_triton).get_group(name) or {}
    return CompiledKernel(code.source, group, of_triton) if name in group else None


def _keep(code: _Code, compiled: Any) -> None:
    """Write the second entry of ``compiled``, which has been launched: nothing that is wrong here is wrong with that.

    What Triton has to write itself it has written, or it raised. So the folder was filled by somebody else, or is full
    by now, and later processes start as slowly as without an entry. ``portkern doctor`` names the folder.
    """
    from triton.runtime.cache import get_cache_manager

    with contextlib.suppress(OSError):
        get_cache_manager(code.entry).put(json.dumps({"hash": compiled.hash}).encode(), ENTRY)


@functools.cache
def _fingerprint() -> str:
    """Triton's version and place, with the size and time of each file that decides what it compiles."""
    import triton

    root = Path(triton.__file__).parent
    found = [(str(path.relative_to(root)), *_stat(path)) for path in sorted(_files(root))]
    return hashlib.sha256(f"{triton.__version__} {root} {found}".encode()).hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for part in PARTS:
        whole = root / part
        if whole.is_file():
            yield whole
        for folder, _, names in os.walk(whole, followlinks=True):  # in a Triton that is developed, backends are links
            tools = Path(folder).name == "bin"
            yield from (Path(folder, name) for name in names if tools or name.endswith(SUFFIXES))


def _stat(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _settings() -> list[Any]:
    """Triton's environment, which may name another assembler or library: with their sizes and times."""
    found = sorted((name, value) for name, value in os.environ.items() if name.startswith("TRITON_"))
    return [(name, value, _stat(Path(value)) if os.path.isfile(value) else None) for name, value in found]
