"""Checks that public functions make of their arguments, with torch's error classes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import torch

from portkern.errors import BadArgument, BadDim, BadType, UnsupportedDtype

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}  # in seconds
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # of which torch takes a number, and nothing is computed
NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat)
LONGEST_SHOWN = 40  # characters of a value in a message


def check_tensor(op: str, name: str, value: Any) -> torch.Tensor:
    """``value`` if it is a dense tensor. Raises BadType or BadArgument."""
    if not isinstance(value, torch.Tensor):
        raise BadType(f"{op}(): argument '{name}' must be a torch.Tensor, not {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        raise BadArgument(
            f"{op}(): argument '{name}' is {'nested' if value.is_nested else value.layout}; "
            "make it dense first, with .to_dense() or .to_padded_tensor()"
        )
    return value


def check_dim(op: str, dim: Any, rank: int) -> int:
    """``dim`` as an index from 0. A 0-d tensor takes -1 and 0, as in torch. Raises BadDim, BadType."""
    try:
        if isinstance(dim, bool):
            raise TypeError
        index = operator.index(dim)
    except TypeError:
        raise BadType(f"{op}(): argument 'dim' must be an int, not {type(dim).__name__}") from None
    span = max(rank, 1)
    if not -span <= index < span:
        raise BadDim(f"{op}(): dim {dim} is out of range; a tensor of rank {rank} takes {-span} to {span - 1}")
    return index % span


def check_one_dim(op: str, dim: Any, rank: int) -> int:
    """``check_dim`` where torch takes one int, and not one of several: no bool in a tensor, and no tensor with dims."""
    return check_dim(op, check_int(op, "dim", dim, size=False), rank)


def check_int(op: str, name: str, value: Any, *, size: bool = True) -> int:
    """``value`` if it is an integer, Python's or numpy's, or a tensor of one, and no bool. For a ``size`` torch takes
    tensors and arrays of one element, whatever their dims; else 0-d tensors alone. Raises BadType."""
    try:
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype not in (*INTEGERS, *UNSIGNED)):
            raise TypeError
        if not size and (value.dim() if isinstance(value, torch.Tensor) else _is_array(value)):
            raise TypeError
        # What torch.compile has for a size is an integer, and stays symbolic.
        return value if isinstance(value, (int, torch.SymInt)) else operator.index(value)  # type: ignore[return-value]
    except (TypeError, RuntimeError):  # torch's, of a tensor without a value
        raise BadType(
            f"{op}(): argument '{name}' must be an int, not {type(value).__name__} ({_shown(value)}); "
            "write it as a Python int"
        ) from None


def _is_array(value: Any) -> bool:
    """Whether it is numpy's, which is not imported to ask."""
    return (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")


def check_bool(op: str, name: str, value: Any) -> bool:
    """``value`` if it is True or False, as torch asks: 1 and numpy's are none. Raises BadType."""
    if not isinstance(value, bool):
        raise BadType(f"{op}(): argument '{name}' must be a bool, not {type(value).__name__}: give True or False")
    return value


def check_number(op: str, name: str, value: Any) -> float:
    """``value`` as a float, if it is a number as ``check_scalar`` takes. Raises BadType, BadArgument."""
    if type(value) is float:
        return value
    try:
        traced = torch.compiler.is_compiling() and not isinstance(value, NUMBERS)
        return float(value if traced and _traceable(value) else check_scalar(op, name, value))
    except OverflowError:
        raise BadArgument(f"{op}(): argument '{name}' is an integer that no float64 holds: give less") from None


def check_scalar(op: str, name: str, value: Any) -> Any:
    """``value`` as torch takes one for a number: a bool, int or float, Python's or numpy's, or that of a 0-d tensor
    without a gradient. Nothing else that has a float in it. Raises BadType."""
    value = as_python(value)
    if isinstance(value, torch.Tensor):
        value = _item(op, name, value)
    if isinstance(value, NUMBERS):
        return value
    raise BadType(
        f"{op}(): argument '{name}' must be a number, not {type(value).__name__} ({_shown(value)}); "
        "write it as a Python float or int"
    )


def as_python(value: Any) -> Any:
    """A numpy number as Python's; anything else as it is. To torch numpy's bool is a float."""
    kind = type(value)
    if isinstance(value, NUMBERS) and kind.__module__ != "numpy":  # whose float64 is a float
        return value
    if kind.__module__ != "numpy" or not (isinstance(value, Real) or kind.__name__ in ("bool", "bool_")):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _item(op: str, name: str, tensor: torch.Tensor) -> Any:
    """The value of a 0-d ``tensor`` that stands for a number."""
    start = f"{op}(): argument '{name}' must be a number, not a tensor"
    remedy = f"give {name}.item()" if tensor.numel() == 1 else "give a number"
    if tensor.dim() or tensor.requires_grad:
        which = f"of shape {list(tensor.shape)}" if tensor.dim() else "that requires a gradient, which would be lost"
        raise BadType(f"{start} {which}: {remedy}")
    if torch.compiler.is_compiling():
        raise BadType(f"{start}, whose value is not known while this is compiled: {remedy} outside")
    try:
        return tensor.item()
    except (RuntimeError, NotImplementedError) as error:  # a fake one, one on the meta device or of torch.func
        raise BadType(f"{start} without a value ({str(error)[:80]}): give a number") from None


def _traceable(value: Any) -> bool:
    """Whether torch.compile can go on with the float of ``value``, an array or a tensor: numpy's numbers are arrays to
    it, and of those with 64 bits it can."""
    if not isinstance(value, torch.Tensor):
        return type(value).__module__ == "numpy" and value.ndim == 0 and value.itemsize == 8
    return value.ndim == 0 and value.itemsize == 8 and not value.requires_grad


def _shown(value: Any) -> str:
    """``value`` in a message."""
    text = f"of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def autocast_to_float32(tensor: torch.Tensor, *, cpu: bool = False) -> torch.dtype:
    """The dtype that torch's autocast gives an op on its float32 list: float32 for 16-bit GPU tensors in an
    autocast region, else the tensor's own. ``cpu`` is whether its list for the CPU, which is another, has the op too:
    softmax keeps the dtype there."""
    device = tensor.device.type
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    # torch knows no autocast for meta tensors.
    if narrow and device != "meta" and (cpu or device != "cpu") and torch.is_autocast_enabled(device):
        return torch.float32
    return tensor.dtype


def autocast_to_narrow(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as torch's autocast gives it to an op on its list of matrix products: in the region's dtype, unless it
    is float64 or no floating-point tensor."""
    device = tensor.device.type
    if device == "meta":  # torch knows no autocast for it
        return tensor
    if tensor.dtype.is_floating_point and tensor.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def tf32_asked() -> bool:
    """Whether torch's setting for fp32 matrix products permits rounding the operands to tf32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# As torch.compiler.assume_constant_result marks it, whose import takes a second. torch's own guards recompile what was
# traced when the setting changes.
tf32_asked._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_dtype(op: str, name: str, dtype: Any, allowed: Collection[torch.dtype], remedy: str = "") -> torch.dtype:
    """``dtype`` if it is one of ``allowed``. Raises BadType, UnsupportedDtype."""
    if not isinstance(dtype, torch.dtype):
        raise BadType(f"{op}(): argument '{name}' must be a torch.dtype, not {type(dtype).__name__}")
    if dtype not in allowed:
        names = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        raise UnsupportedDtype(
            f"{op}(): '{name}' is {str(dtype).removeprefix('torch.')}, not implemented; "
            f"it takes {names}" + (f"; {remedy}" if remedy else "")
        )
    return dtype


def refuse_inplace(op: str, inplace: Any) -> None:
    """Raise BadArgument where torch's ``inplace=True`` is asked for, BadType for what is no bool."""
    if isinstance(inplace, torch.Tensor):
        raise BadType(f"{op}(): argument 'inplace' must be a bool, not {type(inplace).__name__}")
    if inplace:
        raise BadArgument(f"{op}(): inplace is {inplace!r}; portkern never alters its arguments: leave it False")


def seconds(budget: float | str) -> float:
    """The seconds in ``90``, ``"90s"``, ``"5m"``, ``"1h"``. Raises BadArgument."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(budget))
    found = float(match[1]) * UNITS[match[2]] if match and not isinstance(budget, bool) else 0.0
    if not 0 < found < math.inf:
        raise BadArgument(f"budget {budget!r} is no length of time above 0; write seconds, '90s', '5m' or '1h'")
    return found
