"""Distributed tensors over two processes of this machine: right results and gradients, or a refusal by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILD = """
import sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor
import portkern
from portkern.errors import BadSharding

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, g = torch.randn(7, 6, 5), torch.randn(7, 6, 5)


def refused(call, text):
    try:
        call()
    except BadSharding as error:
        assert text in str(error), error
    else:
        raise AssertionError("not refused")


for placement in (Shard(0), Shard(1), Shard(-2), Replicate()):
    d = distribute_tensor(x, mesh, [placement]).detach().requires_grad_()
    y = portkern.softmax(d, -1)
    want = x.clone().requires_grad_()
    expected = torch.softmax(want, -1)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.backward(distribute_tensor(g, mesh, [placement]))
    expected.backward(g)
    torch.testing.assert_close(d.grad.full_tensor(), want.grad)
refused(lambda: portkern.softmax(distribute_tensor(x, mesh, [Shard(2)]), -1), "can be sharded over 0, 1, or")
refused(lambda: portkern.softmax(DTensor.from_local(x, mesh, [Partial()]), -1), "spreads over ranks")
assert portkern.dropout(d, 0.5, training=False) is d, "nothing to compute"
a = torch.randn(4, 4)
whole = distribute_tensor(a, mesh, [Replicate()])
torch.testing.assert_close(portkern.matmul(whole, whole).full_tensor(), a @ a)
whole = distribute_tensor(x, mesh, [Replicate()])
n = portkern.layer_norm(whole, (6, 5))
assert n.shape == n.to_local().shape == x.shape and n.stride() == x.stride()
torch.testing.assert_close(n.full_tensor(), torch.nn.functional.layer_norm(x, (6, 5)))
torch.manual_seed(rank)  # as of ranks that read unlike data: what is replicated would not be equal
refused(lambda: portkern.dropout(whole, 0.5), "other numbers on each rank")
refused(lambda: portkern.bincount(distribute_tensor(torch.arange(4), mesh, [Replicate()])), "reads values")
whole = distribute_tensor(a, mesh, [Replicate()])
rows = distribute_tensor(a, mesh, [Shard(0)])
refused(lambda: portkern.quantize_fp8(rows), "cannot be distributed")
refused(lambda: portkern.matmul(rows, rows), "can be sharded over no dim")
refused(lambda: portkern.matmul(rows, whole), "on one mesh")
refused(lambda: portkern.matmul(whole, a), "plain tensor")
dist.destroy_process_group()
print("ok", rank)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_processes(tmp_path: Path) -> None:
    code = CHILD.format(root=str(Path(__file__).resolve().parent.parent))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = [process.communicate(timeout=300) for process in processes]
    for rank, (out, errors) in enumerate(found):
        assert out.split() == ["ok", str(rank)], errors
