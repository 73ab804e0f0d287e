"""Importing portkern: no Triton, no GPU, no open file, and how ops load."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

ROOTS = ("triton", "torch", "pluggy", "sqlite3", "click", "tabulate", "numpy")


def child(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_is_light_and_opens_nothing() -> None:
    found = child(
        """
import json, sys
opened = []
import json.decoder, os.path, importlib
def audit(event, args):
    if event == "open" and not str(args[0]).endswith((".py", ".pyc")):
        opened.append(str(args[0]))
sys.addaudithook(audit)
before = set(sys.modules)
import portkern
new = sorted(set(sys.modules) - before)
print(json.dumps({"new": new, "opened": opened}))
"""
    )
    assert found["opened"] == []
    assert not [name for name in found["new"] if name.split(".")[0] in ROOTS]
    assert len(found["new"]) <= 12, found["new"]


def test_an_op_loads_at_first_use_and_starts_no_gpu() -> None:
    found = child(
        """
import json, sys
import torch, portkern
modules = set(sys.modules)
portkern.softmax
print(json.dumps({
    "before": [name for name in modules if name.startswith("portkern.kernels")],
    "after": "portkern.kernels.softmax" in sys.modules,
    "gpu": torch.cuda.is_initialized(),
}))
"""
    )
    assert found == {"before": [], "after": True, "gpu": False}


def test_importing_a_module_from_the_package_loads_no_op() -> None:
    """``from portkern import testing`` asks the package for an attribute of that name first."""
    found = child(
        """
import json, sys
from portkern import testing, library, dispatch
print(json.dumps([name for name in sys.modules if name.startswith("portkern.kernels.")]))
"""
    )
    assert found == []


def test_importing_ops_registers_all() -> None:
    found = child(
        """
import json
import torch, portkern.ops
print(json.dumps([hasattr(torch.ops.portkern, name) for name in ("softmax", "log_softmax", "softmax_backward")]))
"""
    )
    assert found == [True, True, True]


def test_without_triton_the_error_says_what_to_install() -> None:
    found = child(
        """
import json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name="triton")
sys.meta_path.insert(0, Blocker())
import torch, portkern
try:
    portkern.softmax(torch.ones(2))
except ImportError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
    )
    assert found[0] == "MissingTriton" and "pip install" in found[1]


def test_fork_after_import_and_use() -> None:
    found = child(
        """
import json, os
import torch, portkern
portkern.softmax(torch.ones(3))
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps(portkern.softmax(torch.zeros(2)).tolist()).encode())
    os._exit(0)
os.wait()
print(os.read(read, 100).decode())
"""
    )
    assert found == [0.5, 0.5]
