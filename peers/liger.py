"""Liger-Kernel: its autograd functions, as of version 0.8; gradients by its backward alone, outside autograd.

Some of its kernels write over what they are given: they get copies, made once, so what a repeated call computes is
another value at the same cost. Where it lets one choose, arithmetic is in float32 throughout, as here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from portkern.peer import Call, library
from portkern.peers._offers import REDUCTIONS, along_last, both, need, rows, same_dtype, weights

EPS = 2**-17  # for gradients, whose arguments hold it in the statistics: of no effect on values of a usual size
CASTING = "gemma"  # float32 up to the last rounding


class _Context:
    """Stands in for autograd's, so that a backward is timed without a graph, and can be captured."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (True,) * inputs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def _liger(name: str) -> Any:
    return getattr(import_module("liger_kernel.ops"), name)


def _softmax(input: Tensor, dim: int, dtype: torch.dtype) -> Call:
    along_last(input, dim)
    same_dtype(input, dtype)
    function = _liger("LigerSoftmaxFunction")
    return lambda: function.apply(input)


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Call:
    along_last(output, dim)
    same_dtype(output, input_dtype)
    function, context = _liger("LigerSoftmaxFunction"), _Context(1)
    function.forward(context, output)
    context.save_for_backward(output)  # that of the forward before this gradient, which saves its output alone
    return lambda: function.backward(context, grad_output)


def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    weights(weight, bias)
    same_dtype(input, dtype)
    function = _liger("LigerLayerNormFunction")
    return lambda: function.apply(input, weight, bias, eps)


def _layer_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    need(grad_sum is None, "norm of a sum")
    need(weight is not None and weight_dtype is not None and bias_dtype is not None, "norm without weight and bias")
    function, x, dy = _liger("layer_norm_backward"), rows(input), rows(grad_output)
    mean, rstd = (each.reshape(-1) for each in statistics)
    bias = torch.zeros_like(weight)  # type: ignore[arg-type]  # not None: need() raised

    def call() -> tuple[Tensor, ...]:
        dx, dw, db = function(dy, x, weight, bias, mean, rstd)
        return dx.view(input.shape), dw, db

    return call


def _rms_norm(input: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    same_dtype(input, dtype)
    function = _liger("LigerRMSNormFunction")
    return lambda: function.apply(input, weight, eps, 0.0, CASTING, False)


def _rms_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    need(grad_sum is None, "norm of a sum")
    function, context = _liger("LigerRMSNormFunction"), _Context(2)
    function.forward(context, input, weight, EPS, 0.0, CASTING, False)
    return lambda: tuple(function.backward(context, grad_output)[:2])


def _add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    weights(weight)
    same_dtype(input, dtype)
    same_dtype(residual, dtype)
    function = _liger("LigerFusedAddRMSNormFunction")
    return lambda: function.apply(input, residual, weight, eps, 0.0, CASTING, False)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Call:
    weights(weight, bias)
    same_dtype(input, dtype)
    function = _liger("LigerGroupNormFunction")
    return lambda: function.apply(input, weight, bias, input.shape[1], num_groups, eps)


def _group_norm_backward(
    grad_output: Tensor, input: Tensor, num_groups: int, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    need(weight is not None and weight_dtype is not None and bias_dtype is not None, "norm without weight and bias")
    function, x, dy = _liger("group_norm_backward"), input.contiguous(), grad_output.contiguous()
    mean, rstd = (each.contiguous() for each in statistics)
    return lambda: function(dy, x, weight, weight, mean, rstd, x.shape[1], num_groups)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    z_loss: float, softcap: float, gradient: bool, dtype: torch.dtype,
) -> Call:  # fmt: skip
    need(input.dim() == 2, f"logits of {input.dim()} dims")
    function, x = _liger("LigerCrossEntropyFunction"), input
    if gradient:
        x = input.clone().requires_grad_()  # its gradient is written over it
    options = (weight, ignore_index, z_loss, label_smoothing, REDUCTIONS[reduction], softcap or None)

    def call() -> tuple[Tensor | None, ...]:
        loss = function.apply(x, target, *options)[0].detach()
        return (loss, None, None, x.detach()) if gradient else (loss,)

    return call


def _swiglu(x: Tensor | None, gate: Tensor | None, x_number: float, gate_number: float, dtype: torch.dtype) -> Call:
    if x is not None and gate is None:
        same_dtype(x, dtype)
        packed = _liger("LigerFusedGateUpSiLUMulFunction")
        return lambda: packed.apply(x)
    a, b = both(x, gate, "swiglu")
    same_dtype(a, dtype)
    function = _liger("LigerSiLUMulFunction")
    return lambda: function.apply(a, b)


def _geglu(
    x: Tensor | None, gate: Tensor | None, x_number: float, gate_number: float, tanh: int, dtype: torch.dtype
) -> Call:
    need(bool(tanh), "geglu by erf")
    a, b = both(x, gate, "geglu")
    same_dtype(a, dtype)
    function = _liger("LigerGELUMulFunction")
    return lambda: function.apply(a, b)


def _gated_backward(name: str, grad: Tensor | None, x: Tensor | None, gate: Tensor | None, wanted: Any) -> Call:
    a, b = both(x, gate, name)
    dy, _ = both(grad, a, name)
    need(tuple(wanted) == (0, 1), f"{name} of one operand")
    function, dy, a, b = _liger(name), dy.contiguous(), a.contiguous().clone(), b.contiguous().clone()
    return lambda: tuple(function(a, b, dy))


def _swiglu_backward(
    grad: Tensor | None, x: Tensor | None, gate: Tensor | None, grad_number: float, x_number: float,
    gate_number: float, dtype: torch.dtype, wanted: Any,
) -> Call:  # fmt: skip
    if x is not None and gate is None:
        packed, context, shape = _liger("LigerFusedGateUpSiLUMulFunction"), _Context(1), x.shape
        packed.forward(context, x)
        return lambda: packed.backward(context, grad)[0].view(shape)  # it gives a matrix
    return _gated_backward("swiglu_backward", grad, x, gate, wanted)


def _geglu_backward(
    grad: Tensor | None, x: Tensor | None, gate: Tensor | None, grad_number: float, x_number: float,
    gate_number: float, tanh: int, dtype: torch.dtype, wanted: Any,
) -> Call:  # fmt: skip
    need(bool(tanh), "geglu by erf")
    return _gated_backward("geglu_backward", grad, x, gate, wanted)


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, offset: int, interleaved: bool, back: bool
) -> Call:
    need(not interleaved, "rope of neighbouring columns")
    need(starts is None, "rope with a place for each batch")
    function, read = _liger("LigerRopeFunction"), slice(offset, offset + q.shape[1])
    tables = [torch.cat((each[..., read, :],) * 2, -1) for each in (cos, -sin if back else sin)]
    # It rotates in place memory that lies as ours, seen as (B, H, S, D).
    a, b = (each.contiguous().clone().transpose(1, 2) for each in (q, k))
    return lambda: tuple(each.transpose(1, 2) for each in function.apply(a, b, *tables))


PEER = library(
    "liger",
    "liger_kernel",
    "liger-kernel",
    {
        "softmax": _softmax,
        "softmax_backward": _softmax_backward,
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "add_rms_norm": _add_rms_norm,
        "group_norm": _group_norm,
        "group_norm_backward": _group_norm_backward,
        "cross_entropy": _cross_entropy,
        "swiglu": _swiglu,
        "swiglu_backward": _swiglu_backward,
        "geglu": _geglu,
        "geglu_backward": _geglu_backward,
        "rope": _rope,
    },
)
