"""Elements of small tensors that lie more than 2^31 apart, in memory that is a file of holes: every op and variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import portkern
from portkern import dispatch
from portkern.config import Config
from portkern.executors.launch import execute
from portkern.library import altered_by
from portkern.lookup import Choice, fits
from portkern.memory import Guarded
from portkern.op import Case, Op
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.target import Device
from portkern.testing import judge
from portkern.variants import run_fitting
from tests.spine import generator, variants

OPS = sorted(name for name in all_ops() if "::" not in name)
LARGEST = 2100  # elements of a case: each takes a page of memory


def far_apart(tensor: torch.Tensor, axis: int, file: Path) -> torch.Tensor:
    """``tensor`` with its last index along ``axis`` at element 2^31 and beyond. Each step takes 31 bits, so that not
    the type of a kernel's stride makes its products wide; with two elements, one step takes more."""
    step = (1 << 31) // (tensor.shape[axis] - 1) + 1
    strides, inner = [0] * tensor.dim(), 1
    for each in reversed(range(tensor.dim())):
        strides[each] = step if each == axis else inner
        inner *= 1 if each == axis else tensor.shape[each]
    assert inner <= step
    whole = torch.from_file(str(file), shared=True, size=(1 << 31) + 2 * step, dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, strides).copy_(tensor)


def axes_of(arg: Any) -> list[int]:
    """The dims of a tensor that may be far apart: those of 3 and more elements, if there are any."""
    if not isinstance(arg, torch.Tensor):
        return []
    return [axis for axis, size in enumerate(arg.shape) if size >= min(3, max(arg.shape))] if arg.numel() > 1 else []


def laid_out(args: tuple[Any, ...], place: str, near: Sequence[int], folder: Path) -> tuple[Any, ...]:
    """``args`` with tensors far apart along their first or last dim, but for those in the places ``near``."""
    found = list(args)
    for number, arg in enumerate(args):
        axes = axes_of(arg)
        if axes and number not in near:
            found[number] = far_apart(arg, axes[0 if place == "first" else -1], folder / str(number))
    return tuple(found)


def small_args(op: Op) -> tuple[Case, tuple[Any, ...]]:
    """The case of few elements with the most dims of 3 and more, and its arguments."""
    dtype, found = torch.float16 if "float16" in op.dtypes else torch.float32, []
    for number, case in enumerate(
        case for case in op.cases if "zeros" not in case.options
    ):  # of which little is finite
        metas = [each for each in op.inputs(case.sizes, dtype, device="meta", **case.options) if axes_of(each)]
        if metas and max(each.numel() for each in metas) <= LARGEST:
            dims = sum(size > 2 for each in metas for size in each.shape)
            rows = sum(each.numel() // max(each.shape) for each in metas)  # each takes a program
            found.append((min(dims, 3), -rows, -number, case))
    *_, case = max(found)
    return case, op.inputs(case.sizes, dtype, generator=generator(5), **case.options)


def configs(op: Op, args: tuple[Any, ...], device: Device) -> list[Config]:
    if op.candidates is not None:
        return list(op.candidates(device, op.work(op.problem(*metas_of(args)))))[:1]
    found = variants(current(), op, args, device)
    # Programs that wait for one another run one after another here.
    return [config for config, variant in found if variant != "coresident_row"]


def brought_near(name: str) -> tuple[int, ...]:
    """Positions of the arguments that never lie far apart: what public functions bring near (see
    ``test_what_public_functions_bring_near``), and what only the op's own forward makes."""
    names: tuple[str, ...] = ()
    if "norm" in name or "cross_entropy" in name:
        names = ("weight", "bias", "statistics")
    schema = torch._C.parse_schema(f"a::b{all_ops()[name].schema}")
    return tuple(position for position, argument in enumerate(schema.arguments) if argument.name in names)


def run(situation: dispatch.Situation, choice: Choice, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """As ``tests.spine.run_config``, without a copy of what lies far apart."""
    memory = Guarded()
    outputs = run_fitting(
        situation, choice, lambda plan, options: execute(plan, args, torch.device("cpu"), options, allocate=memory)
    )
    assert not memory.broken()
    return outputs


@pytest.mark.parametrize(
    ("name", "place"),
    # The public function of rope brings heads near.
    [(name, place) for name in OPS for place in ("first", "last") if (name, place) != ("rope", "last")],
)
def test_offsets_take_64_bits(name: str, place: str, tmp_path: Path) -> None:
    op, device = all_ops()[name], dispatch.reference_device(current(), "sm90")
    case, given = small_args(op)
    every, near, refused = configs(op, given, device), brought_near(name), list[str]()
    for config in every:
        args = laid_out(given, place, near, tmp_path)
        assert any(arg is not each for arg, each in zip(args, given, strict=True))
        situation = dispatch.situate(current(), op, metas_of(args), device)
        blocks, refusal = fits(op, situation.work, device, situation.backend, config)
        if blocks is None:
            refused.append(refusal)  # of a variant that takes no such strides
            continue
        outputs = run(situation, Choice(config, blocks, "test", "test"), args)
        if altered_by(op):
            expected = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in given]
            op.reference(*expected)
            for position in altered_by(op):
                torch.testing.assert_close(args[position], expected[position])
        else:
            verdict = judge(op, args, outputs)
            assert verdict.right, f"{case} [{config}]: {verdict.reason}"
    assert len(refused) < len(every), refused


CALLS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, w, b: portkern.layer_norm(x, (5,), w, b),
    "add_layer_norm": lambda x, w, b: portkern.add_layer_norm(x, x, (5,), w, b)[0],
    "rms_norm": lambda x, w, b: portkern.rms_norm(x, (5,), w),
    "add_rms_norm": lambda x, w, b: portkern.add_rms_norm(x, x, (5,), w)[0],
    "group_norm": lambda x, w, b: portkern.group_norm(x[:, :, None], 1, w, b),
    "cross_entropy": lambda x, w, b: portkern.cross_entropy(x, torch.tensor([4, 1, 0]), w.detach()),
    "smoothed": lambda x, w, b: portkern.cross_entropy(x, torch.tensor([4, 1, 0]), w.detach(), label_smoothing=0.1),
    "prelu": lambda x, w, b: portkern.prelu(x, w),
    "rope": lambda x, w, b: portkern.rope(
        x[None, :, None, :4], x[None, :, None, :4], w[None, :2].expand(3, 2), b[None, :2].expand(3, 2)
    )[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_what_public_functions_bring_near(name: str, tmp_path: Path) -> None:
    """Vectors along a row, by values and gradients."""
    made = [torch.randn(size, generator=generator(6)) for size in ((3, 5), (5,), (5,))]
    found = []
    for far in (False, True):
        x, w, b = (
            far_apart(each, 0, tmp_path / str(place)) if far and place else each.clone()
            for place, each in enumerate(made)
        )
        leaves = [x.requires_grad_(), *(() if name == "rope" else (w.requires_grad_(), b.requires_grad_()))]
        y = CALLS[name](x, w, b)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)))
    for near, far in zip(*found, strict=True):
        assert (near is None and far is None) or torch.equal(near, far)


def test_heads_of_rope_far_apart(tmp_path: Path) -> None:
    q, table, step = (
        torch.randn(1, 2, 3, 6, generator=generator(7)),
        torch.randn(2, 3, generator=generator(8)),
        torch.rand(1, 2, 3, 6),
    )
    found = []
    for axis in (None, 2, 3):
        x, dy, cos = (
            each if axis is None else far_apart(each, min(axis, each.dim() - 1), tmp_path / str(number))
            for number, each in enumerate((q, step, table))
        )
        x = x.detach().requires_grad_()
        y, _ = portkern.rope(x, q, cos, table)
        found.append((y, *torch.autograd.grad(y, x, dy)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("far", ["a", "b"])
def test_a_step_along_k_takes_64_bits(far: str, tmp_path: Path) -> None:
    """Two blocks of k, more than 2^31 elements apart where no offset within a tile is."""
    op, device, stride = all_ops()["matmul"], dispatch.reference_device(current(), "sm90"), (1 << 26) + 16
    a, b = (torch.randn(sizes, generator=generator(9)) for sizes in ((5, 40), (40, 6)))
    whole = torch.from_file(str(tmp_path / far), shared=True, size=40 * stride, dtype=a.dtype)
    if far == "a":
        a = whole.as_strided(a.shape, (1, stride)).copy_(a)
    else:
        b = whole.as_strided(b.shape, (stride, 1)).copy_(b)
    config = Config("tiles", {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 1}, 4, 1)  # type: ignore[arg-type]
    args = (a, b, False)
    situation = dispatch.situate(current(), op, metas_of(args), device)
    blocks, _ = fits(op, situation.work, device, situation.backend, config)
    assert blocks is not None
    verdict = judge(op, args, run(situation, Choice(config, blocks, "test", "test"), args))
    assert verdict.right, verdict.reason
