"""The parameters of a scalar function, and the public function that they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl

from portkern.errors import PluginError
from portkern.op import Result
from portkern.pointwise_arguments import canonical
from portkern.pointwise_call import Expression


def parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a ``@triton.jit`` function. Raises PluginError for anything else, or one that cannot run."""
    if not hasattr(function, "fn"):
        raise PluginError(f"pointwise() takes a @triton.jit function of scalars, got {function!r}")
    if tl not in function.fn.__globals__.values():
        raise PluginError(
            f"the module of {function.fn.__name__} does not import triton.language, which Triton's interpreter "
            "looks for there: add 'import triton.language as tl'"
        )
    return list(inspect.signature(function.fn).parameters.values())


def kind_of(parameter: inspect.Parameter) -> str:
    """``scalar``, ``switch`` or ``operand``; annotations may be texts."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "switch" if "constexpr" in text else "scalar" if text in ("float", "int") else "operand"


def defaults_of(function: Any) -> dict[str, Any]:
    """The parameters that have a default, with it."""
    found = {parameter.name: parameter.default for parameter in parameters(function)}
    return {name: value for name, value in found.items() if value is not inspect.Parameter.empty}


def signature_of(function: Any) -> Callable[..., tuple[Any, ...]]:
    """A public function with the parameters of the scalar function."""
    kinds = {"operand": "Tensor | float", "scalar": "float", "switch": "int"}
    shown = [parameter.replace(annotation=kinds[kind_of(parameter)]) for parameter in parameters(function)]
    names = [parameter.name for parameter in shown]
    defaults = defaults_of(function)

    def given(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in names if name not in found]
        if len(args) > len(names) or missing or len(found) > len(names):
            raise TypeError(
                f"{given.__name__}() takes ({', '.join(names)}); got {len(args)} arguments and the keywords "
                f"{', '.join(kwargs) or '(none)'}, without {', '.join(missing) or '(none)'}"
            )
        return tuple(found[name] for name in names)

    given.__name__ = given.__qualname__ = function.fn.__name__
    given.__doc__ = function.fn.__doc__ or f"Elementwise function of {', '.join(names)}."
    given.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    given.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return given


def public_function(
    name: str, expression: Expression, signature: Callable[..., tuple[Any, ...]], integers: str
) -> Callable[..., tuple[Any, ...]]:
    """``signature``, whose results are checked and made canonical."""

    @functools.wraps(signature)
    def public(*args: Any, **kwargs: Any) -> Any:
        given = signature(*args, **kwargs)
        return given if isinstance(given, Result) else canonical(expression, given, integers)

    public.__name__ = name.rpartition("::")[2]
    return public
