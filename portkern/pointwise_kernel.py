"""The one Triton source of the kind ``pointwise``: it walks the tiles and calls the user's scalar function.

A tile is BLOCK_M by BLOCK_N elements. Operands come as tuples, so any number of them, of any number of dims, is one
kernel; integers in a tuple are specialised like any other. What does not vary along a side of the tile is loaded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiple(x, UNIT: tl.constexpr):
    """x, which the caller knows to be a multiple of UNIT, in a form that shows it: Triton sees 16 and 1 by itself."""
    if UNIT == 1:
        return x
    else:
        return x // UNIT * UNIT


@triton.jit
def step(index, stride):
    """index * stride in 64 bits, whatever those of the two."""
    return tl.cast(index, tl.int64) * stride


@triton.jit
def tile_range(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """0 to BLOCK - 1; WIDE: in 64 bits, since their products with strides may pass 31."""
    if WIDE:
        return tl.cast(tl.arange(0, BLOCK), tl.int64)
    else:
        return tl.arange(0, BLOCK)


@triton.jit
def _widened(x, AS: tl.constexpr, COMPUTE: tl.constexpr):
    """x as the type that all operands share, as torch converts it, then as what is computed in."""
    if AS != COMPUTE and x.dtype != AS:
        # The interpreter, which keeps bfloat16 as integers of 16 bits, takes others of these for it.
        if x.dtype.primitive_bitwidth != 16 or not x.dtype.is_floating():
            x = x.to(tl.float32)
        x = x.to(AS)
    return x.to(COMPUTE)


@triton.jit
def narrowed(x, TYPE: tl.constexpr):
    """x as an output's type; to a narrow float by way of float32, as torch does."""
    if TYPE == tl.float16 or TYPE == tl.bfloat16:
        if x.dtype != TYPE:
            x = x.to(tl.float32)
    return x.to(TYPE)


@triton.jit
def _pointers(
    pointer, index, m, n, strides, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of one operand, from the tile's start on; 1 for a side along which it is repeated."""
    stride_m, stride_n = multiple(strides[0], UNIT_M), multiple(strides[1], UNIT_N)
    start = pointer + tl.cast(m, tl.int64) * stride_m + tl.cast(n, tl.int64) * stride_n
    for d in tl.static_range(RANK):
        start += tl.cast(index[d], tl.int64) * multiple(strides[2 + d], UNIT)
    return start + (tile_range(ROWS, WIDE)[:, None] * stride_m + tile_range(COLUMNS, WIDE)[None, :] * stride_n)


@triton.jit
def _mask(left_m, left_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What of a tile there is."""
    return (tl.arange(0, ROWS)[:, None] < left_m) & (tl.arange(0, COLUMNS)[None, :] < left_n)


@triton.jit
def _load(
    pointer, index, m, n, left_m, left_n, strides, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    pointers = _pointers(pointer, index, m, n, strides, UNIT_M, UNIT_N, UNIT, ROWS, COLUMNS, WIDE, RANK)
    if MASKED:
        return tl.load(pointers, mask=_mask(left_m, left_n, ROWS, COLUMNS))
    else:
        return tl.load(pointers)


@triton.jit
def _tile(
    inputs, outputs, values, index, m, n, left_m, left_n, in_strides, out_strides,
    FUNCTION: tl.constexpr, ORDER: tl.constexpr, SWITCHES: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    SEVERAL: tl.constexpr, WANTED: tl.constexpr,
    AS: tl.constexpr, COMPUTE: tl.constexpr, UNITS: tl.constexpr, OUT_UNITS: tl.constexpr, VARIES: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile. ORDER says what each argument of FUNCTION is, 0 input or 1 value, and which; its SWITCHES follow."""
    args = ()
    for k in tl.static_range(len(ORDER) // 2):
        if ORDER[2 * k] == 0:
            x = _load(
                inputs[ORDER[2 * k + 1]], index, m, n, left_m, left_n, in_strides[ORDER[2 * k + 1]],
                UNITS[3 * ORDER[2 * k + 1]], UNITS[3 * ORDER[2 * k + 1] + 1], UNITS[3 * ORDER[2 * k + 1] + 2],
                BLOCK_M if VARIES[2 * ORDER[2 * k + 1]] else 1, BLOCK_N if VARIES[2 * ORDER[2 * k + 1] + 1] else 1,
                MASKED, WIDE, RANK,
            )  # fmt: skip
            args = args + (_widened(x, AS, COMPUTE),)
        else:
            args = args + (values[ORDER[2 * k + 1]].to(COMPUTE),)
    # A tuple would make tensors of them.
    if SWITCHES == 0:
        results = FUNCTION(*args)
    elif SWITCHES == 1:
        results = FUNCTION(*args, S0)
    else:
        results = FUNCTION(*args, S0, S1)
    if not SEVERAL:
        results = (results,)
    for i in tl.static_range(len(outputs)):
        pointers = _pointers(
            outputs[i], index, m, n, out_strides[i], OUT_UNITS[3 * i], OUT_UNITS[3 * i + 1], OUT_UNITS[3 * i + 2],
            BLOCK_M, BLOCK_N, WIDE, RANK,
        )  # fmt: skip
        y = tl.broadcast_to(narrowed(results[WANTED[i]], outputs[i].dtype.element_ty), [BLOCK_M, BLOCK_N])
        if MASKED:
            tl.store(pointers, y, mask=_mask(left_m, left_n, BLOCK_M, BLOCK_N))
        else:
            tl.store(pointers, y)


@triton.jit
def _walk(
    inputs, outputs, values, outer, M, N, tiles, in_strides, out_strides,
    FUNCTION: tl.constexpr, ORDER: tl.constexpr, SWITCHES: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    SEVERAL: tl.constexpr, WANTED: tl.constexpr,
    AS: tl.constexpr, COMPUTE: tl.constexpr, UNIT_N: tl.constexpr, UNITS: tl.constexpr, OUT_UNITS: tl.constexpr,
    VARIES: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, WALKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    N = multiple(N, UNIT_N)
    if WALKS:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            _place(
                tile, inputs, outputs, values, outer, M, N, in_strides, out_strides,
                FUNCTION, ORDER, SWITCHES, S0, S1, SEVERAL, WANTED, AS, COMPUTE, UNITS, OUT_UNITS, VARIES, EVEN,
                TAIL, WIDE,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        _place(
            tl.program_id(0), inputs, outputs, values, outer, M, N, in_strides, out_strides,
            FUNCTION, ORDER, SWITCHES, S0, S1, SEVERAL, WANTED, AS, COMPUTE, UNITS, OUT_UNITS, VARIES, EVEN, TAIL, WIDE,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _place(
    tile, inputs, outputs, values, outer, M, N, in_strides, out_strides,
    FUNCTION: tl.constexpr, ORDER: tl.constexpr, SWITCHES: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    SEVERAL: tl.constexpr, WANTED: tl.constexpr,
    AS: tl.constexpr, COMPUTE: tl.constexpr, UNITS: tl.constexpr, OUT_UNITS: tl.constexpr, VARIES: tl.constexpr,
    EVEN: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tile number ``tile``: columns first, then rows, then the outer dims. Unit dims leave no division."""
    columns, rows = (N - 1) // BLOCK_N + 1, (M - 1) // BLOCK_M + 1
    n = tile % columns * BLOCK_N
    rest = tile // columns
    m = rest % rows * BLOCK_M
    rest = rest // rows
    index = ()
    for d in tl.static_range(len(outer)):
        index = index + (rest % outer[d],)
        rest = rest // outer[d]
    if EVEN:
        _tile(
            inputs, outputs, values, index, m, n, M - m, N - n, in_strides, out_strides, FUNCTION, ORDER,
            SWITCHES, S0, S1,
            SEVERAL, WANTED, AS, COMPUTE, UNITS, OUT_UNITS, VARIES, False, WIDE, len(outer), BLOCK_M, BLOCK_N,
        )  # fmt: skip
    elif TAIL:
        # Only the last tile ends early, at a place that no vector load can: the others keep theirs.
        if N - n >= BLOCK_N:
            _tile(
                inputs, outputs, values, index, m, n, M - m, N - n, in_strides, out_strides, FUNCTION, ORDER,
                SWITCHES, S0, S1,
                SEVERAL, WANTED, AS, COMPUTE, UNITS, OUT_UNITS, VARIES, False, WIDE, len(outer), BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            _tile(
                inputs, outputs, values, index, m, n, M - m, N - n, in_strides, out_strides, FUNCTION, ORDER,
                SWITCHES, S0, S1,
                SEVERAL, WANTED, AS, COMPUTE, UNITS, OUT_UNITS, VARIES, True, WIDE, len(outer), BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        _tile(
            inputs, outputs, values, index, m, n, M - m, N - n, in_strides, out_strides, FUNCTION, ORDER,
            SWITCHES, S0, S1,
            SEVERAL, WANTED, AS, COMPUTE, UNITS, OUT_UNITS, VARIES, True, WIDE, len(outer), BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _numbers(v0, v1, v2, v3, TYPE: tl.constexpr):
    """The values as what they were declared to be, which Triton's interpreter does not heed."""
    return tl.full([], v0, TYPE), tl.full([], v1, TYPE), tl.full([], v2, TYPE), tl.full([], v3, TYPE)


@triton.jit(do_not_specialize=["v0", "v1", "v2", "v3", "tiles"])
def _pointwise_kernel(
    inputs, outputs, v0: tl.float64, v1: tl.float64, v2: tl.float64, v3: tl.float64,
    outer, M, N, tiles, in_strides, out_strides,
    FUNCTION: tl.constexpr, ORDER: tl.constexpr, SWITCHES: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    SEVERAL: tl.constexpr, WANTED: tl.constexpr,
    AS: tl.constexpr, COMPUTE: tl.constexpr, UNIT_N: tl.constexpr, UNITS: tl.constexpr, OUT_UNITS: tl.constexpr,
    VARIES: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, WALKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: one program a tile, or fewer that walk them (WALKS). ``portkern.pointwise_plan`` says what each is."""
    _walk(
        inputs, outputs, _numbers(v0, v1, v2, v3, tl.float64), outer, M, N, tiles, in_strides, out_strides,
        FUNCTION, ORDER, SWITCHES, S0, S1, SEVERAL, WANTED, AS, COMPUTE, UNIT_N, UNITS, OUT_UNITS, VARIES, EVEN,
        TAIL, WIDE,
        WALKS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["v0", "v1", "v2", "v3", "tiles"])
def _integer_kernel(
    inputs, outputs, v0: tl.int64, v1: tl.int64, v2: tl.int64, v3: tl.int64,
    outer, M, N, tiles, in_strides, out_strides,
    FUNCTION: tl.constexpr, ORDER: tl.constexpr, SWITCHES: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    SEVERAL: tl.constexpr, WANTED: tl.constexpr,
    AS: tl.constexpr, COMPUTE: tl.constexpr, UNIT_N: tl.constexpr, UNITS: tl.constexpr, OUT_UNITS: tl.constexpr,
    VARIES: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, WALKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same where the result is an integer: its scalars are."""
    _walk(
        inputs, outputs, _numbers(v0, v1, v2, v3, tl.int64), outer, M, N, tiles, in_strides, out_strides,
        FUNCTION, ORDER, SWITCHES, S0, S1, SEVERAL, WANTED, AS, COMPUTE, UNIT_N, UNITS, OUT_UNITS, VARIES, EVEN,
        TAIL, WIDE,
        WALKS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
