"""Op files and plugins that are wrong are named, in one error of portkern's own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import portkern
from portkern.config import Config
from portkern.errors import BadType, PluginError, UnknownName
from portkern.pinning import pin
from portkern.registry import all_ops, get, load_file, register
from portkern.runtime import Runtime, current, using


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


TAKEN = """
import sys
import torch, triton, triton.language as tl
import portkern
from portkern.errors import PluginError

assert "portkern.kernels.activations" not in sys.modules
try:
    if sys.argv[1] == "pointwise":
        @triton.jit
        def mine(x):
            return x + 100
        portkern.pointwise("relu", reference=lambda x: x + 100)(mine)(torch.ones(2))
    else:
        import dataclasses
        from portkern.registry import load_file
        (op,) = load_file("tests/ops/scale.py")
        portkern.register(dataclasses.replace(op, name="relu"))
except PluginError as error:
    assert "relu is taken: use a namespace, as in 'mine::relu'" in str(error), error
else:
    raise SystemExit("it was taken")
assert portkern.relu(torch.tensor([-2.0])).item() == 0
"""


@pytest.mark.parametrize("how", ["pointwise", "register"])
def test_no_op_takes_the_name_of_a_shipped_one_that_is_not_loaded(tmp_path: Path, how: str) -> None:
    """It was replaced, in silence."""
    file = tmp_path / "taken.py"
    file.write_text(TAKEN)
    ours = {**os.environ, "PYTHONPATH": str(Path(portkern.__file__).parent.parent)}
    done = subprocess.run([sys.executable, str(file), how], capture_output=True, text=True, env=ours)
    assert done.returncode == 0, done.stderr


def test_a_shipped_op_is_not_replaced_by_one_of_its_schema() -> None:
    softmax = get("softmax")
    with pytest.raises(PluginError, match="op softmax is taken: use a namespace, as in 'mine::softmax'"):
        register(dataclasses.replace(softmax, values=()))
    assert get("softmax") is softmax
    register(softmax)  # itself
    for name in ("softmax_backward", "portkern::softmax", "portkern::new"):  # of which torch would know the first two
        with pytest.raises(PluginError, match=f"op {name} is taken: use a namespace, as in 'mine::"):
            register(dataclasses.replace(softmax, name=name))
    with using(Runtime()):  # where it is not registered
        with pytest.raises(PluginError, match="op softmax is taken"):
            register(dataclasses.replace(softmax, values=()))
        assert "softmax" not in current().ops
        assert get("softmax") is softmax


def test_an_op_of_ones_own_is_declared_again_without_a_namespace() -> None:
    with using(Runtime()):
        (op,) = load_file("tests/ops/scale.py")
        for factor in (2.0, 3.0):
            own = dataclasses.replace(op, name="own_scale", tune_cases=(), reference=lambda x, f, by=factor: x * f * by)
            function = register(own)
            assert all_ops()["own_scale"] is own and callable(function)


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
