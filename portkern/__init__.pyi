"""Made by ci/make_stub.py from the ops' signatures. Do not edit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from portkern.config import Config as Config
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

def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> tuple[Tensor, Tensor]:
    """``layer_norm(input + residual, ...)`` and the sum, in one pass: (output, new residual)."""

def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``rms_norm(input + residual, ...)`` and the sum, in one pass: (output, new residual)."""

def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = 'mean',
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Cross entropy of logits and class indices, as ``torch.nn.functional.cross_entropy``."""

def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """Group norm of ``input``, as ``torch.nn.functional.group_norm``."""

def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """Layer norm of ``input`` over its last dims, as ``torch.nn.functional.layer_norm``."""

def log_softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Logarithm of the softmax of ``input`` along ``dim``, as ``torch.nn.functional.log_softmax``."""

def logsumexp(
    input: Tensor,
    dim: int | Sequence[int],
    keepdim: bool = False,
) -> Tensor:
    """Logarithm of the sum of exponentials over ``dim``, as ``torch.logsumexp``."""

def masked_softmax(
    input: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
) -> Tensor:
    """Softmax of ``scale * input`` over the last dim, of what ``mask`` and ``causal`` leave."""

def matmul(
    input: Tensor,
    other: Tensor,
) -> Tensor:
    """The matrix product of ``input`` and ``other``, as ``torch.matmul``."""

def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """RMS norm of ``input`` over its last dims, as ``torch.nn.functional.rms_norm``."""

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
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "devices",
    "explain",
    "function",
    "group_norm",
    "hookimpl",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "matmul",
    "pin",
    "register",
    "rms_norm",
    "softmax",
    "tune",
    "verify",
]
