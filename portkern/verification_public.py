"""The public function of an op, for ``verify``: what its signature makes of arguments, and how it is then called."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from portkern import library
from portkern.errors import PluginError, PortkernError
from portkern.judging import examine
from portkern.memory import Kept, same_bits
from portkern.op import Op, Result, unpack, visible
from portkern.registry import function_of
from portkern.testing import Verdict

CALLS = 3  # planned, prepared, replayed


class NotCalled(Exception):
    """The public function does not take this case, for a reason to print."""


def check_public(op: Op, args: Sequence[Any]) -> Verdict:
    """Call the public function with what the canonical ``args`` show of its arguments. What its signature makes of them
    is judged by the op's reference, and what the function gives must be that. Raises NotCalled."""
    assert op.signature is not None
    named = public_arguments(op, args)
    try:
        canonical = op.signature(**named)
        if isinstance(canonical, Result):
            raise NotCalled("its signature gives the result itself, with no call of the op to judge")
        inputs = Kept(canonical)
        outputs = library.call(op.name, *inputs.args)
    except PluginError:
        raise  # a fault in the op
    except PortkernError as error:
        raise NotCalled(str(error)) from error
    verdict = examine(op, inputs, unpack(outputs))
    if not verdict.right:
        return Verdict(verdict.ratio, f"with what its signature gives: {verdict.reason}")
    wanted = unpack(visible(op, outputs, (), named))
    function = function_of(op)
    for _ in range(
        CALLS if any(each.device.type != "cpu" for each in inputs.args if isinstance(each, torch.Tensor)) else 1
    ):
        wrong = _difference(unpack(function(**named)), wanted, op.random)
        if wrong:
            return Verdict(math.inf, f"the public function gives {wrong}")
    return verdict


def public_arguments(op: Op, args: Sequence[Any]) -> dict[str, Any]:
    """Arguments of the public function, by name: what ``Op.public`` says, the canonical ones of the same names, and
    for others that it needs the first tensors that are left. A default stays where the canonical one is of another
    type: it means something else. Raises NotCalled."""
    assert op.signature is not None
    names = [each.name for each in torch._C.parse_schema(f"{op.qualname}{op.schema}").arguments]
    given = dict(zip(names, args, strict=True)) | ({} if op.public is None else dict(op.public(*args)))
    parameters = inspect.signature(op.signature).parameters
    spare = [value for name, value in given.items() if name not in parameters and isinstance(value, torch.Tensor)]
    found = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in given:
            if default in (None, parameter.empty) or isinstance(given[name], type(default)):
                found[name] = given[name]
        elif default is parameter.empty:
            if not spare:
                raise NotCalled(f"no canonical argument is its {name!r}: give the Op public=")
            found[name] = spare.pop(0)
    return found


def _difference(found: Sequence[Any], wanted: Sequence[Any], drawn: bool) -> str:
    """How ``found`` differs from ``wanted``, of which only the shapes count where it is ``drawn`` at random."""
    if len(found) != len(wanted):
        return f"{len(found)} results, the op {len(wanted)}"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            kinds = [f"{each.dtype} of shape {list(each.shape)}" for each in (one, other)]
            return f"{kinds[0]} as result {number}, the op {kinds[1]}"
        if not drawn and not same_bits(_in_line(one), _in_line(other)):
            return f"other values than the op as result {number}"
    return ""


def _in_line(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with its elements one after another, even of one or none, of which any stride counts as contiguous."""
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
