"""Rotary position embedding of queries and keys, in one pass.

    (a, b) -> (a cos - b sin, b cos + a sin)        for each pair of the first R columns of a head

q: (B, S, H, D), k: (B, S, H', D), any strides; cos, sin: (L, R / 2) or (B, L, R / 2). Pairs are (i, i + R / 2), or
neighbours (2 i, 2 i + 1) where interleaved; columns from R on pass through. Token s of batch b has the row offset + s,
or starts[b] + s. A program takes BLOCK_H heads of one token, so that cos and sin are read once for them. The gradient
is the rotation back.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, check_bool, check_dtype, check_int, check_tensor
from portkern.config import Blocks, Config
from portkern.errors import BadArgument, Mismatch
from portkern.integers import next_power_of_2
from portkern.layout import VECTOR_BYTES, near
from portkern.op import Backward, Case, Op
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan, Value, like
from portkern.pointwise_kernel import multiple, narrowed, step
from portkern.pointwise_plan import pointwise_work
from portkern.pointwise_reference import values_of
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.target import Device


@triton.jit
def _rotated(
    x_ptr, y_ptr, cos, sin, heads, head, stride_xh, stride_xd, stride_yh, stride_yd,
    HALF: tl.constexpr, PASSED: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The heads from ``head`` on of one token. cos, sin: [1, BLOCK_R], or [1, BLOCK_R, 2] of pairs with their sign."""
    offs_h = head + tl.arange(0, BLOCK_H)
    mask_h = (offs_h < heads)[:, None]
    x_rows, y_rows = x_ptr + offs_h[:, None] * stride_xh, y_ptr + offs_h[:, None] * stride_yh
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    mask = mask_h & (offs_r < HALF)
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_R)[None, :]
        whole = mask_h & (offs < 2 * HALF)
        x = tl.load(x_rows + offs * stride_xd, mask=whole, other=0.0)
        a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_R, 2)))
        a, b = a.to(COMPUTE), b.to(COMPUTE)
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_H, 2 * BLOCK_R))
        tl.store(y_rows + offs * stride_yd, narrowed(y, y_ptr.dtype.element_ty), mask=whole)
    else:
        a = tl.load(x_rows + offs_r * stride_xd, mask=mask, other=0.0).to(COMPUTE)
        b = tl.load(x_rows + (offs_r + HALF) * stride_xd, mask=mask, other=0.0).to(COMPUTE)
        tl.store(y_rows + offs_r * stride_yd, narrowed(a * cos - b * sin, y_ptr.dtype.element_ty), mask=mask)
        b = narrowed(b * cos + a * sin, y_ptr.dtype.element_ty)
        tl.store(y_rows + (offs_r + HALF) * stride_yd, b, mask=mask)
    if PASSED > 0:
        offs_p = tl.arange(0, BLOCK_P)[None, :]
        mask = mask_h & (offs_p < PASSED)
        x = tl.load(x_rows + (offs_p + 2 * HALF) * stride_xd, mask=mask)
        tl.store(y_rows + (offs_p + 2 * HALF) * stride_yd, x, mask=mask)


@triton.jit(do_not_specialize=["offset"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, starts_ptr, q_out_ptr, k_out_ptr, offset: tl.int64, TOKENS, S, L, H_Q, H_K,
    q_strides, k_strides, q_out_strides, k_out_strides, cos_strides, sin_strides, stride_starts,
    HALF: tl.constexpr, PASSED: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, COMPUTE: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid: tokens times tiles of query heads, then tokens times tiles of key heads. Strides: (b, s, h, d)."""
    tiles_q = (H_Q - 1) // BLOCK_HQ + 1
    program = tl.program_id(0)
    query = program < TOKENS * tiles_q
    token = program // tiles_q if query else program - TOKENS * tiles_q
    if not query:
        token = token // ((H_K - 1) // BLOCK_HK + 1)
    b, s = token // S, token % S
    row = s + tl.full([], offset, tl.int64)
    if starts_ptr is not None:
        row = s + tl.load(starts_ptr + step(b, stride_starts)).to(tl.int64)
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    mask = offs_r < tl.where((row >= 0) & (row < L), HALF, 0)
    cos = tl.load(
        cos_ptr + step(b, cos_strides[0]) + row * cos_strides[1] + offs_r * cos_strides[2], mask=mask, other=0.0
    )
    sin = tl.load(
        sin_ptr + step(b, sin_strides[0]) + row * sin_strides[1] + offs_r * sin_strides[2], mask=mask, other=0.0
    )
    cos, sin = cos.to(COMPUTE), sin.to(COMPUTE)
    if BACK:
        sin = -sin
    if query:
        _rotated(
            q_ptr + step(b, multiple(q_strides[0], UNITS[0])) + step(s, multiple(q_strides[1], UNITS[0])),
            q_out_ptr + step(b, multiple(q_out_strides[0], UNITS[2]))
            + step(s, multiple(q_out_strides[1], UNITS[2])),
            cos, sin, H_Q, program % tiles_q * BLOCK_HQ, multiple(q_strides[2], UNITS[0]), q_strides[3],
            multiple(q_out_strides[2], UNITS[2]), q_out_strides[3],
            HALF, PASSED, INTERLEAVED, COMPUTE, BLOCK_HQ, BLOCK_R, BLOCK_P,
        )  # fmt: skip
    else:
        tiles_k = (H_K - 1) // BLOCK_HK + 1
        _rotated(
            k_ptr + step(b, multiple(k_strides[0], UNITS[1])) + step(s, multiple(k_strides[1], UNITS[1])),
            k_out_ptr + step(b, multiple(k_out_strides[0], UNITS[3]))
            + step(s, multiple(k_out_strides[1], UNITS[3])),
            cos, sin, H_K, (program - TOKENS * tiles_q) % tiles_k * BLOCK_HK, multiple(k_strides[2], UNITS[1]),
            k_strides[3], multiple(k_out_strides[2], UNITS[3]), k_out_strides[3],
            HALF, PASSED, INTERLEAVED, COMPUTE, BLOCK_HK, BLOCK_R, BLOCK_P,
        )  # fmt: skip


# ---- the op -------------------------------------------------------------------------------------------------------


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, offset: int | Tensor = 0,
    rotary_dim: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Rotary position embedding of ``q`` and ``k``.

    Args:
        q, k: (B, S, H, D) and (B, S, H', D), floating, any strides.
        cos, sin: (L, R / 2) or (B, L, R / 2), floating; no gradient flows to them.
        interleaved: pairs are neighbouring columns; otherwise column i goes with i + R / 2.
        offset: the row of cos and sin for the first token; or one for each batch, an integer tensor (B,). Tokens whose
            row such a tensor puts outside cos and sin become 0.
        rotary_dim: R, the columns that are rotated, if it is to be checked; the others pass through unchanged.

    Returns the rotated ``q`` and ``k``, in their own memory formats. The arguments are not altered.
    Raises BadArgument (a ValueError), Mismatch (a RuntimeError), BadType (a TypeError), UnsupportedDtype.
    """
    for name, each in {"q": q, "k": k, "cos": cos, "sin": sin}.items():
        check_dtype("rope", name, check_tensor("rope", name, each).dtype, FLOATS)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise BadArgument("rope(): cos or sin requires grad, and no gradient flows to them: use .detach()")
    _check_shapes(q, k, cos, sin, rotary_dim)
    starts: Tensor | None = None
    if isinstance(offset, Tensor):
        if offset.shape != q.shape[:1] or offset.dtype not in (torch.int32, torch.int64):
            raise BadArgument(
                f"rope(): offset has shape {tuple(offset.shape)} and {offset.dtype}; it takes int32 or int64 of shape "
                f"({q.shape[0]},), one for each batch"
            )
        starts, first = offset, 0
    else:
        first = check_int("rope", "offset", offset)
        if first < 0 or first + q.shape[1] > cos.shape[-2]:
            raise BadArgument(
                f"rope(): rows {first} to {first + q.shape[1] - 1} of cos and sin are read; they have {cos.shape[-2]}"
            )
    q, k, cos, sin = near(q, 2), near(k, 2), near(cos, cos.dim() - 1), near(sin, sin.dim() - 1)
    return q, k, cos, sin, starts, first, check_bool("rope", "interleaved", interleaved), False


def _check_shapes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise Mismatch(
            f"rope(): q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they take (B, S, H, D) of equal B, S and D"
        )
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or (cos.dim() == 3 and cos.shape[0] not in (1, q.shape[0])):
        raise Mismatch(
            f"rope(): cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; both take (L, R / 2) or (B, L, R / 2)"
        )
    rotated = 2 * cos.shape[-1]
    if rotary_dim is not None and (check_int("rope", "rotary_dim", rotary_dim) % 2 or rotary_dim != rotated):
        raise BadArgument(
            f"rope(): rotary_dim is {rotary_dim}; it must be even, twice the {cos.shape[-1]} columns of cos"
        )
    if rotated > q.shape[3]:
        raise Mismatch(f"rope(): {cos.shape[-1]} columns of cos rotate {rotated} of a head, which has {q.shape[3]}")


def _outputs(q: Meta, k: Meta, *rest: Any) -> tuple[Buffer, ...]:
    return like(q), like(k)


def _class(meta: Meta | Buffer) -> str:
    if meta.strides[3] != 1:
        return "s"
    aligned = getattr(meta, "aligned", True) and all(
        step * meta.dtype.itemsize % VECTOR_BYTES == 0 for step in meta.strides[:3]
    )
    return "n16" if aligned else "n"


def _problem(q: Meta, k: Meta, cos: Meta, *rest: Any) -> Problem:
    named: dict[str, Meta | Buffer] = {"y0": like(q), "y1": like(k), "x0": q, "x1": k}
    return Problem(
        op="rope",
        sizes=FrozenMap(N=q.shape[3], M=q.shape[2] + k.shape[2], OUTER=q.shape[0] * q.shape[1], R=2 * cos.shape[-1]),
        dtypes=FrozenMap({**{name: _dtype(each) for name, each in named.items()}, "cos": _dtype(cos)}),
        flags=FrozenMap(interleaved=rest[3], back=rest[4]),
        layout=FrozenMap({name: _class(each) for name, each in named.items()}),
    )


def _dtype(meta: Meta | Buffer) -> str:
    return str(meta.dtype).removeprefix("torch.")


def _work(problem: Problem) -> Work:
    sizes = FrozenMap({name: size for name, size in problem.sizes.items() if name != "R"})
    # An element of q or k is read once and written once.
    read = FrozenMap({name: problem.dtypes[name] for name in ("x0", "y0")})
    work = pointwise_work(3.0, dataclasses.replace(problem, sizes=sizes, dtypes=read))
    return dataclasses.replace(work, sizes=problem.sizes, dtypes=problem.dtypes)


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    heads = max(1, config.params["BLOCK"] // next_power_of_2(work.sizes["N"]))
    return Blocks(BLOCK_H=min(heads, next_power_of_2(work.sizes["M"])))


def _plan(
    config: Config, blocks: Blocks, device: Device, q: Meta, k: Meta, cos: Meta, sin: Meta, starts: Meta | None,
    offset: Any, interleaved: bool, back: bool,
) -> Plan:  # fmt: skip
    outputs = _outputs(q, k)
    tokens, half = q.shape[0] * q.shape[1], cos.shape[-1]
    block_q, block_k = (min(blocks["BLOCK_H"], next_power_of_2(each.shape[2])) for each in (q, k))
    if tokens * q.shape[3] * (q.shape[2] + k.shape[2]) == 0:
        return Plan(outputs)
    moved: tuple[Meta | Buffer, ...] = (q, k, *outputs)
    double = torch.float64 in (q.dtype, k.dtype)
    passed = q.shape[3] - 2 * half
    tables = [
        each.strides if len(each.shape) == 3 and each.shape[0] > 1 else (0, *each.strides[-2:]) for each in (cos, sin)
    ]
    launch = Launch(
        kernel=_rope_kernel,
        grid=(tokens * (-(-q.shape[2] // block_q) + -(-k.shape[2] // block_k)),),
        args=(
            In(0), In(1), In(2), In(3), In(4) if starts else None, Out(0), Out(1), Value(5),
            tokens, q.shape[1], cos.shape[-2], q.shape[2], k.shape[2], q.strides, k.strides,
            outputs[0].strides, outputs[1].strides, *tables, starts.strides[0] if starts else 0,
        ),
        constexprs={
            "HALF": half, "PASSED": passed, "INTERLEAVED": interleaved, "BACK": back,
            "COMPUTE": tl.float64 if double else tl.float32,
            "UNITS": tuple(VECTOR_BYTES // each.dtype.itemsize if _class(each) == "n16" else 1 for each in moved),
            "BLOCK_HQ": block_q, "BLOCK_HK": block_k,
            "BLOCK_R": next_power_of_2(half), "BLOCK_P": next_power_of_2(passed),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return Plan(outputs, launches=(launch,))


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, offset: int, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """The rotation in plain torch."""
    rows = torch.arange(q.shape[1], device=q.device)[None] + (offset if starts is None else starts[:, None])
    known = (rows >= 0) & (rows < cos.shape[-2])
    rows = rows.clamp(0, max(cos.shape[-2] - 1, 0)).expand(q.shape[0], -1)
    c, s = (torch.where(known[..., None], _rows_of(each, rows), 0.0)[:, :, None] for each in (cos, sin))
    s = -s if back else s
    return _rotate(q, c, s, interleaved), _rotate(k, c, s, interleaved)


def _rows_of(table: Tensor, rows: Tensor) -> Tensor:
    table = table if table.dim() == 3 else table[None]
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None] % table.shape[0]
    return table[batch, rows]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    turned, passed = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    found = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((found.to(x.dtype), passed), -1)


def _eager(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, offset: int, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """``x * cos + turned(x) * sin``, as transformers' models have it."""
    tables = []
    for table in (cos, -sin if back else sin):
        if starts is None:
            table = table[..., offset : offset + q.shape[1], :]
        else:
            rows = starts[:, None] + torch.arange(q.shape[1], device=q.device)
            table = table[rows] if table.dim() == 2 else torch.take_along_dim(table, rows[..., None], 1)
        table = table.to(q.dtype).unsqueeze(-2)
        tables.append(table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1))
    c, s = tables
    return _turned(q, c, s, interleaved), _turned(k, c, s, interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    rotated, passed = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    found = rotated * cos + turned * sin
    return torch.cat((found, passed), -1) if passed.shape[-1] else found


def _terms(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    starts, offset, interleaved, _ = rest
    turned = reference(q.abs(), k.abs(), cos.abs(), -sin.abs(), starts, offset, interleaved, False)
    plain = reference(q.abs(), k.abs(), cos.abs(), sin.abs(), starts, offset, interleaved, False)
    first, second = (torch.maximum(x.abs(), y.abs()) for x, y in zip(turned, plain, strict=True))
    return first, second


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", rotary: int = 0, interleaved: bool = False, offset: int = 0, starts: bool = False,
    batched: bool = False, back: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """``sizes``: B, S, H, H', D; ``rotary``: columns that are rotated, all by default."""
    b, s, heads, key_heads, d = sizes
    q = values_of((b, s, heads, d), dtype, device, generator, "wide" if style == "wide" else "normal")
    k = values_of((b, s, key_heads, d), dtype, device, generator, style)
    half, rows = (rotary or d) // 2, s + offset + 3
    angle = torch.rand((b, rows, half) if batched else (rows, half), generator=generator, device=device) * math.tau
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    places = torch.arange(b, device=device) % 4 if starts else None
    return q, k, cos, sin, places, 0 if starts else offset, interleaved, back


CASES = (
    Case((2, 3, 4, 2, 16)), Case((1, 1, 1, 1, 2)), Case((2, 5, 3, 1, 64), {"rotary": 16}), Case((0, 3, 2, 2, 8)),
    Case((2, 3, 2, 2, 80), {"rotary": 20, "interleaved": True}), Case((2, 4, 5, 2, 32), {"interleaved": True}),
    Case((2, 3, 4, 2, 32), {"offset": 5, "back": True}), Case((3, 2, 2, 1, 24), {"starts": True, "batched": True}),
    Case((1, 3, 32, 8, 128)), Case((2, 3, 2, 0, 8)),
)  # fmt: skip
OPS = (
    Op(
        "rope",
        "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? starts, SymInt offset, bool interleaved, bool back)"
        " -> (Tensor, Tensor)",
        signature=rope, problem=_problem, work=_work, outputs=_outputs, fit=_fit, plan=_plan, reference=reference,
        eager=_eager, terms=_terms, inputs=_inputs, cases=CASES, values=(5,),
        dtypes=("float32", "float16", "bfloat16", "float64"),
        tune_cases=(Case((4, 4096, 32, 8, 128)), Case((4, 4096, 32, 8, 128), {"interleaved": True})),
        depends=((0, (0,)), (1, (1,))),
        backward=Backward(
            "rope", lambda args, outputs: args[2:],
            lambda saved, grads: (*(near(each, 2) for each in grads), *saved[:-1], not saved[-1]), (0, 1),
        ),
    ),
)  # fmt: skip
