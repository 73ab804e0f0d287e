"""Op files and plugins that are wrong are named, in one error of portkern's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from portkern.config import Config
from portkern.errors import BadType, PluginError, UnknownName
from portkern.registry import load_file
from portkern.runtime import pin


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def broken(:\n", "does not import: SyntaxError"),
        ("import nothing_of_that_name\n", "does not import: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "does not import: SystemExit"),
        ("", "must define OPS"),
        ("OPS = 5\n", "must define OPS as a tuple of portkern.Op, and has 5"),
        ("OPS = (5,)\n", "gives 5, expected portkern.Op"),
    ],
)
def test_op_files_that_are_wrong(tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "ops.py"
    file.write_text(source)
    with pytest.raises(PluginError, match=message):
        load_file(file)


def test_an_op_file_that_takes_a_name(tmp_path: Path) -> None:
    file = tmp_path / "ops.py"
    file.write_text("from portkern.registry import get\nOPS = (get('softmax'),)\n")
    with pytest.raises(PluginError, match="softmax, which is taken"):
        load_file(file)


def test_an_op_file_is_read_once() -> None:
    assert load_file("tests/ops/scale.py") == load_file("tests/ops/../ops/scale.py")


def test_no_file() -> None:
    with pytest.raises(UnknownName, match="no file"):
        load_file("nowhere.py")


@pytest.mark.parametrize("config", [None, "resident_row", {"variant": "a"}])
def test_pin_takes_a_config(config: object) -> None:
    with pytest.raises(BadType, match="portkern.Config"), pin("softmax", config):  # type: ignore[arg-type]
        pass
    with pytest.raises(UnknownName, match="no op 'sofmax'"), pin("sofmax", Config("a")):
        pass
    with pytest.raises(BadType), pin(3, Config("a")):  # type: ignore[arg-type]
        pass
