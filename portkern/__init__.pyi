"""Made by ci/make_stub.py from the ops' signatures. Do not edit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from portkern.config import Config as Config
from portkern.emulation import emulate as emulate
from portkern.explanation import explain as explain
from portkern.freezing import freeze as freeze
from portkern.freezing import lock_hash as lock_hash
from portkern.hookspecs import hookimpl as hookimpl
from portkern.op import Backward as Backward
from portkern.op import Case as Case
from portkern.op import Op as Op
from portkern.pinning import pin as pin
from portkern.pointwise_op import pointwise as pointwise
from portkern.registry import function as function
from portkern.registry import register as register
from portkern.runtime import devices as devices
from portkern.target import Device as Device
from portkern.target import Target as Target
from portkern.tuner import tune as tune
from portkern.verification import verify as verify

__version__: str

def add(
    input: Tensor | float,
    other: Tensor | float,
    *,
    alpha: float = 1,
) -> Tensor:
    """``input + alpha * other``, as ``torch.add``."""

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

def amax(
    input: Tensor,
    dim: int | Sequence[int] | None = ...,
    keepdim: bool = False,
) -> Tensor:
    """Maximum over ``dim``, as ``torch.amax``: NaN where there is one."""

def argmax(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Place of the maximum along ``dim``, or in the flattened ``input``, as ``torch.argmax``."""

def axpy(
    x: Tensor | float,
    y: Tensor | float,
    a: float,
) -> Tensor:
    """``a * x + y`` with a number ``a``. Args, result and errors are otherwise those of ``add``."""

def bias_dropout_add(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.5,
    training: bool = True,
) -> Tensor:
    """``residual + dropout(input + bias, p, training)`` in one pass."""

def bincount(
    input: Tensor,
    weights: Tensor | None = None,
    minlength: int = 0,
) -> Tensor:
    """How often each value occurs in ``input``, or the sum of its ``weights``, as ``torch.bincount``."""

def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Cross entropy of logits and class indices, as ``torch.nn.functional.cross_entropy``."""

def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Multiplies elements by 0 with chance ``p``, the others by 1 / (1 - p), as ``torch.nn.functional.dropout``."""

def geglu(
    input: Tensor,
    gate: Tensor | None = None,
    approximate: str = "none",
) -> Tensor:
    """``gelu(input, approximate) * gate``. Args, result and errors are those of ``swiglu`` and ``gelu``."""

def gelu(
    input: Tensor,
    approximate: str = "none",
) -> Tensor:
    """Gaussian error linear unit of each element, as ``torch.nn.functional.gelu``."""

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

def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
) -> Tensor:
    """``input`` where that is above 0, else ``negative_slope * input``, as ``torch.nn.functional.leaky_relu``."""

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

def mean(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Mean over ``dim``, as ``torch.mean``. Args, result and errors are those of ``sum``; integers need a ``dtype``."""

def mish(
    input: Tensor,
    inplace: bool = False,
) -> Tensor:
    """``input * tanh(log(1 + exp(input)))`` of each element, as ``torch.nn.functional.mish``."""

def prelu(
    input: Tensor,
    weight: Tensor,
) -> Tensor:
    """``input`` where that is above 0, else ``weight * input``, as ``torch.nn.functional.prelu``."""

def quantize_fp8(
    input: Tensor,
    dim: int | Sequence[int] | None = -1,
) -> Tensor:
    """``input`` as 8-bit floats, and the scales that it is to be multiplied by."""

def reglu(
    input: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """``relu(input) * gate``. Args, result and errors are those of ``swiglu``."""

def relu(
    input: Tensor,
    inplace: bool = False,
) -> Tensor:
    """``max(input, 0)`` of each element, as ``torch.nn.functional.relu``."""

def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """RMS norm of ``input`` over its last dims, as ``torch.nn.functional.rms_norm``."""

def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    offset: int | Tensor = 0,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of ``q`` and ``k``."""

def sigmoid(
    input: Tensor,
) -> Tensor:
    """``1 / (1 + exp(-input))`` of each element, as ``torch.sigmoid``; integers give torch's default dtype."""

def silu(
    input: Tensor,
    inplace: bool = False,
) -> Tensor:
    """``input * sigmoid(input)`` of each element, as ``torch.nn.functional.silu``."""

def softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Softmax of ``input`` along ``dim``, as ``torch.nn.functional.softmax``."""

def sum(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over ``dim``, as ``torch.sum``."""

def swiglu(
    input: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """``silu(input) * gate``."""

def tanh(
    input: Tensor,
) -> Tensor:
    """Hyperbolic tangent of each element, as ``torch.tanh``; integers give torch's default dtype."""

def var_mean(
    input: Tensor,
    dim: int | Sequence[int] | bool | None = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Variance and mean over ``dim``, as ``torch.var_mean``."""

__all__ = [
    "Backward",
    "Case",
    "Config",
    "Device",
    "Op",
    "Target",
    "__version__",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "amax",
    "argmax",
    "axpy",
    "bias_dropout_add",
    "bincount",
    "cross_entropy",
    "devices",
    "dropout",
    "emulate",
    "explain",
    "freeze",
    "function",
    "geglu",
    "gelu",
    "group_norm",
    "hookimpl",
    "layer_norm",
    "leaky_relu",
    "lock_hash",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "matmul",
    "mean",
    "mish",
    "pin",
    "pointwise",
    "prelu",
    "quantize_fp8",
    "register",
    "reglu",
    "relu",
    "rms_norm",
    "rope",
    "sigmoid",
    "silu",
    "softmax",
    "sum",
    "swiglu",
    "tanh",
    "tune",
    "var_mean",
    "verify",
]
