"""PTX for an older NVIDIA architecture, loaded by the driver of a later GPU, which translates it.

By the driver's C interface: Triton's own launcher takes binaries of the very architecture only.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from typing import Any

from portkern.errors import CompileFailed, Infeasible
from portkern.translator import Translator

LIBRARY = "libcuda.so.1"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
C_TYPES = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class PtxTranslator(Translator):
    """Keeps each kernel's loaded module, by Triton's hash of it."""

    def __init__(self) -> None:
        self._library: Any = None
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}

    def launch(
        self, compiled: Any, grid: Sequence[int], arguments: Sequence[tuple[str, Any]], stream: int, coresident: bool
    ) -> None:
        name = compiled.metadata.name
        function = self._function(compiled)
        values = [_value(kind, value) for kind, value in arguments]
        # Triton's kernels end in pointers to scratch memory, which these do not use.
        values += [ctypes.c_uint64(0)] * (_parameters(compiled.asm["ptx"], name) - len(values))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        sizes = [ctypes.c_uint(each) for each in (*grid, threads, 1, 1, shared)]
        start = self._driver().cuLaunchCooperativeKernel if coresident else self._driver().cuLaunchKernel
        rest = () if coresident else (None,)
        self._check(start(function, *sizes, ctypes.c_void_p(stream), pointers, *rest), name, Infeasible)

    def _function(self, compiled: Any) -> ctypes.c_void_p:
        name, context = compiled.metadata.name, ctypes.c_void_p()
        self._check(self._driver().cuCtxGetCurrent(ctypes.byref(context)), name, CompileFailed)
        key = (compiled.hash, context.value or 0)
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            code = compiled.asm["ptx"].encode() + b"\0"
            self._check(self._driver().cuModuleLoadData(ctypes.byref(module), code), name, CompileFailed)
            found = self._driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            self._check(found, name, CompileFailed)
            shared = ctypes.c_int(compiled.metadata.shared)
            set_ = self._driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared)
            self._check(set_, name, Infeasible)
            self._functions[key] = function
        return self._functions[key]

    def _driver(self) -> Any:
        if self._library is None:
            self._library = ctypes.CDLL(LIBRARY)
        return self._library

    def _check(self, code: int, kernel: str, error: type[Exception]) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver().cuGetErrorString(code, ctypes.byref(text))
            raise error(f"the driver refuses {kernel}: {(text.value or b'unknown error').decode()} ({code})")


def _parameters(ptx: str, name: str) -> int:
    """How many parameters the entry of kernel ``name`` declares."""
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    if found is None:
        raise CompileFailed(f"the PTX of {name} has no entry of this name")
    return len(re.findall(r"\.param\b", found[1]))


def _value(kind: str, value: Any) -> Any:
    """``value`` as the C type that Triton's ``kind`` of parameter has in PTX."""
    if kind.startswith("*"):
        return ctypes.c_uint64(value or 0)
    if kind == "fp16":
        return ctypes.c_uint16(struct.unpack("<H", struct.pack("<e", value))[0])
    if kind == "bf16":
        return ctypes.c_uint16(struct.unpack("<I", struct.pack("<f", value))[0] >> 16)
    if kind not in C_TYPES:
        raise CompileFailed(f"a parameter of type {kind} cannot be passed to translated code: use another variant")
    return C_TYPES[kind](value)
