"""Ops as torch sees them, on CPU tensors: fake kernels, autograd, torch.compile, export."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import portkern
from portkern.config import Config
from portkern.errors import DeviceMismatch, NotDifferentiable
from portkern.library import call
from portkern.registry import all_ops, public_names
from portkern.runtime import current
from tests.spine import generator

BASE = torch.randn(4, 6, 8)
VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.permute(2, 0, 1),
    "sliced": BASE[:, ::2, 1:7],
    "expanded": BASE[:1].expand(3, 6, 8),
    "scalar": BASE[0, 0, 0],
    "empty": BASE[:0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_opcheck(name: str, view: str) -> None:
    x = VIEWS[view].detach()
    portkern.function(name)
    op = getattr(torch.ops.portkern, name).default
    torch.library.opcheck(op, (x, 0, torch.float32))
    torch.library.opcheck(op, (x.clone().requires_grad_(), 0, torch.float32))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_fake_metadata_is_real_metadata(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for view in VIEWS.values():
        for dtype in (None, torch.float64):
            real = getattr(portkern, name)(view, 0, dtype)
            with FakeTensorMode() as mode:
                fake = getattr(portkern, name)(mode.from_tensor(view), 0, dtype)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert portkern.softmax(BASE.to("meta")).device.type == "meta"


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradcheck(name: str) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1):
        assert torch.autograd.gradcheck(lambda x, dim=dim: getattr(portkern, name)(x, dim), (x,))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return portkern.softmax(x.transpose(0, 1) * 2, -1) + portkern.log_softmax(x, 0).transpose(0, 1)

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((4, 6), (5, 7)):
        x = torch.randn(shape, requires_grad=True)
        torch.testing.assert_close(compiled(x), f(x))
        (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (want,) = torch.autograd.grad(f(x).square().sum(), x)
        torch.testing.assert_close(got, want)


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return portkern.softmax(x, dim=1)

    x = torch.randn(3, 4)
    program = torch.export.export(Model(), (x,))
    assert "portkern.softmax" in str(program.graph)
    torch.testing.assert_close(program.module()(x), torch.softmax(x, 1))


def test_dtype_reaches_the_gradient() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    y = portkern.softmax(x, dtype=torch.float32)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_second_derivative_is_refused_by_name() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(portkern.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotDifferentiable, match="softmax_backward"):
        gradient.sum().backward()


def test_mixed_devices_are_refused_before_anything_runs() -> None:
    portkern.function("softmax")
    with pytest.raises(DeviceMismatch, match="cpu, meta"):
        call("softmax_backward", torch.randn(2, 3), torch.randn(2, 3, device="meta"), 1, torch.float32)


def test_caller_tensors_are_not_altered() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    portkern.softmax(x)
    assert torch.equal(x, before)


# torch's own forward-mode and functorch modules still use what torch deprecates.
old_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@old_torch
def test_forward_mode_is_refused_not_dropped() -> None:
    import torch.autograd.forward_ad as forward_ad

    x, t = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(NotDifferentiable, match="softmax has reverse-mode autograd only"):
        torch.func.jvp(portkern.softmax, (x,), (t,))
    with forward_ad.dual_level(), pytest.raises(NotDifferentiable, match="softmax"):
        portkern.softmax(forward_ad.make_dual(x, t))
    with forward_ad.dual_level():
        assert portkern.softmax(x).shape == x.shape  # no tangent, nothing to lose


@old_torch
@pytest.mark.parametrize(
    "function",
    [
        lambda z: portkern.argmax(z, 1),
        lambda z: portkern.bincount(torch.tensor([0, 1, 1])) + 0 * z.detach().sum(),
        lambda z: portkern.bincount(torch.tensor([0, 1, 1]), z[:, 0]),
        lambda z: portkern.quantize_fp8(z)[1],
    ],
)
def test_what_has_no_derivative_passes_functional_gradients(function) -> None:
    import torch.autograd.forward_ad as forward_ad

    x, t = torch.randn(3, 4), torch.randn(3, 4)

    def beside(z: torch.Tensor) -> torch.Tensor:
        return z.square().sum() + 0 * function(z).sum()

    torch.testing.assert_close(torch.func.grad(beside)(x), 2 * x)
    torch.testing.assert_close(torch.func.vjp(beside, x)[1](torch.ones(()))[0], 2 * x)
    torch.testing.assert_close(torch.func.jvp(beside, (x,), (t,))[1], 2 * (x * t).sum())
    torch.testing.assert_close(torch.func.hessian(beside)(x).sum(), torch.tensor(24.0))
    with forward_ad.dual_level():
        torch.testing.assert_close(function(forward_ad.make_dual(x, t)), function(x))


@old_torch
def test_an_op_that_lacks_its_derivative_is_refused() -> None:
    """A result that is not detached would lose the derivative without a word."""
    op = dataclasses.replace(all_ops()["mish"], name="tested::underived", backward=None)
    mish, x = portkern.register(op), torch.randn(3)
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(NotDifferentiable, match="underived has no derivative"):
            transform(lambda z: mish(z).sum())(x)
    with pytest.raises(NotDifferentiable, match="underived has no derivative"):
        torch.func.jvp(lambda y: torch.func.grad(lambda z: (z * mish(y)).sum())(x).sum(), (x,), (x,))
    torch.testing.assert_close(torch.func.grad(lambda z: (z + mish(z.detach())).sum())(x), torch.ones(3))


@old_torch
def test_functional_gradients_are_refused_by_name() -> None:
    x = torch.randn(3, 4)
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(NotDifferentiable, match="softmax"):
            transform(lambda x: portkern.softmax(x).square().sum())(x)


def test_an_op_that_alters_its_argument_is_honest() -> None:
    from portkern.registry import load_file

    load_file("tests/ops/shift.py")
    ops = [name for name in portkern.registry.all_ops() if "!" in portkern.registry.get(name).schema]
    assert ops, "tests/ops/shift.py brings an op that alters its argument"
    op = portkern.registry.get(ops[0])
    args = op.inputs((7,), torch.float32, device="cpu", generator=None)
    version = args[0]._version
    call(ops[0], *args)
    assert args[0]._version > version
    leaf = args[0].clone().requires_grad_()
    with pytest.raises(NotDifferentiable, match="in place"):
        call(ops[0], leaf, *args[1:])
    x = args[0].clone().requires_grad_()
    y = x * 2
    z = (y * y).sum()
    with torch.no_grad():
        call(ops[0], y, *args[1:])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_an_op_can_be_registered_again() -> None:
    """A notebook cell that is run twice: the later one counts, for values, metadata and gradients."""
    import dataclasses

    from portkern.registry import get, load_file

    (first,) = load_file("tests/ops/scale.py")
    current().bad["device", "problem", Config("blocks")] = "too many registers, before the kernel was mended"
    try:
        portkern.register(dataclasses.replace(first, backward=None))
        assert not current().bad
        x = torch.randn(4, requires_grad=True)
        with pytest.raises(NotDifferentiable):
            portkern.function("example::scale")(x, 2.0).sum().backward()
    finally:
        portkern.register(first)
    portkern.function("example::scale")(x, 2.0).sum().backward()
    assert x.grad is not None and get("example::scale") is first


def test_public_signature_tells_what_comes_back() -> None:
    import inspect

    assert inspect.signature(portkern.softmax).return_annotation == "Tensor"
    assert list(inspect.signature(portkern.softmax).parameters) == ["input", "dim", "dtype"]


def first_derivative(name: str, x: torch.Tensor) -> torch.Tensor:
    further = {
        "layer_norm": ((6,),),
        "rms_norm": ((6,),),
        "group_norm": (2,),
        "add": (x,),
        "axpy": (x, 2.0),
        "mean": (0,),
    }
    further |= {"cross_entropy": (torch.tensor([0, 1, 2, 3]),), "matmul": (x.t(),), "logsumexp": (0,), "sum": (0,)}
    further |= {"prelu": (torch.tensor(0.5, dtype=x.dtype),), "add_rms_norm": (x, (6,)), "add_layer_norm": (x, (6,))}
    further |= {"bias_dropout_add": (None, x)}
    if name == "rope":
        q = x.reshape(1, 4, 1, 6)
        found = portkern.rope(q, q, *torch.ones(2, 4, 3, dtype=x.dtype))
    else:
        found = getattr(portkern, name)(x, *further.get(name, ()))
    first = found[0] if isinstance(found, tuple) else found
    (gradient,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return gradient


@pytest.mark.parametrize("name", [each for each in public_names() if all_ops()[each].backwards])
def test_a_second_derivative_is_right_or_refused(name: str) -> None:
    """A gradient that forgot what it was made of would drop a penalty on it without a word."""
    x = torch.randn(4, 6, generator=generator(1), requires_grad=True)
    gradient = first_derivative(name, x)
    assert gradient.requires_grad, "the penalty on this gradient would be lost"
    try:
        torch.autograd.grad(gradient.square().sum(), x)
    except NotDifferentiable as error:
        assert "for a second derivative use torch's own function" in str(error)
