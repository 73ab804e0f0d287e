"""Plugins are found, ordered, and held to the hook contract by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from portkern import backends, plugins
from portkern.backends.nvidia_sm90 import Hopper
from portkern.errors import PluginError, UnknownName
from portkern.hookspecs import hookimpl
from portkern.target import Target

ROOT = Path(__file__).parents[1]
PACKAGES = Path(__file__).parent / "plugins"
SM90 = Target("cuda", "sm90", 32)


def manager() -> Any:
    return plugins.plugin_manager(entry_points=False)


def plugin(**hooks: Callable[..., Any]) -> SimpleNamespace:
    """A plugin object with these functions marked as hooks."""
    return SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()})


def test_every_shipped_architecture_is_registered() -> None:
    files = {path.stem for path in (ROOT / "backends").glob("[a-z]*.py")}
    names = {name for name, _ in manager().list_name_plugin()}
    assert names == {f"portkern.backends.{stem}" for stem in files}
    assert len(files) >= 3


def test_targets_are_those_that_plugins_are_written_for() -> None:
    assert [target.arch for target in plugins.targets(manager())] == ["sm80", "sm90", "gfx942"]


@pytest.mark.parametrize(
    ("text", "arch", "backend", "lanes"),
    [
        ("sm80", "sm80", "cuda", 32),
        ("SM_90a", "sm90", "cuda", 32),
        ("compute_86", "sm86", "cuda", 32),
        ("9.0", "sm90", "cuda", 32),
        ("12.0", "sm120", "cuda", 32),
        ("cuda:89", "sm89", "cuda", 32),
        ("sm_103f", "sm103", "cuda", 32),
        (" gfx942:sramecc+:xnack- ", "gfx942", "hip", 64),
        ("hip:gfx950", "gfx950", "hip", 64),
        ("GFX90A", "gfx90a", "hip", 64),
    ],
)
def test_spellings_of_architectures(text: str, arch: str, backend: str, lanes: int) -> None:
    assert plugins.parse_arch(manager(), text) == Target(backend, arch, lanes)


@pytest.mark.parametrize("text", ["", "sm", "sm75", "7.5", "gfx1100", "h200", "9", "sm900", "gfx"])
def test_unknown_architecture_names_the_known_ones(text: str) -> None:
    with pytest.raises(UnknownName, match=r"sm80, sm90, gfx942.*install") as error:
        plugins.parse_arch(manager(), text)
    assert repr(text) in str(error.value)


def test_no_backend_for_a_target_that_nobody_serves() -> None:
    with pytest.raises(UnknownName, match="sm75.*sm80, sm90, gfx942"):
        plugins.backend_for(manager(), Target("cuda", "sm75", 32))


def test_the_backend_is_of_the_asked_target() -> None:
    pm = manager()
    for target in plugins.targets(pm):
        assert plugins.backend_for(pm, target).target == target
    wrong_vendor = Target("hip", "sm90", 32)
    with pytest.raises(UnknownName):
        plugins.backend_for(pm, wrong_vendor)


def test_a_later_plugin_overrides_a_shipped_one_and_may_decline() -> None:
    class Mine(Hopper):
        note = "mine"

    pm = manager()
    plugins.register(pm, plugin(portkern_backend=lambda target: Mine(target) if target == SM90 else None), "mine")
    assert plugins.backend_for(pm, SM90).note == "mine"
    assert plugins.backend_for(pm, Target("cuda", "sm80", 32)).note == ""


OWN_FILE = """
from portkern.backends.nvidia_sm90 import Hopper, hookimpl
from portkern.target import Target

TARGET = Target("cuda", "sm120", 32)


class Own(Hopper):
    pass


@hookimpl
def portkern_backend(target):
    return Own(target) if target == TARGET else None


@hookimpl
def portkern_targets():
    return (TARGET,)
"""


@pytest.mark.parametrize("name", ["nvidia_sm120", "zz_sm120", "a_sm120"])
def test_the_file_of_an_architecture_is_asked_before_one_that_lends_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(OWN_FILE)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    try:
        found = manager()
        own, lent = (plugins.backend_for(found, Target("cuda", arch, 32)) for arch in ("sm120", "sm100"))
        assert (type(own).__name__, type(lent)) == ("Own", Hopper)
        assert type(plugins.backend_for(found, SM90)) is Hopper
    finally:
        sys.modules.pop(f"portkern.backends.{name}", None)
        vars(backends).pop(name, None)


def test_a_misspelt_hook_fails_by_name() -> None:
    with pytest.raises(PluginError, match=r"plugin mine: portkern_bakend .*portkern_backend\?"):
        plugins.register(manager(), plugin(portkern_bakend=lambda target: None), "mine")


def test_a_misspelt_hook_without_the_prefix_fails_by_name() -> None:
    with pytest.raises(PluginError, match=r"mine.*backend_for"):
        plugins.register(manager(), plugin(backend_for=lambda target: None), "mine")


def test_an_unmarked_hook_fails_by_name() -> None:
    unmarked = SimpleNamespace(portkern_backend=lambda target: None)
    with pytest.raises(PluginError, match="mine: portkern_backend .*hookimpl"):
        plugins.register(manager(), unmarked, "mine")
    misspelt = SimpleNamespace(portkern_bakend=lambda target: None)
    with pytest.raises(PluginError, match=r"mine: portkern_bakend .*portkern_backend\?"):
        plugins.register(manager(), misspelt, "mine")


def test_a_hook_with_a_wrong_argument_fails_by_name() -> None:
    with pytest.raises(PluginError, match=r"(?s)mine.*portkern_backend.*gpu"):
        plugins.register(manager(), plugin(portkern_backend=lambda gpu: None), "mine")


def test_the_same_plugin_twice_fails_by_name() -> None:
    pm, mine = manager(), plugin(portkern_ops=lambda: ())
    plugins.register(pm, mine, "mine")
    with pytest.raises(PluginError, match="mine"):
        plugins.register(pm, mine, "mine")


@pytest.mark.parametrize(
    ("hook", "answer", "call"),
    [
        ("portkern_backend", lambda target: "fast", lambda pm: plugins.backend_for(pm, SM90)),
        ("portkern_parse_arch", lambda text: text, lambda pm: plugins.parse_arch(pm, "sm90")),
        ("portkern_device", lambda properties, index: 7, lambda pm: plugins.device_from(pm, None, 0)),
        ("portkern_targets", lambda: ["sm90"], plugins.targets),
        ("portkern_targets", lambda: 7, plugins.targets),
        ("portkern_ops", lambda: (len,), plugins.plugin_ops),
        ("portkern_environment", lambda: ["A"], plugins.environment),
        ("portkern_environment", lambda: {"A": 1}, plugins.environment),
    ],
)
def test_a_wrong_answer_names_plugin_and_hook(
    hook: str, answer: Callable[..., Any], call: Callable[[Any], Any]
) -> None:
    pm = manager()
    plugins.register(pm, plugin(**{hook: answer}), "mine")
    plugins.register(pm, plugin(portkern_ops=lambda: ()), "innocent")
    with pytest.raises(PluginError, match=f"plugin mine: {hook} gave .*, expected "):
        call(pm)


def test_remarks_of_several_plugins_on_one_variable_are_kept() -> None:
    pm = manager()
    plugins.register(pm, plugin(portkern_environment=lambda: {"CUDA_VISIBLE_DEVICES": "mine too"}), "mine")
    remarks = plugins.environment(pm)["CUDA_VISIBLE_DEVICES"]
    assert "mine too" in remarks
    assert len(remarks) == len(set(remarks)) == 3


def test_importing_starts_and_loads_nothing() -> None:
    code = (
        "import sys, portkern.plugins as plugins\n"
        "pm = plugins.plugin_manager()\n"
        "[plugins.backend_for(pm, target).reference_device() for target in plugins.targets(pm)]\n"
        "assert 'triton' not in sys.modules\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REPORT = """
from portkern import backends, plugins
from portkern.problem import Work
from portkern.record import FrozenMap
pm = plugins.plugin_manager()
backend = plugins.backend_for(pm, plugins.parse_arch(pm, "sm90"))
work = Work("row_reduction", FrozenMap(M=4096, N=4096), FrozenMap(x="float32"), FrozenMap(x="n16"),
            FrozenMap(resident_row=1.4), 1, 1, ("resident_row",))
print(backend.note, "|", backend.default(backend.reference_device(), work).num_warps)
"""


def installed(package: Path, folder: Path) -> dict[str, str]:
    """The environment of a process that has ``package`` installed, from a copy of its source."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(package, source)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--no-index", "--disable-pip-version-check", "--target", str(site), str(source)),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def report(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REPORT], env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.packaging
def test_an_installed_package_overrides_a_default(tmp_path: Path) -> None:
    before = report({**os.environ, "PYTHONPATH": str(ROOT)})
    assert before.stdout.strip() == "| 4", before.stderr
    after = report(installed(PACKAGES / "thirdparty", tmp_path))
    assert after.stdout.strip() == "defaults of portkern-example-plugin | 8", after.stderr


@pytest.mark.packaging
def test_an_installed_package_with_a_misspelt_hook_is_named(tmp_path: Path) -> None:
    done = report(installed(PACKAGES / "misspelt", tmp_path))
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("portkern.errors.PluginError: ")
    assert all(word in message for word in ("portkern-misspelt-plugin:misspelt", "portkern_bakend"))


def test_an_entry_point_that_cannot_be_imported_names_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken_thing-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: broken-thing\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text("[portkern]\nwrecked = no_such_module_of_ours\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"broken-thing.*wrecked.*no_such_module_of_ours.*ModuleNotFound"):
        plugins.plugin_manager()
    plugins.plugin_manager(entry_points=False)
