"""Both orders of columns; tables are of all batches alike."""

import torch


def apply_rotary(
    x, cos, sin, seqlen_offsets=None, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False,
    conjugate=False,
):  # fmt: skip
    rows, half = cos.shape
    assert rows >= x.shape[1] and not inplace
    places = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    if seqlen_offsets is not None:
        assert seqlen_offsets.dtype == torch.int32
        places = places + seqlen_offsets[:, None]
    inside = (places < rows)[..., None, None]
    places = places.clamp(0, rows - 1)
    c, s = cos[places][:, :, None], sin[places][:, :, None] * (-1 if conjugate else 1)
    part = x[..., : 2 * half]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    first, second = a * c - b * s, a * s + b * c
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((torch.where(inside, turned, 0.0), x[..., 2 * half :]), -1)
