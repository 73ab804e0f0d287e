"""``Plan``: what an op gives instead of launching. Pure data; making one allocates nothing.

An executor turns a Plan into something: it launches it, compiles it, interprets it. A plan is made
from ``Meta`` (what is known of a tensor without its pointer), so absent hardware can be planned for.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from portkern.errors import PluginError
from portkern.record import FrozenMap


@dataclass(frozen=True, slots=True)
class Meta:
    """A tensor without its data: shape and strides in elements, dtype, and 16-byte alignment."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # the base address is a multiple of 16

    @staticmethod
    def of(tensor: torch.Tensor) -> Meta:
        """The Meta of ``tensor``; a meta tensor counts as aligned by its storage offset."""
        if tensor.device.type == "meta":
            address = tensor.storage_offset() * tensor.element_size()
        else:
            address = tensor.data_ptr()
        return Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype, address % 16 == 0)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that the executor allocates: strides in elements; ``init`` is None (poisoned in
    tests) or 0 (zeroed before each run). No launch of the plan reads an ``unread`` one: where nobody
    else will either, it may lie on others."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    init: int | None = None
    unread: bool = False

    def __post_init__(self) -> None:
        if self.init not in (None, 0):
            raise PluginError(f"a buffer starts undefined (init=None) or zeroed (init=0), not at {self.init!r}")

    @property
    def extent(self) -> int:
        """Bytes from its first element to the end of its last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def meta(self) -> Meta:
        """As an operand: torch's allocators align to 16 bytes and more."""
        return Meta(self.shape, self.strides, self.dtype, aligned=True)

    @staticmethod
    def flat(numel: int, dtype: torch.dtype, init: int | None = None) -> Buffer:
        """A contiguous buffer of one dim, for scratch."""
        return Buffer((numel,), (1,), dtype, init)


def _dense(meta: Meta) -> bool:
    """Whether the elements of ``meta`` fill memory in some order of its dims, each with a stride of its own."""
    expected = 1
    for stride, size in sorted(zip(meta.strides, meta.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected or size < 2:
            return False
        expected *= size
    return True


def _falling(meta: Meta) -> bool:
    """Whether each dim has several elements, and a stride less than the one before it."""
    steps = (*meta.strides, 0)
    return min(meta.shape, default=2) >= 2 and all(a > b for a, b in zip(steps, steps[1:], strict=False))


def like(meta: Meta, dtype: torch.dtype | None = None) -> Buffer:
    """The buffer that ``torch.empty_like`` would make (``preserve_format``).

    A dense input keeps its strides; an expanded or overlapping one becomes contiguous in the
    order of its strides, which is torch's rule, so torch itself is asked.
    """
    if _dense(meta):  # as torch would answer, which takes 40 us
        return Buffer(meta.shape, meta.strides, dtype or meta.dtype)
    if _falling(meta):
        strides = (*itertools.accumulate(meta.shape[:0:-1], operator.mul, initial=1),)[::-1]
        return Buffer(meta.shape, strides, dtype or meta.dtype)
    empty = torch.empty_strided(meta.shape, meta.strides, dtype=dtype or meta.dtype, device="meta")
    return Buffer(meta.shape, torch.empty_like(empty).stride(), dtype or meta.dtype)


@dataclass(frozen=True, slots=True)
class In:
    """Argument: the tensor at ``position`` of the op's arguments, ``offset`` elements in."""

    position: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Out:
    """Argument: output ``position`` of the plan, ``offset`` elements in."""

    position: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Scratch:
    """Argument: scratch buffer ``position`` of the plan, ``offset`` elements in."""

    position: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Desc:
    """Argument: a host-made tensor descriptor over a buffer (TMA where the target has it)."""

    buffer: In | Out | Scratch
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """Argument: a number given per call (seed, eps, scale), the op argument at ``position``.

    It is never part of a key, so the kernel must type it and list it in ``do_not_specialize``.
    """

    position: int


# A tuple of arguments is one argument of a kernel, of any length.
Argument = In | Out | Scratch | Desc | Value | int | float | bool | None | tuple["Argument", ...]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``coresident`` programs wait for each other: all must fit at once."""

    kernel: Any  # triton.runtime.JITFunction
    grid: tuple[int, ...]
    args: tuple[Argument, ...]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    options: Mapping[str, Any] = field(default_factory=FrozenMap)
    coresident: bool = False

    def __post_init__(self) -> None:
        if hasattr(getattr(self.kernel, "fn", None), "run"):
            raise PluginError(
                f"a launch got a kernel inside {type(self.kernel).__name__}; portkern chooses its configs, so pass the "
                "@triton.jit function below it, as kernel.fn"
            )


@dataclass(frozen=True)
class Plan:
    """``outputs`` and ``scratch`` to allocate, then ``launches`` in order."""

    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...] = ()
    launches: tuple[Launch, ...] = ()


def metas_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """``args`` with every tensor replaced by its Meta, and every list by a tuple: the input key of a call."""
    return tuple(
        Meta.of(arg) if isinstance(arg, torch.Tensor) else tuple(arg) if isinstance(arg, list) else arg for arg in args
    )
