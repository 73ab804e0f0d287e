"""CI is data: the matrix, what reads it, and the README's commands agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MATRIX = ROOT / "ci" / "matrix.toml"
SCRIPT = ROOT / "ci" / "run_row.py"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"

pytest.importorskip("tomllib", reason="ci/run_row.py needs Python 3.11")


@pytest.fixture(scope="module")
def run_row() -> ModuleType:
    spec = spec_from_file_location("run_row", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(run_row: ModuleType) -> dict[str, dict[str, Any]]:
    return run_row.load(MATRIX)


def script(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def headline_commands() -> list[str]:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)\n```$", first_screen, flags=re.MULTILINE | re.DOTALL)


def test_readme_has_two_commands_of_one_line() -> None:
    work, test = headline_commands()
    assert "\n" not in work + test
    assert work.endswith("portkern tune") and test.endswith("python -m pytest")


def test_ci_runs_the_second_command_of_the_readme() -> None:
    assert script("cpu", "--print").stdout.strip() == headline_commands()[1]


def test_ci_script_runs_only_rows(rows: dict[str, Any]) -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert re.findall(r"python3 (\S+)", text) == ["ci/run_row.py"]
    loops = re.findall(r"^for row in (.*); do$", text, flags=re.MULTILINE)  # one starts them, one shows them
    assert len(loops) == 2
    for listed in loops:
        assert listed.split() == [name for name, row in rows.items() if row["hosted"]]


def test_matrix_names_every_target(rows: dict[str, Any]) -> None:
    assert {"cpu", "cpu-triton36", "cuda-sm80", "cuda-sm90", "rocm-gfx942"} <= set(rows)
    for name, row in rows.items():
        assert row["about"] and row["labels"], name
        assert bool(row["image"]) != row["hosted"], name
        assert bool(row["python"]) == row["hosted"], name


def test_matrix_pins_what_it_tests(rows: dict[str, Any]) -> None:
    lines = (ROOT / "ci" / "constraints-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.match(r"[a-z]+==[0-9.]+(; python_version .*)?$", pin) for pin in pins)
    assert {pin.split("==")[0] for pin in pins} == {"torch", "triton", "numpy"}
    (torch,) = (pin for pin in pins if pin.startswith("torch"))
    assert torch in rows["cpu-triton36"]["install"].split()


def test_a_run_for_the_gpu_does_not_pass_without_one(rows: dict[str, Any]) -> None:
    assert {row["tests"] for row in rows.values() if not row["hosted"]} == {"-m gpu"}
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_peak.py"]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "-m gpu: no GPU" in done.stderr


def test_workflow_matrix_has_each_row_once(rows: dict[str, Any]) -> None:
    outputs = dict(line.split("=", 1) for line in script("--github-matrix").stdout.splitlines() if line)
    found = {key: json.loads(value)["include"] for key, value in outputs.items()}
    names = {key: [row.pop("name") for row in include] for key, include in found.items()}
    assert names["hosted"] + names["gpu"] == sorted(rows, key=lambda name: not rows[name]["hosted"])
    assert found["gpu"][0] == rows[names["gpu"][0]]


def test_workflow_is_valid() -> None:
    check = [sys.executable, "-m", "check_jsonschema"]
    schema = ["--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run([*check, *schema], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflow_reads_the_matrix(run_row: ModuleType) -> None:
    text = WORKFLOW.read_text()
    assert "python3 ci/run_row.py --github-matrix >>" in text
    for output in ("hosted", "gpu"):
        assert f"{output}: ${{{{ steps.matrix.outputs.{output} }}}}" in text
        assert f"matrix: ${{{{ fromJSON(needs.rows.outputs.{output}) }}}}" in text
    assert set(re.findall(r"matrix\.(\w+) }}", text)) <= {"name", *run_row.KEYS}


def test_no_host_is_named() -> None:
    files = [*(ROOT / "ci").glob("*.*"), ROOT / ".ci" / "run", WORKFLOW, ROOT / "pyproject.toml"]
    assert len(files) > 6
    assert [file.name for file in files if "://" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("labels", ""), "row cpu: labels is no list"),
        (("venv", "src"), "venv 'src' is not named"),
        (("pyton", "3.11"), "missing or unknown: pyton"),
    ],
)
def test_bad_row(
    run_row: ModuleType, rows: dict[str, Any], tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    row = {**rows["cpu"], change[0]: change[1]}
    path = tmp_path / "matrix.toml"
    # JSON of strings, booleans and lists of strings is TOML.
    path.write_text("[cpu]\n" + "".join(f"{key} = {json.dumps(row[key])}\n" for key in row))
    with pytest.raises(run_row.BadMatrix, match=message):
        run_row.load(path)


def test_unknown_row_is_one_line_and_exit_2() -> None:
    done = script("cuda-sm100", check=False)
    assert done.returncode == 2 and "no row 'cuda-sm100'; rows: cpu" in done.stderr
    assert done.stderr.count("\n") == 1


def test_gpu_rows_borrow_torch_from_their_image(
    rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)  # this environment is the image
    for name, row in rows.items():
        if not row["hosted"]:
            folder = tmp_path / name
            folder.mkdir()
            code = "import importlib.util as util; print(util.find_spec('torch').origin)"
            look = f'{row["venv"]}/bin/python -c "{code}"'
            steps = [f"python3 -m venv --without-pip {row['venv']}", *row["prepare"], look]
            done = subprocess.run(["bash", "-c", " && ".join(steps)], cwd=folder, capture_output=True, text=True)
            assert done.stdout.strip().endswith("torch/__init__.py"), done.stderr


PYTHON = """#!/bin/bash
echo "python3 $*" >> log
mkdir -p "$3/bin"
for tool in pip python ruff; do
    printf '#!/bin/bash\\necho "%s $*" >> log\\n[ "$1" != "$FAIL" ]\\n' $tool > "$3/bin/$tool"
done
chmod +x "$3/bin/"*
"""


SET_UP = ["python3 -m venv .venv", "pip install ."]
TESTS = ["python -m pytest"]
CHECKS = ["ruff check", "ruff x"]


@pytest.mark.parametrize(
    ("failing", "status", "ran"),
    [
        ("", 0, [*SET_UP, *TESTS, *CHECKS]),
        ("install", 1, [*SET_UP, *CHECKS]),
        ("check", 1, [*SET_UP, *TESTS, *CHECKS]),
    ],
)
def test_run(
    run_row: ModuleType,
    rows: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    status: int,
    ran: list[str],
) -> None:
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAIL", failing)
    row = {**rows["cpu"], "install": ".", "checks": ["ruff check", "ruff x"]}
    assert run_row.run("cpu", row, tmp_path, replace=False) == status
    assert (tmp_path / "log").read_text().splitlines() == ran
    with pytest.raises(run_row.BadMatrix, match="add --replace"):
        run_row.run("cpu", row, tmp_path, replace=False)
    assert run_row.run("cpu", row, tmp_path, replace=True) == status
