"""What a plugin's translator looks like to portkern: code for its architecture, run by the driver of a later GPU.

A Backend offers one under the name ``translate`` among its ``executors()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

NAME = "translate"


class Translator(ABC):
    """Runs kernels of one architecture on a later one of the same vendor."""

    @abstractmethod
    def launch(
        self, compiled: Any, grid: Sequence[int], arguments: Sequence[tuple[str, Any]], stream: int, coresident: bool
    ) -> None:
        """Launch a Triton ``CompiledKernel`` on ``stream`` of the current device.

        ``grid`` has three counts, ``arguments`` are (Triton's name of the type, value), addresses as integers. Raises
        CompileFailed where the driver does not take the code, Infeasible where the device cannot hold the launch.
        """
