"""Versions of what portkern builds on, and whether they are ones it was tested with."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from portkern._version import __version__
from portkern.errors import MissingTriton

OLDEST_TRITON = (3, 6)
NEWEST_TRITON = (3, 9)


@cache
def triton_version() -> str:
    """Triton's version. Raises MissingTriton with what to install."""
    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    try:
        import triton
    except ImportError as error:
        raise MissingTriton(
            "Triton is not installed. torch's GPU builds bring it; on a CPU-only machine install "
            "it with: pip install 'portkern[cpu]'"
        ) from error
    return str(triton.__version__)


def triton_series() -> str:
    """Triton's major.minor: what the toolchain of a record is compared by."""
    return ".".join(triton_version().split(".")[:2])


def require_triton() -> None:
    """Raise MissingTriton unless a tested Triton is installed."""
    text = triton_version()
    found = tuple(int(part) for part in text.split(".")[:2])
    if not OLDEST_TRITON <= found <= NEWEST_TRITON:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST_TRITON, NEWEST_TRITON))
        raise MissingTriton(
            f"portkern is tested with Triton {oldest} to {newest}, this is {text}; "
            f"install a torch whose Triton lies in that range"
        )


def provenance() -> dict[str, Any]:
    """Versions for a record."""
    import torch

    return {
        "portkern": __version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "runtime": str(torch.version.cuda or torch.version.hip or "none"),
    }
