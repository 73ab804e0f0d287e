"""``Op``: the one contract that built-in and third-party operations are declared by.

Every field but ``name``, ``schema`` and ``cases`` is a pure function. Where a function is said to
take ``*args`` these are the op's canonical arguments, in the order of its schema; in ``problem``,
``outputs`` and ``plan`` each tensor among them is replaced by its ``Meta``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from portkern.config import Blocks, Config
from portkern.errors import PluginError
from portkern.plan import Buffer, Plan
from portkern.problem import Problem, Work
from portkern.record import FrozenMap
from portkern.target import Device

NAMESPACE = "portkern"


@dataclass(frozen=True)
class Case:
    """One input of an op for tests and ``verify``: ``inputs(sizes, dtype, **options)``."""

    sizes: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", FrozenMap(self.options))

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes)) or "scalar"
        return "-".join([sizes, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass(frozen=True)
class Result:
    """What a signature function, or ``Backward.arguments``, returns in the place of canonical arguments where there is
    nothing to compute: what the op would have come to."""

    value: Any


@dataclass(frozen=True)
class Backward:
    """How an op is differentiated: by another op, tuned and verified like any other.

    ``save(args, outputs)`` gives what the derivative needs, tensors and constants; what is no tensor must depend on
    shapes, dtypes, constants and what requires a gradient only, since a prepared call asks once;
    ``arguments(saved, grads)`` gives the canonical arguments of ``op``, or a Result of the gradients; the outputs of
    ``op`` are, in order, the gradients of the forward arguments at the positions ``inputs``, or at those that
    ``positions(saved)`` says, where a call gives only some; or what ``gradients(saved, outputs)`` makes of the outputs,
    None for a gradient that was not computed. ``grads`` has zeros for an output that nothing used, and None
    where the op has ``saved`` outputs. An op with several of these saves for and calls only those that some wanted
    gradient needs. Without an ``op``, what ``arguments`` gives are the gradients. The gradient of the arguments
    at the positions ``passed(saved)`` is the first of ``grads`` itself, in no case that of ``positions``; where
    ``positions(saved)`` is empty then, ``op`` is not called.
    """

    op: str
    save: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]
    arguments: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
    inputs: tuple[int, ...]
    gradients: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]] | None = None
    positions: Callable[[tuple[Any, ...]], tuple[int, ...]] | None = None
    passed: Callable[[tuple[Any, ...]], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Op:
    """One operation. ``name`` is bare for built-in ops and ``namespace::name`` elsewhere.

    schema      torch.library schema of the canonical arguments: ``"(Tensor x, int dim) -> Tensor"``
    signature   the public function: it checks its arguments and returns the canonical ones; None
                keeps the op out of the public namespace (a backward)
    problem     ``(*args) -> Problem``
    work        ``(Problem) -> Work``
    outputs     ``(*args) -> tuple[Buffer, ...]``
    fit         ``(Config, Work, Device) -> Blocks``: derived constexprs; raises Infeasible
    plan        ``(Config, Blocks, Device, *args) -> Plan``
    reference   ``(*args) -> Tensor | tuple``: plain torch, in the precision of what it is given
    inputs      ``(sizes, dtype, *, device, generator, style, **options) -> args``; ``style`` is
                ``normal``, ``wide`` (range of the dtype that the op must survive) or ``nonfinite``
    cases       sizes and options that the tests and ``verify`` run: 1, odd, empty, large
    tune_cases  what ``tune`` and ``bench`` measure when no shape is given
    dtypes      what ``inputs`` takes, as torch names (``bfloat16``)
    eager       ``(*args) -> Tensor | tuple``: what one calls in torch without this op, in the dtypes of the arguments,
                for ``bench`` to time as torch. Outputs for the derivative may lack; None uses reference
    candidates  ``(Device, Work) -> Configs``, only for a kind that no plugin knows
    exact       ``(*args) -> Tensor | tuple``: the reference in fp64, where that is more than the reference of
                arguments in fp64 (an op that rounds one first)
    terms       ``(*args) -> Tensor``: the size of what each output element is a sum or difference of,
                for the error budget, where cancellation makes that larger than the output itself
    parallel    ``(*args) -> dims`` of the first tensor, with Metas for tensors, along which no element of an output
                depends on another; every output and every other tensor of that rank has them in the same place
    settings    what the signature reads beside its arguments and autocast: settings of torch, which decide which
                prepared call serves
    reads_values  whether the signature reads values of tensors: what it gives is then no function of shapes and
                dtypes, and no call is prepared by what the public function is given
    random      whether the signature draws random numbers: ranks that hold one tensor would draw unlike ones
    depends     (output, positions of the arguments that its gradient flows to) for outputs where these are not all:
                one of which none requires a gradient requires none
    saved       how many of the last outputs are for the derivative only: the public function does not give them
    result      ``(outputs, *args, **kwargs)``: what the public function gives, from the outputs that it gives and
                the arguments that it was called with; None: the outputs as they are. What it does must depend on
                shapes, dtypes and constants only: where it gave the outputs themselves, it is not asked again
    public      ``(*args) -> {name: value}``: for ``verify``, arguments of the public function that have no default and
                that no canonical argument is named like
    values      positions of arguments that change per call and never the plan (seed, eps): the
                plan takes them as ``Value``, no key holds them
    vmap        ``(in_dims, *args) -> Folded | None`` (``portkern.batching``): the call that covers a dim which
                ``torch.func.vmap`` maps, at those places of the arguments; None: slice by slice, as without one
    traced      problem, work, fit and plan may be given numbers that note what is asked of them (``portkern.sizes``),
                so that a new shape need not be planned: False for an op that keeps sizes beyond a call
    """

    name: str
    schema: str
    problem: Callable[..., Problem]
    work: Callable[[Problem], Work]
    outputs: Callable[..., tuple[Buffer, ...]]
    fit: Callable[[Config, Work, Device], Blocks]
    plan: Callable[..., Plan]
    reference: Callable[..., Any]
    inputs: Callable[..., tuple[Any, ...]]
    cases: tuple[Case, ...]
    tune_cases: tuple[Case, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    signature: Callable[..., tuple[Any, ...]] | None = None
    backward: Backward | tuple[Backward, ...] | None = None
    eager: Callable[..., Any] | None = None
    candidates: Callable[[Device, Work], tuple[Config, ...]] | None = None
    exact: Callable[..., Any] | None = None
    terms: Callable[..., Any] | None = None
    parallel: Callable[..., Sequence[int]] | None = None
    settings: Callable[[], Hashable] | None = None
    reads_values: bool = False
    random: bool = False
    depends: tuple[tuple[int, tuple[int, ...]], ...] = ()
    saved: int = 0
    result: Callable[..., Any] | None = None
    public: Callable[..., Mapping[str, Any]] | None = None
    values: tuple[int, ...] = ()
    vmap: Callable[..., Any] | None = None
    traced: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([a-z_]\w*::)?[a-z_]\w*", self.name):
            raise PluginError(f"op name {self.name!r} must be 'name' or 'namespace::name', lower case")
        if not re.fullmatch(r"\(.*\) -> .+", self.schema):
            raise PluginError(f"op {self.name}: schema {self.schema!r} must read '(Tensor x, ...) -> Tensor'")

    @cached_property
    def backwards(self) -> tuple[Backward, ...]:
        """Every part of the derivative; none for an op that has no derivative."""
        if self.backward is None:
            return ()
        return (self.backward,) if isinstance(self.backward, Backward) else tuple(self.backward)

    @cached_property
    def differentiated(self) -> tuple[int, ...]:
        """Positions of the arguments that gradients are given for."""
        return tuple(position for part in self.backwards for position in part.inputs)

    @property
    def listed(self) -> bool:
        """Whether the schema promises a list of tensors, of any length."""
        return self.schema.endswith("[]")

    @property
    def qualname(self) -> str:
        """The name that torch.library knows the op by."""
        return qualified(self.name)


def qualified(name: str) -> str:
    """The torch.library name of the op called ``name``."""
    return name if "::" in name else f"{NAMESPACE}::{name}"


def visible(op: Op, outputs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the public function of ``op``, called with these arguments, gives for ``outputs``."""
    shown = pack(unpack(outputs)[: -op.saved]) if op.saved else outputs
    return shown if op.result is None else op.result(unpack(shown), *args, **kwargs)


def pack(outputs: Sequence[torch.Tensor], listed: bool = False) -> Any:
    """No tensor as None, a single one as itself, several as a tuple; or a list: what a schema promises."""
    if listed:
        return list(outputs)
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def unpack(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The inverse of ``pack``."""
    if outputs is None:
        return ()
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
