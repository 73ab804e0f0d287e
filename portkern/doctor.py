"""``diagnose``: what portkern needs of this machine, what is missing, and the command that mends it.

Each check stands alone: one that fails unexpectedly is itself reported, and stops no other.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from portkern.errors import PortkernError
from portkern.record import Record

OK, INFO, WARN, BROKEN = "ok", "info", "warn", "broken"
INSTALLERS = {  # the package manager's command for a C compiler and Python's headers
    "apt-get": ("apt-get install -y gcc libc6-dev", "apt-get install -y python3-dev"),
    "dnf": ("dnf install -y gcc glibc-devel", "dnf install -y python3-devel"),
    "yum": ("yum install -y gcc glibc-devel", "yum install -y python3-devel"),
    "apk": ("apk add gcc musl-dev", "apk add python3-dev"),
    "conda": ("conda install -y gcc_linux-64", "conda install -y python"),
}
WATCHED = ("PORTKERN_", "TRITON_")  # prefixes of variables that change what happens


@dataclass(frozen=True)
class Check(Record):
    """One finding. ``status`` is ``ok``, ``info``, ``warn`` (something works less well) or
    ``broken``; ``remedy`` is a command, or says what to do."""

    name: str
    status: str
    value: str
    remedy: str = ""


def diagnose() -> tuple[Check, ...]:
    """Every check, in order of what builds on what."""
    found: list[Check] = []
    for check in (
        _python, _torch, _triton, _gpus, _visible, _compiler, _headers, _tools, _triton_cache, _database,
        _plugins, _verified, _ops, _settings,
    ):  # fmt: skip
        try:
            found += [each for each in check() if each not in found]
        except Exception as error:  # a doctor that falls over its patient helps nobody
            name = check.__name__.strip("_").replace("_", " ")
            known = isinstance(error, (PortkernError, OSError))
            text = str(error) if known else f"{type(error).__name__}: {error}"
            text = " ".join(text.split())
            if text not in {each.value for each in found}:  # one cause, several checks
                found.append(Check(name, BROKEN, text))
    return tuple(found)


def broken(checks: tuple[Check, ...]) -> bool:
    """Whether something that is needed does not work."""
    return any(check.status == BROKEN for check in checks)


def _python() -> Iterator[Check]:
    import platform

    import portkern

    yield Check("portkern", OK, f"{portkern.__version__} in {os.path.dirname(portkern.__file__)}")
    yield Check("python", OK, f"{platform.python_version()} on {platform.machine()} {platform.system()}")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check("torch", BROKEN, f"does not import: {error}", "pip install torch")
        return
    runtime = torch.version.cuda or torch.version.hip
    yield Check("torch", OK, f"{torch.__version__}, {f'GPU build for {runtime}' if runtime else 'CPU build'}")


def _triton() -> Iterator[Check]:
    from portkern.executors.replay import FORMS, form
    from portkern.toolchain import NEWEST_TRITON, OLDEST_TRITON, require_triton, triton_version

    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_TRITON, NEWEST_TRITON))
    wanted = _wanted_triton()
    install = f"pip install {wanted or f'triton>={oldest},<={newest}.*'!r}"
    try:
        import triton

        require_triton()
    except PortkernError as error:
        yield Check("triton", BROKEN, str(error), install)
        return
    except ImportError as error:
        yield Check("triton", BROKEN, f"does not import: {error}", install)
        return
    yield Check("triton", OK, f"{triton_version()} (tested: {oldest} to {newest})")
    yield Check("prepared calls", OK, FORMS[form(triton_version())])
    if wanted and wanted != f"triton=={triton.__version__}":
        yield Check("torch's triton", WARN, f"this torch asks for {wanted}, not {triton.__version__}", install)
    try:
        importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        yield Check("numpy", WARN, "missing: Triton's interpreter and emulators need it", "pip install numpy")


def _wanted_triton() -> str:
    """The Triton that the installed torch pins, as a requirement; empty if it pins none."""
    lines = (line.split(";")[0].strip() for line in importlib.metadata.requires("torch") or [])
    return next((line for line in lines if line.startswith("triton==")), "")


def _gpus() -> Iterator[Check]:
    import torch

    from portkern.discovery import unserved
    from portkern.runtime import current

    runtime = current()
    for device in runtime.devices:
        note = runtime.backend(device.target).note
        text = f"{device.name} ({device.target}, {device.units} units), driver {device.driver or 'unknown'}"
        yield Check(f"GPU cuda:{device.index}", OK, text + (f"; {note}" if note else ""))
    for name in unserved(runtime.plugins):
        yield Check("GPU", WARN, f"{name}: no plugin serves it", "pip install a package that offers a plugin for it")
    if torch.cuda.device_count() == 0:
        built = torch.version.cuda or torch.version.hip
        why = "torch is a CPU build" if not built else "this GPU build of torch sees none"
        remedy = "" if not built else "check the driver and the variables that hide GPUs"
        text = f"none ({why}): ops run torch's reference; compile, explain and offline tuning work"
        yield Check("GPU", INFO if not built else WARN, text, remedy)


def _visible() -> Iterator[Check]:
    from portkern.discovery import visibility
    from portkern.runtime import current

    for variable in visibility(current().plugins):
        yield Check(variable.name, INFO, f"{variable.value!r}: {'; '.join(variable.remarks)}")


def _compiler() -> Iterator[Check]:
    """Triton builds each kernel's launcher with CC, else gcc, else clang."""
    named = os.environ.get("CC")
    found = shutil.which(named.split()[0]) if named and named.split() else None
    found = found or (None if named else shutil.which("gcc") or shutil.which("clang"))
    if found:
        yield Check("C compiler", OK, found)
        return
    status, why = _needed_on_gpu()
    installer = next((commands[0] for name, commands in INSTALLERS.items() if shutil.which(name)), "install gcc")
    if named is not None:
        remedy = f"unset CC, or set it to a compiler: {installer}"
        yield Check("C compiler", status, f"CC={named!r} is no program on PATH; {why}", remedy)
        return
    other = shutil.which("cc")
    remedy = f"export CC={other}" if other else installer
    yield Check("C compiler", status, f"no gcc or clang on PATH, and CC is not set; {why}", remedy)


def _headers() -> Iterator[Check]:
    """The launchers include Python.h."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.exists():
        yield Check("Python headers", OK, str(header.parent))
        return
    status, why = _needed_on_gpu()
    installer = next((commands[1] for name, commands in INSTALLERS.items() if shutil.which(name)), "")
    yield Check("Python headers", status, f"no {header}; {why}", installer or "install Python's headers")


def _needed_on_gpu() -> tuple[str, str]:
    import torch

    why = "Triton builds its launchers with it, so nothing can be launched on a GPU"
    return (BROKEN if torch.cuda.device_count() else WARN), why


def _tools() -> Iterator[Check]:
    """The programs by which plugins read compiled kernels; they come with Triton."""
    from portkern.plugins import targets
    from portkern.runtime import current
    from portkern.toolchain import triton_version

    triton_version()  # without Triton they cannot be there: that is one finding, not several
    runtime = current()
    here = {device.target for device in runtime.devices}
    told = set()  # targets of one vendor share their programs
    for target in dict.fromkeys((*here, *targets(runtime.plugins))):
        for name, path in runtime.backend(target).tools().items():
            if not path:
                text = f"missing: kernels for {target} cannot be checked for registers and spills"
                yield Check(name, BROKEN if target in here else WARN, text, _reinstall())
            elif (name, path) not in told:
                told.add((name, path))
                yield Check(name, OK, path)


def _reinstall() -> str:
    return f"pip install --force-reinstall {_wanted_triton() or 'triton'!r}"


def _triton_cache() -> Iterator[Check]:
    folder = os.environ.get("TRITON_CACHE_DIR", "").strip()
    if not folder:
        folder = os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    problem = _unwritable(Path(folder))
    if problem:
        text = f"{folder}: {problem}; Triton cannot compile without it"
        yield Check("Triton cache", BROKEN, text, f"export TRITON_CACHE_DIR={tempfile.gettempdir()}/triton-cache")
    else:
        yield Check("Triton cache", OK, f"{folder} (writable)")


def _database() -> Iterator[Check]:
    from portkern.runtime import current
    from portkern.tuning_db.paths import VARIABLE

    database = current().database
    problem = _unwritable(database.home)
    if problem:
        text = f"{database.home}: {problem}; tuning results last only as long as the process"
        yield Check("database", WARN, text, f"export {VARIABLE}=/a/writable/folder")
    else:
        yield Check("database", OK, f"{database.home} (writable)")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for slug in database.slugs():
            try:
                bad = 0 if problem else len(database.quarantined(slug))  # which needs the home
                text = f"{len(database.facts(slug))} facts" + (f", {bad} bad rows set apart" if bad else "")
                yield Check(f"records of {slug}", INFO, text)
            except PortkernError as error:  # ops run without this file
                yield Check(f"records of {slug}", WARN, str(error), f"export {VARIABLE}=/another/folder")
    if not problem:  # which has been said
        yield from (Check("database file", WARN, str(each.message), "portkern tune, or db import") for each in told)


def _plugins() -> Iterator[Check]:
    from portkern.plugins import loaded_plugins
    from portkern.runtime import current

    for name, origin in loaded_plugins(current().plugins):
        yield Check("plugin", OK, f"{name}, from {origin}")


def _verified() -> Iterator[Check]:
    """What each target's results rest on."""
    from portkern.plugins import targets
    from portkern.runtime import current

    runtime = current()
    for target in targets(runtime.plugins):
        yield Check(f"verified {target}", INFO, runtime.backend(target).verified or "its plugin does not say how")


def _ops() -> Iterator[Check]:
    from portkern.registry import all_ops

    names = sorted(all_ops())
    yield Check("ops", OK if names else BROKEN, ", ".join(names) or "none")


def _settings() -> Iterator[Check]:
    for name, value in sorted(os.environ.items()):
        if not name.startswith(WATCHED):
            continue
        if name == "TRITON_INTERPRET" and value.lower() in ("1", "true", "on", "yes", "y"):
            remedy = "unset TRITON_INTERPRET"
            yield Check(name, WARN, f"{value}: kernels are interpreted on the CPU, not compiled", remedy)
        else:
            yield Check(name, INFO, value)


def _unwritable(folder: Path) -> str:
    """Why nothing can be written in ``folder``, or made where it should be; empty if it can."""
    existing: Path = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if existing != folder:
        return "" if os.access(existing, os.W_OK | os.X_OK) else f"it cannot be made, {existing} is not writable"
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"portkern")
            probe.flush()
    except OSError as error:
        return f"not writable ({error.strerror})"
    return ""
