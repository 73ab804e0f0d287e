"""Every op and variant at its default, compiled for each target: it fits and nothing spills."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from portkern import dispatch
from portkern.executors.compile import compile_plan
from portkern.lookup import Choice, fits
from portkern.op import Case
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import lay_out
from tests.spine import variants

ARCHS = ("sm80", "sm90", "gfx942")
OPS = sorted(name for name in all_ops() if "::" not in name)
VARIANTS = ("packed_rows", "resident_row", "cached_row", "looped_row", "split_row", "coresident_row")
# Row lengths at which a variant's default changes, or alignment is lost; and a column reduction.
CASES = (
    Case((4096, 200)), Case((4096, 1024)), Case((4096, 4095)), Case((4096, 8192)), Case((4096, 32768)),
    Case((4096, 131072)), Case((1, 1048576)), Case((4, 1048577)), Case((64, 512, 128), {"dim": 1}),
)  # fmt: skip
DTYPES = ("bfloat16", "float32", "float64")
# A third of the matrix, another one for each op, variant and target; all of it on demand.
FULL = os.environ.get("PORTKERN_FULL_SWEEP") == "1"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPS)
def test_default_compiles_without_spills(name: str, variant: str, arch: str) -> None:
    op, runtime = all_ops()[name], current()
    device = dispatch.reference_device(runtime, arch)
    compiled = 0
    turn = OPS.index(name) + VARIANTS.index(variant) + ARCHS.index(arch)
    for number, (case, dtype) in enumerate(itertools.product(CASES, DTYPES)):
        if not FULL and (number + number // len(DTYPES) + turn) % len(DTYPES):
            continue
        args = metas_of(op.inputs(case.sizes, getattr(torch, dtype), device="meta", **case.options))
        situation = dispatch.situate(runtime, op, args, device)
        for config, found in variants(runtime, op, args, device):
            if found != variant:
                continue
            blocks, _ = fits(op, situation.work, device, situation.backend, config)
            assert blocks is not None
            plan = situation.plan(Choice(config, blocks, "test", ""))
            options = situation.backend.launch_options(config)
            for launch in compile_plan(plan, args, situation.backend, device, options):
                needs = launch.resources
                what = f"{case} {dtype} [{config}] {launch.kernel}: {needs}"
                assert needs.spills == 0, what
                assert needs.shared_bytes <= device.shared_bytes, what
                assert needs.registers <= device.max_registers, what
                if plan.launches[-1].coresident:
                    # Fewer programs than asked for are the lookup's next answer, down to one row at a time.
                    assert needs.programs_per_unit * device.units >= blocks["SPLITS"], what
            compiled += 1
    if not compiled:
        assert variant == "cached_row"  # for 16-bit forwards where the nearest cache holds a row
        pytest.skip(f"{variant} does not apply to {name} on {arch}")


@pytest.mark.parametrize("arch", ARCHS)
def test_strided_inputs_compile_without_spills(arch: str) -> None:
    """The plain default, whatever variant it is, on operands that are not contiguous."""
    op, runtime = all_ops()["softmax"], current()
    device = dispatch.reference_device(runtime, arch)
    for layout, n in itertools.product(("transposed", "sliced", "offset", "padded"), (100, 5000)):
        args = metas_of(lay_out(op.inputs((64, n), torch.bfloat16), layout))
        situation = dispatch.situate(runtime, op, args, device)
        choice = dispatch.resolve(runtime, situation)
        options = situation.backend.launch_options(choice.config)
        for launch in compile_plan(situation.plan(choice), args, situation.backend, device, options):
            assert launch.resources.spills == 0, f"{layout} {n} [{choice.config}]"
