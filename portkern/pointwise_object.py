"""What ``@portkern.pointwise`` gives: an object that calls its op, and is copied and pickled as a function is."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from importlib import import_module
from typing import Any

from torch.compiler import is_dynamo_compiling

from portkern import library
from portkern.errors import UnknownName
from portkern.op import Op
from portkern.registry import function_of, register
from portkern.runtime import current, declared


class Pointwise:
    """A scalar function as ops: its own and, with a derivative, that of its gradient.

    Calling it calls the op, which registers the ops where that is still to do; a file of ops lists ``ops`` in its OPS.
    A copy is the object itself. A pickle names the object, or the op; the process that loads it needs the declaration.
    """

    def __init__(self, ops: tuple[Op, ...], function: Any) -> None:
        """``function`` is the scalar function, whose name and place in its module this object takes."""
        self.ops = ops
        op = ops[0]
        self._public = partial(library.call, op.name) if op.signature is None else function_of(op)
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__
        self.__name__ = op.name.rpartition("::")[2]
        self.__doc__ = self._public.__doc__
        if op.signature is not None:
            self.__signature__ = inspect.signature(self._public)

        def ready() -> None:
            self._register()

        # torch.compile runs it as it is, where it would trace the lock of ``register``. This is all that
        # torch.compiler.assume_constant_result does, but for importing the compiler.
        ready._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self._ready = ready
        declared()[op.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            self._ready()
        else:
            known = current().ops
            for op in self.ops:
                if known.get(op.name) is not op:
                    self._register()
                    break
        return self._public(*args, **kwargs)

    def _register(self) -> None:
        known = current().ops
        for op in self.ops:
            if known.get(op.name) is not op:
                register(op)

    def __repr__(self) -> str:
        return f"<portkern.pointwise {self.ops[0].name}{getattr(self, '__signature__', '')}>"

    def __copy__(self) -> Pointwise:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Pointwise:
        return self

    def __reduce__(self) -> Any:
        return restored, (self.ops[0].name, self.__module__, self._attribute())

    def _attribute(self) -> str:
        """What its module calls this object; nothing where it is no attribute of the module."""
        module, name = sys.modules.get(self.__module__), str(self.__qualname__)
        if _at(module, name) is self:
            return name
        return next((name for name, value in vars(module).items() if value is self), "") if module else ""


def _at(module: Any, path: str) -> Any:
    """What ``path``, as a qualified name, is in ``module``; None where there is nothing."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def restored(name: str, module: str, attribute: str) -> Pointwise:
    """The object of a pickle: the ``attribute`` of ``module`` where it was one, else the one declared for the op called
    ``name`` in this process. Raises UnknownName where there is neither."""
    if attribute:
        try:
            found = _at(import_module(module), attribute)
        except ModuleNotFoundError:  # of a script, or a file of ops: it may be declared all the same
            found = None
        if isinstance(found, Pointwise):
            return found
    if name not in declared():
        raise UnknownName(
            f"a pickle holds the pointwise op {name!r}, which this process does not declare: run its declaration "
            f"first, {attribute or 'a local name'} in the module {module}; a file of ops is loaded by "
            "portkern.registry.load_file"
        )
    return declared()[name]
