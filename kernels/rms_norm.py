"""RMS norm, alone or of a sum with a residual: y = x / sqrt(mean(x^2) + eps) * weight.

x, y: (..., *normalized_shape); weight: normalized_shape. Kernels, plans and gradients are those of ``_norm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from portkern.arguments import check_number, check_tensor
from portkern.kernels._norm import Form, backward_op, backward_reference, forward_op, signature, unflattened

_PLAIN = Form("rms_norm", rms=True, add=False)
_ADD = Form("add_rms_norm", rms=True, add=True)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Any, ...]:
    """RMS norm of ``input`` over its last dims, as ``torch.nn.functional.rms_norm``.

    Args:
        input: (..., *normalized_shape), any strides; float16, bfloat16, float32 or float64.
        normalized_shape: the sizes of the dims that are normalised together.
        weight: normalized_shape, of any of these dtypes, or None.
        eps: is added to the mean square; by default the machine epsilon of float32 (float64 for a float64 ``input``),
            which is what torch computes with for 16-bit types too.

    Returns a tensor of ``input``'s shape and dtype (float32 where autocast is on, for a 16-bit ``input`` on a GPU). In
    a row with an infinity, infinities become NaN and the rest 0; a row with a NaN is NaN.

    Raises BadType (a TypeError), Mismatch (a RuntimeError), UnsupportedDtype (a NotImplementedError).
    """
    return signature(_PLAIN, input, None, normalized_shape, weight, None, _eps("rms_norm", input, eps))


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Any, ...]:
    """``rms_norm(input + residual, ...)`` and the sum, in one pass: (output, new residual).

    ``residual`` has the shape of ``input``; both results have the dtype that torch promotes the two to. Other arguments
    and errors are those of ``rms_norm``.
    """
    check_tensor("add_rms_norm", "residual", residual)
    return signature(_ADD, input, residual, normalized_shape, weight, None, _eps("add_rms_norm", input, eps, residual))


def _eps(op: str, input: Tensor, eps: float | None, residual: Tensor | None = None) -> float:
    if eps is not None:
        return check_number(op, "eps", eps)
    given = (("input", input), ("residual", residual))
    double = any(check_tensor(op, name, each).dtype == torch.float64 for name, each in given if each is not None)
    return torch.finfo(torch.float64 if double else torch.float32).eps


def _result(outputs: Sequence[Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return unflattened(outputs, input)


def _eager(input: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.rms_norm(input, input.shape[-1:], weight, eps)


def _add_eager(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total = input + residual
    return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), total


def _backward_eager(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    if input.device.type == "cpu":  # torch has its function for GPUs alone
        args = (grad_output, grad_sum, input, weight, statistics, weight_dtype, bias_dtype)
        return backward_reference(True, *args)
    wanted = [True, weight_dtype is not None]
    dx, dw = torch.ops.aten._fused_rms_norm_backward(
        grad_output, input, input.shape[-1:], statistics[0].unsqueeze(-1), weight, wanted
    )
    return dx if grad_sum is None else dx + grad_sum, dw, None  # there is no bias


OPS = (
    forward_op(_PLAIN, rms_norm, _result, _eager),
    forward_op(_ADD, add_rms_norm, _result, _add_eager),
    backward_op(_PLAIN, _backward_eager),
)
