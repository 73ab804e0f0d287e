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
from portkern.pointwise_op import pointwise as pointwise
from portkern.registry import function as function
from portkern.registry import register as register
from portkern.runtime import devices as devices
from portkern.runtime import pin as pin
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

def amax(
    input: Tensor,
    dim: int | Sequence[int] | None = ...,
    keepdim: bool = False,
) -> Tensor:
    """Maximum over ``dim``, as ``torch.amax``: NaN where there is one. The gradient is shared by equal maxima."""

def amax_backward(
    share: Tensor | float,
    x: Tensor | float,
    maximum: Tensor | float,
) -> Tensor:
    """Elementwise function of share, x, maximum."""

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

def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Zeroes elements with chance ``p``, scales the others by 1 / (1 - p), as ``torch.nn.functional.dropout``."""

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
    dim: int | Sequence[int] | None = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Variance and mean over ``dim``, as ``torch.var_mean``."""

def var_mean_backward(
    grad_var: Tensor | float,
    grad_mean: Tensor | float,
    x: Tensor | float,
    mean: Tensor | float,
    twice: float,
    once: float,
) -> Tensor:
    """Elementwise function of grad_var, grad_mean, x, mean, twice, once."""

__all__ = [
    "Backward",
    "Case",
    "Config",
    "Device",
    "Op",
    "Target",
    "__version__",
    "add",
    "amax",
    "amax_backward",
    "argmax",
    "axpy",
    "bias_dropout_add",
    "bincount",
    "devices",
    "dropout",
    "explain",
    "function",
    "geglu",
    "gelu",
    "hookimpl",
    "leaky_relu",
    "log_softmax",
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
    "rope",
    "sigmoid",
    "silu",
    "softmax",
    "sum",
    "swiglu",
    "tanh",
    "tune",
    "var_mean",
    "var_mean_backward",
    "verify",
]
