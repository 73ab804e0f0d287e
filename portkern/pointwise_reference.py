"""What pointwise ops are judged by: references in plain torch, inputs, and cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from portkern.errors import BadArgument, PluginError
from portkern.op import Case
from portkern.pointwise_arguments import canonical
from portkern.pointwise_call import Expression, packed

OUTPUT, GRADIENT = "output", "grad"  # what a derivative calls the result and its gradient
Reference = Callable[..., Any]

CASES = tuple(Case(sizes) for sizes in ((), (1,), (7,), (0, 5), (5, 1), (3, 33), (2, 3, 130), (4099,), (2, 5, 3, 17)))
# Further operands: a row, a column, one element, a number in its place, something of other dims or of another dtype.
CASES_OF_SEVERAL = (
    *CASES,
    *(Case((5, 33), {"other": other}) for other in ("row", "column", "scalar", "number")),
    Case((3, 1, 40), {"other": "outer"}),
    Case((3, 50), {"mixed": "float32"}),
)
CASES_PACKED = (
    *CASES,
    *(Case(sizes, {"packed": True}) for sizes in ((6,), (0, 4), (3, 64), (2, 3, 34), (2, 2, 2048))),
)
TUNE_CASES = (Case((8192, 14336)), Case((4096, 4096)), Case((1048576,)))
# Values that functions treat in a way of their own: zeros, subnormals, ties, and far out.
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 6.0, -6.0, 88.0, -88.0, 3e3, -3e3)


def named_arguments(expression: Expression, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments of the scalar function by name; parts of a packed tensor are views."""
    count = len(expression.operands)
    tensors, numbers = list(args[:count]), args[count : 2 * count]
    if packed(expression, tuple(tensors)):
        tensors[-expression.parts :] = tensors[-expression.parts].chunk(expression.parts, dim=-1)
    given = [number if each is None else each for each, number in zip(tensors, numbers, strict=True)]
    names = (*expression.operands, *expression.scalars, *expression.switches)
    return dict(zip(names, (*given, *args[2 * count :]), strict=False))


def widened(expression: Expression, named: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``named`` with operands as the type that all of them share, as in the kernel: a function of one that is narrower
    would round, and one of unsigned integers wrap, before it met the others."""
    return {
        name: each.to(dtype) if name in expression.operands and isinstance(each, torch.Tensor) else each
        for name, each in named.items()
    }


def dtype_of(expression: Expression, args: Sequence[Any]) -> torch.dtype:
    """The dtype among canonical arguments."""
    found: torch.dtype = args[2 * len(expression.operands) + len(expression.scalars) + len(expression.switches)]
    return found


def forward_reference(expression: Expression, reference: Reference, *args: Any) -> torch.Tensor:
    """``reference`` with canonical arguments. Raises PluginError where it gives no tensor."""
    named = widened(expression, named_arguments(expression, args), dtype_of(expression, args))
    found = reference(*(named[each] for each in expression.parameters))
    if not isinstance(found, torch.Tensor):
        raise PluginError(f"op {expression.name}: its reference gives {found!r}; it must give one tensor")
    return found.to(expression.result or dtype_of(expression, args))


def gradient_reference(
    forward: Expression, backward: Expression, tested: Mapping[str, Any], reference: Reference,
    derivative: Reference | None, *args: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients by ``derivative``, a torch function of the derivative's parameters, or by autograd. Raises
    PluginError where it gives others than one of each tensor, in the result's shape."""
    wanted, dtype = args[-1], dtype_of(backward, args)
    named = widened(backward, named_arguments(backward, args), dtype)
    grad = named[GRADIENT]
    if derivative is not None:
        found = derivative(*(named[each] for each in backward.parameters))
        every = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in every]
        if shapes != [tuple(grad.shape)] * len(forward.operands):  # expand would broadcast a sum
            raise PluginError(
                f"op {forward.name}: what is given as the derivative in torch gives tensors of the shapes {shapes}; it "
                f"must give one of {tuple(grad.shape)} for each of {', '.join(forward.operands)}, expanded where it "
                "repeats"
            )
    else:
        every = _by_autograd(forward, tested, reference, named, grad)
    every = tuple(each.expand(grad.shape).to(dtype) for each in every)
    if packed(backward, tuple(args[: len(backward.operands)])):
        return (torch.cat(every, -1),)
    return tuple(every[place] for place in wanted)


def _by_autograd(
    forward: Expression, tested: Mapping[str, Any], reference: Reference, named: Mapping[str, Any], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """One gradient for each operand, in the shape of ``grad``. Where an operand is not saved, the derivative does not
    depend on it, and zeros serve; for a number, the one that is ``tested``."""
    given = {**tested, **named}
    leaves: dict[str, torch.Tensor] = {}
    with recording():
        for each in forward.operands:
            value = given.get(each, torch.zeros((), dtype=grad.dtype, device=grad.device))
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, dtype=grad.dtype, device=grad.device)
            leaf = value.detach().expand(grad.shape)
            leaves[each] = leaf.requires_grad_() if leaf.is_floating_point() else leaf
        output = reference(*(leaves.get(each, given.get(each)) for each in forward.parameters))
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype), materialize_grads=True))
    return tuple(next(found) if leaf.requires_grad else torch.zeros_like(grad) for leaf in leaves.values())


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record, also where an op's kernel runs, below torch's dispatch to autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded - autograd):
        yield


def values_of(
    sizes: Sequence[int], dtype: torch.dtype, device: Any, generator: torch.Generator | None, style: str, place: int = 0
) -> torch.Tensor:
    """Values of operand number ``place`` for tests. ``wide``: up to a hundred, and SPECIAL ones; ``nonfinite``: usual
    ones, SPECIAL ones, NaN and infinities. What is special in one operand is usual in the others."""
    x = torch.randn(tuple(sizes), generator=generator, device=device, dtype=torch.float32)
    if style == "normal" or x.numel() == 0 or x.device.type == "meta":
        return x.to(dtype)
    special = SPECIAL + ((math.nan, math.inf, -math.inf) if style == "nonfinite" else ())
    flat = x.view(-1) * (25 if style == "wide" else 1)
    places = torch.arange(min(place % 3, flat.numel()), flat.numel(), 3, device=flat.device)
    chosen = torch.tensor(special, device=flat.device)[places // 3 % len(special)]
    if dtype == torch.bfloat16:  # whose subnormals Triton's interpreter takes for zeros
        chosen = torch.where(chosen.abs() < 1e-38, chosen * 1e3, chosen)
    return flat.index_put((places,), chosen).view(x.shape).to(dtype)


def _other_sizes(sizes: tuple[int, ...], other: str) -> tuple[int, ...]:
    """The shape of further operands."""
    return {
        "": sizes, "row": sizes[-1:], "column": (*sizes[:-1], 1), "scalar": (),
        "outer": (sizes[0], 8, 1) if sizes else (),
    }[other]  # fmt: skip


def make_inputs(
    expression: Expression, tested: Mapping[str, Any], integers: str,
    sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu", generator: torch.Generator | None = None,
    style: str = "normal", other: str = "", mixed: str = "", packed: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Canonical arguments: the first operand has ``sizes`` and ``dtype``; ``options`` set scalars and switches. Raises
    BadArgument for others."""
    known = (*expression.scalars, *expression.switches)
    for name in options:
        if name not in known:
            raise BadArgument(f"{expression.name} has no argument {name!r} to set; it has {', '.join(known) or 'none'}")
    make = partial(values_of, device=device, generator=generator, style=style)
    given: dict[str, Any] = {}
    for place, name in enumerate(expression.operands):
        if place == 0:
            given[name] = make(sizes, dtype, place=place)
        elif packed:
            given[name] = None
        elif other == "number":
            given[name] = 1.25 + place
        else:
            given[name] = make(_other_sizes(sizes, other), getattr(torch, mixed) if mixed else dtype, place=place)
    for name in (*expression.scalars, *expression.switches):
        given[name] = options.get(name, tested[name])
    return canonical(expression, [given[name] for name in expression.parameters], integers)


def gradient_inputs(
    forward: Expression, backward: Expression, inputs: Callable[..., tuple[Any, ...]], reference: Reference,
    arguments: Callable[..., tuple[Any, ...]], sizes: tuple[int, ...], dtype: torch.dtype, *, device: Any = "cpu",
    generator: torch.Generator | None = None, style: str = "normal", **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Canonical arguments of the derivative, as autograd would give them by ``Backward.arguments``."""
    args = inputs(sizes, dtype, device=device, generator=generator, style=style, **options)
    output = reference(*args)
    grad = torch.randn(output.shape, generator=generator, device=device, dtype=torch.float32).to(output.dtype)
    wanted = gradients_of(args[: len(forward.operands)])
    return arguments(saved_arguments(forward, backward, args, (output,), None, wanted), (grad,))


def gradients_of(operands: Sequence[Any]) -> list[int]:
    """The places of the operands that have a gradient."""
    return [place for place, each in enumerate(operands) if isinstance(each, torch.Tensor) and each.is_floating_point()]


def saved_arguments(
    forward: Expression, backward: Expression, args: Sequence[Any], outputs: Sequence[torch.Tensor], grad: Any,
    wanted: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """The canonical arguments of the derivative, for a call with ``args`` that gave ``outputs``."""
    count = len(forward.operands)
    tensors = {**dict(zip(forward.operands, args, strict=False)), OUTPUT: outputs[0], GRADIENT: grad}
    numbers = {**dict(zip(forward.operands, args[count:], strict=False)), OUTPUT: 0, GRADIENT: 0}
    rest = dict(zip((*forward.scalars, *forward.switches), args[2 * count :], strict=False))
    return (
        *(tensors[each] for each in backward.operands), *(numbers[each] for each in backward.operands),
        *(rest[each] for each in (*backward.scalars, *backward.switches)), dtype_of(forward, args), wanted,
    )  # fmt: skip
