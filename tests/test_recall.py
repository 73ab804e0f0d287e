"""A process finds what an earlier one compiled, without Triton's own key: Triton 3.6 itself, on a stand-in for a GPU.

The kernels are compiled for sm90 for real; what would load and launch them writes down what it was given.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from portkern.executors import recall
from portkern.executors.recall import ENTRY, VERSIONS

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(VERSIONS), reason="other versions of Triton start kernels as ever"
)

KERNEL = """
import triton
import triton.language as tl

BLOCK = tl.constexpr(64)

@triton.jit
def helper(x):
    return x {operation} 1

@triton.jit
def kernel(x_ptr, n, N: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, helper(tl.load(x_ptr + offs, mask=offs < n, other=0.0)), mask=offs < n)
"""
DEVICE = """
import errno, json, os, sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import triton_key

loaded, launched = [], []

class Launcher:
    def __init__(self, source, metadata):
        assert source.signature["x_ptr"] == "*fp32" and metadata.name == "kernel"
    def __call__(self, *args):
        launched.append([arg for arg in args if isinstance(arg, int)])

class Device:
    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, binary, shared, device: (loaded.append(len(binary)), (1, 77, 10, 0, 1024))[1],
    )
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Device())
sys.path.insert(0, sys.argv[1])
from kernels_of_test import kernel
from portkern.executors import recall
"""
CHILD = f"""{DEVICE}
def read_only(name, mode=0o777, exist_ok=False):
    if not os.path.isdir(name):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

if "read_only" in sys.argv:  # the superuser may write everywhere, so the system's functions answer as they would
    os.makedirs = read_only

known = set()
found = []
for n, warps in ((40, 4), (48, 4), (40, 2), (41, 4)):
    compiled = recall.start(kernel, (3,), [torch.zeros(64), n], {{"N": 1, "num_warps": warps}}, known)
    found.append(compiled.hash)
print(json.dumps({{"found": found, "hashed": triton_key.cache_info().currsize, "loaded": loaded, "launched": launched,
                  "known": sorted(known)}}))
"""
IDENTIFY = f"""{DEVICE}
def entry(backend=None, **words):
    caches = kernel.device_caches[0]
    kernel.device_caches[0] = caches if backend is None else (*caches[:3], backend, caches[4])
    found = recall._ask(kernel, [torch.zeros(64), 40], {{"N": 1, **words}}).code().entry
    kernel.device_caches[0] = caches
    return found

library = sys.argv[1] + "/library.bc"
found = []
for text in ("one", "two"):
    with open(library, "w") as file:
        file.write(text)
    os.utime(library, (0, 0))
    from triton.backends.nvidia.compiler import file_hash
    file_hash.cache_clear()
    found.append(entry(extern_libs={{"mine": library}}))

class Other(type(kernel.device_caches[0][3])):  # a backend that comes with another package
    def __init__(self, target, version):
        super().__init__(target)
        self.version = version
    def hash(self):
        return self.version

target = kernel.device_caches[0][2]
found += [entry(), entry(Other(target, "1")), entry(Other(target, "2"))]
print(json.dumps({{"entries": found, "again": entry(), "hashed": triton_key.cache_info().currsize}}))
"""

AGAIN = f"""{DEVICE}
identified, known, identify = [], set(), recall._identify
recall._identify = lambda *rest: (identified.append(1), identify(*rest))[1]
for n in (40, 41, 43):  # one code
    recall.start(kernel, (3,), [torch.zeros(64), n], {{"N": 1, "num_warps": 4}}, known)
print(json.dumps({{"identified": len(identified), "hashed": triton_key.cache_info().currsize}}))
"""

# A launch of known code against Triton's own launch of it: what the launcher is given, hooks, a global that changed.
KNOWN = f"""{DEVICE}
import kernels_of_test
from triton import knobs

known, bound, ran, x = set(), [], [], torch.zeros(64)
launch = lambda n, grid=(3,): recall.start(kernel, grid, [x, n], {{"N": 1, "num_warps": 4}}, known)
launch(40)
caches = kernel.device_caches[0]
kernel.device_caches[0] = (*caches[:4], lambda *args, **words: (bound.append(args[1]), caches[4](*args, **words))[1])
compiled = launch(41, (3, 2))
kernel[(3, 2)](x, 41, N=1, num_warps=4)
alike = launched[-1] == launched[-2] and launched[-1][:3] == [3, 2, 1]
once = bound == [41, 41]
knobs.runtime.launch_enter_hook.add(lambda metadata: ran.append(metadata.get()["name"]))
hook = knobs.runtime.launch_enter_hook
Launcher.__call__ = lambda self, *args: args[7](args[6])
launch(43)
kernel.add_pre_run_hook(lambda *args, **words: ran.append("before"))
launch(45)
kernel.pre_run_hooks.clear()
kernels_of_test.BLOCK = None
try:
    launch(47)
except RuntimeError as error:
    ran.append(str(error)[:32])
print(json.dumps({{"alike": alike, "once": once, "ran": ran, "compiled": compiled.hash in known}}))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    write(tmp_path)

    def run(*words: str, source: str = CHILD) -> dict[str, Any]:
        command = [sys.executable, "-c", source, str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def write(folder: Path, operation: str = "+") -> None:
    (folder / "kernels_of_test.py").write_text(KERNEL.format(operation=operation))


def test_the_second_process_does_not_hash_triton(child: Any) -> None:
    first, second = child(), child()
    assert first["hashed"] == 1 and second["hashed"] == 0
    assert first["found"] == second["found"] and len(set(first["found"])) == 3, "40 and 41 are one code, 48 is another"
    assert first["launched"] == second["launched"] and len(first["launched"]) == 4
    assert first["loaded"] == second["loaded"] and first["known"] == second["known"] == sorted(set(first["found"]))


def test_other_code_is_compiled(child: Any, tmp_path: Path) -> None:
    """What a kernel calls is part of its code."""
    first = child()
    write(tmp_path, operation="*")
    second = child()
    assert second["hashed"] == 1 and not set(first["found"]) & set(second["found"])
    write(tmp_path)
    assert child() == {**first, "hashed": 0}


@pytest.mark.parametrize("damage", ["cut", "other", "gone"])
def test_a_damaged_cache_is_compiled_anew(child: Any, tmp_path: Path, damage: str) -> None:
    first = child()
    entries = list((tmp_path / "cache").glob(f"*/{ENTRY}"))
    assert len(entries) == 3
    if damage == "gone":  # the kernels themselves
        for path in (tmp_path / "cache").glob("*/__grp__*"):
            path.unlink()
    for path in entries if damage != "gone" else ():
        path.write_text("{" if damage == "cut" else '["hash"]')
    second = child()
    assert second == first, "hashed, compiled or found by Triton's key, and kept again"
    assert child() == {**first, "hashed": 0}


def test_settings_of_triton_are_part_of_the_key(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child()
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert child()["hashed"] == 1
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    assert child()["hashed"] == 1


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_call(child: Any, tmp_path: Path) -> None:
    """Triton reads a cache that it cannot write: with our entries, and filled by somebody who writes none."""
    first = child()
    assert child("read_only") == {**first, "hashed": 0}
    for path in (tmp_path / "cache").glob(f"*/{ENTRY}"):
        shutil.rmtree(path.parent)
    assert child("read_only") == first and not list((tmp_path / "cache").glob(f"*/{ENTRY}"))


def test_a_cache_of_another_kind_is_left_to_triton(child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manager_of_test.py").write_text(
        "from triton.runtime.cache import FileCacheManager\n\nclass Manager(FileCacheManager):\n    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "manager_of_test:Manager")
    assert child()["known"] == [] and not list((tmp_path / "cache").glob(f"*/{ENTRY}"))


def test_libraries_and_other_backends_are_part_of_the_key(child: Any) -> None:
    """By what they hold and say, as in Triton's: not by their names."""
    found = child(source=IDENTIFY)
    assert len(set(found["entries"])) == 5 and found["again"] == found["entries"][2] and found["hashed"] == 0


def test_a_new_shape_of_known_code_is_not_identified_again(child: Any) -> None:
    """That takes a millisecond, and a process that found all its kernels never hashes Triton."""
    assert child(source=AGAIN) == {"identified": 2, "hashed": 1}, "to look, and to keep"
    assert child(source=AGAIN) == {"identified": 1, "hashed": 0}


def test_known_code_is_launched_as_triton_does(child: Any) -> None:
    """Its arguments are bound once; hooks of launches and kernels run; a global that changed is an error."""
    ran = ["kernel", "before", "kernel", "Global variable BLOCK has change"]
    assert child(source=KNOWN) == {"alike": True, "once": True, "ran": ran, "compiled": True}


def test_the_files_of_a_triton_that_is_developed(tmp_path: Path) -> None:
    """Its backends are links to folders elsewhere."""
    for name in ("triton/backends/inner/bin/tool", "third_party/compiler.py", "triton/knobs.py", "triton/testing.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "triton/backends/linked").symlink_to(tmp_path / "third_party")
    found = {str(path.relative_to(tmp_path / "triton")) for path in recall._files(tmp_path / "triton")}
    assert found == {"backends/inner/bin/tool", "backends/linked/compiler.py", "knobs.py"}
