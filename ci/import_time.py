"""Print what ``import portkern`` adds to ``import torch``, and the first use of an op: medians in milliseconds.

No test: a time on a shared machine proves nothing. docs/measurements.md has the figures.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 7
STEPS = {
    "import portkern, after torch": ("import torch", "import portkern"),
    "portkern.softmax, first use": ("import torch, portkern", "portkern.softmax"),
}
CHILD = "import time\n{before}\nstart = time.perf_counter()\n{timed}\nprint((time.perf_counter() - start) * 1e3)"


def main() -> None:
    for name, (before, timed) in STEPS.items():
        code = CHILD.format(before=before, timed=timed)
        command = [sys.executable, "-c", code]
        times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(RUNS)]
        print(f"{name}: {statistics.median(times):.1f} ms (median of {RUNS}, {min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
