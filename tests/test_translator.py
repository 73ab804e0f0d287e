"""Code of an older architecture on a later GPU: what the driver is told, without a driver; and refusals by name."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portkern.backends._nvidia_translator import PtxTranslator, _parameters, _value
from portkern.dispatch import reference_device
from portkern.errors import BadArgument, CompileFailed, Infeasible, UnknownName
from portkern.executors.translate import translator_of
from portkern.runtime import current
from portkern.verification import verify

PTX = """
.visible .entry kernel(
\t.param .u64 .ptr .global .align 1 kernel_param_0,
\t.param .u32 kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2,
\t.param .u64 .ptr .global .align 1 kernel_param_3
)
.reqntid 128
{ ret; }
"""
COMPILED = SimpleNamespace(
    hash="a", asm={"ptx": PTX}, metadata=SimpleNamespace(name="kernel", num_warps=4, shared=66_000)
)


class Driver:
    """Writes down what it is called with, and what lies behind the kernel's parameters."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuGetErrorString":
                args[1]._obj.value = b"no image for this device"
                return 0
            values = [arg.value if hasattr(arg, "value") else arg for arg in args]
            if name.startswith("cuLaunch"):
                pointers = args[9]
                values[9] = [ctypes.c_uint32.from_address(pointers[i]).value for i in range(len(pointers))]
            self.calls.append((name, values))
            return 209 if name == self.fails else 0

        return call


def launched(coresident: bool = False, driver: Driver | None = None) -> Driver:
    translator, driver = PtxTranslator(), driver or Driver()
    translator._library = driver
    for _ in range(2):
        translator.launch(COMPILED, (5, 2, 1), [("*fp32", 0x1000), ("i32", -7)], 99, coresident)
    return driver


def test_what_the_driver_is_told() -> None:
    calls = launched().calls
    names = [name for name, _ in calls]
    assert names.count("cuModuleLoadData") == 1 and names.count("cuLaunchKernel") == 2, "loaded once"
    attribute = next(values for name, values in calls if name == "cuFuncSetAttribute")
    assert attribute[1:] == [8, 66_000]
    values = calls[-1][1]
    assert values[1:9] == [5, 2, 1, 128, 1, 1, 66_000, 99]
    assert values[9] == [0x1000, 2**32 - 7, 0, 0], "the scratch pointers are null"
    assert launched(coresident=True).calls[-1][0] == "cuLaunchCooperativeKernel"


def test_refusals_of_the_driver() -> None:
    with pytest.raises(CompileFailed, match="no image for this device"):
        launched(driver=Driver("cuModuleLoadData"))
    with pytest.raises(Infeasible, match="kernel"):
        launched(driver=Driver("cuLaunchKernel"))
    with pytest.raises(CompileFailed, match="no entry"):
        _parameters(PTX, "other")


def test_values_have_their_c_type() -> None:
    assert _value("fp16", 1.0).value == 0x3C00 and _value("bf16", -2.0).value == 0xC000
    assert _value("i64", -1).value == -1 and _value("u1", True).value == 1 and _value("*i8", None).value == 0
    with pytest.raises(CompileFailed, match="tensordesc"):
        _value("tensordesc<bf16[64, 64]>", None)


def test_who_has_a_translator() -> None:
    runtime = current()
    for arch, has in (("sm80", True), ("sm90", False), ("gfx942", False)):
        backend = runtime.backend(reference_device(runtime, arch).target)
        if has:
            assert isinstance(translator_of(backend), PtxTranslator)
        else:
            with pytest.raises(UnknownName, match=arch):
                translator_of(backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_verify_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(BadArgument, match="is no GPU"):
        verify(["log_softmax"], device="cpu", translate="sm80")
