"""The command line as users run it: JSON of every command, one line for every mistake, no traceback."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from portkern import relu
from portkern.cli.main import COMMANDS, portkern
from portkern.config import Config
from portkern.errors import UnknownName
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

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


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


MISTAKES = {
    "no tolerance": (("bench", "--tolerance", "nan"), "--tolerance is nan; it takes a percentage"),
    "unknown command": (("explian",), "did you mean 'explain'?"),
    "unknown option": (("ops", "--jsn"), "--json"),
    "missing argument": (("explain",), "portkern explain --help"),
    "missing subcommand": (("db",), "portkern db --help"),
    "unknown op": (("explain", "sofmax", "--device", "sm90"), "did you mean softmax"),
    "unknown op, nothing near": (("ops", "zzzzzz"), "there are "),
    "unknown arch": (("explain", "softmax", "--device", "sm9O"), "did you mean sm90"),
    "unknown arch, nothing near": (("compile", "softmax", "--device", "zzzzzz"), "there are "),
    "unknown slug": (("explain", "softmax", "--device", "nvidia_h20"), "did you mean nvidia_h200"),
    "no such GPU": (("explain", "softmax", "--device", "cuda:77"), "there is no GPU 77"),
    "shape garbage": (("explain", "softmax", "--shape", "4096*8"), "as in 4096x8192"),
    "shape empty": (("explain", "softmax", "--shape", ""), "as in 4096x8192"),
    "shape negative": (("explain", "softmax", "--shape", "-4x8"), "sizes from 0"),
    "shape negative inside": (("explain", "softmax", "--shape", "4x-8"), "sizes from 0"),
    "shape too large": (("explain", "softmax", "--shape", "9999999999x9999999999"), "2^48"),
    "shape of one op": (
        ("--ops", SCALE, "explain", "softmax", "--shape", "4x5", "--set", "dim=7"),
        "dim 7 is out of range",
    ),
    "unknown dtype": (("explain", "softmax", "--dtype", "floot16"), "did you mean float16?"),
    "dtype of another op": (("explain", "softmax", "--dtype", "int8"), "only float32, float16, bfloat16, float64"),
    "set without a value": (("explain", "softmax", "--set", "dim"), "NAME=VALUE"),
    "set of an unknown argument": (("explain", "softmax", "--set", "axis=0"), "takes dim"),
    "set of our own argument": (("explain", "softmax", "--set", "device='cpu'"), "takes dim"),
    "set of a wrong type": (("explain", "softmax", "--device", "sm90", "--set", "dim=abc"), "'dim' must be an int"),
    "unknown variant": (("compile", "softmax", "--device", "sm90", "--variant", "looped"), "looped_row"),
    "missing ops file": (("--ops", "/nowhere/ops.py", "ops"), "no file /nowhere/ops.py"),
    "ops file without OPS": (("--ops", __file__, "ops"), "must define OPS"),
    "ops file, a folder": (("--ops", str(ROOT), "ops"), "--ops takes"),
    "verify on an absent architecture": (("verify", "--device", "sm80"), "portkern compile"),
    "verify an unknown dtype": (("verify", "softmax", "--dtype", "int4", "--device", "cpu"), "they take"),
    "verify, no jobs": (("verify", "--jobs", "0"), "1"),
    "verify, report in no folder": (("verify", "--report", "/nowhere/report.json"), "name another"),
    "tune, budget": (("tune", "softmax", "--device", "sm90", "--budget", "soon"), "90s"),
    "verify, one dtype unknown": (("verify", "softmax", "--dtype", "fp16,floot16", "--device", "cpu"), "'floot16'"),
    "verify, report that cannot be": (("verify", "--report", "/proc/report.json"), "name another"),
    "empty device": (("compile", "softmax", "--device", ""), "leave --device out"),
    "empty op": (("tune", "", "--device", "sm90"), "empty part"),
    "empty dtype": (("explain", "softmax", "--dtype", "bf16,"), "leave --dtype out"),
    "export of an empty slug": (("db", "export", "x.jsonl", "--device", ""), "leave --device out"),
    "tune, a dtype that no op takes": (("tune", "--device", "sm90", "--dtype", "bf16,int8"), "int8"),
    "tune, unknown op": (("tune", "sofmax"), "did you mean softmax"),
    "tune, unknown device": (("tune", "softmax", "--device", "zzz"), "zzz"),
    "tune, dtype": (("tune", "softmax", "--dtype", "bf61"), "bfloat16"),
    "show an unknown device": (("db", "show", "nvidia_h2OO"), "nothing is recorded"),
    "import of no file": (("db", "import", "/nowhere/facts.jsonl"), "/nowhere/facts.jsonl"),
    "import of a folder": (("db", "import", str(ROOT)), str(ROOT)),
    "import of garbage": (("db", "import", __file__), "line 1"),
    "export to no folder": (("db", "export", "/nowhere/facts.jsonl"), "/nowhere/facts.jsonl: No such file"),
    "bench of an unknown op": (("bench", "sofmax"), "did you mean softmax"),
    "bench against no file": (("bench", "softmax", "--baseline", "/nowhere.json"), "/nowhere.json: No such file"),
    "export of an unknown device": (("db", "export", "x.jsonl", "--device", "zzz"), "nothing is recorded"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(cli: Callable[..., Result], name: str) -> None:
    args, expected = MISTAKES[name]
    assert expected in complaint(cli(*args))


@no_gpu
@pytest.mark.parametrize("args", [("bench", "softmax"), ("explain", "softmax"), ("verify", "--device", "cuda:0")])
def test_what_needs_a_gpu_says_so(cli: Callable[..., Result], args: tuple[str, ...]) -> None:
    assert "GPU" in complaint(cli(*args))


def test_a_config_that_cannot_run(cli: Callable[..., Result], tmp_path: Path) -> None:
    """An op whose every candidate is refused: the reason, not a traceback."""
    file = tmp_path / "wide.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'ops')!r})\n"
        "import dataclasses\nimport scale\nfrom portkern.errors import Infeasible\n"
        "def fit(config, work, device):\n    raise Infeasible('it needs 9 lanes')\n"
        "OPS = (dataclasses.replace(scale.OPS[0], name='wide::scale', fit=fit, backward=None),)\n"
    )
    line = complaint(
        cli("--ops", file, "explain", "wide::scale", "--device", "sm90", "--shape", "8", "--dtype", "fp32")
    )
    assert "it needs 9 lanes" in line


@pytest.mark.parametrize("debug", ["", "1"])
def test_the_unexpected_is_one_line_too(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("portkern.cli.ops.find_ops", fail)
    monkeypatch.setenv("PORTKERN_DEBUG", debug)
    result = cli("ops")
    assert result.exit_code == 1
    if debug:
        assert isinstance(result.exception, ZeroDivisionError)
    else:
        assert result.stderr.splitlines() == [
            "portkern: error: ZeroDivisionError: two lines; set PORTKERN_DEBUG=1 for the traceback"
        ]


def test_a_full_disk_is_one_line(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("portkern.cli.ops.emit", fail)
    result = cli("ops")
    assert result.exit_code == 1
    assert result.stderr == "portkern: error: No space left on device; free some space, or write elsewhere\n"


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


def test_import_from_a_newer_portkern(cli: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "newer.jsonl"
    file.write_text(json.dumps({**FACT.to_json(), "schema": 99, "colour": "red"}) + "\n")
    line = complaint(cli("db", "import", file))
    assert "schema 99, this portkern reads up to 1" in line and line.endswith("upgrade portkern")


def test_list_where_the_home_is_no_folder(tmp_path: Path) -> None:
    """What is shipped is there all the same."""
    (tmp_path / "home").write_text("")
    done = shell("db", "list", "--json", tmp_path=tmp_path)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1 and "PORTKERN_HOME" in done.stderr
    assert data_of(done, "db-list")["devices"][0]["quarantined"] is None


def test_interrupt(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("portkern.cli.ops.find_ops", interrupt)
    result = cli("ops")
    assert result.exit_code == 130 and "Traceback" not in result.stderr


def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "portkern", "devices"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    with child.stderr as errors:
        assert errors.read() == b""
    child.wait(60)


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams_change_nothing_else(tmp_path: Path, closed: int) -> None:
    """As after ``2>&-``, where Python has None in the place of the stream."""
    command = shlex.join([sys.executable, "-m", "portkern", "verify", "relu", "--device", "cpu", "--dtype", "fp32"])
    done = subprocess.run(f"{command} {closed}>&-", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert ("cases are right" in done.stdout) == (closed == 2)


@pytest.mark.parametrize(
    ("variable", "arch", "says"),
    [
        ("PORTKERN_EMULATE", "foo", "PORTKERN_EMULATE=foo: no plugin knows"),
        ("PORTKERN_EMULATE", "sm90", "PORTKERN_EMULATE=sm90: no plugin has an emulator"),
        ("PORTKERN_ARCH", "foo", "PORTKERN_ARCH=foo: no plugin knows"),
    ],
)
def test_a_variable_with_a_wrong_architecture_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, arch: str, says: str
) -> None:
    monkeypatch.setenv(variable, arch)
    if variable == "PORTKERN_ARCH":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with using(Runtime()), pytest.raises(UnknownName, match=says):
        relu(torch.ones(3))


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


def test_unusable_home_costs_one_warning(tmp_path: Path) -> None:
    """A home that is no folder: the answer comes, and stderr names the variable to set."""
    args = ("explain", "softmax", "--shape", "8x8", "--device", "sm90", "--json")
    done = shell(*args, tmp_path=tmp_path, PORTKERN_HOME="/dev/null/portkern")
    assert done.returncode == 0 and data_of(done, "explain")
    (line,) = done.stderr.splitlines()
    assert line.startswith("portkern: warning: ") and "PORTKERN_HOME" in line
