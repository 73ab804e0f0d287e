"""From the arguments of a pointwise call to the canonical ones of its op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from portkern.arguments import NUMBERS, as_python, check_int, check_scalar, check_tensor
from portkern.broadcast import broadcast_shape
from portkern.errors import BadArgument, BadType, Mismatch, UnsupportedDtype
from portkern.pointwise_call import Expression, packed
from portkern.promotion import result_dtype

LARGEST = torch.finfo(torch.float32).max


def canonical(expression: Expression, given: Sequence[Any], integers: str = "keep") -> tuple[Any, ...]:
    """The canonical arguments of a call with ``given``, in the order of the function's parameters.

    Raises BadType, BadArgument, Mismatch, UnsupportedDtype.
    """
    op, named = expression.name, dict(zip(expression.parameters, given, strict=True))
    operands = [named[each] for each in expression.operands]
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    if not tensors:
        raise BadType(f"{op}(): no operand is a torch.Tensor; at least one must be")
    for each, value in zip(expression.operands, operands, strict=True):
        if value is not None or expression.parts == 1:
            named[each] = check_operand(op, each, value)
    if any(each.shape != tensors[0].shape for each in tensors):
        broadcast_shape(op, [each.shape for each in tensors])
    named.update({each: check_scalar(op, each, named[each]) for each in expression.scalars})
    scalars = [int(named[each]) if isinstance(named[each], bool) else named[each] for each in expression.scalars]
    operands = [named[each] for each in expression.operands]
    present = [each for each in operands if each is not None]
    dtype = result_dtype(op, present)
    if integers == "refuse" and not dtype.is_floating_point:  # whatever a number beside them is
        shown = str(dtype).removeprefix("torch.")
        raise UnsupportedDtype(f"{op}(): not implemented for {shown}; convert to a floating dtype first")
    dtype = result_dtype(op, [*present, *(named[each] for each in expression.scalars)])
    if integers == "float" and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    for each in (*operands, *scalars):
        _check_integer(op, each, dtype)
    for name, number in zip(expression.scalars, scalars, strict=True):
        if isinstance(number, float) and dtype != torch.float64 and LARGEST < abs(number) < math.inf:
            raise Mismatch(f"{op}(): {name} is {number}, more than float32 holds: give float64 tensors, or less")
    if expression.parts > 1:
        operands = _whole_parts(expression, operands, tensors[0], dtype)
    operands, numbers = _to_one_device(operands, tensors)
    switches = [_switch(op, each, named[each]) for each in expression.switches]
    return (*operands, *numbers, *scalars, *switches, dtype)


def check_operand(op: str, name: str, value: Any) -> Any:
    """``value`` if it is a dense tensor or a number. Raises BadType or BadArgument."""
    if isinstance(value, torch.Tensor):
        return check_tensor(op, name, value)
    value = as_python(value)
    if not isinstance(value, NUMBERS):
        raise BadType(f"{op}(): argument '{name}' must be a torch.Tensor or a number, not {type(value).__name__}")
    return value


def _switch(op: str, name: str, value: Any) -> int:
    number = int(value) if isinstance(value, bool) else check_int(op, name, value)
    if not -(2**63) <= number < 2**63:
        raise Mismatch(f"{op}(): {name} is an integer of {number.bit_length()} bits; it takes 64")
    return number


def _check_integer(op: str, number: Any, dtype: torch.dtype) -> None:
    """Raise Mismatch for an integer that does not fit what a kernel, or torch, is given."""
    top = 64 if dtype.is_floating_point else 63
    if isinstance(number, int) and not -(2**63) <= number < 2**top:
        bits = number.bit_length()
        raise Mismatch(f"{op}(): an integer of {bits} bits does not lie between -2^63 and 2^{top} - 1: give a float")


def _whole_parts(expression: Expression, operands: list[Any], beside: torch.Tensor, dtype: torch.dtype) -> list[Any]:
    """Operands of a function that also takes one packed tensor: an absent one says so, so numbers become tensors."""
    parts, op = expression.parts, expression.name
    if packed(expression, tuple(operands)):
        whole = operands[-parts]
        if whole.dim() == 0 or whole.shape[-1] % parts:
            raise BadArgument(
                f"{op}(): a packed tensor of shape {tuple(whole.shape)} has no last dim that is a multiple of "
                f"{parts}: give its parts as tensors of their own"
            )
        return operands
    return [
        each if isinstance(each, torch.Tensor) else torch.full((), each, dtype=dtype, device=beside.device)
        for each in operands
    ]


def _to_one_device(operands: list[Any], tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """The tensors, and the numbers in the place of those that are none. A 0-d CPU tensor beside GPU tensors is a
    number, as in torch, unless its gradient is wanted."""
    elsewhere = next((each.device for each in tensors if each.device.type != "cpu"), None)
    found: list[Any] = []
    numbers: list[Any] = []
    for each in operands:
        number: Any = 0
        if isinstance(each, torch.Tensor):
            if elsewhere is not None and each.device.type == "cpu" and each.dim() == 0:
                if each.requires_grad or torch.compiler.is_compiling():
                    each = each.to(elsewhere)
                else:
                    number, each = each.item(), None
        elif each is not None:
            each, number = None, int(each) if isinstance(each, bool) else each
        found.append(each)
        numbers.append(number)
    return found, numbers
