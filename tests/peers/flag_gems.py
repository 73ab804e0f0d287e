"""A stand-in for FlagGems 5.0.2: its functions' names and parameters, computed by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def softmax(self, dim, half_to_float=False):
    return torch.softmax(self, dim)


def softmax_backward(grad_output, output, dim, input_dtype):
    return aten._softmax_backward_data(grad_output, output, dim, input_dtype)


def log_softmax(self, dim, half_to_float=False):
    return torch.log_softmax(self, dim)


def log_softmax_backward(grad_output, output, dim, input_dtype):
    return aten._log_softmax_backward_data(grad_output, output, dim, input_dtype)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return aten.native_layer_norm(input, normalized_shape, weight, bias, eps)


def layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=None):
    assert input.numel() // input.shape[0] == normalized_shape[0], "rows are those of the first dim"
    return aten.native_layer_norm_backward(
        grad_out, input, normalized_shape, mean[:, None], rstd[:, None], weight, bias, output_mask
    )


def rms_norm(x, normalized_shape, weight, eps=1e-5):
    assert weight is not None
    return F.rms_norm(x, normalized_shape, weight, eps)


def rms_norm_backward(dy, x, inv_rms, normalized_shape, weight, eps=1e-5):
    h = x * inv_rms.view(*x.shape[:-1], 1)
    u = dy * weight
    dx = (u - h * (u * h).mean(-1, keepdim=True)) * inv_rms.view(*x.shape[:-1], 1)
    return dx, (dy * h).reshape(-1, x.shape[-1]).sum(0)


def fused_add_rms_norm(x, residual, normalized_shape, weight, eps=1e-5):
    residual.add_(x)
    return x.copy_(F.rms_norm(residual, normalized_shape, weight.to(residual.dtype), eps)), residual


def group_norm(input, weight, bias, N, C, HxW, group, eps=1e-5):
    return aten.native_group_norm(input, weight, bias, N, C, HxW, group, eps)


def group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    return aten.native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)


def cross_entropy_loss(inp, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    return F.cross_entropy(inp, target, weight, None, ignore_index, None, reduction, label_smoothing)


def sum_dim(inp, dim=None, keepdim=False, *, dtype=None):
    return torch.sum(inp, dim, keepdim, dtype=dtype)


def mean_dim(inp, dim=None, keepdim=False, *, dtype=None):
    return torch.mean(inp, dim, keepdim, dtype=dtype)


def var_mean(x, dim=None, *, correction=None, keepdim=False):
    return torch.var_mean(x, dim, correction=correction, keepdim=keepdim)


def amax(inp, dim=None, keepdim=False):
    assert len(dim) > 0, "dims, where argmax takes one"
    return torch.amax(inp, dim, keepdim)


def argmax(inp, dim=None, keepdim=False, *, dtype=None):
    assert isinstance(dim, int)
    return torch.argmax(inp, dim, keepdim)


def relu(self):
    return F.relu(self)


def silu(self):
    return F.silu(self)


def silu_backward(grad_output, self):
    return aten.silu_backward(grad_output, self)


def gelu(self, *, approximate="none"):
    return F.gelu(self, approximate=approximate)


def gelu_backward(grad_output, self, *, approximate="none"):
    return aten.gelu_backward(grad_output, self, approximate=approximate)


def sigmoid(self):
    return torch.sigmoid(self)


def sigmoid_backward(grad_output, output):
    return aten.sigmoid_backward(grad_output, output)


def tanh(self):
    return torch.tanh(self)


def tanh_backward(grad_output, output):
    return aten.tanh_backward(grad_output, output)


def silu_and_mul(A, B):
    return F.silu(A) * B


def gelu_and_mul(x, y, approximate="none"):
    return F.gelu(x, approximate=approximate) * y


def add(A, B, *, alpha=1):
    return torch.add(A, B, alpha=alpha)


def mm(a, b):
    return torch.mm(a, b)


def bmm(A, B):
    return torch.bmm(A, B)


def bincount(input, weights=None, minlength=0):
    return torch.bincount(input, weights, minlength)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, rotary_interleaved=False, inplace=False):
    assert position_ids is None and not inplace and 2 * cos.shape[1] == q.shape[-1]
    return tuple(_turned(each, cos[: q.shape[1], None], sin[: q.shape[1], None], rotary_interleaved) for each in (q, k))


def _turned(x, cos, sin, interleaved):
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
