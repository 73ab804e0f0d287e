"""``portkern doctor`` on machines that lack something: it always answers, and names the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern import doctor
from portkern.doctor import BROKEN, INFO, OK, WARN, Check
from portkern.runtime import Runtime, using

ROOT = Path(__file__).parent.parent
GPU = torch.cuda.is_available()


def examine(code: str = "", **environment: str | None) -> tuple[int, dict[str, Any], str]:
    """Exit code, checks by name, and stderr of ``portkern doctor --json`` in a process of its own.

    ``code`` runs first in that process; None removes a variable.
    """
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom portkern.__main__ import main\nmain()", "doctor", "--json"],
        cwd=ROOT,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == "portkern.doctor/1"
    assert answer["data"]["healthy"] == (done.returncode == 0)
    return done.returncode, {each["name"]: each for each in answer["data"]["checks"]}, done.stderr


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """Checks by name, made in this process with a changed environment."""

    def run(**environment: str | None) -> dict[str, Check]:
        for name, value in environment.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        with using(Runtime()):
            return {check.name: check for check in doctor.diagnose()}

    return run


def program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_a_home_that_is_no_folder() -> None:
    """The exit code says that nothing can be compiled; the text says what to export."""
    code, checks, _ = examine(HOME="/dev/null", PORTKERN_HOME=None, XDG_DATA_HOME=None, TRITON_CACHE_DIR=None)
    assert code == 1 and checks["Triton cache"]["remedy"].startswith("export TRITON_CACHE_DIR=")


WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name={name!r})
sys.meta_path.insert(0, Blocker())
import importlib.metadata as metadata
version = metadata.version
def absent(name):
    if name == {name!r}:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = absent
"""


def test_a_machine_that_lacks_nothing(tmp_path: Path) -> None:
    code, checks, errors = examine(PORTKERN_HOME=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert code == 0 and errors == ""
    for name in ("portkern", "python", "torch", "triton", "C compiler", "Triton cache", "database", "plugin", "ops"):
        assert checks[name]["status"] == OK, checks[name]
    assert checks["database"]["value"] == f"{tmp_path} (writable)"
    assert "softmax" in checks["ops"]["value"]
    if not GPU:
        assert checks["GPU"]["status"] in (INFO, WARN) and checks["GPU"]["value"].startswith("none")


def test_a_program_that_several_targets_share_is_told_once() -> None:
    names = [check.name for check in doctor.diagnose()]
    assert names.count("cuobjdump") == 1


def test_plugins_come_with_their_distribution() -> None:
    from portkern.plugins import loaded_plugins, plugin_manager

    found = dict(loaded_plugins(plugin_manager(entry_points=False)))
    assert found and all(origin.startswith("portkern ") for origin in found.values())


def test_no_compiler(here: Callable[..., dict[str, Check]], tmp_path: Path) -> None:
    """Without gcc, cc, clang and CC: broken where there is a GPU to launch on."""
    found = here(PATH=str(tmp_path), CC=None)["C compiler"]
    assert found.status == (BROKEN if GPU else WARN)
    assert "gcc" in found.value and "gcc" in found.remedy


@pytest.mark.parametrize("manager, command", [("apt-get", "apt-get install -y gcc"), ("dnf", "dnf install -y gcc")])
def test_no_compiler_names_the_command(
    here: Callable[..., dict[str, Check]], tmp_path: Path, manager: str, command: str
) -> None:
    program(tmp_path / manager)
    assert here(PATH=str(tmp_path), CC=None)["C compiler"].remedy.startswith(command)


def test_only_cc(here: Callable[..., dict[str, Check]], tmp_path: Path) -> None:
    """Triton looks for gcc and clang, not for cc: CC makes it use that."""
    program(tmp_path / "cc")
    assert here(PATH=str(tmp_path), CC=None)["C compiler"].remedy == f"export CC={tmp_path / 'cc'}"


def test_cc_names_no_program(here: Callable[..., dict[str, Check]]) -> None:
    found = here(CC="no-such-compiler -O2")["C compiler"]
    assert "no-such-compiler" in found.value and "unset CC" in found.remedy


def test_without_triton() -> None:
    code, checks, _ = examine(WITHOUT.format(name="triton"))
    assert code == 1 and checks["triton"]["status"] == BROKEN
    assert checks["triton"]["remedy"].startswith("pip install 'triton")
    assert checks["torch"]["status"] == OK and checks["database"]["status"] == OK


def test_without_torch() -> None:
    code, checks, _ = examine(WITHOUT.format(name="torch"))
    assert code == 1 and checks["torch"]["remedy"] == "pip install torch"
    assert checks["python"]["status"] == OK and checks["C compiler"]["name"]


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0"])
def test_an_untested_triton(
    here: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("portkern.toolchain.triton_version", lambda: version)
    found = here()["triton"]
    assert found.status == BROKEN and version in found.value and "3.6 to 3.9" in found.value


def test_triton_that_torch_does_not_want(
    here: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_wanted_triton", lambda: "triton==3.1.4")
    found = here()["torch's triton"]
    assert found.status == WARN and found.remedy == "pip install 'triton==3.1.4'"


@pytest.mark.parametrize("home", [None, "/", "/dev/null", "/nonexistent/home"])
def test_unusable_home(here: Callable[..., dict[str, Check]], home: str | None) -> None:
    """Whatever HOME is, the doctor answers; where nothing can be written it says what to export."""
    checks = here(HOME=home, PORTKERN_HOME=None, XDG_DATA_HOME=None, TRITON_CACHE_DIR=None, TRITON_HOME=None)
    for name, variable in (("database", "PORTKERN_HOME"), ("Triton cache", "TRITON_CACHE_DIR")):
        assert checks[name].status == OK or f"export {variable}=" in checks[name].remedy
    if home == "/dev/null":
        assert checks["database"].status == WARN and checks["Triton cache"].status == BROKEN


def test_read_only_home(here: Callable[..., dict[str, Check]], tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write anywhere")
    found = here(PORTKERN_HOME=str(tmp_path / "home"))["database"]
    assert found.status == WARN and "not writable" in found.value


def test_a_database_file_that_cannot_be_opened(here: Callable[..., dict[str, Check]], tmp_path: Path) -> None:
    """It costs speed, so nothing is broken; the other checks of the database stand."""
    (tmp_path / "nvidia_h200.sqlite3").mkdir()
    checks = here(PORTKERN_HOME=str(tmp_path))
    found = checks["records of nvidia_h200"]
    assert found.status == "warn" and found.remedy.startswith("export PORTKERN_HOME=")
    assert checks["database"].status == "ok"


def test_a_corrupt_database_file_is_named(here: Callable[..., dict[str, Check]], tmp_path: Path) -> None:
    (tmp_path / "sm80.sqlite3").write_bytes(bytes(range(256)) * 8)
    found = here(PORTKERN_HOME=str(tmp_path))["database file"]
    assert found.status == WARN and "was corrupt" in found.value and found.remedy


def test_a_plugin_that_fails_is_named_once() -> None:
    code, checks, _ = examine(
        "import portkern.runtime as r\nfrom portkern.errors import PluginError\n"
        "def fail(): raise PluginError('distribution bad offers the plugin bad, which fails to import')\n"
        "r.plugin_manager = fail"
    )
    named = [each for each in checks.values() if "distribution bad" in each["value"]]
    assert code == 1 and len(named) == 1 and named[0]["status"] == BROKEN


def test_variables_that_hide_gpus_are_shown(here: Callable[..., dict[str, Check]]) -> None:
    checks = here(CUDA_VISIBLE_DEVICES="GPU-1234,1", HIP_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert "GPU-1234,1" in checks["CUDA_VISIBLE_DEVICES"].value and "HIP_VISIBLE_DEVICES" in checks
    assert checks["TRITON_INTERPRET"].status == WARN and checks["TRITON_INTERPRET"].remedy == "unset TRITON_INTERPRET"


@pytest.mark.parametrize(("value", "status"), [("true", WARN), ("ON", WARN), ("0", "info"), ("false", "info")])
def test_the_interpreter_is_on_where_triton_says_so(
    here: Callable[..., dict[str, Check]], value: str, status: str
) -> None:
    assert here(TRITON_INTERPRET=value)["TRITON_INTERPRET"].status == status


def test_a_check_that_falls_over_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Check]:
        raise ZeroDivisionError("odd")

    fail.__name__ = "_compiler"
    monkeypatch.setattr(doctor, "_compiler", fail)
    checks = {each.name: each for each in doctor.diagnose()}
    assert checks["compiler"] == Check("compiler", BROKEN, "ZeroDivisionError: odd")
    assert checks["ops"].status == OK and doctor.broken(tuple(checks.values()))
