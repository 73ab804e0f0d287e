"""``@portkern.pointwise``: a scalar Triton function becomes an op, with broadcasting, promotion and a derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from portkern.batching import fold_elementwise
from portkern.errors import PluginError
from portkern.op import Case, Op
from portkern.pointwise_call import Expression
from portkern.pointwise_checks import (
    DTYPES,
    check_callable,
    check_functions,
    check_name,
    check_parts,
    check_results,
    check_words,
)
from portkern.pointwise_derivative import backward_of, check_passed, check_switches, derivative_of
from portkern.pointwise_object import Pointwise
from portkern.pointwise_plan import (
    fit_pointwise,
    pointwise_outputs,
    pointwise_plan,
    pointwise_problem,
    pointwise_work,
)
from portkern.pointwise_reference import (
    CASES,
    CASES_OF_SEVERAL,
    CASES_PACKED,
    GRADIENT,
    OUTPUT,
    TUNE_CASES,
    Reference,
    forward_reference,
    gradient_inputs,
    gradient_reference,
    make_inputs,
)
from portkern.pointwise_signature import (
    check_values,
    defaults_of,
    kind_of,
    parameters,
    public_function,
    signature_of,
)
from portkern.registry import KERNELS, refuse_taken


def pointwise(
    name: str,
    *,
    reference: Reference,
    derivative: Any = None,
    derivative_reference: Reference | None = None,
    passed: Callable[..., Sequence[str]] | None = None,
    signature: Callable[..., tuple[Any, ...]] | None = None,
    integers: str = "keep",
    parts: int = 1,
    cases: Sequence[Case] | None = None,
    tune_cases: Sequence[Case] = TUNE_CASES,
    live: float = 2.0,
    terms: Reference | None = None,
    derivative_terms: Reference | None = None,
    defaults: Mapping[str, Any] | None = None,
    examples: Mapping[str, Any] | None = None,
    result: torch.dtype | None = None,
    public: bool = True,
    dtypes: Sequence[str] = DTYPES,
    eager: Reference | None = None,
    derivative_eager: Reference | None = None,
) -> Callable[[Any], Pointwise]:
    """Make a ``@triton.jit`` function of scalars into an op; ``docs/add-an-op.md`` walks through one.

    The function's parameters are tensors (of shapes that broadcast, any strides; numbers too), numbers that change per
    call (annotated ``float``) and, last, switches: integers that are compiled in (``tl.constexpr``). It is computed in
    float32 for 16-bit operands, else in the dtype that torch's promotion gives.

    Args:
        name: of the op, ``mine::axpy``.
        reference: the same in plain torch.
        derivative: a ``@triton.jit`` function ``(grad, ...)`` of any of the function's parameters and ``output``, by
            name. It gives one gradient for each tensor parameter, several as a tuple.
        derivative_reference: the same in plain torch, where autograd through ``reference`` does not serve.
        passed: of the derivative's numbers and switches, by name, which tensors' gradient is the incoming one as it is,
            as of a sum: for those nothing is computed. Not with ``parts``.
        signature: the public function, where its parameters are others; it returns those of the scalar function.
        integers: what becomes of integer operands: ``keep``, ``float`` (torch's default dtype) or ``refuse``.
        parts: with 2, one tensor may stand in the place of the last two, which are the halves of its last dim.
        cases, tune_cases, dtypes: for tests, ``verify``, ``tune`` and ``bench``.
        live: 32-bit registers per element that the function keeps besides its operands.
        terms, derivative_terms: see ``Op.terms``; called as the two references.
        defaults: of parameters, in calls and in tests. Not with ``signature``, which has its own.
        examples: scalars and switches in tests, where those are not the defaults.
        result: the dtype of the result, where that is not what is computed in.
        public: whether ``portkern.function(name)`` gives it.
        eager: what ``bench`` times as torch's own, if not ``reference``: what one writes without this op. A packed
            tensor's parts are given as views.
        derivative_eager: the same for the gradient, called as ``derivative_reference``; it gives all gradients.

    Raises PluginError for a declaration that does not fit together.
    """
    check_name(name)
    details = _Details(
        reference, derivative, derivative_reference, passed, signature, integers, parts, cases, tune_cases, live, terms,
        derivative_terms, defaults, examples, result, public, dtypes, eager, derivative_eager,
    )  # fmt: skip
    return partial(_declare, name, details)


@dataclass(frozen=True)
class _Details:
    """The arguments of ``pointwise``."""

    reference: Reference
    derivative: Any
    derivative_reference: Reference | None
    passed: Callable[..., Sequence[str]] | None
    signature: Callable[..., tuple[Any, ...]] | None
    integers: str
    parts: int
    cases: Sequence[Case] | None
    tune_cases: Sequence[Case]
    live: float
    terms: Reference | None
    derivative_terms: Reference | None
    defaults: Mapping[str, Any] | None
    examples: Mapping[str, Any] | None
    result: torch.dtype | None
    public: bool
    dtypes: Sequence[str]
    eager: Reference | None
    derivative_eager: Reference | None


def _declare(name: str, details: _Details, function: Any) -> Pointwise:
    expression = dataclasses.replace(_expression(name, function, details.parts), result=details.result)
    if not str(function.fn.__module__).startswith(f"{KERNELS}."):
        refuse_taken(name)
    backward = derivative_of(name, expression, details.derivative) if details.derivative is not None else None
    _check(name, expression, backward, details)
    own = check_values("its signature", expression, defaults_of(function), expression.parameters)
    defaults = {**own, **check_values("defaults=", expression, details.defaults, expression.parameters)}
    numbers = (*expression.scalars, *expression.switches)
    given = {**defaults, **check_values("examples=", expression, details.examples, numbers)}
    if details.passed is not None:
        check_passed(name, expression, backward, details.passed, given)
    signature = details.signature or signature_of(name, function, defaults)
    tested = {**dict.fromkeys(expression.scalars, 1.5), **dict.fromkeys(expression.switches, 0), **given}
    return Pointwise(_ops(expression, backward, details, signature, tested), function.fn)


def _check(name: str, expression: Expression, backward: Expression | None, details: _Details) -> None:
    words = ("integers", "dtypes", "live", "result", "cases", "tune_cases")
    check_words(name, **{word: getattr(details, word) for word in words})
    if details.signature is not None:
        check_callable(name, "signature", details.signature)
        if details.defaults is not None:
            raise PluginError(f"pointwise op {name}: it has signature= and defaults=, which belong in that function")
    check_functions(
        expression,
        backward,
        {"reference": details.reference, "terms": details.terms, "eager": details.eager},
        {
            "derivative_reference": details.derivative_reference,
            "derivative_terms": details.derivative_terms,
            "derivative_eager": details.derivative_eager,
        },
    )
    check_results(name, expression, backward)


def _ops(
    expression: Expression, backward: Expression | None, details: _Details, signature: Callable[..., tuple[Any, ...]],
    tested: Mapping[str, Any],
) -> tuple[Op, ...]:  # fmt: skip
    name = expression.name
    several = CASES_PACKED if details.parts > 1 else CASES_OF_SEVERAL
    cases = details.cases if details.cases is not None else several if len(expression.operands) > 1 else CASES
    common: dict[str, Any] = {
        "work": partial(pointwise_work, details.live), "fit": fit_pointwise, "dtypes": tuple(details.dtypes),
        "cases": tuple(cases), "tune_cases": tuple(details.tune_cases), "vmap": fold_elementwise,
    }  # fmt: skip
    inputs = partial(make_inputs, expression, tested, details.integers)
    forward = partial(forward_reference, expression, details.reference)
    part = backward_of(expression, backward, details.passed) if backward is not None else None
    op = Op(
        name,
        expression.schema,
        signature=public_function(name, expression, signature, details.integers) if details.public else None,
        reference=forward,
        terms=partial(forward_reference, expression, details.terms) if details.terms else None,
        eager=partial(forward_reference, expression, details.eager) if details.eager else None,
        inputs=inputs,
        backward=part,
        **_planning(expression),
        **common,
    )
    if backward is None or part is None:
        return (op,)
    judged = partial(gradient_reference, expression, backward, tested, details.reference)
    gradient = Op(
        backward.name,
        backward.schema,
        reference=partial(judged, details.derivative_reference),
        terms=partial(judged, details.derivative_terms) if details.derivative_terms else None,
        eager=partial(judged, details.derivative_eager) if details.derivative_eager else None,
        inputs=partial(gradient_inputs, expression, backward, inputs, forward, part.arguments),
        **_planning(backward),
        **common,
    )
    return op, gradient


def _planning(expression: Expression) -> dict[str, Any]:
    return {
        "problem": partial(pointwise_problem, expression),
        "outputs": partial(pointwise_outputs, expression),
        "plan": partial(pointwise_plan, expression),
        "values": expression.values,
    }


def _expression(name: str, function: Any, parts: int) -> Expression:
    named = {parameter.name: kind_of(parameter) for parameter in parameters(function)}
    if not any(kind == "operand" for kind in named.values()):
        raise PluginError(f"pointwise op {name}: the function has no tensor parameter; leave one without annotation")
    reserved = sorted({OUTPUT, GRADIENT} & set(named))
    if reserved:
        raise PluginError(f"pointwise op {name}: parameters may not be called {reserved}, which derivatives use")
    operands, scalars, switches = (
        tuple(each for each, kind in named.items() if kind == wanted) for wanted in ("operand", "scalar", "switch")
    )
    check_switches(name, tuple(named), switches)
    found = Expression(name, function, tuple(named), operands, scalars, switches, parts=parts)
    check_parts(found)
    return found
