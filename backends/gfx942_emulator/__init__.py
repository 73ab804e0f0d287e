"""A functional emulator of gfx942 (CDNA3): executes the machine code that Triton compiles, on a CPU, with numpy only.

It shows whether code computes the right numbers: masks, lanes, barriers, addresses, rounding. It says nothing of speed,
wait counts, hazards or the order of memory, and was never compared with the hardware.
"""

from __future__ import annotations
