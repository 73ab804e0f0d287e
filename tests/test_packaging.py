"""The package as users get it: wheel, sdist, plain and editable installs, and a bare checkout."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "portkern": "portkern",
    "backends": "portkern/backends",
    "kernels": "portkern/kernels",
    "peers": "portkern/peers",
    "tuning_db": "portkern/tuning_db",
}
DATA = ("*.py", "py.typed", "*.pyi", "shipped/*.jsonl")
SUBPACKAGES = ("backends", "kernels", "peers", "tuning_db")

pytestmark = pytest.mark.packaging


def tree_files(root: Path) -> set[str]:
    """What the wheel has to hold, by its name in the wheel."""
    return {
        f"{inside}/{path.relative_to(root / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for pattern in DATA
        for path in (root / folder).rglob(pattern)
    }


class Environment:
    """A virtual environment that borrows all packages of this one, except portkern itself."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        # A plain path in a path file: path files inside it (an editable portkern) are not read.
        borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
        self.site = site

    def pip_install(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
        run([*pip, *offline, *map(str, arguments)], self.site)

    def run(self, *arguments: str | Path, cwd: Path) -> str:
        return run([str(self.python), *map(str, arguments)], cwd)

    def folders(self, cwd: Path) -> list[Path]:
        """Where portkern and its sub-packages come from, seen from ``cwd``."""
        names = ["portkern", *(f"portkern.{name}" for name in SUBPACKAGES)]
        code = "import importlib\n" + "".join(f"print(importlib.import_module({name!r}).__file__)\n" for name in names)
        return [Path(line).parent for line in self.run("-c", code, cwd=cwd).splitlines()]


def run(command: list[str], cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, so that no build leaves anything in it."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    copy.mkdir()
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", ".hypothesis")
    for folder in (*FOLDERS, "ci", "docs", "tests"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, copy / folder, ignore=junk)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = checkout.parent / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    run([*build, str(checkout)], checkout.parent)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(checkout: Path) -> Environment:
    """``pip install .``"""
    environment = Environment(checkout.parent / "installed")
    environment.pip_install(checkout)
    return environment


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "elsewhere").mkdir()
    yield tmp_path / "elsewhere"


def test_every_source_folder_is_a_package() -> None:
    bare = [
        str(path.parent.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert bare == []


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == tree_files(ROOT)
    assert {name.split("/")[0] for name in names - info} == {"portkern"}
    assert {name.split("/")[0] for name in info} == {wheel.name.split("-py3")[0] + ".dist-info"}
    assert {"portkern/py.typed", "portkern/__init__.pyi"} <= names


def test_metadata(wheel: Path) -> None:
    import portkern

    with zipfile.ZipFile(wheel) as archive:
        info = f"portkern-{portkern.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/top_level.txt").decode().split() == ["portkern"]
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Version"] == portkern.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {line.split(">")[0] for line in required}
    assert names == {"torch", "pluggy", "tabulate", "click", "tqdm", "platformdirs"}
    assert metadata.get_all("Provides-Extra") == ["cpu", "plots", "ray", "test"]
    assert "portkern = portkern.__main__:main" in scripts


def test_sdist_can_be_tested(built: Path, checkout: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"}
    wanted |= {"ci/matrix.toml", "ci/constraints-cpu.txt", "setup.py"}
    wanted |= {
        path.relative_to(checkout).as_posix()
        for folder in (*FOLDERS, "tests")
        for path in (checkout / folder).rglob("*.py")
    }
    assert wanted - names == set()


def test_plain_install_is_the_wheel(installed: Environment, wheel: Path, elsewhere: Path) -> None:
    base = installed.site / "portkern"
    assert installed.folders(elsewhere) == [base, *(base / name for name in SUBPACKAGES)]
    files = {
        path.relative_to(installed.site).as_posix()
        for path in base.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        assert files == {name for name in archive.namelist() if name.startswith("portkern/")}


def test_command_line(installed: Environment, elsewhere: Path) -> None:
    script = run([str(installed.python.parent / "portkern"), "--help"], elsewhere)
    module = installed.run("-m", "portkern", "--help", cwd=elsewhere)
    assert "tune" in script and "explain" in script
    assert script == module


def test_bare_checkout_with_a_plain_install(installed: Environment, checkout: Path) -> None:
    at_root = [checkout / "portkern", *(checkout / name for name in SUBPACKAGES)]
    assert installed.folders(checkout) == at_root
    assert "tune" in installed.run("-m", "portkern", "--help", cwd=checkout)
    probe = checkout / "tests" / "test_probe.py"
    imports = "".join(f"import portkern.{name}\n" for name in SUBPACKAGES)
    probe.write_text(
        f"{imports}from pathlib import Path\n\n\ndef test_probe():\n"
        f"    assert Path(portkern.kernels.__file__).parent == Path({str(checkout)!r}, 'kernels')\n"
    )
    assert "1 passed" in installed.run("-m", "pytest", "-q", "tests/test_probe.py", cwd=checkout)
    probe.unlink()


def test_bare_checkout_without_an_install(checkout: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    at_root = [checkout / "portkern", *(checkout / name for name in SUBPACKAGES)]
    assert environment.folders(checkout) == at_root
    assert "tune" in environment.run("-m", "portkern", "--help", cwd=checkout)


def test_editable_install(checkout: Path, tmp_path: Path, elsewhere: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy)
    environment = Environment(tmp_path / "environment")
    environment.pip_install("-e", copy)
    at_root = [copy / "portkern", *(copy / name for name in SUBPACKAGES)]
    assert environment.folders(elsewhere) == at_root
    assert "tune" in run([str(environment.python.parent / "portkern"), "--help"], elsewhere)
    (copy / "kernels" / "added_later.py").write_text("HERE = 1\n")
    code = "from portkern.kernels.added_later import HERE; print(HERE)"
    assert environment.run("-c", code, cwd=elsewhere) == "1\n"


def test_host_functions_in_kernel_files_are_annotated() -> None:
    """Ruff and mypy leave ``kernels`` alone, where a Triton kernel's pointers have no type."""
    missing = []
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                named = named[named[:1] != [] and named[0].arg == "self" :]
                stars = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
                if not node.returns or not all(arg.annotation for arg in (*named, *stars)):
                    missing.append(f"{path.name}:{node.lineno} {node.name}")
    assert missing == []
