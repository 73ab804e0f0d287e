"""portkern/__init__.pyi says what the ops really take."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import Tensor

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "ci" / "make_stub.py"


@pytest.fixture(scope="module")
def make_stub() -> ModuleType:
    spec = spec_from_file_location("make_stub", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stub_is_current() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_function(make_stub: ModuleType) -> None:
    def norm(input: Tensor, shape, weight: Tensor | None = None, *, eps: float = 1e-5):
        """Normalise.

        More.
        """

    norm.__annotations__["shape"] = "Sequence[int]"
    op = SimpleNamespace(name="norm", saved=0, signature=norm, schema="(Tensor x) -> (Tensor, Tensor?)")
    assert make_stub.function(op) == (
        "\n"
        "def norm(\n"
        "    input: Tensor,\n"
        "    shape: Sequence[int],\n"
        "    weight: Tensor | None = None,\n"
        "    *,\n"
        "    eps: float = 1e-05,\n"
        ") -> tuple[Tensor, Tensor | None]:\n"
        '    """Normalise."""\n'
    )


def test_unannotated_parameter_is_refused(make_stub: ModuleType) -> None:
    op = SimpleNamespace(name="f", saved=0, signature=lambda x: (x,), schema="(Tensor x) -> Tensor")
    with pytest.raises(TypeError, match="without annotation"):
        make_stub.function(op)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ("(Tensor x) -> Tensor", "Tensor"),
        ("(Tensor x) -> (Tensor, Tensor)", "tuple[Tensor, Tensor]"),
        ("(Tensor x) -> (Tensor y, Tensor? z)", "tuple[Tensor, Tensor | None]"),
        ("(Tensor(a!) x) -> Tensor(a!)", "Tensor"),
        ("(Tensor(a!) x) -> ()", "None"),
        ("(Tensor[] x) -> Tensor[]", "list[Tensor]"),
    ],
)
def test_returns(make_stub: ModuleType, schema: str, kind: str) -> None:
    assert make_stub.returns(schema) == kind
