"""Dropout: y = residual + keep(i) * (x + bias) / (1 - p), where keep(i) is random for each element i with chance 1 - p.

bias and residual are there in ``bias_dropout_add`` only. keep(i) is word (i // 64) % 4 of Philox4x32-10 at the counter
(i // 256) * 64 + i % 64, with i the 64-bit index of the element in the shape and a 64-bit seed: it depends on neither
strides, dtype, tile nor target. A counter's four words serve elements 64 apart, so that neighbours stay vectors.
The seed is drawn from torch's generator of the device, and stays there. The gradient draws the mask again. What is
dropped is multiplied by 0, as in torch: a NaN or an infinity gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from portkern.arguments import FLOATS, check_bool, check_dtype, check_number, check_tensor, refuse_inplace
from portkern.broadcast import Grid, broadcast_shape, contiguous, elementwise_layout, expanded, grid_layout, grid_of
from portkern.config import Blocks, Config
from portkern.errors import BadArgument, Mismatch
from portkern.layout import NARROW, VECTOR_BYTES
from portkern.op import Backward, Case, Op, Result
from portkern.plan import Buffer, In, Launch, Meta, Out, Plan, Value
from portkern.pointwise_kernel import multiple, narrowed
from portkern.pointwise_plan import fit_pointwise, pointwise_work
from portkern.pointwise_reference import values_of
from portkern.problem import Problem, Work
from portkern.promotion import result_dtype
from portkern.record import FrozenMap
from portkern.target import Device

_RUN: tl.constexpr = tl.constexpr(64)  # neighbours that share a word's place: part of what a seed means, for ever
_GROUP: tl.constexpr = tl.constexpr(256)  # elements of as many counters as a run has


@triton.jit
def _words(seed, counter):
    """The four words of Philox4x32-10, as ``tl.philox`` gives them, by products of 64 bits: that is one instruction for
    both halves, where it takes one each, and they are half of all that a dropout computes."""
    key0, key1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1 = (counter & 0xFFFFFFFF).to(tl.uint32), ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = c1 * 0
    c3 = c2
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (b >> 32).to(tl.uint32) ^ c1 ^ key0, b.to(tl.uint32), (a >> 32).to(tl.uint32) ^ c3 ^ key1, a.to(tl.uint32),
        )  # fmt: skip
        key0, key1 = key0 + tl.full([], 0x9E3779B9, tl.uint32), key1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _limit(p):
    """The largest word that drops its element: those whose first 24 bits are less than p * 2^24 do. With a p of 0
    nothing is drawn; here it would drop one word of 2^32."""
    least = tl.ceil(tl.full([], p, tl.float64).to(tl.float32) * 16777216.0).to(tl.int64)
    return tl.maximum((least << 8) - 1, 0).to(tl.uint32)


@triton.jit
def _given(starts, rows, columns, mask, strides, UNITS: tl.constexpr, NUMBER: tl.constexpr):
    """What of an input lies at rows and columns of a tile."""
    row = multiple(strides[NUMBER + 1][0], UNITS[3 * NUMBER + 3])
    return tl.load(starts[NUMBER] + (rows * row + columns * strides[NUMBER + 1][1]), mask=mask)


@triton.jit
def _finish(
    x, starts, y_start, rows, columns, mask, word, limit, scale, strides, UNITS: tl.constexpr,
    TRAINING: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Drops and stores elements; reads the other inputs."""
    y = x.to(COMPUTE)
    if BIAS:
        y = y + _given(starts, rows, columns, mask, strides, UNITS, 1).to(COMPUTE)
    if TRAINING:
        y = y * tl.where(word > limit, 1.0, 0.0) * scale  # 0 times what is not finite is NaN, as in torch
    if RESIDUAL:
        y = y + _given(starts, rows, columns, mask, strides, UNITS, len(starts) - 1).to(COMPUTE)
    offsets = rows * multiple(strides[0][0], UNITS[0]) + columns * strides[0][1]
    tl.store(y_start + offsets, narrowed(y, y_start.dtype.element_ty), mask=mask)


@triton.jit
def _beside(i, x, N):
    """i, and a 0 made of x that the compiler cannot see through: what follows is then laid out over lanes as x was
    loaded. Else every word is computed in another layout and its outcome goes through shared memory."""
    zero = tl.cast(N < 0, tl.int32)
    if x.dtype.primitive_bitwidth == 16:
        return i + (x.to(tl.int16, bitcast=True).to(tl.int32) & zero)
    elif x.dtype.primitive_bitwidth == 32:
        return i + (x.to(tl.int32, bitcast=True) & zero)
    else:
        return i


@triton.jit(do_not_specialize=["p"])
def _dropout_kernel(
    inputs, y_ptr, seed_ptr, p: tl.float64, outer, M, N, strides,
    TRAINING: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, UNITS: tl.constexpr,
    RUNS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: one program a tile. strides: of y, the inputs, and the index. RUNS: a row is whole groups of neighbours."""
    tile = tl.program_id(0)
    columns, rows = (N - 1) // BLOCK_N + 1, (M - 1) // BLOCK_M + 1
    n, rest = tile % columns * BLOCK_N, tile // columns
    m, rest = rest % rows * BLOCK_M, rest // rows
    y_start = y_ptr + (tl.cast(m, tl.int64) * strides[0][0] + tl.cast(n, tl.int64) * strides[0][1])
    first = tl.cast(m, tl.int64) * strides[len(inputs) + 1][0] + tl.cast(n, tl.int64) * strides[len(inputs) + 1][1]
    starts = ()
    for i in tl.static_range(len(inputs)):
        start = inputs[i] + tl.cast(m, tl.int64) * multiple(strides[i + 1][0], UNITS[3 * i + 3])
        starts = starts + (start + tl.cast(n, tl.int64) * strides[i + 1][1],)
    for d in tl.static_range(len(outer)):
        at = tl.cast(rest % outer[d], tl.int64)
        rest = rest // outer[d]
        y_start += at * multiple(strides[0][2 + d], UNITS[2])
        first += at * strides[len(inputs) + 1][2 + d]
        moved = ()
        for i in tl.static_range(len(inputs)):
            moved = moved + (starts[i] + at * multiple(strides[i + 1][2 + d], UNITS[3 * i + 5]),)
        starts = moved
    seed, limit = tl.load(seed_ptr), _limit(p)
    kept = 1.0 - tl.full([], p, tl.float64)
    scale = tl.where(kept > 0.0, 1.0 / kept, 0.0).to(COMPUTE)
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    rows = tl.cast(offs_m, tl.int64) if WIDE else offs_m
    index = first + tl.cast(offs_m, tl.int64) * strides[len(inputs) + 1][0]
    if RUNS:
        i = tl.arange(0, BLOCK_N // 4)[None, :]
        # Alone, x is read first, and its words are drawn where it lies: 135 us for 8192x14336 in bf16, not 164.
        # Beside other inputs that takes the registers of too many programs: 201 to 251 us, not 194.
        ALONE: tl.constexpr = len(inputs) == 1
        offs_n, x = (), ()
        for j in tl.static_range(4):
            at = i // _RUN * _GROUP + j * _RUN + i % _RUN
            offs_n = offs_n + (tl.cast(at, tl.int64) if WIDE else at,)
            if ALONE:
                mask = None if EVEN else (offs_m < M - m) & (offs_n[j] < N - n)
                x = x + (_given(starts, rows, offs_n[j], mask, strides, UNITS, 0),)
        words = _words(seed, index // 4 + (_beside(i, x[0], N) if ALONE else i))
        for j in tl.static_range(4):
            mask = None if EVEN else (offs_m < M - m) & (offs_n[j] < N - n)
            _finish(
                x[j] if ALONE else _given(starts, rows, offs_n[j], mask, strides, UNITS, 0), starts, y_start, rows,
                offs_n[j], mask, words[j], limit, scale, strides, UNITS, TRAINING, BIAS, RESIDUAL, COMPUTE,
            )  # fmt: skip
    else:
        at = tl.arange(0, BLOCK_N)[None, :]
        mask = (offs_m < M - m) & (at < N - n)
        index += tl.cast(at, tl.int64) * strides[len(inputs) + 1][1]
        a, b, c, d4 = _words(seed, index // _GROUP * _RUN + index % _RUN)
        place = index // _RUN % 4
        word = tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d4)))
        offs_n = tl.cast(at, tl.int64) if WIDE else at
        _finish(
            _given(starts, rows, offs_n, mask, strides, UNITS, 0), starts, y_start, rows, offs_n, mask, word, limit,
            scale, strides, UNITS, TRAINING, BIAS, RESIDUAL, COMPUTE,
        )  # fmt: skip


# ---- the ops ------------------------------------------------------------------------------------------------------


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Multiplies elements by 0 with chance ``p``, the others by 1 / (1 - p), as ``torch.nn.functional.dropout``.

    Args:
        input: any shape and strides; floating, where anything is dropped.
        p: the chance, from 0 to 1, with 24 bits.
        training: without it, the result is ``input`` itself.
        inplace: must be False: no op of portkern alters its arguments.

    The mask depends on torch's generator of the device, which advances, and on the index of the element: one seed gives
    one mask, whatever the strides, dtype, GPU or config. It is not the mask that torch draws.
    Raises BadArgument (a ValueError), BadType (a TypeError), UnsupportedDtype (a NotImplementedError).
    """
    refuse_inplace("dropout", inplace)
    check_tensor("dropout", "input", input)
    chance, training = _chance("dropout", p), check_bool("dropout", "training", training)
    if not training or chance == 0:
        return Result(input)
    check_dtype("dropout", "input", input.dtype, FLOATS)
    if input.numel() == 0:
        return Result(input)
    return input, None, None, draw_seed(input), chance, True, input.dtype


def bias_dropout_add(
    input: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.5, training: bool = True
) -> tuple[Any, ...]:
    """``residual + dropout(input + bias, p, training)`` in one pass.

    Args:
        input, bias, residual: floating tensors that broadcast to ``input``'s shape, of any strides; ``bias`` may be
            None.
        p, training: as for ``dropout``.

    Returns a tensor of ``input``'s shape, of the type that torch's promotion gives. Errors are those of ``dropout``.
    """
    op, given = "bias_dropout_add", {"input": input, "bias": bias, "residual": residual}
    for name, each in given.items():
        if each is not None or name != "bias":
            check_dtype(op, name, check_tensor(op, name, each).dtype, FLOATS)
    present = [each for each in (input, bias, residual) if each is not None]
    if tuple(broadcast_shape(op, [each.shape for each in present])) != tuple(input.shape):
        raise Mismatch(
            f"{op}(): bias and residual must broadcast to input's shape {tuple(input.shape)}; they have "
            f"{' and '.join(str(tuple(each.shape)) for each in present[1:])}"
        )
    chance = _chance(op, p)
    drops = check_bool(op, "training", training) and chance > 0
    seed = draw_seed(input) if drops else torch.zeros(1, dtype=torch.int64, device=input.device)
    return input, bias, residual, seed, chance if drops else 0.0, drops, result_dtype(op, present)


def _chance(op: str, p: Any) -> float:
    chance = check_number(op, "p", p)
    if not 0 <= chance <= 1:
        raise BadArgument(f"{op}(): dropout probability has to be between 0 and 1, but got {p}")
    return chance


def draw_seed(beside: Tensor) -> Tensor:
    """64 random bits of torch's generator, on the device of ``beside``: nothing waits, and a graph draws anew."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=beside.device)


def _operands(args: Sequence[Any]) -> list[tuple[int, Meta]]:
    return [(place, meta) for place, meta in enumerate(args[:3]) if meta is not None]


def _outputs(*args: Any) -> tuple[Buffer, ...]:
    shape, strides = elementwise_layout("dropout", [meta for _, meta in _operands(args)])
    return (Buffer(shape, strides, args[6]),)


def _grid(args: Sequence[Any]) -> tuple[Grid, bool]:
    """Output, inputs and the index as a grid; and whether its rows are whole groups of neighbours."""
    (output,) = _outputs(*args)
    inputs = [expanded(meta, output.shape) for _, meta in _operands(args)]
    grid = grid_of(output.shape, [output.strides, *inputs, contiguous(output.shape)])
    row, column, *outer = grid.strides[-1]
    neighbours = (column == 1 or grid.n == 1) and all(step % _GROUP.value == 0 for step in (row, *outer))
    return grid, neighbours


def _problem(name: str, *args: Any) -> Problem:
    (grid, runs), (output,) = _grid(args), _outputs(*args)
    named: dict[str, Meta | Buffer] = {"y": output, **{f"x{place}": meta for place, meta in _operands(args)}}
    layout = {key: grid_layout(meta, grid, i) for i, (key, meta) in enumerate(named.items())}
    return Problem(
        op=name,
        sizes=FrozenMap(N=grid.n, M=grid.m, OUTER=math.prod(grid.outer)),
        dtypes=FrozenMap({key: str(meta.dtype).removeprefix("torch.") for key, meta in named.items()}),
        flags=FrozenMap(training=args[5]),
        layout=FrozenMap({**layout, "index": "n16" if runs else "s"}),
    )


def _work(problem: Problem) -> Work:
    return pointwise_work(_LIVE[problem.layout["index"]], problem)


_LIVE = {"n16": 3.0, "s": 12.0}  # a counter's four words serve four elements, or one


def _fit(config: Config, work: Work, device: Device) -> Blocks:
    if work.layout["index"] == "s":
        return fit_pointwise(config, work, device)
    # A lane's part of each quarter of a tile is a vector.
    lanes = config.num_warps * device.target.warp_size
    least = max(_GROUP.value, 4 * lanes * max(1, VECTOR_BYTES // work.element_bytes))
    blocks = fit_pointwise(config.replace(params={"BLOCK": max(least, config.params["BLOCK"])}), work, device)
    return Blocks({**blocks, "BLOCK_N": max(_GROUP.value, blocks["BLOCK_N"])})


def _plan(config: Config, blocks: Blocks, device: Device, *args: Any) -> Plan:
    (output,), (grid, runs) = _outputs(*args), _grid(args)
    if grid.numel == 0:
        return Plan((output,))
    block_m, block_n = blocks["BLOCK_M"], blocks["BLOCK_N"]
    operands = _operands(args)
    every: list[Meta | Buffer] = [output, *(meta for _, meta in operands)]
    vectors = [max(1, VECTOR_BYTES // each.dtype.itemsize) for each in every]
    units: list[int] = []
    for vector, (row, _, *outer) in zip(vectors, grid.strides, strict=False):
        units += [vector if row % vector == 0 else 1, 1, vector if all(step % vector == 0 for step in outer) else 1]
    tiles = math.prod(grid.outer) * -(-grid.m // block_m) * -(-grid.n // block_n)
    span = max(block_m * abs(row) + block_n * abs(column) for row, column, *_ in grid.strides[:-1])
    launch = Launch(
        kernel=_dropout_kernel,
        grid=(tiles,),
        args=(
            tuple(In(place) for place, _ in operands), Out(0), In(3), Value(4), grid.outer, grid.m, grid.n, grid.strides
        ),
        constexprs={
            "TRAINING": args[5], "BIAS": args[1] is not None, "RESIDUAL": args[2] is not None,
            "COMPUTE": tl.float64 if args[6] == torch.float64 else tl.float32, "UNITS": tuple(units), "RUNS": runs,
            "EVEN": grid.n % block_n == 0 and grid.m % block_m == 0, "WIDE": span > NARROW,
            "BLOCK_M": block_m, "BLOCK_N": block_n,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return Plan((output,), launches=(launch,))


# ---- reference ----------------------------------------------------------------------------------------------------


def philox(seed: int, counter: Tensor) -> list[Tensor]:
    """The four words of Philox4x32-10 at each 64-bit ``counter``, as int64."""
    low32 = 0xFFFFFFFF
    keys = [seed & low32, seed >> 32 & low32]
    c = [counter & low32, counter >> 32 & low32, torch.zeros_like(counter), torch.zeros_like(counter)]
    for _ in range(10):
        a_high, a_low = _multiplied(0xD2511F53, c[0])
        b_high, b_low = _multiplied(0xCD9E8D57, c[2])
        c = [b_high ^ c[1] ^ keys[0], b_low, a_high ^ c[3] ^ keys[1], a_low]
        keys = [(keys[0] + 0x9E3779B9) & low32, (keys[1] + 0xBB67AE85) & low32]
    return c


def _multiplied(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product of two numbers of 32 bits."""
    first, second = a * (b & 0xFFFF), a * (b >> 16)
    total = first + ((second & 0xFFFF) << 16)
    return (second >> 16) + (total >> 32), total & 0xFFFFFFFF


def keep_mask(seed: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Which elements of a tensor of ``shape`` stay."""
    index = torch.arange(math.prod(shape), device=seed.device)
    words = torch.stack(philox(int(seed), index // 256 * 64 + index % 64))
    word = words.gather(0, (index // 64 % 4)[None])[0]
    uniform = (word >> 8).to(torch.float32) * 2.0**-24
    return (uniform >= torch.tensor(p, dtype=torch.float32, device=seed.device)).view(tuple(shape))


def reference(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    p: float,
    training: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Dropout in plain torch."""
    x = input if bias is None else input + bias
    if training and x.device.type != "meta":
        kept = keep_mask(seed, x.shape, p)
        x = x * kept * (1 / (1 - p) if p < 1 else 0.0)  # the number in torch's own precision, not in 16 bits
    return (x if residual is None else residual + x).to(dtype)


def _eager(
    input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float, training: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """torch's dropout, whose mask is its own."""
    x = F.dropout(input if bias is None else input + bias, p, training)
    return x if residual is None else residual + x


def _terms(input: Tensor, bias: Any, residual: Any, seed: Tensor, p: float, training: bool, dtype: Any) -> Tensor:
    sizes = [each.abs() for each in (input, bias, residual) if each is not None]
    total: Tensor = sum(sizes[1:], sizes[0] / (1 - p) + 0.0)
    return total


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", p: float = 0.3, training: bool = True, bias: bool = False, residual: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    make = partial(values_of, dtype=dtype, device=device, generator=generator, style=style)
    return (
        make(sizes), make(sizes[-1:], place=1) if bias else None, make(sizes, place=2) if residual else None,
        torch.randint(0, 2**62, (1,), generator=generator, device=device), p, training, dtype,
    )  # fmt: skip


_SIZES = ((), (1,), (7,), (0, 5), (3, 33), (4099,), (2, 3, 130), (3, 512), (2, 5, 3, 17))
CASES = tuple(Case(sizes) for sizes in _SIZES)
ADD_CASES = (
    *(Case(sizes, {"bias": True, "residual": True}) for sizes in _SIZES),
    Case((3, 512), {"residual": True}), Case((3, 300), {"bias": True, "residual": True, "training": False}),
    Case((3, 512), {"residual": True, "p": 0.9}),
)  # fmt: skip
_SCHEMA = (
    "(Tensor input, Tensor? bias, Tensor? residual, Tensor seed, Scalar p, bool training, ScalarType dtype) -> Tensor"
)


def _save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[3], args[4], args[5], args[6]


def _gradient(saved: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return grads[0], None, None, *saved


_DROPPED = partial(Backward, "dropout", _save, _gradient)
_COMMON: dict[str, Any] = {
    "schema": _SCHEMA, "work": _work, "outputs": _outputs, "fit": _fit, "plan": _plan, "reference": reference,
    "eager": _eager, "terms": _terms, "inputs": _inputs, "values": (4,),
    "dtypes": ("float32", "float16", "bfloat16", "float64"), "random": True,
}  # fmt: skip
OPS = (
    Op(
        "dropout", signature=dropout, problem=partial(_problem, "dropout"), cases=CASES, backward=_DROPPED((0,)),
        tune_cases=(Case((8192, 14336)), Case((4096, 4096))), **_COMMON,
    ),
    Op(
        "bias_dropout_add", signature=bias_dropout_add, problem=partial(_problem, "bias_dropout_add"), cases=ADD_CASES,
        tune_cases=(Case((8192, 14336), {"bias": True, "residual": True}),), **_COMMON,
        backward=(
            _DROPPED((0,)), _DROPPED((1,)),
            Backward("", lambda args, outputs: (), lambda saved, grads: (grads[0],), (2,)),
        ),
    ),
)  # fmt: skip
