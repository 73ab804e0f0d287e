"""A stand-in for the GPU's timer: it launches for real, and makes the times up.

PORTKERN_TEST_TIMES is a JSON object: the time of a config is that of the first key in its text.
Every call that is timed is one line in the file PORTKERN_TEST_LOG. PORTKERN_TEST_SLEEP makes each
last that many seconds; the process aborts when it times a config with PORTKERN_TEST_ABORT in its text, and of one with
PORTKERN_TEST_LAUNCH in its text no graph can be made.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from portkern.target import Device
from portkern.timing import Calls, Timing

OTHERWISE = 100.0
SAMPLES = 3


class StubTimer:
    def interleaved(
        self,
        calls: Calls,
        device: Device,
        *,
        budget_ms: float = 0.0,
        before: Callable[[], Any] | None = None,
        slow: float = 0.0,
    ) -> dict[str, Timing]:
        times = json.loads(os.environ.get("PORTKERN_TEST_TIMES", "{}"))
        found = {}
        for name, call in calls.items():
            if os.environ.get("PORTKERN_TEST_ABORT", "nothing") in name:
                os.abort()
            time.sleep(float(os.environ.get("PORTKERN_TEST_SLEEP", "0")))
            for _ in range(SAMPLES):
                if before is not None:
                    before()
                call()
            with open(os.environ["PORTKERN_TEST_LOG"], "a") as log:
                log.write(f"{name}\n")
            time_us = next((us for text, us in times.items() if text in name), OTHERWISE)
            launched = "no memory" if os.environ.get("PORTKERN_TEST_LAUNCH", "nothing") in name else ""
            found[name] = Timing(time_us, 0.0, SAMPLES, launched)
        return found

    def copy_ceiling(self, device: Device) -> float:
        return 1000.0


TIMER = StubTimer()
