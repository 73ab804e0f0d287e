"""What only a GPU shows, in one command a phase: docs/measurements.md is written from the files that this leaves.

    python ci/on_gpu.py OUT PHASE...      every phase without any; several run one after another

Each phase has a limit of its own and writes OUT/PHASE.log; the exit code is 1 if any phase failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable, "-m"]
PORTKERN = [*PYTHON, "portkern"]
# Test files side by side: they compile for minutes, on one core each, and time nothing.
TESTS = sorted(path.name for path in (ROOT / "tests").glob("test_gpu*.py"))
TINY = ("softmax", "layer_norm", "rms_norm", "gelu", "add")

Commands = Sequence[Sequence[str]]


def phases(out: Path) -> Mapping[str, tuple[int, Commands]]:
    """Seconds, and commands: those of ``tests`` run at the same time, the others one after another."""
    return {
        "tests": (900, [[*PYTHON, "pytest", "-q", "-m", "gpu", f"tests/{name}"] for name in TESTS]),
        "verify": (1800, [[*PORTKERN, "verify", "--report", str(out / "verify.json")]]),
        "sm80": (1800, [[*PORTKERN, "verify", "--device", "cuda:0", "--as", "sm80"]]),
        "tune": (
            1800,
            [
                [*PORTKERN, "tune", "--device", "cuda:0", "--budget", "4m"],
                [*PORTKERN, "db", "export", str(out / "winners.jsonl"), "--winners"],
            ],
        ),
        "bench": (1800, [[*PORTKERN, "bench", "--against", "torch", "--json"]]),
        "host": (
            300,
            [
                [*PORTKERN, "bench", "--host", *TINY, "--dtype", "bf16"],
                [sys.executable, "ci/first_call.py", "softmax", "log_softmax"],
            ],
        ),
    }


def run(name: str, limit: int, commands: Commands, out: Path) -> bool:
    """Run one phase; whether all of it passed."""
    start = time.monotonic()

    def one(command: Sequence[str]) -> tuple[int, str]:
        left = max(1.0, limit - (time.monotonic() - start))
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=left, text=True, errors="replace", stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return 124, f"{(error.stdout or b'').decode(errors='replace')}\nended after {left:.0f} s"
        return done.returncode, done.stdout

    with ThreadPoolExecutor(len(commands) if name == "tests" else 1) as pool:
        found = list(pool.map(one, commands))
    texts = [
        f"$ {' '.join(command)}\n{text}exit {code}\n" for command, (code, text) in zip(commands, found, strict=True)
    ]
    (out / f"{name}.log").write_text("\n".join(texts))
    passed = all(code in (0, 5) for code, _ in found)  # 5: a file all of whose tests are deselected
    print(
        f"{name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s, {out / name}.log", flush=True
    )
    return passed


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = phases(out)
    wanted = sys.argv[2:] or list(known)
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        print(f"no phase {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    return int(not all([run(name, *known[name], out) for name in wanted]))


if __name__ == "__main__":
    sys.exit(main())
