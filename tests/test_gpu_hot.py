"""The fast route on a real GPU: the same results as by torch.library, its keys, and whom the other route serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import portkern
from portkern import dispatch, families, hot, library
from portkern.errors import DeviceMismatch, PortkernError
from portkern.registry import all_ops
from portkern.runtime import Runtime, current, using
from portkern.testing import poison

pytestmark = pytest.mark.gpu


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with using(current().anew()) as made:
        yield made


@pytest.fixture
def by_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many calls went by torch.library."""
    seen: list[str] = []
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, *args: (seen.append(name), call(name, *args))[1])
    return lambda: len(seen)


def replayed(runtime: Runtime) -> int:
    return len(runtime.calls)


def test_same_bits_as_by_torch_library(runtime: Runtime) -> None:
    for shape, dtype in (((64, 512), torch.bfloat16), ((7, 33), torch.float32), ((3, 5, 70000), torch.float16)):
        x, g = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        for turn in range(3):
            a = x.clone().requires_grad_()
            y = portkern.softmax(a, -1)
            y.backward(g)
            b = x.clone().requires_grad_()
            z = torch.ops.portkern.softmax.default(b, *_canonical("softmax", b)[1:])
            z.backward(g)
            assert torch.equal(y, z) and torch.equal(a.grad, b.grad), turn
            assert torch.equal(portkern.softmax(x, -1), z.detach())
    assert replayed(runtime)


def _canonical(name: str, *args: Any) -> tuple[Any, ...]:
    signature = all_ops()[name].signature
    assert signature is not None
    return signature(*args)


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_every_op_replays_to_the_same_bits(runtime: Runtime, name: str) -> None:
    """Each case and dtype three times: from the second time on as a prepared call, into memory that is not zero."""
    op = all_ops()[name]
    altered = library.altered_by(op)
    for dtype in op.dtypes:
        for case in op.cases:
            if altered:
                break
            args = op.inputs(case.sizes, getattr(torch, dtype), device="cuda", **case.options)
            function = runtime.functions[op.name]
            first = function(*args)
            for _ in range(2):
                dirty = [poison(torch.empty_like(each)) for each in _tuple(first)]
                del dirty  # memory of this size is the next that the allocator gives
                again = function(*args)
                for a, b in zip(_tuple(first), _tuple(again), strict=True):
                    assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), (case, dtype)
    assert altered or replayed(runtime) > 1


@pytest.mark.parametrize(
    "name",
    ["softmax", "layer_norm", "layer_norm_backward", "rms_norm", "cross_entropy", "gelu", "add", "sum"],
)
def test_new_shapes_are_served_as_they_would_be_planned(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same bits, whether a shape is served from its family or planned by itself."""
    op = all_ops()[name]
    sizes = [(n, 256) for n in (*range(3, 120, 2), *range(200, 5000, 333))]
    calls = [op.inputs(each, torch.bfloat16, device="cuda") for each in sizes]
    served = [dispatch.run(op, args) for args in calls]
    assert sum(isinstance(each, families.Served) for each in runtime.plans.values()) > len(calls) / 2
    monkeypatch.setattr(families, "learn", lambda *args: None)
    with using(current().anew()):
        for size, args, found in zip(sizes, calls, served, strict=True):
            for a, b in zip(_tuple(found), _tuple(dispatch.run(op, args)), strict=True):
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), size


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return () if found is None else (found,) if isinstance(found, torch.Tensor) else tuple(found)


def test_what_decides_the_code_is_in_the_key(runtime: Runtime) -> None:
    """Shape, strides, dtype, alignment, dim, and how an argument is spelled: right results in turn."""
    base = torch.randn(40 * 200 + 8, device="cuda")
    views = [
        base[: 40 * 200].view(40, 200),
        base[1 : 40 * 200 + 1].view(40, 200),
        base[4 : 40 * 200 + 4].view(40, 200),
        base[: 40 * 200].view(200, 40).T,
        base[: 40 * 200].view(40, 200)[:, ::2],
        base[:200].expand(40, 200),
        base[: 40 * 200].view(40, 200).half(),
        base[: 40 * 200].view(40, 200).double(),
    ]
    for _ in range(3):
        for x in views:
            for dim in (0, 1, -1):
                torch.testing.assert_close(portkern.softmax(x, dim), torch.softmax(x, dim))
                torch.testing.assert_close(portkern.softmax(input=x, dim=dim), torch.softmax(x, dim))
            wide = portkern.softmax(x, 1, dtype=torch.float64)
            torch.testing.assert_close(wide, torch.softmax(x, 1, dtype=torch.float64))


def test_no_wrong_argument_is_answered_from_the_cache(runtime: Runtime) -> None:
    x = torch.randn(4, 4, device="cuda")
    for _ in range(2):  # the second prepares
        portkern.softmax(x, 1)
    assert replayed(runtime)
    for bad in (True, 1.0, "1", [1]):
        with pytest.raises(TypeError):
            portkern.softmax(x, bad)
    with pytest.raises(IndexError):
        portkern.softmax(x, 2)
    a, b = (torch.randn(4, 4, device="cuda") for _ in range(2))
    for _ in range(2):
        portkern.matmul(a, b)
    with pytest.raises(DeviceMismatch):
        portkern.matmul(a, a.cpu())
    with pytest.raises(PortkernError):
        portkern.matmul(a, a.half())


def test_the_other_route_serves_what_torch_must_see(runtime: Runtime, by_library: Callable[[], int]) -> None:
    x = torch.randn(4, 64, device="cuda")
    want = torch.softmax(x, -1)
    for _ in range(2):
        portkern.softmax(x, -1)
    assert by_library() == 0 and replayed(runtime)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Sub(torch.Tensor):
        pass

    seen: list[str] = []
    with Mode():
        torch.testing.assert_close(portkern.softmax(x, -1), want)
    assert any("portkern.softmax" in each for each in seen)
    assert by_library() == 1
    torch.testing.assert_close(portkern.softmax(x.as_subclass(Sub), -1).as_subclass(torch.Tensor), want)
    torch.testing.assert_close(torch.func.vmap(lambda row: portkern.softmax(row, -1))(x), want)
    with torch.autocast("cuda", torch.float16):
        assert portkern.softmax(x.half(), -1).dtype == torch.float32
    assert portkern.softmax(x.half(), -1).dtype == torch.float16
    before = by_library()
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(portkern.softmax(negative, -1), torch.softmax(-x, -1))
    assert by_library() == before + 1


def test_matmul_follows_the_setting_of_torch(runtime: Runtime) -> None:
    a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
    exact = (a.double() @ b.double()).float()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            error = (portkern.matmul(a, b) - exact).abs().max().item()
            assert (error > 1e-3) == (precision == "tf32"), (precision, error)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_gradients_that_arrive_in_any_layout(runtime: Runtime) -> None:
    x = torch.randn(60, 80, device="cuda")
    plain = torch.randn(60, 80, device="cuda")
    grads = {
        "contiguous": plain,
        "transposed": plain.T.contiguous().T,
        "sliced": torch.stack((plain, plain), -1)[..., 0],
        "narrowed": torch.cat((plain, plain), 1)[:, :80],
        "expanded": plain[:1].expand(60, 80),
    }
    for _ in range(2):
        for name, grad in grads.items():
            ours, theirs = (x.clone().requires_grad_() for _ in range(2))
            portkern.softmax(ours, -1).backward(grad)
            torch.softmax(theirs, -1).backward(grad)
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    leaf = x.clone().requires_grad_()
    portkern.softmax(leaf, -1).sum().backward()
    assert leaf.grad.abs().max() < 1e-6


def test_no_grad_and_inference_mode(runtime: Runtime) -> None:
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    assert portkern.softmax(x, -1).requires_grad and portkern.softmax(x, -1).grad_fn is not None
    with torch.no_grad():
        assert not portkern.softmax(x, -1).requires_grad
    with torch.inference_mode():
        assert portkern.softmax(x, -1).is_inference()
    assert portkern.softmax(x, -1).requires_grad


def test_1000_row_lengths_need_few_compiles(runtime: Runtime) -> None:
    from triton import knobs

    compiles: list[str] = []

    def count(*, fn: Any, **rest: Any) -> None:
        compiles.append(str(fn))

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = count
    generator = torch.Generator().manual_seed(0)
    lengths = {1, 100_000, *torch.randint(1, 100_001, (998,), generator=generator).tolist()}
    try:
        for n in lengths:
            x = torch.randn(2, n, device="cuda")
            torch.testing.assert_close(portkern.softmax(x, -1), torch.softmax(x, -1), rtol=1e-5, atol=1e-7)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    print(f"{len(lengths)} row lengths, {len(compiles)} compiles")
    assert 1 <= len(compiles) <= 40


def test_watched_is_false_for_plain_calls() -> None:
    assert not hot.watched()


def test_a_gradient_that_was_not_wanted_before(runtime: Runtime) -> None:
    """What is prepared without a gradient does not serve a call that wants one, nor the other way round."""
    x, target = torch.randn(64, 100, device="cuda"), torch.randint(0, 100, (64,), device="cuda")
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            portkern.cross_entropy(leaf, target)
        portkern.cross_entropy(x, target)
        (found,) = torch.autograd.grad(portkern.cross_entropy(leaf, target), leaf)
        (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(leaf, target), leaf)
        torch.testing.assert_close(found, want)


def test_a_tensor_given_twice_and_then_two(runtime: Runtime) -> None:
    x, y = (torch.randn(32, 32, device="cuda") for _ in range(2))
    for _ in range(3):
        torch.testing.assert_close(portkern.add(x, x), x + x)
        torch.testing.assert_close(portkern.add(x, y), x + y)
        torch.testing.assert_close(portkern.matmul(x, x), x @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(portkern.matmul(x, y), x @ y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(portkern.sum(x, -1), x.sum(-1))


def test_a_number_that_changes_per_call_reaches_the_derivative(runtime: Runtime) -> None:
    """The third call of a key that has no number in it, by the op's own function: each gradient is of its call."""
    function, op = runtime.functions["rope"], all_ops()["rope"]
    q, k = (torch.randn(2, 3, 4, 8, device="cuda") for _ in range(2))
    cos, sin = (torch.randn(16, 4, device="cuda") for _ in range(2))
    for offset in range(5):
        a, b = q.clone().requires_grad_(), q.clone().requires_grad_()
        rest = (k, cos, sin, None, offset, False, False)
        function(a, *rest)[0].sum().backward()
        op.reference(b, *rest)[0].sum().backward()
        torch.testing.assert_close(a.grad, b.grad)


def test_prepared_calls_keep_no_memory_of_their_arguments(runtime: Runtime) -> None:
    def call(rows: int) -> None:
        x = torch.randn(rows, 4096, device="cuda")
        for _ in range(3):
            portkern.softmax(x, -1)

    call(2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for rows in range(512, 520):
        call(rows)
    torch.cuda.synchronize()
    assert replayed(runtime) >= 9 and torch.cuda.memory_allocated() == before
