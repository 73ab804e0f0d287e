"""Run mypy on the wheel as installed, outside the checkout: what a user's type checker sees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        # By way of an sdist: building in the tree would pick up what an older build left there.
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(wheels)]
        subprocess.run([*build, str(ROOT)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = wheels.glob("*.whl")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", str(site), str(wheel)], cwd=folder, check=True)
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        cache = ["--cache-dir", str(Path(folder, "cache"))]
        environment = {**os.environ, "MYPYPATH": str(site)}
        done = subprocess.run([*mypy, *cache, "-p", "portkern"], cwd=folder, env=environment)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
