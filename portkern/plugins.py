"""Plugins: found, checked against the hook contract, and asked.

Those shipped are the modules of ``portkern.backends``; others come by the entry-point group
``portkern``. Later ones are asked first, so a package can override what is shipped.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module, metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

import portkern.hookspecs as hookspecs  # "from portkern" would load every op
from portkern.backend import Backend
from portkern.errors import PluginError, UnknownName
from portkern.target import Device, Target

if TYPE_CHECKING:
    from portkern.op import Op

T = TypeVar("T")
PREFIX = f"{hookspecs.PROJECT}_"


def plugin_manager(entry_points: bool = True) -> pluggy.PluginManager:
    """A manager with every shipped plugin, and with those of installed packages if wanted.

    Raises PluginError for one that cannot be imported, or has a hook that portkern does not know.
    """
    pm = pluggy.PluginManager(hookspecs.PROJECT)
    pm.add_hookspecs(hookspecs)
    for module in _shipped():
        register(pm, module, module.__name__)
    if entry_points:
        found = metadata.entry_points(group=hookspecs.PROJECT)
        for entry in sorted(found, key=lambda point: (_distribution(point), point.name)):
            register(pm, _load(entry), f"{_distribution(entry)}:{entry.name}")
    return pm


def _shipped() -> list[ModuleType]:
    """The modules of ``portkern.backends`` by name, those after others that these lend their choices to: so the file of
    an architecture is asked before its neighbours' are."""
    package = import_module("portkern.backends")
    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if not found.ispkg)
    modules = [import_module(f"{package.__name__}.{name}") for name in names if not name.startswith("_")]
    backends = [module.portkern_backend for module in modules if hasattr(module, "portkern_backend")]

    def served(module: ModuleType) -> int:
        own = module.portkern_targets() if hasattr(module, "portkern_targets") else ()
        return sum(backend(target) is not None for target in own for backend in backends)

    return sorted(modules, key=served)


def register(pm: pluggy.PluginManager, plugin: Any, name: str) -> None:
    """Add ``plugin`` after checking that each of its hooks is one that portkern calls.

    Raises PluginError for one that is not, or a plugin that is there already.
    """
    for hook in dir(plugin):
        if hook.startswith(PREFIX) and inspect.isroutine(getattr(plugin, hook)):
            _check_hook(pm, plugin, name, hook)
    try:
        pm.register(plugin, name)
        pm.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"plugin {name}: {error}") from error


def parse_arch(pm: pluggy.PluginManager, text: str) -> Target:
    """The Target that ``text`` means, whichever vendor's spelling it is in.

    Raises UnknownName if no plugin knows it.
    """
    target = _first(pm, "portkern_parse_arch", Target, text=text)
    if target is None:
        raise UnknownName(
            f"no plugin knows the architecture {text!r}; there are plugins for "
            f"{', '.join(known.arch for known in targets(pm))} and their neighbours: use one of "
            "those, or install a package that offers a plugin for it"
        )
    return target


def backend_for(pm: pluggy.PluginManager, target: Target) -> Backend:
    """The Backend of the last registered plugin that serves ``target``.

    Raises UnknownName if none does.
    """
    backend = _first(pm, "portkern_backend", Backend, target=target)  # type: ignore[type-abstract]
    if backend is None:
        raise UnknownName(
            f"no plugin serves {target.arch} ({target.backend}); there are plugins for "
            f"{', '.join(known.arch for known in targets(pm))}: install a package that offers one"
        )
    return backend


def device_from(pm: pluggy.PluginManager, properties: Any, index: int) -> Device | None:
    """The Device that some plugin makes of torch's ``properties``, or None if no plugin does."""
    return _first(pm, "portkern_device", Device, properties=properties, index=index)


def targets(pm: pluggy.PluginManager) -> tuple[Target, ...]:
    """Every target that some plugin is written for, in order of backend and name."""
    found = dict.fromkeys(_all(pm, "portkern_targets", Target))
    return tuple(sorted(found, key=lambda target: (target.backend, target.arch)))


def plugin_ops(pm: pluggy.PluginManager) -> tuple[Op, ...]:
    """Every op that a plugin brings."""
    from portkern.op import Op

    return tuple(_all(pm, "portkern_ops", Op))


def environment(pm: pluggy.PluginManager) -> Mapping[str, tuple[str, ...]]:
    """The variables that decide which devices are visible, with every plugin's remark on each."""
    remarks: dict[str, dict[str, None]] = {}
    for given in pm.hook.portkern_environment():
        if not _texts(given):
            raise _wrong(pm, "portkern_environment", given, "a mapping of strings", _texts, {})
        for variable, remark in given.items():
            remarks.setdefault(variable, {})[remark] = None
    return {variable: tuple(remarks[variable]) for variable in sorted(remarks)}


def loaded_plugins(plugins: pluggy.PluginManager) -> Iterator[tuple[str, str]]:
    """Name and distribution of each plugin."""
    from portkern._version import __version__

    for name, _ in plugins.list_name_plugin():
        distribution = name.partition(":")[0] if ":" in name else ""
        try:
            version = metadata.version(distribution) if distribution else __version__
        except metadata.PackageNotFoundError:
            version = "unknown version"
        yield name, f"{distribution or 'portkern'} {version}"


def _first(pm: pluggy.PluginManager, hook: str, kind: type[T], **asked: Any) -> T | None:
    """The first answer to ``hook``, which must be of ``kind``."""

    def right(answer: Any) -> bool:
        return answer is None or isinstance(answer, kind)

    answer = getattr(pm.hook, hook)(**asked)
    if not right(answer):
        raise _wrong(pm, hook, answer, f"{kind.__name__} or None", right, asked)
    return answer  # type: ignore[no-any-return]


def _all(pm: pluggy.PluginManager, hook: str, kind: type[T]) -> Iterator[T]:
    """Every item of every answer to ``hook``, each of which must be of ``kind``."""

    def right(answer: Any) -> bool:
        return isinstance(answer, Iterable) and all(isinstance(item, kind) for item in answer)

    for answer in getattr(pm.hook, hook)():
        items = tuple(answer) if isinstance(answer, Iterable) else answer
        if not right(items):
            raise _wrong(pm, hook, items, f"an iterable of {kind.__name__}", right, {})
        yield from items


def _texts(answer: Any) -> bool:
    return isinstance(answer, Mapping) and all(isinstance(text, str) for item in answer.items() for text in item)


def _wrong(
    pm: pluggy.PluginManager,
    hook: str,
    answer: Any,
    expected: str,
    right: Callable[[Any], bool],
    asked: Mapping[str, Any],
) -> PluginError:
    """The error that names the plugin whose ``hook`` gave a wrong answer: each is asked again."""
    authors = [
        implementation.plugin_name
        for implementation in reversed(getattr(pm.hook, hook).get_hookimpls())
        if not right(implementation.function(*(asked[name] for name in implementation.argnames)))
    ]
    return PluginError(f"plugin {authors[0] if authors else 'unknown'}: {hook} gave {answer!r}, expected {expected}")


def _check_hook(pm: pluggy.PluginManager, plugin: Any, name: str, hook: str) -> None:
    known = [spec for spec in vars(hookspecs) if spec.startswith(PREFIX)]
    if hook not in known:
        close = difflib.get_close_matches(hook, known, 1)
        advice = f"did you mean {close[0]}?" if close else f"portkern calls {', '.join(known)}"
        raise PluginError(f"plugin {name}: {hook} is no hook of portkern; {advice}")
    if pm.parse_hookimpl_opts(plugin, hook) is None:
        raise PluginError(f"plugin {name}: {hook} would never be called: mark it with @portkern.hookspecs.hookimpl")


def _load(entry: metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise PluginError(
            f"distribution {_distribution(entry)} offers the plugin {entry.name} = {entry.value}, "
            f"which fails to import: {type(error).__name__}: {error}. Repair or uninstall it"
        ) from error


def _distribution(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"
