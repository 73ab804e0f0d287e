"""Numbers that note what is asked of them: what is planned from such sizes holds for all that would answer alike.

A ``Trace`` hands out one ``Size`` for each size of a call. Arithmetic on them makes further ones; whatever decides
something (a comparison, a loop, an index) is answered by the sizes of this call, and noted. ``Trace.function`` gives
the numbers that were made for other sizes, or None where one of them would have been answered otherwise.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Made = Callable[[Sequence[int]], "tuple[Any, ...] | None"]

_ARITHMETIC = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_,
    "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_COMPARED = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OTHERWISE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def _arithmetic(symbol: str) -> tuple[Any, Any]:
    def forward(self: Any, other: Any) -> Any:
        return self.trace.computed(symbol, self, other) if isinstance(other, (int, float)) else NotImplemented

    def reflected(self: Any, other: Any) -> Any:
        return self.trace.computed(symbol, other, self) if isinstance(other, (int, float)) else NotImplemented

    return forward, reflected


def _comparison(symbol: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        return self.trace.compared(symbol, self, other) if isinstance(other, (int, float)) else NotImplemented

    return compare


class Size:
    """A number of a traced call. It passes for the int or float that it is, and has no hash: whatever would keep it
    beyond the trace, as a key or a copy, fails.

    What Python's own code reads as a number (an index, a range, a conversion, a text) is from then on this very one.
    """

    __slots__ = ("name", "trace", "value")
    __hash__ = None  # type: ignore[assignment]

    __add__, __radd__ = _arithmetic("+")
    __sub__, __rsub__ = _arithmetic("-")
    __mul__, __rmul__ = _arithmetic("*")
    __truediv__, __rtruediv__ = _arithmetic("/")
    __floordiv__, __rfloordiv__ = _arithmetic("//")
    __mod__, __rmod__ = _arithmetic("%")
    __pow__, __rpow__ = _arithmetic("**")
    __lshift__, __rlshift__ = _arithmetic("<<")
    __rshift__, __rrshift__ = _arithmetic(">>")
    __and__, __rand__ = _arithmetic("&")
    __or__, __ror__ = _arithmetic("|")
    __xor__, __rxor__ = _arithmetic("^")
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")
    __eq__, __ne__ = _comparison("=="), _comparison("!=")

    def __init__(self, trace: Trace, name: str, value: Any) -> None:
        self.trace, self.name, self.value = trace, name, value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def fixed(self) -> Any:
        """The plain number, noted: it holds for this one alone."""
        self.trace.compared("==", self, self.value)
        return self.value

    def __index__(self) -> int:
        return operator.index(self.fixed())

    def __int__(self) -> int:
        return int(self.fixed())

    __trunc__ = __int__

    def __float__(self) -> float:
        return float(self.fixed())

    def __bool__(self) -> bool:
        return self.trace.compared("!=", self, 0)

    def bit_length(self) -> int:
        """As of an int: noted as the powers of two that it lies between."""
        bits: int = self.value.bit_length()
        _ = (self >= 1 << (bits - 1), self < 1 << bits) if self.value > 0 else self.fixed()
        return bits

    def __neg__(self) -> Any:
        return 0 - self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __ceil__(self) -> Any:
        return self.trace.applied("ceil", math.ceil, self)

    def __floor__(self) -> Any:
        return self.trace.applied("floor", math.floor, self)

    def __round__(self, digits: int | None = None) -> Any:
        return self.trace.applied("round", round, self) if digits is None else round(self.fixed(), digits)

    def __repr__(self) -> str:
        return f"<size {self.name}>" if self.trace.telling else repr(self.fixed())

    def __format__(self, spec: str) -> str:
        return repr(self) if self.trace.telling else format(self.fixed(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:  # ``dataclasses.asdict`` comes here too
        raise TypeError("no copy of a traced size: what is asked of one would not be noted")


@dataclass
class Trace:
    """What was computed and asked in one traced call, in order."""

    texts: dict[str, str] = field(default_factory=dict)  # by name, of what is computed
    made: dict[str, Size] = field(default_factory=dict)  # by text: each is computed once
    variables: list[Size] = field(default_factory=list)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)  # (name, comparison that holds, number or name)
    telling: bool = False  # texts are reasons for a person: they show no number, and decide nothing

    def variable(self, value: int) -> Any:
        """A size of the call."""
        self.variables.append(Size(self, f"v{len(self.variables)}", value))
        return self.variables[-1]

    def computed(self, symbol: str, a: Any, b: Any) -> Size:
        """The result of an arithmetic operation."""
        if symbol == "**":
            _ = b >= 0, a >= 0  # which tells an int from a float, and a float from a complex number
        return self._make(f"{_text(a)} {symbol} {_text(b)}", lambda: _ARITHMETIC[symbol](plain(a), plain(b)))

    def applied(self, name: str, function: Callable[[Any], Any], a: Size) -> Size:
        """The result of a function of one number, which ``_NAMES`` knows."""
        return self._make(f"{name}({a.name})", lambda: function(a.value))

    def _make(self, text: str, value: Callable[[], Any]) -> Size:
        found = self.made.get(text)
        if found is None:
            found = self.made[text] = Size(self, f"t{len(self.texts)}", value())
            self.texts[found.name] = text
        return found

    def compared(self, symbol: str, a: Size, b: Any) -> bool:
        """The answer to a comparison, which is noted."""
        answer = bool(_COMPARED[symbol](a.value, plain(b)))
        if a is b:
            return answer  # for all sizes
        symbol = symbol if answer else _OTHERWISE[symbol]
        self.asked.append((a.name, symbol, b.name if is_traced(b) else b))
        return answer

    def forget(self) -> None:
        """Keep nothing of what was noted: the numbers that are left last as long as what was planned with them."""
        for noted in (self.texts, self.made, self.variables, self.asked):
            noted.clear()

    def function(self, wanted: Sequence[Size]) -> Made:
        """From the sizes of a call, in the order of ``variables``, to the ``wanted`` numbers, or None."""
        source = _Source(self.texts, dict.fromkeys(each.name for each in self.variables))
        for name, conditions in _merged(self.asked).items():
            source.need(name)
            for condition in conditions:
                source.ask(name, condition)
        for each in wanted:
            source.need(each.name)
        return source.function([each.name for each in wanted])


def _merged(asked: Sequence[tuple[str, str, Any]]) -> Mapping[str, list[str]]:
    """What is asked of each number, as few conditions as say the same, in the order of the numbers' first questions.

    A condition that holds earlier than it was asked can only leave out more.
    """
    found: dict[str, list[str]] = {}
    bounds: dict[str, dict[str, list[Any]]] = {}
    for name, symbol, other in asked:
        conditions = found.setdefault(name, [])
        if isinstance(other, str):
            if (condition := f"{name} {symbol} {other}") not in conditions:
                conditions.append(condition)
        else:
            bounds.setdefault(name, {}).setdefault(symbol, []).append(other)
    for name, limits in bounds.items():
        exact, unequal = limits.pop("==", []), limits.pop("!=", [])
        for symbol, numbers in limits.items():
            found[name].append(f"{name} {symbol} {_text(min(numbers) if symbol in ('<', '<=') else max(numbers))}")
        found[name] += [f"{name} == {_text(number)}" for number in dict.fromkeys(exact)]
        if unequal and not exact:
            found[name].append(f"{name} not in {{{', '.join(_text(number) for number in dict.fromkeys(unequal))}}}")
    return found


class _Source:
    """Python source that computes each number once, and not before it is needed."""

    def __init__(self, texts: Mapping[str, str], known: dict[str, None]) -> None:
        self.texts, self.known = texts, known
        self.lines = [f"{', '.join(known)}, = sizes"] if known else []

    def need(self, name: str) -> None:
        """Have ``name`` computed by here."""
        waiting = [name]
        while waiting:
            name = waiting[-1]
            lacking = [each for each in _names(self.texts.get(name, "")) if each not in self.known]
            if name in self.known or not lacking:
                waiting.pop()
                if name not in self.known:
                    self.known[name] = None
                    self.lines.append(f"{name} = {self.texts[name]}")
            else:
                waiting += lacking

    def ask(self, name: str, condition: str) -> None:
        """Give None where ``condition`` does not hold."""
        for each in _names(condition):
            if each != name:
                self.need(each)
        self.lines.append(f"if not {condition}: return None")

    def function(self, wanted: Sequence[str]) -> Made:
        body = "\n        ".join([*self.lines, f"return ({''.join(f'{name}, ' for name in wanted)})"])
        # A division by what is 0 for these sizes, say, which a later condition would have left out.
        source = f"def made(sizes):\n    try:\n        {body}\n    except errors: return None\n"
        space: dict[str, Any] = {**_NAMES, "errors": (ArithmeticError, ValueError, TypeError)}
        exec(compile(source, "<portkern sizes>", "exec"), space)  # made of the texts above
        made: Made = space["made"]
        return made


_NAMES = {"ceil": math.ceil, "floor": math.floor, "round": round, "log2": math.log2, "inf": math.inf, "nan": math.nan}


def _names(text: str) -> Iterator[str]:
    """The names of sizes in ``text``."""
    words = text.replace("(", " ").replace(")", " ").split()
    return (word for word in words if word[0] in "vt" and word[1:].isdigit())


def _text(number: Any) -> str:
    if is_traced(number):
        return str(number.name)
    # Not by repr(): that of an IntEnum's member or of numpy's float64 is no number in Python.
    return f"({int.__repr__(number) if isinstance(number, int) else float.__repr__(number)})"


def is_traced(number: Any) -> bool:
    """Whether ``number`` is a Size, which passes for a plain number otherwise."""
    return type(number) is Size


def plain(number: Any) -> Any:
    """The number itself, unnoted."""
    return number.value if is_traced(number) else number


def log2(number: Any) -> Any:
    """``math.log2``, of traced numbers too."""
    return number.trace.applied("log2", math.log2, number) if is_traced(number) else math.log2(number)


def kept(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """``functools.lru_cache``, typed, that also takes arguments without a hash, whose results it does not keep."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        known = functools.lru_cache(maxsize=maxsize, typed=True)(function)

        @functools.wraps(function)
        def call(*args: Any) -> T:
            try:
                hash(args)
            except TypeError:
                return function(*args)
            return known(*args)

        return call

    return decorate
