"""Which tests run in which process.

``tests/interpreter`` needs TRITON_INTERPRET=1 before Triton is imported; ``tests/crosscompile`` and
``tests/emulation`` replace Triton's driver for the whole process. So each runs in a process of its own,
which ``test_interpreter.py``, ``test_crosscompile.py`` and ``test_emulation.py`` start; or by hand:

    TRITON_INTERPRET=1 python -m pytest tests/interpreter
    python -m pytest tests/crosscompile
    python -m pytest tests/emulation
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
INTERPRETER = TESTS / "interpreter"
CROSSCOMPILE = TESTS / "crosscompile"
EMULATION = TESTS / "emulation"
MARKERS = {INTERPRETER: "interpret", CROSSCOMPILE: "crosscompile", EMULATION: "emulate"}
TAIL = 12_000  # characters of a child's output that a failure shows


def pytest_configure(config: pytest.Config) -> None:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    own = {folder: _asked_for(config, folder) for folder in MARKERS}
    if interpreting != all(own[INTERPRETER]):
        raise pytest.UsageError(
            "TRITON_INTERPRET=1 and tests/interpreter go together, with no other tests: "
            "TRITON_INTERPRET=1 python -m pytest tests/interpreter"
        )
    for folder in (CROSSCOMPILE, EMULATION):
        if any(own[folder]) and not all(own[folder]):
            raise pytest.UsageError(f"tests/{folder.name} needs a process of its own: name nothing else")


def _asked_for(config: pytest.Config, folder: Path) -> list[bool]:
    """For each path on the command line: does it lie in ``folder``?"""
    start = config.invocation_params.dir
    paths = [(start / argument.split("::")[0]).resolve() for argument in config.args]
    return [path.is_relative_to(folder) for path in paths]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path in MARKERS:
        return not any(_asked_for(config, collection_path))
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for folder, marker in MARKERS.items():
            if item.path.is_relative_to(folder):
                item.add_marker(marker)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        reason = _why_no_gpu()
        if reason and config.option.markexpr == "gpu":  # a run for the GPU's sake does not pass without one
            raise pytest.UsageError(f"-m gpu: {reason}")
        for item in on_gpu if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    return f"no GPU: torch.cuda.is_available() is False (torch {torch.__version__})"


@pytest.fixture
def run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Path, dict[str, str], float], None]:
    """Runs a folder's tests in a process of their own; fails unless some ran and all passed."""

    def run(folder: Path, environment: dict[str, str], timeout: float) -> None:
        report = tmp_path / "report.xml"
        arguments = [str(folder), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        log = tmp_path / "log"
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "pytest", *arguments],
                    cwd=TESTS.parent,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                )
                outcome = f"exited with {done.returncode}"
            except subprocess.TimeoutExpired:
                outcome = f"was stopped after {timeout:.0f} s"
        tail = log.read_text(errors="replace")[-TAIL:]
        if outcome != "exited with 0":
            pytest.fail(f"pytest in {folder.name} {outcome}:\n{tail}", pytrace=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        ran = int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
        if ran < 1:
            pytest.fail(f"no test in {folder.name} ran:\n{tail}", pytrace=False)
        with capsys.disabled():
            print(f"\n{folder.name}: {tail.strip().splitlines()[-1].strip('= ')}")

    return run
