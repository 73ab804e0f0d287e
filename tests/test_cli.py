"""The command line as users run it: JSON of every command."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from portkern.cli.main import COMMANDS, portkern
from portkern.config import Config
from portkern.fact import Fact
from portkern.problem import Problem
from portkern.runtime import Runtime, using
from portkern.tuning_db import Database

ROOT = Path(__file__).parent.parent
SCALE = str(Path(__file__).parent / "ops" / "scale.py")
PROBLEM = Problem("softmax", {"M": 4096, "N": 4096}, {"x": "bfloat16", "y": "bfloat16"}, {}, {"x": "n16", "y": "n16"})
FACT = Fact(
    "nvidia_h100", "sm90", "softmax", "k1", "3.9", PROBLEM, Config("resident_row"), "measured", "default", 21.5, 0.2, 30
)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Callable[..., Result]]:
    """Runs a command in this process, on an empty database."""
    with using(Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))):
        yield lambda *args: CliRunner().invoke(portkern, list(map(str, args)))


def shell(*args: str, tmp_path: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own; None removes a variable."""
    variables = {**os.environ, "PORTKERN_HOME": str(tmp_path / "home"), **environment}
    return subprocess.run(
        [sys.executable, "-m", "portkern", *args],
        cwd=ROOT,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )


def data_of(result: Result | subprocess.CompletedProcess[str], command: str) -> Any:
    answer = json.loads(result.stdout)
    assert answer["schema"] == f"portkern.{command}/1" and set(answer) == {"schema", "data"}
    return answer["data"]


def complaint(result: Result) -> str:
    """The one line on stderr of bad input."""
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("portkern: error: ")
    return line


def test_help_needs_neither_torch_nor_triton() -> None:
    code = """
import sys
from portkern.cli.main import portkern
for name in [None, *sys.argv[1:]]:
    try:
        portkern.main([name, "--help"] if name else ["--help"])
    except SystemExit as error:
        assert error.code == 0
assert not {"torch", "triton", "tabulate", "pluggy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, *COMMANDS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"Usage: portkern {name} " in done.stdout for name in COMMANDS)


def test_no_command_prints_help(cli: Callable[..., Result]) -> None:
    result = cli()
    assert result.exit_code == 0 and all(name in result.stdout for name in COMMANDS)
    assert cli("--version").stdout.startswith("portkern, version ")


def test_ops(cli: Callable[..., Result]) -> None:
    assert {"softmax", "log_softmax_backward"} <= {each["name"] for each in data_of(cli("ops", "--json"), "ops")}
    (softmax,) = data_of(cli("ops", "softmax", "--json"), "ops")
    assert softmax["kind"] == "row_reduction" and softmax["backward"] == "softmax_backward"
    assert softmax["waiting"] == ["coresident_row"] and set(softmax["dtypes"]) >= {"bfloat16", "float32"}
    assert "resident_row" in cli("ops").stdout


def test_ops_file_before_and_after_the_command(cli: Callable[..., Result]) -> None:
    for args in (("--ops", SCALE, "ops"), ("ops", "--ops", SCALE)):
        names = [each["name"] for each in data_of(cli(*args, "--json"), "ops")]
        assert "example::scale" in names and "softmax" in names


def test_devices(cli: Callable[..., Result]) -> None:
    data = data_of(cli("devices", "--json"), "devices")
    assert {each["arch"] for each in data["targets"]} >= {"sm80", "sm90", "gfx942"}
    assert len(data["devices"]) == torch.cuda.device_count()
    assert "gfx942" in cli("devices").stdout


@pytest.mark.parametrize("device", ["gfx942", "sm_90a", "amd_mi300x", "gfx942:sramecc+:xnack-", "9.0"])
def test_explain(cli: Callable[..., Result], device: str) -> None:
    args = ("explain", "softmax", "--shape", "4096x8192", "--dtype", "bf16", "--device", device)
    (answer,) = data_of(cli(*args, "--json"), "explain")
    assert answer["layer"] == "default" and answer["blocks"]["BLOCK_N"] == 8192
    text = cli(*args).stdout
    assert "softmax 4096x8192 bfloat16 n16" in text and answer["config"] in text


def test_explain_several_and_set(cli: Callable[..., Result]) -> None:
    args = (
        "--shape",
        "64x32,scalar",
        "--shape",
        "0x5",
        "--dtype",
        "half,fp32",
        "--device",
        "sm80,gfx942",
        "--set",
        "dim=0",
    )
    answers = data_of(cli("explain", "softmax", *args, "--json"), "explain")
    assert len(answers) == 3 * 2 * 2
    assert [answer["problem"] for answer in answers][:2] == ["softmax 32x64 float16 m16", "softmax 32x64 float32 m16"]


def test_explain_names_a_record_of_another_spelling(cli: Callable[..., Result], tmp_path: Path) -> None:
    Database(tmp_path / "home").record([FACT])
    (answer,) = data_of(cli("explain", "softmax", "--shape", "4096x2048", "--device", "sm90", "--json"), "explain")
    (near,) = answer["near"]
    assert near["device"] == "nvidia_h100" and near["distance"] == 1.0
    assert any("N 4096 for 2048" in text for text in near["differs"])


def test_what_an_ops_file_prints_is_no_part_of_the_answer(cli: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "loud öps.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'ops')!r})\nprint('loud')\nfrom scale import OPS"
    )
    result = cli("--ops", file, "ops", "example::scale", "--json")
    assert data_of(result, "ops")[0]["name"] == "example::scale" and "loud" in result.stderr
    tuned = cli("--ops", file, "tune", "example::scale", "--device", "sm90", "--budget", "0.01s", "--json")
    assert data_of(tuned, "tune")["unfinished"], tuned.stderr


def test_compile_where_triton_interprets(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in complaint(cli("compile", "softmax", "--device", "sm90"))


def test_tune_exits_with_1_where_a_problem_failed(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'ops')!r})\n"
        "import dataclasses\nimport scale\ndef plan(*args):\n    raise ValueError('no plan')\n"
        "OPS = (dataclasses.replace(scale.OPS[0], name='broken::scale', plan=plan, backward=None),)\n"
    )
    done = shell("--ops", str(file), "tune", "broken::scale", "--device", "sm90", "--dtype", "fp16", "--json",
                 tmp_path=tmp_path)  # fmt: skip
    lines = data_of(done, "tune")["lines"]
    assert done.returncode == 1 and lines[0]["status"] == "failed" and "no plan" in lines[0]["why"]


def test_database_round_trip(cli: Callable[..., Result], tmp_path: Path) -> None:
    slower = dataclasses.replace(FACT, config=Config("looped_row"), role="candidate", time_us=40.0)
    Database(tmp_path / "home").record([FACT, slower])
    (listed,) = data_of(cli("db", "list", "--json"), "db-list")["devices"]
    assert listed["slug"] == "nvidia_h100" and listed["outcomes"] == {"measured": 2} and listed["ops"] == ["softmax"]
    assert [each["time_us"] for each in data_of(cli("db", "show", "nvidia_h100", "--json"), "db-show")] == [21.5]
    # The driver's name of the same part, every fact, one op.
    shown = cli("db", "show", "NVIDIA H100 80GB HBM3", "--all", "--op", "softmax", "--json")
    assert [each["time_us"] for each in data_of(shown, "db-show")] == [21.5, 40.0]
    assert "resident_row" in cli("db", "show", "nvidia_h100").stdout
    assert "there is about softmax" in complaint(cli("db", "show", "nvidia_h100", "--op", "matmul"))
    assert "did you mean nvidia_h100?" in complaint(cli("db", "show", "nvidia_h10"))

    file = tmp_path / "facts.jsonl"
    assert data_of(cli("db", "export", file, "--json"), "db-export")["facts"] == 2
    assert data_of(cli("db", "export", tmp_path / "best.jsonl", "--winners", "--json"), "db-export")["facts"] == 1
    with using(Runtime(database=Database(tmp_path / "other", tmp_path / "shipped"))):
        assert data_of(cli("db", "import", file, "--json"), "db-import")["added"] == 2
        assert data_of(cli("db", "import", file, "--json"), "db-import")["known"] == 2
        file.write_text(file.read_text() + "no fact\n")
        result = cli("db", "import", file, "--json")
        assert result.exit_code == 1
        assert [each["line"] for each in data_of(result, "db-import")["rejected"]] == [3]
        assert "1 lines refused" in cli("db", "import", file).stdout


def test_empty_database(cli: Callable[..., Result], tmp_path: Path) -> None:
    assert data_of(cli("db", "list", "--json"), "db-list")["devices"] == []
    assert "portkern tune" in cli("db", "list").stdout
    result = cli("db", "export", tmp_path / "none.jsonl")
    assert result.exit_code == 0 and "nothing to export" in result.stderr


def test_compile_on_three_targets(tmp_path: Path) -> None:
    args = ("compile", "softmax", "--device", "sm80,sm90,gfx942", "--shape", "512x1024", "--dtype", "bf16")
    done = shell(*args, "--variant", "all", "--json", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    data = data_of(done, "compile")
    assert {each["target"] for each in data} == {"sm80", "sm90", "gfx942"}
    assert {"resident_row", "looped_row", "split_row"} <= {each["variant"] for each in data}
    for each in data:
        assert bool(each["launches"]) != bool(each["refused"]) and not each["error"]
        for launch in each["launches"]:
            needs = launch["resources"]
            assert needs["registers"] > 0 and needs["spills"] == 0 and 0 < needs["occupancy"] <= 1
            assert launch["compile_s"] >= 0
    assert len(next(each for each in data if each["variant"] == "split_row")["launches"]) == 2


def test_compile_reports_spills_and_failures(tmp_path: Path) -> None:
    """Exit 1 and one line; the table still shows what did compile."""
    file = tmp_path / "greedy.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'ops')!r})\n"
        "import dataclasses\nimport scale\nimport triton\nimport triton.language as tl\n"
        "from portkern.config import Config\nfrom portkern.record import FrozenMap\n"
        "def one(device, work):\n    return (Config('blocks', FrozenMap(BLOCK_N=1 << 21), num_warps=4),)\n"
        "OPS = (dataclasses.replace(scale.OPS[0], name='greedy::scale', candidates=one, backward=None),)\n"
    )
    args = ("--ops", str(file), "compile", "greedy::scale", "--device", "sm90", "--shape", "64", "--dtype", "fp32")
    done = shell(*args, tmp_path=tmp_path)
    assert done.returncode == 1 and "does not compile" in done.stdout
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


def test_tune_offline(tmp_path: Path) -> None:
    args = ("tune", "softmax", "--device", "gfx942", "--shape", "64x128", "--dtype", "bf16", "--budget", "5m", "--json")
    first = data_of(shell(*args, tmp_path=tmp_path), "tune")
    assert {line["status"] for line in first["lines"]} == {"predicted"} and first["unfinished"] == 0
    again = data_of(shell(*args, tmp_path=tmp_path), "tune")
    assert {line["status"] for line in again["lines"]} == {"known"}
    explain = ("explain", "softmax", "--shape", "64x128", "--dtype", "bf16", "--device", "gfx942", "--json")
    (answer,) = data_of(shell(*explain, tmp_path=tmp_path), "explain")
    assert answer["layer"] == "predicted"
