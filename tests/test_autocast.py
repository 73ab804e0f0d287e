"""Autocast regions: each op takes and gives the dtypes that torch's list of it says."""

from __future__ import annotations

import pytest
import torch

import portkern
from portkern.registry import all_ops, public_names
from tests.spine import generator
from tests.test_library import first_derivative


def test_autocast_gives_float32_on_a_gpu() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)  # the context manager wants a real GPU
        try:
            assert portkern.softmax(x).dtype == torch.float32
            assert portkern.softmax(x, dtype=torch.float16).dtype == torch.float16
            assert portkern.softmax(x.double()).dtype == torch.float64
            assert portkern.sum(x, 1).dtype == torch.float32 and portkern.mean(x, 1).dtype == torch.bfloat16
            assert portkern.sum(x, dtype=torch.float16).dtype == torch.float16
            assert portkern.sum(x.double()).dtype == torch.float64 and portkern.sum(x.int()).dtype == torch.int64
            weight = torch.ones(1, device="cuda")
            assert portkern.prelu(x.float(), weight).dtype == torch.get_autocast_dtype("cuda")
            assert portkern.prelu(x.double(), weight.double()).dtype == torch.float64
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert portkern.softmax(x).dtype == torch.bfloat16
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert portkern.softmax(x).dtype == torch.softmax(x, -1).dtype


CAST_ON_THE_CPU = ("matmul", "prelu", "cross_entropy")  # which torch's autocast lists there, of the ops that are here


@pytest.mark.parametrize(
    "name", [each for each in public_names() if all_ops()[each].backwards and each not in CAST_ON_THE_CPU]
)
@pytest.mark.parametrize("region", [torch.float16, torch.bfloat16])
def test_autocast_on_the_cpu_changes_nothing(name: str, region: torch.dtype) -> None:
    x = torch.randn(4, 6, generator=generator(1)).to(torch.bfloat16).requires_grad_()
    torch.manual_seed(0)
    want = first_derivative(name, x)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=region):
        assert torch.equal(first_derivative(name, x), want)


@pytest.mark.parametrize("region", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["prelu", "cross_entropy"])
def test_autocast_on_the_cpu_is_that_of_torch(name: str, dtype: torch.dtype, region: torch.dtype) -> None:
    x = torch.randn(4, 6, generator=generator(1)).to(dtype).requires_grad_()
    other = torch.tensor([0, 1, 2, 3]) if name == "cross_entropy" else torch.tensor([0.25], dtype=dtype)
    with torch.autocast("cpu", dtype=region):
        found, wanted = getattr(portkern, name)(x, other), getattr(torch.nn.functional, name)(x, other)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(each.sum(), x)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs)
