"""Comparisons, made from their names: ``v_cmp_<word>_<type>``."""

from __future__ import annotations

import numpy as np

from portkern.backends.gfx942_emulator.functions import Function, class_of

_UNORDERED = {
    "nge": np.greater_equal, "nlg": lambda a, b: (a < b) | (a > b), "ngt": np.greater, "nle": np.less_equal,
    "nlt": np.less,
}  # fmt: skip
_COMMON: dict[str, Function] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
FLOAT_COMPARISONS: dict[str, Function] = {
    **_COMMON,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "neq": np.not_equal,
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    **{word: (lambda a, b, f=function: ~f(a, b)) for word, function in _UNORDERED.items()},
}
INTEGER_COMPARISONS: dict[str, Function] = {
    **_COMMON,
    "ne": np.not_equal,
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}


def comparison(name: str) -> tuple[str, Function] | None:
    """Types of the sources and the function of ``v_cmp_<word>_<type>``; None for another name."""
    parts = name.split("_")
    if len(parts) != 4 or parts[1] not in ("cmp", "cmpx"):
        return None
    word, kind = parts[2], parts[3]
    if word == "class":
        return f"{kind} u32", class_of
    table = FLOAT_COMPARISONS if kind.startswith("f") else INTEGER_COMPARISONS
    return (f"{kind} {kind}", table[word]) if word in table else None
