"""What can be known to be wrong with the declaration of a pointwise op, before anyone calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portkern.errors import PluginError
from portkern.op import Case
from portkern.pointwise_call import Expression
from portkern.pointwise_values import NOTHING, SINGLE, values_given

DTYPES = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("keep", "float", "refuse")


def check_name(name: Any) -> None:
    """Raise PluginError for what is no text; ``Op`` checks how it is spelt."""
    if not isinstance(name, str):
        raise PluginError(f"pointwise() takes the name of an op first, as in 'mine::axpy', not {name!r}")


def check_words(
    name: str, *, integers: Any, dtypes: Any, live: Any, result: Any, cases: Any, tune_cases: Any
) -> None:  # fmt: skip
    """Raise PluginError for a setting that there is not."""

    def refuse(word: str, value: Any, wanted: str) -> None:
        raise PluginError(f"pointwise op {name}: {word} is {value!r}; it takes {wanted}")

    if integers not in INTEGERS:
        refuse("integers", integers, "'keep', 'float' or 'refuse'")
    if isinstance(dtypes, str) or not isinstance(dtypes, Sequence):
        refuse("dtypes", dtypes, f"a sequence of {', '.join(DTYPES)}")
    unknown = [each for each in dtypes if each not in DTYPES]
    if unknown or not dtypes:
        found = ", ".join(map(repr, unknown)) or "nothing"
        raise PluginError(f"pointwise op {name}: dtypes has {found}; it takes {', '.join(DTYPES)}")
    if isinstance(live, bool) or not isinstance(live, (int, float)) or not live >= 0:
        refuse("live", live, "a number of registers, 0 or more")
    if result is not None and not isinstance(result, torch.dtype):
        refuse("result", result, "a torch.dtype")
    for word, given in (("cases", cases), ("tune_cases", tune_cases)):
        absent = given is None and word == "cases"
        if not absent and not (isinstance(given, Sequence) and all(isinstance(each, Case) for each in given)):
            refuse(word, given, "a sequence of portkern.Case")


def check_parts(expression: Expression) -> None:
    """Raise PluginError for a number of parts that no tensor can be cut into."""
    parts, count = expression.parts, len(expression.operands)
    if type(parts) is not int or not 1 <= parts <= count:
        raise PluginError(
            f"pointwise op {expression.name}: parts is {parts!r}; it is how many of the last tensors may be one, from "
            f"1 to {count}, for {', '.join(expression.operands)}"
        )


def check_functions(
    forward: Expression, backward: Expression | None, of_forward: Mapping[str, Any], of_backward: Mapping[str, Any]
) -> None:
    """Raise PluginError for functions of the declaration, by their words in it, that cannot be called with the
    parameters of the scalar function, or of its derivative, by position; absent ones are None."""
    for word, function in of_forward.items():
        if function is not None or word == "reference":
            _check_function(forward.name, word, function, forward.parameters)
    for word, function in of_backward.items():
        if function is not None and backward is None:
            raise PluginError(f"pointwise op {forward.name}: it has {word}= and no derivative=, which it speaks of")
        if function is not None and backward is not None:
            _check_function(forward.name, word, function, backward.parameters)


def _check_function(name: str, word: str, function: Any, parameters: Sequence[str]) -> None:
    check_callable(name, word, function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin, as torch.relu is, does not say what it takes
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise PluginError(
            f"pointwise op {name}: {word} is called with ({', '.join(parameters)}), by position, and takes "
            f"{signature}: {error}"
        ) from None


def check_callable(name: str, word: str, function: Callable[..., Any] | None) -> None:
    """Raise PluginError for what cannot be called."""
    if not callable(function):
        raise PluginError(f"pointwise op {name}: {word} is {function!r}; it takes a function")


def check_results(name: str, forward: Expression, backward: Expression | None) -> None:
    """Raise PluginError where the scalar functions' sources say that they give another number of values than they have
    to. On the CPU the references run, so that nobody would see it there."""
    found = values_given(forward.function)
    if found not in (SINGLE, None):
        raise PluginError(f"pointwise op {name}: its function gives {_shown(found)}; it must give one value")
    if backward is None:
        return
    found, wanted = values_given(backward.function), len(forward.operands)
    if found is None or found == (SINGLE if wanted == 1 else wanted):
        return
    expected = "one value" if wanted == 1 else f"a tuple of {wanted}"
    raise PluginError(
        f"pointwise op {name}: its derivative gives {_shown(found)}; it must give {expected}, one gradient for each of "
        f"its tensors {', '.join(forward.operands)}"
    )


def _shown(found: int | None) -> str:
    return {SINGLE: "one value", NOTHING: "nothing"}.get(found or NOTHING, f"a tuple of {found}")
