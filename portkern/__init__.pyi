"""Made by ci/make_stub.py from the ops' signatures. Do not edit."""

import torch
from torch import Tensor

from portkern.config import Config as Config
from portkern.emulation import emulate as emulate
from portkern.explanation import explain as explain
from portkern.hookspecs import hookimpl as hookimpl
from portkern.op import Backward as Backward
from portkern.op import Case as Case
from portkern.op import Op as Op
from portkern.registry import function as function
from portkern.registry import register as register
from portkern.runtime import devices as devices
from portkern.runtime import pin as pin
from portkern.target import Device as Device
from portkern.target import Target as Target
from portkern.tuner import tune as tune
from portkern.verification import verify as verify

__version__: str

def log_softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Logarithm of the softmax of ``input`` along ``dim``, as ``torch.nn.functional.log_softmax``."""

def matmul(
    input: Tensor,
    other: Tensor,
) -> Tensor:
    """The matrix product of ``input`` and ``other``, as ``torch.matmul``."""

def softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Softmax of ``input`` along ``dim``, as ``torch.nn.functional.softmax``."""

__all__ = [
    "Backward",
    "Case",
    "Config",
    "Device",
    "Op",
    "Target",
    "__version__",
    "devices",
    "emulate",
    "explain",
    "function",
    "hookimpl",
    "log_softmax",
    "matmul",
    "pin",
    "register",
    "softmax",
    "tune",
    "verify",
]
