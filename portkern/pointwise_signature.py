"""The parameters of a scalar function, their defaults, and the public function that they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import triton.language as tl

from portkern.arguments import NUMBERS, as_python
from portkern.errors import PluginError
from portkern.op import Result
from portkern.pointwise_arguments import canonical
from portkern.pointwise_call import Expression


def parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a ``@triton.jit`` function. Raises PluginError for anything else, or one that cannot run."""
    if not hasattr(function, "fn"):
        raise PluginError(
            f"pointwise() takes a @triton.jit function of scalars, written with def in a Python file, got {function!r}"
        )
    name = function.fn.__name__
    if name == "<lambda>" or not _has_source(function):
        what = "a lambda" if name == "<lambda>" else f"{name}, whose source is in no file"
        raise PluginError(f"pointwise() got {what}: Triton reads the source, so write it with def in a Python file")
    if tl not in function.fn.__globals__.values():
        raise PluginError(
            f"the module of {name} does not import triton.language, which Triton's interpreter "
            "looks for there: add 'import triton.language as tl'"
        )
    found = list(inspect.signature(function.fn).parameters.values())
    for each in found:
        if each.kind is not each.POSITIONAL_OR_KEYWORD:
            raise PluginError(
                f"the function {name} has the {each.kind.description} parameter '{each.name}'; kernels give it its "
                "arguments by position: write plain parameters, and a signature= for a public function that has others"
            )
    return found


def _has_source(function: Any) -> bool:
    """Triton's interpreter takes functions without one, which no GPU can run."""
    try:
        return hasattr(function, "src") or bool(inspect.getsource(function.fn))
    except OSError:
        return False


def kind_of(parameter: inspect.Parameter) -> str:
    """``scalar``, ``switch`` or ``operand``; annotations may be texts."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "switch" if "constexpr" in text else "scalar" if text in ("float", "int") else "operand"


def defaults_of(function: Any) -> dict[str, Any]:
    """The parameters that have a default, with it."""
    found = {parameter.name: parameter.default for parameter in parameters(function)}
    return {
        name: value.value if isinstance(value, tl.constexpr) else value
        for name, value in found.items()
        if value is not inspect.Parameter.empty
    }


def check_values(word: str, expression: Expression, given: Any, known: tuple[str, ...]) -> dict[str, Any]:
    """What ``word`` of the declaration gives the parameters that are ``known``. Raises PluginError for others, and for
    values that a call would refuse."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PluginError(f"pointwise op {expression.name}: {word} is a mapping of names to numbers, not {given!r}")
    for name, value in given.items():
        if name not in known:
            raise PluginError(
                f"pointwise op {expression.name}: {word} names {name!r}; it may name {', '.join(known) or 'nothing'}"
            )
        kinds = (int,) if name in expression.switches else NUMBERS
        absent = value is None and expression.parts > 1 and name in expression.operands
        if not absent and not isinstance(as_python(value), kinds):
            wanted = "an integer, which a switch is" if name in expression.switches else "a number"
            raise PluginError(f"pointwise op {expression.name}: {word} gives {name} as {value!r}; it must be {wanted}")
    return dict(given)


def signature_of(name: str, function: Any, defaults: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """A public function with the parameters of the scalar function and these ``defaults``, for the op called ``name``.

    It is compiled from text, so that Python itself binds the arguments and says what is wrong with them. Raises
    PluginError for a parameter without default behind one with.
    """
    shown = parameters(function)
    names = [parameter.name for parameter in shown]
    last = next((place for place, each in enumerate(names) if each in defaults), len(names))
    bare = [each for each in names[last:] if each not in defaults]
    if bare:
        raise PluginError(
            f"pointwise op {name}: '{names[last]}' has a default and {', '.join(bare)} after it has none: give "
            "it one too, or put it first"
        )
    made: dict[str, Any] = {}
    exec(f"def given({', '.join(names)}):\n    return ({''.join(f'{each}, ' for each in names)})", made)
    given: Any = made["given"]
    kinds = {"operand": "Tensor | float", "scalar": "float", "switch": "int"}
    given.__defaults__ = tuple(defaults[each] for each in names[last:])
    given.__name__ = given.__qualname__ = name.rpartition("::")[2]
    given.__doc__ = function.fn.__doc__ or f"Elementwise function of {', '.join(names)}."
    given.__annotations__ = {parameter.name: kinds[kind_of(parameter)] for parameter in shown}
    return given  # type: ignore[no-any-return]


def public_function(
    name: str, expression: Expression, signature: Callable[..., tuple[Any, ...]], integers: str
) -> Callable[..., tuple[Any, ...]]:
    """``signature``, whose results are checked and made canonical. A call raises PluginError where they are others
    than the parameters of the scalar function."""

    @functools.wraps(signature)
    def public(*args: Any, **kwargs: Any) -> Any:
        given = signature(*args, **kwargs)
        if isinstance(given, Result):
            return given
        if not isinstance(given, (tuple, list)) or len(given) != len(expression.parameters):
            raise PluginError(
                f"pointwise op {name}: its signature= gives {given!r}; it must give a tuple of "
                f"{', '.join(expression.parameters)}"
            )
        return canonical(expression, given, integers)

    public.__name__ = name.rpartition("::")[2]
    return public
