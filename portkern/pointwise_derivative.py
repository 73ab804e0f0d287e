"""The derivative of an elementwise function: its expression, and what autograd is told of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from portkern.errors import PluginError
from portkern.op import Backward
from portkern.pointwise_call import MAX_SWITCHES, Expression
from portkern.pointwise_reference import GRADIENT, OUTPUT, saved_arguments
from portkern.pointwise_signature import parameters


def check_switches(name: str, named: tuple[str, ...], switches: tuple[str, ...]) -> None:
    """Raise PluginError for switches that a kernel does not take."""
    if len(switches) > MAX_SWITCHES or named[len(named) - len(switches) :] != switches:
        raise PluginError(
            f"pointwise op {name}: its parameters are {', '.join(named)}; at most {MAX_SWITCHES} switches, here "
            f"{', '.join(switches)}, come last"
        )


def derivative_of(name: str, forward: Expression, derivative: Any) -> Expression:
    """The expression of the derivative, whose parameters are known by name.

    Raises PluginError for a function that cannot be the derivative of ``forward``.
    """
    named = [parameter.name for parameter in parameters(derivative)]
    unknown = [each for each in named[1:] if each not in (*forward.parameters, OUTPUT)]
    if named[:1] != [GRADIENT] or unknown:
        raise PluginError(
            f"pointwise op {name}: its derivative takes ({', '.join(named)}); expected '{GRADIENT}' first, then any of "
            f"{', '.join((*forward.parameters, OUTPUT))}"
        )
    switches = tuple(each for each in forward.switches if each in named)
    check_switches(f"{name}_backward", tuple(named), switches)
    operands = tuple(each for each in named if each in (GRADIENT, OUTPUT, *forward.operands))
    halves = forward.operands[-forward.parts :]
    if forward.parts > 1 and operands[-forward.parts :] != halves:
        raise PluginError(
            f"pointwise op {name}: its derivative takes ({', '.join(named)}); of its tensors {', '.join(halves)}, the "
            "parts of one, come last, so that the gradient has a packed tensor's shape"
        )
    return Expression(
        f"{name}_backward",
        derivative,
        tuple(named),
        operands,
        tuple(each for each in forward.scalars if each in named),
        switches,
        gradients=len(forward.operands),
        parts=forward.parts,
    )


def check_passed(
    name: str, forward: Expression, backward: Expression | None, passed: Callable[..., Sequence[str]],
    given: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raise PluginError for what is known to be wrong with ``passed`` before a gradient is asked for."""
    if backward is None:
        raise PluginError(f"pointwise op {name}: it has passed= and no derivative, which gives the other gradients")
    if forward.parts > 1:
        raise PluginError(f"pointwise op {name}: passed= is not for parts=, whose gradient may be one packed tensor")
    names = _numbers(backward)
    try:
        inspect.signature(passed).bind(**dict.fromkeys(names))
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"pointwise op {name}: passed= takes what numbers and switches the derivative takes, by name, here "
            f"({', '.join(names)}): {error}"
        ) from None
    if set(names) <= set(given):
        _passed_names(forward, passed, {each: given[each] for each in names})


def _numbers(backward: Expression) -> tuple[str, ...]:
    return (*backward.scalars, *backward.switches)


def _passed_names(
    forward: Expression, passed: Callable[..., Sequence[str]], numbers: Mapping[str, Any]
) -> Sequence[str]:
    found = passed(**numbers)
    unknown = [each for each in found if each not in forward.operands]
    if unknown:
        raise PluginError(
            f"pointwise op {forward.name}: passed= gives {', '.join(map(repr, unknown))}; its tensors are "
            f"{', '.join(forward.operands)}"
        )
    return found


def backward_of(forward: Expression, backward: Expression, passed: Callable[..., Sequence[str]] | None) -> Backward:
    """How autograd differentiates a call of ``forward`` by ``backward``."""
    count = len(forward.operands)
    names = _numbers(backward)

    def save(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        wanted = tuple(place for place, each in enumerate(args[:count]) if getattr(each, "requires_grad", False))
        return saved_arguments(forward, backward, args, outputs, None, wanted)

    def kept(saved: tuple[Any, ...]) -> tuple[int, ...]:
        if passed is None:
            return ()
        found = _passed_names(forward, passed, dict(zip(names, saved[2 * len(backward.operands) :], strict=False)))
        return tuple(place for place in saved[-1] if forward.operands[place] in found)

    def computed(saved: tuple[Any, ...]) -> tuple[int, ...]:
        if passed is None:
            return tuple(saved[-1])
        without = kept(saved)
        return tuple(place for place in saved[-1] if place not in without)

    return Backward(
        backward.name,
        save,
        arguments=lambda saved, grads: (grads[0], *saved[1:-1], computed(saved)),
        inputs=tuple(range(count)),
        positions=computed,
        passed=None if passed is None else kept,
    )
