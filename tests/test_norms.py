"""Layer norm and RMS norm on CPU tensors: arguments, results as torch's, gradients in fp64, plans."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

import portkern
from portkern import dispatch, errors
from portkern.config import Config
from portkern.lookup import Choice, fits
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import judge
from tests.spine import generator

NORMS = ("layer_norm", "rms_norm")


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    count = 2 if name == "layer_norm" else 1
    x = torch.randn(4, 2, 5, generator=generator(1)).to(dtype).requires_grad_()
    weights = [(torch.rand(2, 5, generator=generator(2 + i)) + 0.5).to(dtype).requires_grad_() for i in range(count)]
    return [x, *weights], (2, 5)


@pytest.mark.parametrize("name", NORMS)
def test_gradcheck(name: str) -> None:
    tensors, shape = case(name)
    function = getattr(portkern, name)
    assert torch.autograd.gradcheck(lambda x, *weights: function(x, shape, *weights), tensors)
    residual = torch.randn(4, 2, 5, generator=generator(9), dtype=torch.float64, requires_grad=True)
    add = getattr(portkern, f"add_{name}")
    assert torch.autograd.gradcheck(lambda r, x, *weights: add(x, r, shape, *weights), [residual, *tensors])


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_as_torch(name: str, dtype: torch.dtype) -> None:
    tensors, shape = case(name, dtype)
    got, want = (
        getattr(portkern, name)(tensors[0], shape, *tensors[1:]),
        getattr(F, name)(tensors[0], shape, *tensors[1:]),
    )
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_weights_of_another_dtype() -> None:
    x = torch.randn(3, 8, generator=generator(3)).bfloat16().requires_grad_()
    w = torch.rand(8, generator=generator(4)).requires_grad_()
    y = portkern.rms_norm(x, (8,), w)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.rms_norm(x.float(), (8,), w).bfloat16())
    y.float().sum().backward()
    assert x.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32
    assert portkern.layer_norm(x.float(), (8,), w.half()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_default_eps_is_what_torch_computes_with(dtype: torch.dtype) -> None:
    x = torch.full((2, 4), 1e-4).to(dtype)
    rtol = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(portkern.rms_norm(x, (4,)), F.rms_norm(x, (4,)), rtol=rtol, atol=0)


@pytest.mark.parametrize("eps", [numpy.float64(1e-3), numpy.float32(1e-3), torch.tensor(1e-3), 1])
def test_numbers(eps: Any) -> None:
    """B37."""
    x = torch.randn(2, 6, generator=generator(5))
    torch.testing.assert_close(portkern.layer_norm(x, (6,), eps=eps), F.layer_norm(x, (6,), eps=float(eps)))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"input": [1.0]}, TypeError, ("input", "list")),
        ({"normalized_shape": 6}, TypeError, ("normalized_shape", "(n,)")),
        ({"normalized_shape": ()}, RuntimeError, ("empty",)),
        ({"normalized_shape": (5,)}, RuntimeError, ("[5]", "[2, 6]")),
        ({"normalized_shape": (1, 2, 6)}, RuntimeError, ("[1, 2, 6]",)),
        ({"weight": torch.ones(5)}, RuntimeError, ("weight", "[5]", "[6]")),
        ({"weight": torch.ones(6, dtype=torch.int32)}, NotImplementedError, ("weight", "int32")),
        ({"input": torch.ones(2, 6, dtype=torch.int64)}, NotImplementedError, ("input", "int64")),
        ({"eps": "1e-5"}, TypeError, ("eps", "str")),
        ({"input": torch.tensor(1.0), "normalized_shape": (1,)}, RuntimeError, ("[1]",)),
    ],
)
def test_refused(name: str, change: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    given = {"input": torch.randn(2, 6), "normalized_shape": (6,), **change}
    with pytest.raises(error) as raised:
        getattr(portkern, name)(**given)
    assert isinstance(raised.value, errors.PortkernError)
    assert all(word in str(raised.value) for word in words), raised.value


def test_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"residual has the shape \[6\], expected \[2, 6\]"):
        portkern.add_rms_norm(torch.randn(2, 6), torch.randn(6), (6,))


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_a_norm_with_a_residual_has_one(name: str) -> None:
    with pytest.raises(TypeError, match="'residual' must be a torch.Tensor, not NoneType"):
        getattr(portkern, name)(torch.randn(2, 6), None, (6,))


@pytest.mark.parametrize("name", ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"))
def test_opcheck(name: str) -> None:
    """B87: the fake kernel tells shapes, strides and dtypes as they are."""
    op = all_ops()[name]
    args = op.inputs((3, 4, 6), torch.float32, generator=generator(6))
    args = tuple(each.requires_grad_() if isinstance(each, torch.Tensor) else each for each in args)
    views = (args, (args[0].detach().transpose(0, 1), *args[1:])) if not name.startswith("add") else (args,)
    for each in views:
        torch.library.opcheck(getattr(torch.ops.portkern, name).default, each, test_utils="test_faketensor")
        torch.library.opcheck(getattr(torch.ops.portkern, name).default, each, test_utils="test_autograd_registration")


def test_compiled() -> None:
    x, w = torch.randn(4, 2, 6, requires_grad=True), torch.rand(2, 6, requires_grad=True)
    compiled = torch.compile(
        lambda x, w: portkern.add_rms_norm(x, x * 2, (2, 6), w)[0], backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x, w), F.rms_norm(x * 3, (2, 6), w))
    compiled(x, w).sum().backward()
    (want,) = torch.autograd.grad(F.rms_norm(x * 3, (2, 6), w).sum(), w)
    torch.testing.assert_close(w.grad, want)


def test_second_derivative_is_refused() -> None:
    x = torch.randn(2, 6, requires_grad=True)
    (first,) = torch.autograd.grad(portkern.layer_norm(x, (6,)).square().sum(), x, create_graph=True)
    with pytest.raises(errors.NotDifferentiable, match="layer_norm_backward"):
        first.sum().backward()


def test_the_reference_is_judged() -> None:
    """A mean that is off by a thousandth of the spread does not pass."""
    op = all_ops()["layer_norm"]
    args = op.inputs((8, 300), torch.float32, generator=generator(7))
    y, statistics = op.reference(*args)
    assert judge(op, args, (y, statistics)).right
    assert not judge(op, args, (y + 1e-3, statistics)).right
    assert not judge(op, args, (y, statistics * 1.0001)).right


@pytest.mark.parametrize(("variant", "programs"), [("resident_row", 264), ("coresident_row", 66), ("looped_row", 66)])
def test_sums_have_as_many_addends_as_programs(variant: str, programs: int) -> None:
    """Whatever the number of rows: each program writes its sums over its own rows once."""
    op, device = all_ops()["layer_norm_backward"], dispatch.reference_device(current(), "sm90")
    sums = {"SUM_BLOCK_M": 64, "SUM_BLOCK_N": 32, "SUM_WARPS": 4, "PROGRAMS_PER_UNIT": 2}
    blocks = {} if variant == "resident_row" else {"BLOCK_N": 1024}
    config = Config(variant, {**sums, **blocks}, num_warps=8)  # type: ignore[arg-type]
    for rows in (4096, 65536):
        args = metas_of(op.inputs((rows, 4096), torch.bfloat16, device="meta"))
        work = op.work(op.problem(*args))
        plan = op.plan(config, op.fit(config, work, device), device, *args)
        partial = plan.scratch[-1]
        assert partial.shape == (2 * programs * 4096,) and partial.dtype == torch.float32
        assert work.partials == 2 * 4096 * 4
    with pytest.raises(errors.Infeasible, match="take 1 or more|programs at once"):
        op.fit(config.replace(params={"PROGRAMS_PER_UNIT": 0}), work, device)
    with pytest.raises(errors.Infeasible, match="SUM_BLOCK_M"):
        op.fit(Config(variant, {**blocks, "PROGRAMS_PER_UNIT": 2}, num_warps=8), work, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_the_last_launch_loads_all_addends_at_once(name: str, arch: str) -> None:
    """Every candidate's: a loop over addends waits for memory at each turn. And its programs cover every column."""
    op, device = all_ops()[name], dispatch.reference_device(current(), arch)
    for sizes in ((32768, 256), (4096, 1024), (8192, 8192), (4096, 32768), (4096, 131072)):
        args = metas_of(op.inputs(sizes, torch.bfloat16, device="meta"))
        situation = dispatch.situate(current(), op, args, device)
        for config in [*dispatch.candidates(situation)][:12]:
            blocks, _ = fits(op, situation.work, device, situation.backend, config)
            if blocks is None:
                continue
            plan = situation.plan(Choice(config, blocks, "test", ""))
            last, kept = plan.launches[-1], plan.scratch[-1].shape[0] // sizes[1]
            sums = 1 if name.startswith("rms") else 2
            assert last.constexprs["BLOCK_M"] >= min(1024, kept // sums), f"{arch} {sizes} [{config}]"
            assert last.grid[0] * last.constexprs["BLOCK_N"] >= sums * sizes[1]


def test_waiting_programs_lag_where_rows_are_read_in_vectors() -> None:
    """And read rows again where more of them fit so: layer_norm keeps two sums a column."""
    device = dispatch.reference_device(current(), "sm90")
    modes = {}
    for name in ("layer_norm_backward", "rms_norm_backward"):
        for n in (32768, 32767):
            op = all_ops()[name]
            args = metas_of(op.inputs((4096, n), torch.bfloat16, device="meta"))
            situation = dispatch.situate(current(), op, args, device)
            params = situation.backend.default(device, situation.work).params
            modes[name, n] = params["LAG"], params["REREAD"], params["PROGRAMS_PER_UNIT"] >= 4
    assert modes["layer_norm_backward", 32768] == (1, 1, True)
    assert modes["rms_norm_backward", 32768] == (1, 0, True)
    assert modes["layer_norm_backward", 32767][:2] == modes["rms_norm_backward", 32767][:2] == (0, 0)


@pytest.mark.parametrize("add", [portkern.add_layer_norm, portkern.add_rms_norm])
def test_a_sum_that_nothing_trained_is_in_has_no_gradient(add: Any) -> None:
    """Frozen activations stay without a graph, as ``x + r`` of torch."""
    x, r, w = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, requires_grad=True)
    y, s = add(x, r, (4,), w)
    assert y.requires_grad and not s.requires_grad
    y.sum().backward()
    assert w.grad is not None
    for each in ((x.requires_grad_(), r), (x.detach(), r.requires_grad_())):
        assert add(*each, (4,), w)[1].requires_grad


@pytest.mark.parametrize("add", [portkern.add_layer_norm, portkern.add_rms_norm])
def test_where_only_the_sum_is_used_its_gradient_passes(add: Any) -> None:
    """Whatever the row holds: no zeros are multiplied with what is not finite."""
    x = torch.tensor([[1.0, torch.inf, 2.0]], requires_grad=True)
    r, w = torch.zeros(1, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    _, s = add(x, r, (3,), w)
    found = torch.autograd.grad(s, (x, r, w), torch.tensor([[1.0, 2.0, 3.0]]), allow_unused=True)
    assert found[2] is None
    for each in found[:2]:
        assert each.tolist() == [[1.0, 2.0, 3.0]]
