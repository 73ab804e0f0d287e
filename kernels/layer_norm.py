"""Layer norm, alone or of a sum with a residual: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

x, y: (..., *normalized_shape); weight, bias: normalized_shape. Kernels, plans and gradients are those of ``_norm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from portkern.arguments import check_number, check_tensor
from portkern.kernels._norm import Form, backward_op, forward_op, signature, unflattened

_PLAIN = Form("layer_norm", rms=False, add=False)
_ADD = Form("add_layer_norm", rms=False, add=True)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> tuple[Any, ...]:
    """Layer norm of ``input`` over its last dims, as ``torch.nn.functional.layer_norm``.

    Args:
        input: (..., *normalized_shape), any strides; float16, bfloat16, float32 or float64.
        normalized_shape: the sizes of the dims that are normalised together.
        weight, bias: normalized_shape, of any of these dtypes; each may be None.
        eps: is added to the variance.

    Returns a tensor of ``input``'s shape and dtype (float32 where autocast is on, for a 16-bit ``input`` on a GPU).
    Mean and variance are taken in float32 (float64 where an operand is), the variance of centred values. A row with a
    NaN or an infinity is NaN.

    Raises BadType (a TypeError), Mismatch (a RuntimeError), UnsupportedDtype (a NotImplementedError).
    """
    number = check_number("layer_norm", "eps", eps)
    return signature(_PLAIN, input, None, normalized_shape, weight, bias, number)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> tuple[Any, ...]:
    """``layer_norm(input + residual, ...)`` and the sum, in one pass: (output, new residual).

    ``residual`` has the shape of ``input``; both results have the dtype that torch promotes the two to. Other arguments
    and errors are those of ``layer_norm``.
    """
    check_tensor("add_layer_norm", "residual", residual)
    number = check_number("add_layer_norm", "eps", eps)
    return signature(_ADD, input, residual, normalized_shape, weight, bias, number)


def _result(outputs: Sequence[Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return unflattened(outputs, input)


def _eager(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.layer_norm(input, input.shape[-1:], weight, bias, eps)


def _add_eager(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total = input + residual
    return torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def _backward_eager(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    if input.device.type == "cpu" and (weight is None or weight.dtype == input.dtype):
        statistics = statistics.to(input.dtype)  # as torch keeps them there; on GPUs they are float32
    mean, rstd = statistics.unsqueeze(-1)
    wanted = [True, weight_dtype is not None, bias_dtype is not None]
    dx, *sums = torch.ops.aten.native_layer_norm_backward(
        grad_output, input, input.shape[-1:], mean, rstd, weight, weight, wanted
    )
    return dx if grad_sum is None else dx + grad_sum, *sums


OPS = (
    forward_op(_PLAIN, layer_norm, _result, _eager),
    forward_op(_ADD, add_layer_norm, _result, _add_eager),
    backward_op(_PLAIN, _backward_eager),
)
