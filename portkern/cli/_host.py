"""``portkern bench --host``: the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portkern.cli._output import table
from portkern.cli._parameters import Shape, default_dtype, make_args

if TYPE_CHECKING:
    from portkern.op import Op
    from portkern.target import Device

TINY = (1, 128)


def measure(
    ops: list[Op], shapes: tuple[Shape, ...], dtypes: tuple[str, ...], settings: dict[str, Any], device: Device
) -> tuple[dict[str, Any], str]:
    """The data and the text of the command."""
    import torch

    from portkern import toolchain
    from portkern.host import host_cost
    from portkern.op import Case
    from portkern.runtime import current

    where, found = torch.device(f"cuda:{device.index}"), []
    for op in ops:
        for dtype in [each for each in dtypes or (default_dtype(op),) if each in op.dtypes]:
            for shape in shapes or (TINY,):
                make_args(op, shape, dtype, settings=settings)
                found.append(host_cost(current(), op, Case(shape, settings), getattr(torch, dtype), where))
    headers = (
        "problem", "us", "torch us", "ratio", "grad us", "torch grad us", "ratio", "new shape us",
        "of it: modes", "key", "allocate", "launch", "form",
    )  # fmt: skip
    rows = [
        (each.problem, each.ours, each.torch, f"{each.over_torch:.2f}", each.ours_grad, each.torch_grad,
         f"{each.grad_over_torch:.2f}" if each.grad_over_torch else "", each.new_shape,
         each.watched, each.key, each.allocate, each.launch, each.form)
        for each in found
    ]  # fmt: skip
    text = [tuple(f"{cell:.1f}" if isinstance(cell, float) else cell for cell in row) for row in rows]
    data = {"device": device.to_json(), "versions": toolchain.provenance(), "costs": found}
    return data, table(headers, text, ())
