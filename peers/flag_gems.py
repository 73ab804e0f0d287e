"""FlagGems: its functions by torch's internal signatures, and its fused ones, as of version 5.0."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from portkern.errors import NotOffered
from portkern.peer import Call, Offer, library
from portkern.peers._offers import REDUCTIONS, both, need, rows, same_dtype


def _gems(name: str) -> Any:
    return getattr(import_module("flag_gems"), name)


# ---- rows ---------------------------------------------------------------------------------------------------------


def _softmax(name: str) -> Offer:
    def offer(input: Tensor, dim: int, dtype: torch.dtype) -> Call:
        same_dtype(input, dtype)
        function = _gems(name)
        return lambda: function(input, dim, False)

    return offer


def _softmax_backward(name: str) -> Offer:
    def offer(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Call:
        function = _gems(name)
        return lambda: function(grad_output, output, dim, input_dtype)

    return offer


def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    same_dtype(input, dtype)
    function, shape = _gems("layer_norm"), list(input.shape[-1:])
    return lambda: function(input, shape, weight, bias, eps)[0]


def _layer_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    need(grad_sum is None, "norm of a sum")
    function, x, dy = _gems("layer_norm_backward"), rows(input), rows(grad_output)
    mean, rstd = (each.reshape(-1) for each in statistics)
    mask = [True, weight_dtype is not None, bias_dtype is not None]

    def call() -> tuple[Tensor | None, ...]:
        dx, dw, db = function(dy, x, list(x.shape[1:]), mean, rstd, weight, weight, mask)  # bias: for its dtype alone
        return dx.view(input.shape), dw, db

    return call


def _rms_norm(input: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    need(weight is not None, "RMS norm without a weight")
    same_dtype(input, dtype)
    function, shape = _gems("rms_norm"), list(input.shape[-1:])
    return lambda: function(input, shape, weight, eps)


def _rms_norm_backward(
    grad_output: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    need(grad_sum is None, "norm of a sum")
    need(weight is not None, "RMS norm without a weight")
    function, shape, rstd = _gems("rms_norm_backward"), list(input.shape[-1:]), statistics.reshape(-1)
    return lambda: tuple(function(grad_output, input, rstd, shape, weight))


def _add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Call:
    need(weight is not None, "RMS norm without a weight")
    same_dtype(input, dtype)
    same_dtype(residual, dtype)
    # It writes both results over its operands: they are copies, made once.
    function, x, r = _gems("fused_add_rms_norm"), input.contiguous().clone(), residual.contiguous().clone()
    return lambda: tuple(function(x, r, list(x.shape[-1:]), weight, eps))


def _whole_groups(input: Tensor, num_groups: int) -> None:
    """Version 5.0 masks the channels of a group by those of the tensor: one of 10 channels sums 16."""
    channels = input.shape[1] // num_groups
    need(channels & (channels - 1) == 0, "groups of channels that are no power of two")


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Call:
    same_dtype(input, dtype)
    _whole_groups(input, num_groups)
    function, sizes = _gems("group_norm"), input.shape
    return lambda: function(input, weight, bias, *sizes, num_groups, eps)[0]


def _group_norm_backward(
    grad_output: Tensor, input: Tensor, num_groups: int, weight: Tensor | None, statistics: Tensor,
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> Call:  # fmt: skip
    _whole_groups(input, num_groups)
    function, (mean, rstd) = _gems("group_norm_backward"), statistics
    mask = [True, weight_dtype is not None, bias_dtype is not None]
    return lambda: tuple(function(grad_output, input, mean, rstd, weight, *input.shape, num_groups, mask))


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    z_loss: float, softcap: float, gradient: bool, dtype: torch.dtype,
) -> Call:  # fmt: skip
    need(not z_loss and not softcap, "z-loss or soft cap")
    function, x = _gems("cross_entropy_loss"), input.detach().requires_grad_(gradient)

    def call() -> tuple[Tensor | None, ...]:
        loss = function(x, target, weight, REDUCTIONS[reduction], ignore_index, label_smoothing)
        if not gradient:
            return (loss,)
        return loss.detach(), None, None, torch.autograd.grad(loss.sum(), x)[0]

    return call


def _reduction(name: str, option: str = "", dim: int | None = None) -> Offer:
    """Over the last dim, to which the op's arguments are brought. ``option`` names what the third of them is."""

    def offer(input: Tensor, shape: Sequence[int], *rest: Any) -> Call:
        function, options = _gems(name), {option: rest[0]} if option else {}
        over = [-1] if dim is None else dim

        def call() -> Any:
            found = function(input, over, **options)
            return found.reshape(shape) if isinstance(found, Tensor) else tuple(each.reshape(shape) for each in found)

        return call

    return offer


# ---- elements -----------------------------------------------------------------------------------------------------


def _elementwise(name: str, operands: int, switch: bool = False) -> Offer:
    """Of tensors, as our canonical arguments of elementwise ops have them: the numbers in their place come next."""

    def offer(*args: Any) -> Call:
        tensors, rest = args[:operands], args[2 * operands :]
        if any(each is None for each in tensors):
            raise NotOffered(f"offers no {name} of a number")
        same_dtype(tensors[-1], rest[int(switch)])
        function = _gems(name)
        options = {"approximate": "tanh" if rest[0] else "none"} if switch else {}
        return lambda: function(*tensors, **options)

    return offer


def _gated(name: str, switch: bool = False) -> Offer:
    def offer(x: Tensor | None, gate: Tensor | None, *rest: Any) -> Call:
        packed = x is not None and gate is None
        a, b = x.chunk(2, -1) if packed else both(x, gate, name)  # type: ignore[union-attr]  # packed: not None
        same_dtype(a, rest[2 + switch])
        function, options = _gems(name), ("tanh" if rest[2] else "none",) if switch else ()
        return lambda: function(a, b, *options)

    return offer


def _add(x: Tensor | None, y: Tensor | None, x_number: Any, y_number: Any, alpha: Any, dtype: torch.dtype) -> Call:
    a, b = both(x, y, "add")
    function = _gems("add")
    return lambda: function(a, b, alpha=alpha)


# ---- others -------------------------------------------------------------------------------------------------------


def _matmul(input: Tensor, other: Tensor, tf32: bool) -> Call:
    need(input.dim() == other.dim() and input.dim() in (2, 3), "product of these numbers of dims")
    need(input.shape[:-2] == other.shape[:-2], "product of broadcast batches")
    function = _gems("mm" if input.dim() == 2 else "bmm")
    return lambda: function(input, other)


def _bincount(input: Tensor, weights: Tensor | None, largest: Tensor | None, bins: int) -> Call:
    function = _gems("bincount")
    return lambda: function(input, weights, bins)


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, offset: int, interleaved: bool, back: bool
) -> Call:
    need(starts is None, "rope with a place for each batch")
    need(cos.dim() == 2 and 2 * cos.shape[-1] == q.shape[-1], "rope of a part of a head, or by tables of each batch")
    function, c, s = _gems("apply_rotary_pos_emb"), cos[offset:], (-sin if back else sin)[offset:]
    return lambda: tuple(function(q, k, c, s, None, interleaved))


PEER = library(
    "flag_gems",
    "flag_gems",
    "flag_gems",
    {
        "softmax": _softmax("softmax"),
        "softmax_backward": _softmax_backward("softmax_backward"),
        "log_softmax": _softmax("log_softmax"),
        "log_softmax_backward": _softmax_backward("log_softmax_backward"),
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "add_rms_norm": _add_rms_norm,
        "group_norm": _group_norm,
        "group_norm_backward": _group_norm_backward,
        "cross_entropy": _cross_entropy,
        "sum": _reduction("sum_dim", "dtype"),
        "mean": _reduction("mean_dim", "dtype"),
        "var_mean": _reduction("var_mean", "correction"),
        "amax": _reduction("amax"),
        "argmax": _reduction("argmax", dim=-1),
        "relu": _elementwise("relu", 1),
        "silu": _elementwise("silu", 1),
        "silu_backward": _elementwise("silu_backward", 2),
        "gelu": _elementwise("gelu", 1, switch=True),
        "gelu_backward": _elementwise("gelu_backward", 2, switch=True),
        "sigmoid": _elementwise("sigmoid", 1),
        "sigmoid_backward": _elementwise("sigmoid_backward", 2),
        "tanh": _elementwise("tanh", 1),
        "tanh_backward": _elementwise("tanh_backward", 2),
        "swiglu": _gated("silu_and_mul"),
        "geglu": _gated("gelu_and_mul", switch=True),
        "add": _add,
        "matmul": _matmul,
        "bincount": _bincount,
        "rope": _rope,
    },
)
