"""Print what the first call of an op costs in a fresh process whose compile cache is warm: medians in milliseconds.

Triton's import and the GPU's context are made before the clock starts. No test: docs/measurements.md has the figures.

python ci/first_call.py [OP...]      on a GPU
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 5
CHILD = """
import time, torch, triton
x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
import portkern
portkern.{op}(x, -1)
torch.cuda.synchronize()
print((time.perf_counter() - start) * 1e3)
"""


def main() -> None:
    for op in sys.argv[1:] or ["softmax", "log_softmax"]:
        command = [sys.executable, "-c", CHILD.format(op=op)]
        times = [float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(RUNS + 1)]
        warm = times[1:]
        print(f"{op}: first {times[0]:.0f} ms, then {statistics.median(warm):.1f} ms (median of {RUNS})")


if __name__ == "__main__":
    main()
