"""As version 0.8.5 documents its functions; what that writes over its arguments, this does too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd import Function


class LigerSoftmaxFunction(Function):
    @staticmethod
    def forward(ctx, input_):
        y = torch.softmax(input_, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return y * (grad_output - (grad_output * y).sum(-1, keepdim=True))


class LigerLayerNormFunction(Function):
    @staticmethod
    def forward(ctx, X, W, B, eps):
        return F.layer_norm(X, W.shape, W, B, eps)


def layer_norm_backward(dY, X, W, B, Mean, RSTD):
    assert X.dim() == 2 and Mean.dim() == RSTD.dim() == 1
    h = (X - Mean[:, None]) * RSTD[:, None]
    u = dY * W
    dx = (u - u.mean(-1, keepdim=True) - h * (u * h).mean(-1, keepdim=True)) * RSTD[:, None]
    return dx, (dY * h).sum(0), dY.sum(0).to(B.dtype)


class LigerRMSNormFunction(Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert casting_mode in ("llama", "gemma", "none")
        ctx.in_place, ctx.offset = in_place, offset
        rstd = (X.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(X, W, rstd)
        return X * rstd if W is None else X * rstd * (W + offset)

    @staticmethod
    def backward(ctx, dY):
        X, W, rstd = ctx.saved_tensors
        assert ctx.needs_input_grad[1]
        h = X * rstd
        u = dY if W is None else dY * (W + ctx.offset)
        dw = None if W is None else (dY * h).reshape(-1, h.shape[-1]).sum(0)
        dx = (u - h * (u * h).mean(-1, keepdim=True)) * rstd
        return dY.copy_(dx) if ctx.in_place else dx, dw, None, None, None, None, None


class LigerFusedAddRMSNormFunction(Function):
    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        S = X + R
        return S * (S.square().mean(-1, keepdim=True) + eps).rsqrt() * (W + offset), S


class LigerGroupNormFunction(Function):
    @staticmethod
    def forward(ctx, X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        assert X.shape[1] == num_channels
        rows = X.reshape(X.shape[0], num_groups, -1)
        h = (rows - rows.mean(-1, keepdim=True)) * (rows.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        return h.view(X.shape) * affine_scaling_weight[:, None] + affine_shifting_bias[:, None]


def group_norm_backward(dY, X, W, B, Mean, RSTD, num_channels, num_groups):
    grads = torch.ops.aten.native_group_norm_backward(
        dY, X, Mean, RSTD, W, X.shape[0], num_channels, X[0, 0].numel(), num_groups, [True, True, True]
    )
    return tuple(grads)


class LigerCrossEntropyFunction(Function):
    @staticmethod
    def forward(
        ctx, _input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
        softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        assert _input.dim() == 2 and int(target.max()) < _input.shape[1], "Target is out of bounds"
        with torch.enable_grad():
            x = _input.detach().clone().requires_grad_()
            z = softcap * torch.tanh(x / softcap) if softcap is not None else x
            loss = F.cross_entropy(z, target, weight, None, ignore_index, None, "none", label_smoothing)
            counts = target != ignore_index
            loss = loss + torch.where(counts, lse_square_scale * torch.logsumexp(z, -1).square(), 0.0)
            w = counts.float() if weight is None else torch.where(counts, weight[target.clamp(0)], 0.0)
            loss = loss.sum() / w.sum() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
            if _input.requires_grad:
                _input.data.copy_(torch.autograd.grad(loss.sum(), x)[0])  # in place, unseen by autograd
        return loss.detach(), None, None, None

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("the gradient is made in the forward")


class LigerSiLUMulFunction(Function):
    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        return F.silu(a) * b


class LigerFusedGateUpSiLUMulFunction(Function):
    @staticmethod
    def forward(ctx, y, in_place=False):
        a, b = y.chunk(2, -1)
        ctx.save_for_backward(y)
        ctx.in_place = in_place
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, dc):
        (y,) = ctx.saved_tensors
        assert not ctx.in_place
        dy = torch.cat(swiglu_backward(*(each.clone() for each in y.chunk(2, -1)), dc), -1)
        return dy.view(-1, y.shape[-1]), None


class LigerGELUMulFunction(Function):
    @staticmethod
    def forward(ctx, a, b):
        return F.gelu(a, approximate="tanh") * b


def _over(a, b, dc, function):
    with torch.enable_grad():
        x = a.detach().requires_grad_()
        y = function(x)
        (da,) = torch.autograd.grad(y, x, dc * b)
    b.copy_(dc * y.detach())
    return a.copy_(da), b


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    return _over(a, b, dc, F.silu)


def geglu_backward(a, b, dc):
    return _over(a, b, dc, lambda x: F.gelu(x, approximate="tanh"))


class LigerRopeFunction(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        return tuple(LigerRopeFunction._turned(each, cos, sin) for each in (q, k))

    @staticmethod
    def _turned(x, cos, sin):
        physical = x.transpose(1, 2).contiguous()  # no copy where the caller's memory lies like this
        cos, sin = ((each if each.dim() == 3 else each[None])[:, :, None] for each in (cos, sin))
        r = cos.shape[-1]
        a, b = physical[..., :r].chunk(2, -1)
        turned = physical[..., :r] * cos + torch.cat((-b, a), -1) * sin
        physical[..., :r] = turned
        return physical.transpose(1, 2)
