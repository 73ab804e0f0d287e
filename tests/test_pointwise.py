"""The pointwise machine on the CPU route: declaration, promotion, derivatives, keys; and the page that explains it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it beside the functions)

import portkern
from portkern import dispatch
from portkern.errors import BadArgument, BadType, Mismatch
from portkern.kernel_hash import kernel_hash
from portkern.plan import Launch, Value
from portkern.pointwise_op import Pointwise, pointwise
from portkern.pointwise_plan import pointwise_plan
from portkern.promotion import result_dtype
from portkern.registry import all_ops, load_file
from portkern.runtime import Runtime, current, using
from tests.spine import generator, ops_of_kind

PAGE = Path(__file__).parent.parent / "docs" / "add-an-op.md"
DECLARED = [name for name in ops_of_kind("pointwise") if getattr(all_ops()[name].plan, "func", None) is pointwise_plan]
OPS = [name for name in DECLARED if all_ops()[name].backwards]


def page_code() -> str:
    """The Python code of the page on ops."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


@triton.jit
def _weighted(x, y, weight: float = 0.5):
    return weight * x + (1.0 - weight) * y


@triton.jit
def _weighted_gradient(grad, weight):
    return grad * weight, grad * (1.0 - weight)


@triton.jit
def _other_gradient(grad, weight):
    return grad * weight, grad - grad * weight


def declared(derivative: Any = _weighted_gradient, function: Any = _weighted, **changes: Any) -> Pointwise:
    given = {"reference": lambda x, y, weight: weight * x + (1 - weight) * y, "derivative": derivative, **changes}
    return pointwise("test::weighted", **given)(function)


def test_the_page_is_a_whole_op(tmp_path: Path) -> None:
    file = tmp_path / "squared_relu.py"
    file.write_text(page_code())
    assert page_code().count("\n") < 80
    with using(Runtime()):
        ops = load_file(file)
        assert [op.name for op in ops] == ["mine::squared_relu", "mine::squared_relu_backward"]
        x = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
        function = portkern.function("mine::squared_relu")
        assert torch.equal(function(x, 2.0), 2.0 * x.relu().square())
        assert torch.equal(function(x), 1.5 * x.relu().square())
        assert torch.autograd.gradcheck(lambda x: function(x, scale=2.0), (x,))


def test_a_declared_function_is_an_op() -> None:
    with using(Runtime()):
        weighted = declared()
        x, y = torch.randn(3, 40), torch.randn(40)
        torch.testing.assert_close(weighted(x, y), (x + y) / 2)
        torch.testing.assert_close(weighted(x, 2.0, weight=0.25), 0.25 * x + 1.5)
        assert portkern.explain("test::weighted", x, y).layer == "reference"
        assert weighted.ops[0].schema.endswith("Scalar weight, ScalarType dtype) -> Tensor")
        with pytest.raises(TypeError, match=r"weighted\(\) missing 1 required positional argument: .y."):
            weighted(x)
        with pytest.raises(BadType, match="no operand is a torch.Tensor"):
            weighted(1.0, 2.0)
        with pytest.raises(BadType, match="argument 'weight' must be a number"):
            weighted(x, y, x)
        with pytest.raises(Mismatch, match=r"\(3, 40\) and \(39,\) do not broadcast"):
            weighted(x, y[1:])


def test_an_op_without_derivative_says_how_to_give_it_one() -> None:
    with using(Runtime()):
        weighted = declared(None)
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="no derivative of 'test::weighted'; give it one where it is declared"):
            weighted(x, x).sum().backward()


def test_inputs_have_the_arguments_of_the_op() -> None:
    op = all_ops()["gelu"]
    op.inputs((3,), torch.float32, TANH=1)
    with pytest.raises(BadArgument, match="gelu has no argument 'TAHN' to set; it has TANH"):
        op.inputs((3,), torch.float32, TAHN=1)


def test_the_hash_covers_the_function_and_its_derivative() -> None:
    """The scalar functions live outside the package of the shared plan."""
    first, second = declared(), declared(_other_gradient)
    assert kernel_hash(first.ops[0]) == kernel_hash(second.ops[0])
    assert kernel_hash(first.ops[1]) != kernel_hash(second.ops[1])
    hashes = {kernel_hash(op) for name, op in all_ops().items() if name in DECLARED}
    assert len(hashes) >= len(OPS)


def launch_of(name: str, *given: Any) -> tuple[dispatch.Situation, Launch]:
    op, runtime = all_ops()[name], current()
    assert op.signature is not None
    args = dispatch.input_key(op, op.signature(*given))
    situation = dispatch.situate(runtime, op, args, dispatch.reference_device(runtime, "sm90"))
    (launch,) = situation.plan(dispatch.resolve(runtime, situation)).launches
    return situation, launch


def test_numbers_are_values_and_part_of_no_key() -> None:
    x = torch.randn(3, 40)
    first, launch = launch_of("axpy", x, x, 2.5)
    second, _ = launch_of("axpy", x, x, -3.0)
    assert first.args == second.args and first.problem == second.problem
    assert [each for each in launch.args if isinstance(each, Value)] == [Value(4)]
    _, launch = launch_of("add", x, 7.0)
    assert [each for each in launch.args if isinstance(each, Value)] == [Value(3), Value(4)]


def test_contiguous_operands_are_one_dim() -> None:
    situation, _ = launch_of("add", torch.empty(4, 5, 6, 7), torch.empty(4, 5, 6, 7))
    assert dict(situation.problem.sizes) == {"M": 1, "N": 840, "OUTER": 1}
    situation, _ = launch_of("add", torch.empty(64, 128), torch.empty(128))
    assert dict(situation.problem.sizes) == {"M": 64, "N": 128, "OUTER": 1}
    situation, _ = launch_of("swiglu", torch.empty(4, 16, 256))
    assert dict(situation.problem.layout) == {"x0": "n16", "x1": "n16", "y0": "n16"}


@pytest.mark.parametrize("first", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_promotion_is_torchs(first: torch.dtype) -> None:
    for second in (torch.bool, torch.int16, torch.float16, torch.float32, torch.float64):
        for shapes in (((2,), (2,)), ((2,), ()), ((), (2,)), ((), ())):
            x, y = torch.empty(shapes[0], dtype=first), torch.empty(shapes[1], dtype=second)
            assert result_dtype("add", [x, y]) == torch.result_type(x, y)
    for number in (True, 2, 2.5):
        for shape in ((2,), ()):
            x = torch.empty(shape, dtype=first)
            assert result_dtype("add", [x, number]) == torch.result_type(x, number)


@pytest.mark.parametrize("name", OPS)
def test_gradients_in_fp64(name: str) -> None:
    """The derivative's formula, as the CPU route computes it, against finite differences."""
    op = all_ops()[name]
    function = getattr(portkern, name)
    x = (torch.randn(3, 8, dtype=torch.float64, generator=generator(1)) + 0.05).requires_grad_()
    y = (torch.randn(8, dtype=torch.float64, generator=generator(2)) + 0.05).requires_grad_()
    more = {"axpy": (1.5,)}.get(name, ())
    args = (x, y, *more) if len([each for each in op.schema.split(",") if "Tensor?" in each]) > 1 else (x,)
    assert torch.autograd.gradcheck(lambda *tensors: function(*tensors, *more), args[: 2 if len(args) > 1 else 1])


@pytest.mark.parametrize("alpha", [0, 1, 2, -3, True, False])
def test_add_of_bools_as_torch(alpha: float) -> None:
    x, y = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])
    for other in (y, y[0], True):
        got, want = (f(x, other, alpha=alpha) for f in (portkern.add, torch.add))
        assert torch.equal(got, want) and got.dtype == torch.bool


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic: bool) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return portkern.swiglu(portkern.add(x, y, alpha=2)) * portkern.gelu(portkern.axpy(y, 3.0, 2.0)).sum()

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        x, y = (torch.randn(rows, 8, generator=generator(rows), requires_grad=True) for _ in range(2))
        got, want = compiled(x, y), f(x, y)
        torch.testing.assert_close(got, want)
        found = [torch.autograd.grad(each.sum(), (x, y)) for each in (got, want)]
        torch.testing.assert_close(*found)


def test_only_wanted_gradients_are_computed() -> None:
    calls: list[tuple[int, ...]] = []
    op = all_ops()["swiglu_backward"]
    x, y = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    (part,) = all_ops()["swiglu"].backwards
    saved = part.save((x, y, 0, 0, torch.float32), (x,))
    calls.append(saved[-1])
    assert calls == [(1,)] and part.positions is not None and part.positions(saved) == (1,)
    found = op.reference(*part.arguments(saved, (torch.ones(3, 8),)))
    assert len(found) == 1 and torch.equal(found[0], torch.nn.functional.silu(x))


def test_the_gradient_of_a_sum_is_the_incoming_one() -> None:
    """As torch gives it: nothing is computed for an operand that is only added."""
    for call, scaled in (
        (lambda x, y: portkern.add(x, y), (None, None)),
        (lambda x, y: portkern.add(x, y, alpha=3), (None, 3.0)),
        (lambda x, y: portkern.axpy(x, y, 0.5), (0.5, None)),
        (lambda x, y: portkern.axpy(x, y, 1.0), (None, None)),
    ):
        x, y = (torch.randn(3, 8, generator=generator(place), requires_grad=True) for place in range(2))
        grad = torch.randn(3, 8, generator=generator(2))
        found = torch.autograd.grad(call(x, y), (x, y), grad)
        for gradient, factor in zip(found, scaled, strict=True):
            assert (gradient.data_ptr() == grad.data_ptr()) == (factor is None)
            torch.testing.assert_close(gradient, grad * (factor or 1.0))
        (alone,) = torch.autograd.grad(call(x.detach(), y), y, grad)
        assert torch.equal(alone, found[1])


def test_the_gradient_of_a_sum_has_its_operands_shape_and_type() -> None:
    x, row = torch.randn(3, 8, requires_grad=True), torch.randn(8, dtype=torch.float64, requires_grad=True)
    for sum_of in (portkern.add, torch.add):
        found = torch.autograd.grad(sum_of(x, row), (x, row), torch.ones(3, 8, dtype=torch.float64))
        assert [(each.shape, each.dtype) for each in found] == [(x.shape, x.dtype), (row.shape, row.dtype)]
        assert torch.equal(found[1], torch.full((8,), 3.0, dtype=torch.float64))
    x = torch.randn(4, requires_grad=True)
    (first,) = torch.autograd.grad((portkern.add(x * x, x) ** 2).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(((x * x + x) ** 2).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x), torch.autograd.grad(wanted.sum(), x))


def test_operands_meet_in_their_common_type() -> None:
    """On the CPU too: a product of unsigned integers does not wrap, nor a function of a narrow one round, before."""
    u = torch.tensor([1], dtype=torch.uint8)
    for other in (torch.zeros(1).half(), torch.zeros(1).long()):
        torch.testing.assert_close(portkern.axpy(u, other, -1), torch.add(other, u, alpha=-1))
    x, one = torch.tensor([-0.7]).bfloat16(), torch.ones(1).double()
    torch.testing.assert_close(portkern.geglu(x, one), torch.nn.functional.gelu(x.double()))
