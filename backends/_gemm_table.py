"""What an architecture states for the kind ``gemm``: its tiles, the constants of its time model, its shared memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from portkern.config import Blocks, Config
from portkern.problem import Work
from portkern.record import FrozenMap


@dataclass(frozen=True)
class Tile:
    """A tile of C, and how it is computed. ``speed`` is the share of the nominal rate that a unit reaches with it;
    ``whole_c`` leaves it to results that can be stored 16 bytes at a time, since others take more registers;
    ``along_k`` to operands that both lie along k, where the matrix unit takes no others; ``along_n`` to B along n;
    ``one_sum`` to sums over k alone, since those over batch dims apart from it take more registers. With ``split_k`` a
    unit should have ``programs`` of it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    speed: float = 0.6
    params: FrozenMap[int] = FrozenMap()
    whole_c: bool = False
    along_k: bool = False
    along_n: bool = False
    one_sum: bool = False
    programs: int = 1


# For a lone row or column, which is summed without dots. On one H200 1x14336x4096 in fp32 took 67 us so, 297 by dots of
# 16 rows; 14336x1x4096 71 and 646; 1x4095x4095 in bf16 24.1 and 30.7.
VECTORS = (
    Tile(1, 16, 256, num_warps=8, num_stages=1, speed=0.5, programs=4),
    Tile(16, 1, 256, num_warps=8, num_stages=1, speed=0.5, programs=4),
)


@dataclass(frozen=True)
class Model:
    """Constants of one architecture's time model: only good for ranking."""

    load_us: float  # from asking for the blocks of a step to having the first bytes
    loose_us: float  # a step of 16-bit operands that cannot be read 16 bytes at a time
    tile_us: float  # the first block of a tile, and its store
    launch_us: float
    cache_gbps: float  # of the cache that all units share, which read much of it together
    sum_us: float  # a launch that waits for the one before and adds up what that has left in the cache
    sum_gbps: float  # at which parts of sums are written there and read again
    memory_share: float = 1.0  # of the nominal bandwidth that a product reaches
    unit_gbps: float = math.inf  # at which the blocks of a step come to a unit, once they have begun to
    unhidden: float = 0.0  # of a program's time, where another bound decides: of equal tiles the shorter come first
    descriptor_us: float = 0.0  # until a program has its descriptors
    split_margin: float = 1.15  # by which split_k has to be better by the model


@dataclass(frozen=True)
class GemmTable:
    """The numbers of one architecture, by precision: ``float32``, ``tf32``, ``float64``, or ``half``.

    ``loose`` has the tiles for operands that cannot be read 16 bytes at a time. ``rates`` are those of
    the matrix unit, or of what stands in for it, over that of 16-bit operands.
    """

    tiles: Mapping[str, tuple[Tile, ...]]
    loose: Mapping[str, tuple[Tile, ...]]
    persistent: Mapping[str, tuple[Tile, ...]]
    rates: Mapping[str, float]
    model: Model
    options: FrozenMap[Any] = FrozenMap()
    # In which A and B are read well (``k``, ``n``; empty: in any), where another order costs more than a copy may.
    orders: Mapping[str, tuple[str, str]] = FrozenMap()
    # In which a copy lies of A or B that is made for loads of 16 bytes alone (empty: as the operand does).
    copied: Mapping[str, tuple[str, str]] = FrozenMap()
    no_descriptors: str = ""  # why ``persistent`` is not offered


class SharedMemory(ABC):
    """How an architecture's compiler lays out shared memory for a product."""

    @abstractmethod
    def bytes_of(self, work: Work, config: Config, blocks: Blocks) -> int:
        """What one program of ``config`` takes."""


def tile_bytes(work: Work, blocks: Blocks) -> tuple[int, int, int]:
    """Bytes of one block of A, of B, and of C."""
    m, n, k = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["BLOCK_K"]
    return m * k * work.element_bytes, k * n * work.element_bytes, m * n * work.element_bytes


def vectors(work: Work) -> tuple[bool, bool]:
    """Whether A and B can be read 16 bytes at a time."""
    return work.layout["a"].endswith("16"), work.layout["b"].endswith("16")


def precision(work: Work) -> str:
    """The entry of a table for ``work``."""
    dot = work.dtypes.get("dot", "float32")
    return "half" if dot in ("float16", "bfloat16") else dot
