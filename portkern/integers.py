"""Whole numbers: division rounded up, powers of two."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for anything below."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_2_below(n: int) -> int:
    """The largest power of two that is at most ``n``; 1 for anything below."""
    return 1 << (max(1, n).bit_length() - 1)
