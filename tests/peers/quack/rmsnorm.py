"""RMS norm of any dims, layer norm of matrices with float32 weights."""

import torch
import torch.nn.functional as F


def rmsnorm(
    x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False,
    weight_offset=0.0,
):  # fmt: skip
    s = x if residual is None else x + residual
    y = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * (weight + weight_offset)
    return (y, s) if prenorm and residual is not None else y


def rmsnorm_bwd(x, weight, dout, rstd, dresidual_out=None, has_bias=False, has_residual=False, weight_offset=0.0):
    assert x.dim() == 2 and rstd.shape == x.shape[:1]
    h = x * rstd[:, None]
    u = dout if weight is None else dout * (weight + weight_offset)
    dx = (u - h * (u * h).mean(-1, keepdim=True)) * rstd[:, None]
    dx = dx if dresidual_out is None else dx + dresidual_out
    return dx, None if weight is None else (dout * h).sum(0), None, None


def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert x.dim() == 2 and weight.dtype == torch.float32
    return F.layer_norm(x, x.shape[1:], weight, bias, eps)


def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    assert x.dim() == 2 and weight.dim() == 1 and rstd.shape == mean.shape == x.shape[:1]
    h = (x - mean[:, None]) * rstd[:, None]
    u = dout * weight
    dx = (u - u.mean(-1, keepdim=True) - h * (u * h).mean(-1, keepdim=True)) * rstd[:, None]
    return dx, (dout * h).sum(0), dout.sum(0) if has_bias else None
