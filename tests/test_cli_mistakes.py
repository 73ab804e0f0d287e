"""The command line where something is wrong: one line for every mistake, no traceback."""

from __future__ import annotations

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
from portkern.cli.main import portkern
from portkern.errors import UnknownName
from portkern.runtime import Runtime, using
from portkern.tuning_db import Database
from tests.test_cli import FACT, ROOT, SCALE, complaint, data_of, shell

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Callable[..., Result]]:
    """Runs a command in this process, on an empty database."""
    with using(Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))):
        yield lambda *args: CliRunner().invoke(portkern, list(map(str, args)))


MISTAKES = {
    "no tolerance": (("bench", "--tolerance", "nan"), "--tolerance is nan; it takes a percentage"),
    "unknown command": (("explian",), "did you mean 'explain'?"),
    "unknown option": (("ops", "--jsn"), "--json"),
    "missing argument": (("explain",), "portkern explain --help"),
    "missing subcommand": (("db",), "portkern db --help"),
    "unknown op": (("explain", "sofmax", "--device", "sm90"), "did you mean softmax"),
    "op without its namespace": (
        ("--ops", SCALE, "explain", "scale", "--device", "sm90"),
        "no op 'scale'; did you mean example::scale?",
    ),
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
    "tune, dtype": (("tune", "softmax", "--dtype", "bf61"), "did you mean bf16?"),
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


def test_unusable_home_costs_one_warning(tmp_path: Path) -> None:
    """A home that is no folder: the answer comes, and stderr names the variable to set."""
    args = ("explain", "softmax", "--shape", "8x8", "--device", "sm90", "--json")
    done = shell(*args, tmp_path=tmp_path, PORTKERN_HOME="/dev/null/portkern")
    assert done.returncode == 0 and data_of(done, "explain")
    (line,) = done.stderr.splitlines()
    assert line.startswith("portkern: warning: ") and "PORTKERN_HOME" in line
