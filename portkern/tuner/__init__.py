"""Tuning: measure candidates on the GPUs of this machine, predict for architectures it lacks.

``tune`` is the whole interface. It plans in this process and launches in child processes, so that
a candidate that crashes, hangs or aborts costs itself only. Nothing here runs unless it is asked.
"""

from __future__ import annotations

from portkern.tuner.report import TuneReport
from portkern.tuner.session import tune

__all__ = ["TuneReport", "tune"]
