"""What ``bench`` times as torch: what one writes in torch without portkern, right, and no slower than it has to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portkern import peak, peer
from portkern.op import Case, Op, unpack
from portkern.registry import all_ops, get

NAMES = sorted(name for name in all_ops() if "::" not in name)
DRAWN = sorted(name for name in NAMES if get(name).random)

# Ops whose reference is what one calls in torch. Of another op without ``eager`` the reference would be timed as
# torch's, with its masks, its integers and its wider types.
REFERENCE_IS_TORCH = {
    "absmax": "x.abs().amax(-1)",
    "add": "torch.add",
    "add_backward": "a multiple of the incoming gradient",
    "amax": "torch.amax",
    "argmax": "torch.argmax",
    "axpy_backward": "a multiple of the incoming gradient",
    "cross_entropy_backward_rescale": "Tensor.mul_",
    "fp8_scale": "torch.where and a quotient, in float32 as the op",
    "leaky_relu": "F.leaky_relu",
    "leaky_relu_backward": "aten.leaky_relu_backward",
    "log_softmax": "torch.log_softmax",
    "matmul": "torch.matmul",
    "matmul_backward": "torch.matmul, and sum_to_size where batches were broadcast",
    "mean": "torch.mean",
    "mish": "F.mish",
    "mish_backward": "aten.mish_backward",
    "reglu": "F.relu(x) * gate",
    "reglu_backward": "aten.threshold_backward and two products",
    "relu": "F.relu",
    "relu_backward": "aten.threshold_backward",
    "sigmoid": "torch.sigmoid",
    "sigmoid_backward": "aten.sigmoid_backward",
    "silu": "F.silu",
    "silu_backward": "aten.silu_backward",
    "softmax": "torch.softmax",
    "sum": "torch.sum",
    "swiglu": "F.silu(x) * gate",
    "swiglu_backward": "aten.silu_backward, F.silu and two products",
    "tanh": "torch.tanh",
    "tanh_backward": "aten.tanh_backward",
}
# What torch itself computes in a wider type than it is given.
WIDER = {
    "quantize_fp8": "scales are float32, and so is a quotient by them",
    "quantize_fp8_rows": "as quantize_fp8",
    "rms_norm": "on the CPU torch composes it of float32 functions",
    "add_rms_norm": "as rms_norm",
    "rms_norm_backward": "torch has a function for GPUs alone; elsewhere this is the reference",
}
# What torch cannot do: op, option, its value, dtypes.
LACKED = (
    ("add_layer_norm", "weight", "bfloat16", ("bfloat16", "float16", "float32")),  # with a float32 sum, on the CPU
    ("cross_entropy", "smoothing", 0.1, ("float16",)),  # it sums a row's logarithms in float16, which overflows
)


def usable(op: Op, case: Case, dtype: str) -> bool:
    """Leaves out what is empty, rows of one element, which have no variance, and what torch lacks; targets that are no
    class raise in torch."""
    lacked = any(
        name == op.name and case.options.get(option) == value and dtype in dtypes
        for name, option, value, dtypes in LACKED
    )
    return math.prod(case.sizes) > 1 and case.sizes[-1] != 1 and not case.options.get("stray") and not lacked


def small(op: Op, size: int = 64) -> list[Case]:
    """The cases that ``bench`` measures, of small sizes."""
    return [Case(tuple(min(each, size) for each in case.sizes), case.options) for case in op.tune_cases]


def inputs(op: Op, case: Case, dtype: str, device: str = "cpu") -> tuple[Any, ...]:
    generator = torch.Generator(device).manual_seed(4)
    args: tuple[Any, ...] = op.inputs(
        case.sizes, getattr(torch, dtype), device=device, generator=generator, **case.options
    )
    return args


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """For an op that alters its arguments."""
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def timed(op: Op) -> Callable[..., Any]:
    return op.eager or op.reference


def disagreement(op: Op, args: tuple[Any, ...], dtype: str) -> str:
    """How what is timed as torch differs from the reference, by more than four roundings of ``dtype``."""
    given = copied(args)
    found, expected = unpack(timed(op)(*given)), unpack(op.reference(*copied(args)))
    if not expected:  # it alters its first argument
        altered = copied(args)
        op.reference(*altered)
        found, expected = given[:1], altered[:1]
    shown = len(expected) - op.saved
    if not shown <= len(found) <= len(expected):
        return f"gives {len(found)} outputs, expected {shown} to {len(expected)}"
    for place, (got, wanted) in enumerate(zip(found, expected, strict=False)):
        if got is None and place < shown and wanted.numel():
            return f"lacks output {place}"
        if got is not None and wanted.is_floating_point():
            kind = getattr(torch, dtype)
            if op.name == "masked_softmax":  # a row of which nothing is left is NaN in torch, and 0 here
                got = got.nan_to_num(0.0)
            words = peer.difference(got.to(kind), wanted.to(kind), drawn=op.random and args[5])
        else:
            words = "" if got is None else peer.difference(got, wanted)
        if words:
            return f"{words} in output {place}"
    return ""


@pytest.fixture(autouse=True)
def in_float32_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "LEAST", 1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in NAMES for dtype in ("bfloat16", "float16", "float32") if dtype in get(name).dtypes],
)
def test_it_computes_what_the_op_does(name: str, dtype: str) -> None:
    op = get(name)
    cases = [case for case in (*op.cases, *small(op)) if usable(op, case, dtype)]
    assert cases
    for case in cases:
        assert disagreement(op, inputs(op, case, dtype), dtype) == "", case


def test_another_function_is_told_from_it() -> None:
    op = get("gelu")
    args = inputs(op, Case((64, 64)), "float32")
    assert disagreement(op, args, "float32") == ""
    other = dataclasses.replace(op, eager=lambda x, *rest: torch.nn.functional.silu(x))
    assert "differs by" in disagreement(other, args, "float32")


@pytest.mark.parametrize("name", DRAWN)
def test_of_random_masks_the_share_is_right(name: str) -> None:
    op = get(name)
    for case in small(op, 512):
        x, bias, residual, _, p, *_ = args = inputs(op, case, "float32")
        with torch.random.fork_rng():
            torch.manual_seed(6)
            left = timed(op)(*args) - (0 if residual is None else residual)
        whole = (x if bias is None else x + bias) / (1 - p)
        zero = left.abs() < 1e-6
        assert abs(float(zero.float().mean()) - p) < 0.01
        assert torch.allclose(left[~zero], whole[~zero], atol=1e-5)


def test_no_other_reference_is_timed_as_torch() -> None:
    assert {name for name in NAMES if get(name).eager is None} == set(REFERENCE_IS_TORCH)


# ---- what it allocates --------------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Notes the tensors that torch's functions make, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []  # kept, so that no memory is taken for a view of other memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in (*self.tensors, *_tensors((args, kwargs)))}
        self.tensors += [each for each in _tensors(found) if each.untyped_storage().data_ptr() not in known]
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def size_of(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def made_by(op: Op, function: Callable[..., Any]) -> Iterator[tuple[Case, tuple[Any, ...], list[torch.Tensor]]]:
    for case in small(op):
        args = copied(inputs(op, case, "bfloat16"))
        with Made() as made:
            function(*args)
        yield case, args, made.tensors


def wide(op: Op, function: Callable[..., Any]) -> list[tuple[str, torch.dtype]]:
    """What of an eighth of the input's elements and more it makes in more than 16 bits."""
    found = []
    for case, args, made in made_by(op, function):
        largest = max(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
        found += [(str(case), each.dtype) for each in made if each.element_size() > 2 and each.numel() > largest / 8]
    return found


def share(op: Op, function: Callable[..., Any]) -> float:
    """The bytes of all that it makes, over those of arguments and outputs, at most."""
    found = []
    for _, args, made in made_by(op, function):
        outputs = [each for each in unpack(op.reference(*copied(args))) if each is not None]
        found.append(size_of(made) / size_of((*outputs, *_tensors(args))))
    return max(found)


NARROW = [name for name in NAMES if "bfloat16" in get(name).dtypes]


@pytest.mark.parametrize("name", NARROW)
def test_nothing_large_is_made_in_a_wider_type(name: str) -> None:
    op = get(name)
    found = wide(op, timed(op))
    assert bool(found) == (name in WIDER), found


@pytest.mark.parametrize("name", [name for name in NARROW if name.startswith("quantize_fp8") or name not in WIDER])
def test_it_makes_no_more_than_a_few_tensors(name: str) -> None:
    op = get(name)
    assert share(op, timed(op)) < 3


def test_a_reference_written_for_exactness_would_fail() -> None:
    for name in ("dropout", "rope", "masked_softmax", "cross_entropy_backward", "group_norm"):
        assert wide(get(name), get(name).reference), name
    assert share(get("dropout"), get("dropout").reference) > 30


# ---- as bench runs it ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("name", [name for name in NAMES if get(name).differentiated])
def test_its_derivative_is_part_of_the_memory_that_bench_counts(name: str) -> None:
    op = get(name)
    dtype = "bfloat16" if "bfloat16" in op.dtypes else "float32"
    for case in small(op):
        args = inputs(op, case, dtype)
        found = peak.eager(op, args)()
        if name == "cross_entropy":  # takes its derivative itself, and gives it last
            found = found[-1:]
        wanted = [args[place] for place in op.differentiated if isinstance(args[place], torch.Tensor)]
        assert [each.shape for each in found] == [each.shape for each in wanted]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # torch's own, in a thread of autograd's
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str) -> None:
    op = get(name)
    dtype = "bfloat16" if "bfloat16" in op.dtypes else "float32"
    for case in small(op, 512):
        args = inputs(op, case, dtype, "cuda")
        assert disagreement(op, args, dtype) == "", case
        step = peak.eager(op, args)
        step()
        step()
