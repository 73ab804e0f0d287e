"""quack: its public functions for rows, as of version 0.6; gradients by its backward functions.

They take matrices: further dims become one, which is a view of what is contiguous.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from portkern.peer import Call, library
from portkern.peers._offers import REDUCTIONS, along_last, need, rows, same_dtype


def _quack(name: str, module: str) -> Any:
    return getattr(import_module(f"quack.{module}"), name)  # quack.softmax is a function, beside a module of that name


def _shaped(function: Any, like: Tensor) -> Call:
    """``function``, its result in the shape of ``like``."""
    return lambda: function().view(like.shape)


def _softmax(input: Tensor, dim: int, dtype: torch.dtype) -> Call:
    along_last(input, dim)
    same_dtype(input, dtype)
    function, x = _quack("softmax", "softmax"), rows(input)
    return _shaped(lambda: function(x), input)


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Call:
    along_last(output, dim)
    same_dtype(output, input_dtype)
    function, dy, y = _quack("softmax_bwd", "softmax"), rows(grad_output), rows(output)
    return _shaped(lambda: function(dy, y), output)


def _rms_norm(input: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    same_dtype(input, dtype)
    function = _quack("rmsnorm", "rmsnorm")
    return lambda: function(input, weight, eps=eps)


def _add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    same_dtype(input, dtype)
    same_dtype(residual, dtype)
    function = _quack("rmsnorm", "rmsnorm")
    return lambda: function(input, weight, residual=residual, eps=eps, prenorm=True)


def _rms_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    function, x, dy, rstd = _quack("rmsnorm_bwd", "rmsnorm"), rows(input), rows(grad_output), statistics.reshape(-1)
    of_sum = None if grad_sum is None else rows(grad_sum)

    def call() -> tuple[Tensor | None, ...]:
        dx, dw, *_ = function(x, weight, dy, rstd, dresidual_out=of_sum)
        return dx.view(input.shape), dw

    return call


def _vector(weight: Tensor | None) -> Tensor | None:
    """As its layer norm takes it: in float32. Converted once, untimed."""
    return None if weight is None else weight.float()


def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    need(weight is not None, "layer norm without a weight")
    same_dtype(input, dtype)
    function, x, w, b = _quack("layernorm_fwd", "rmsnorm"), rows(input), _vector(weight), _vector(bias)
    return _shaped(lambda: function(x, w, b, eps=eps), input)


def _layer_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    need(grad_sum is None, "norm of a sum")
    need(weight is not None and weight_dtype is not None, "layer norm without a weight")
    function, x, dy, w = _quack("layernorm_bwd", "rmsnorm"), rows(input), rows(grad_output), _vector(weight)
    mean, rstd = (each.reshape(-1) for each in statistics)

    def call() -> tuple[Tensor | None, ...]:
        dx, dw, db = function(x, w, dy, rstd, mean, has_bias=bias_dtype is not None)
        return dx.view(input.shape), dw, db

    return call


def _plain_loss(input: Tensor, label_smoothing: float, z_loss: float, softcap: float) -> None:
    need(input.dim() == 2, f"logits of {input.dim()} dims")
    need(not label_smoothing, "label smoothing")
    need(not z_loss and not softcap, "z-loss or soft cap")


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    z_loss: float, softcap: float, gradient: bool, dtype: torch.dtype,
) -> Call:  # fmt: skip
    _plain_loss(input, label_smoothing, z_loss, softcap)
    function, x = _quack("cross_entropy", "cross_entropy"), input.detach().requires_grad_(gradient)

    def call() -> tuple[Tensor | None, ...]:
        loss = function(x, target, weight=weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction])
        if not gradient:
            return (loss,)
        return loss.detach(), None, None, torch.autograd.grad(loss.sum(), x)[0]

    return call


def _cross_entropy_backward(
    grad_output: Tensor, statistics: Tensor, total: Tensor, input: Tensor, target: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: int, label_smoothing: float, z_loss: float, softcap: float,
) -> Call:  # fmt: skip
    _plain_loss(input, label_smoothing, z_loss, softcap)
    function, of_row = _quack("cross_entropy_bwd", "cross_entropy"), grad_output.float()
    if REDUCTIONS[reduction] == "mean":
        of_row = of_row / total
    of_row, lse = of_row.expand(target.shape).contiguous(), statistics.sum(-1)
    return lambda: function(input, target, of_row, lse, weight=weight, ignore_index=ignore_index)


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, offset: int, interleaved: bool, back: bool
) -> Call:
    need(cos.dim() == 2, "rope by tables of each batch")
    function, c, s = _quack("apply_rotary", "rotary"), cos[offset:], sin[offset:]
    places = None if starts is None else starts.to(torch.int32)

    def call() -> tuple[Tensor, ...]:
        return tuple(
            function(each, c, s, seqlen_offsets=places, interleaved=interleaved, conjugate=back) for each in (q, k)
        )

    return call


PEER = library(
    "quack",
    "quack",
    "quack-kernels",
    {
        "softmax": _softmax,
        "softmax_backward": _softmax_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "add_rms_norm": _add_rms_norm,
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "cross_entropy": _cross_entropy,
        "cross_entropy_backward": _cross_entropy_backward,
        "rope": _rope,
    },
)
