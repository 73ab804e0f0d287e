"""The emulator as portkern knows it: Triton's compiled kernel and spans of memory in, counters out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from portkern.backends.gfx942_emulator.launch import Checks, Kernel, Pointer, launch, prepare
from portkern.backends.gfx942_emulator.memory import AddressSpace
from portkern.emulator import Address, Counters, Emulator, Settings, Span


class Gfx942Emulator(Emulator):
    """Runs code for gfx942. Keeps the kernels that it decoded, the last ones only."""

    KEPT = 64

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}

    def prepare(self, compiled: Any, settings: Settings = Settings()) -> Kernel:  # noqa: B008 - frozen
        """Decode a compiled kernel, or give it as it was decoded before."""
        key = f"{compiled.hash} {settings.registers}"
        if key not in self._kernels:
            text, metadata = compiled.asm["amdgcn"], compiled.metadata
            while len(self._kernels) >= self.KEPT:
                self._kernels.pop(next(iter(self._kernels)))
            self._kernels[key] = prepare(
                text, int(metadata.shared), int(metadata.num_warps), checked=settings.registers
            )
        return self._kernels[key]

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        spans: Sequence[Span],
        arguments: Sequence[tuple[str, Any]],
        settings: Settings,
    ) -> Counters:
        """Run a decoded kernel on the memory of ``spans``."""
        space = AddressSpace(count_touched=settings.count, upper=settings.upper)
        regions = [space.add(span.name, span.data, span.alignment) for span in spans]

        def given(value: Any) -> Any:
            if not isinstance(value, Address):
                return value
            return Pointer(None if value.span is None else regions[value.span], value.offset)

        values = [(kind, given(value)) for kind, value in arguments]
        checks = Checks(unwritten_registers=settings.registers)
        return launch(
            kernel, grid, space, values,
            checks=checks, seed=settings.seed, budget=settings.budget, counting=settings.count,
        )  # fmt: skip
