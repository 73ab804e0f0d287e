"""portkern: one block-level Triton source per op, tuned for the GPU that runs it.

``portkern.softmax(x)`` and every other op load at first use; importing this package starts no GPU,
opens no file and imports neither torch nor Triton.
"""

from __future__ import annotations

import os.path
from typing import Any

from portkern._version import __version__

# In a checkout the sub-packages lie beside this folder; installed, they lie inside it.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "kernels")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# The public names that are no ops, and the module that each lives in.
_PUBLIC = {
    "Backward": "portkern.op",
    "Case": "portkern.op",
    "Config": "portkern.config",
    "Device": "portkern.target",
    "Op": "portkern.op",
    "Target": "portkern.target",
    "devices": "portkern.runtime",
    "emulate": "portkern.emulation",
    "explain": "portkern.explanation",
    "freeze": "portkern.freezing",
    "function": "portkern.registry",
    "hookimpl": "portkern.hookspecs",
    "lock_hash": "portkern.freezing",
    "pin": "portkern.pinning",
    "pointwise": "portkern.pointwise_op",
    "register": "portkern.registry",
    "tune": "portkern.tuner",
    "verify": "portkern.verification",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'portkern' has no attribute {name!r}")
    from importlib import import_module
    from importlib.util import find_spec

    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif find_spec(f"{__name__}.{name}") is not None:
        # ``from portkern import testing`` asks here first: a module must not load the ops.
        raise AttributeError(f"module 'portkern' has not imported its sub-module {name!r} yet")
    else:
        value = import_module("portkern.registry").public_function(name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    from portkern.registry import public_names

    return sorted({*globals(), *_PUBLIC, *public_names()})


__all__ = ["__version__", *_PUBLIC]
