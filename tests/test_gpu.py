"""What only a real GPU shows: every variant launched, sizes past 31 bits, streams, graphs."""

from __future__ import annotations

import threading

import pytest
import torch

import portkern
from portkern import dispatch, lookup
from portkern.errors import Infeasible
from portkern.op import Case
from portkern.plan import metas_of
from portkern.registry import all_ops
from portkern.runtime import current
from portkern.testing import LAYOUTS, judge, lay_out
from tests.spine import generator, run_config, variants

pytestmark = pytest.mark.gpu

OPS = (
    "softmax", "softmax_backward", "log_softmax", "log_softmax_backward", "layer_norm", "layer_norm_backward",
    "rms_norm", "rms_norm_backward", "add_layer_norm", "add_rms_norm", "group_norm", "group_norm_backward",
    "cross_entropy", "cross_entropy_backward", "logsumexp", "logsumexp_backward",
    "masked_softmax", "masked_softmax_backward", "quantize_fp8_rows",
)  # fmt: skip
PARTIAL = ("group_norm", "cross_entropy_b", "logsumexp_b", "quantize")  # have not all of the variants
VARIANTS = ("packed_rows", "resident_row", "cached_row", "looped_row", "split_row", "coresident_row")
DTYPES = ("float32", "float16", "bfloat16", "float64")
LONG = tuple(
    Case(sizes) for sizes in ((70, 1000), (300, 5000), (9, 30000), (5, 16384), (9, 40000), (3, 131072), (2, 1048577))
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(name: str, variant: str, dtype: str) -> None:
    """Style and layout of the values rotate, so that each op and variant meets all of them."""
    op, device, ran = all_ops()[name], current().device(0), 0
    turn = DTYPES.index(dtype) * 5 + VARIANTS.index(variant)
    for number, case in enumerate((*op.cases, *LONG)):
        style = ("normal", "wide", "nonfinite")[(number + turn) % 3]
        layout = list(LAYOUTS)[(number + turn) % len(LAYOUTS)]
        args = op.inputs(
            case.sizes, getattr(torch, dtype), device="cuda", generator=generator(number, "cuda"),
            style=style, **case.options,
        )  # fmt: skip
        args = lay_out(args, layout)
        for config, found in variants(current(), op, args, device):
            if found != variant:
                continue
            verdict = judge(op, args, run_config(current(), op, args, device, config))
            assert verdict.right, f"{case} {layout} {style} [{config}]: {verdict.reason}"
            ran += 1
    if not ran:
        # cached_row serves 16-bit forwards, coresident_row exchanges fp32: another variant serves the rest.
        assert variant in ("cached_row", "coresident_row") or name.startswith(PARTIAL)
        pytest.skip(f"{variant} does not apply to {name} in {dtype}")


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_through_the_public_function(name: str) -> None:
    for shape, dim in (((7, 130), 1), ((130, 7), 0), ((3, 5, 9), 1), ((4, 70000), -1)):
        x = torch.randn(shape, device="cuda", requires_grad=True)
        g = torch.randn(shape, device="cuda")
        (got,) = torch.autograd.grad(getattr(portkern, name)(x, dim), x, g)
        exact = x.detach().double().requires_grad_()
        (want,) = torch.autograd.grad(getattr(torch, name)(exact, dim), exact, g.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_more_than_31_bits_of_elements() -> None:
    """Rows past element 2**31 equal the same rows computed alone."""
    x = torch.randn((1 << 21) + 64, 1024, dtype=torch.float16, device="cuda")
    assert x.numel() > 1 << 31
    y = portkern.softmax(x)
    for rows in (slice(0, 64), slice(-64, None), slice((1 << 21) - 32, (1 << 21) + 32)):
        assert torch.equal(y[rows], portkern.softmax(x[rows].contiguous()))
    del y
    y = portkern.softmax(x, 0)[:, :8]
    torch.testing.assert_close(y.float(), torch.softmax(x[:, :8].float(), 0), rtol=2e-3, atol=1e-7)


def test_wide_stride_inside_a_row() -> None:
    step = (1 << 22) - 1
    memory = torch.randn(599 * step + 2, dtype=torch.float16, device="cuda")
    assert memory.numel() > 1 << 31
    x = memory.as_strided((2, 600), (1, step))
    torch.testing.assert_close(portkern.softmax(x).float(), torch.softmax(x.float(), -1), rtol=2e-3, atol=1e-6)


def test_current_stream_and_device_are_respected() -> None:
    x = torch.randn(512, 512, device="cuda")
    portkern.softmax(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            a = a @ a * 1e-2
        slow = x + a[:512, :512].nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)
        y = portkern.softmax(slow)
    stream.synchronize()
    torch.testing.assert_close(y, torch.softmax(slow, -1))
    assert torch.cuda.current_device() == 0


def test_graph_capture_after_warming() -> None:
    x = torch.randn(300, 5000, device="cuda")
    for name in ("softmax", "log_softmax"):
        function = getattr(portkern, name)
        function(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = function(x)
        x.copy_(torch.randn_like(x))
        y.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(y, getattr(torch, name)(x, -1), rtol=1e-5, atol=1e-6)


def test_first_calls_from_many_threads() -> None:
    x = torch.randn(33, 777, device="cuda")
    want, got = torch.softmax(x, -1), []

    def work() -> None:
        got.append(portkern.softmax(x))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(got) == 16
    for y in got:
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


def test_same_bits_every_time() -> None:
    for shape in ((64, 1000), (4, 200000), (3, 40000)):
        x = torch.randn(shape, device="cuda")
        first = portkern.softmax(x)
        assert all(torch.equal(first, portkern.softmax(x)) for _ in range(5))


def test_config_that_cannot_launch_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's model is made to admit a config that takes too much shared memory."""
    op, runtime = all_ops()["softmax"], current()
    device = runtime.device(0)
    x = torch.randn(1000, 32768, device="cuda")
    args = (x, 1, torch.float32)
    situation = dispatch.situate(runtime, op, metas_of(args), device)
    fine = situation.backend.default(device, situation.work, "resident_row")
    greedy = fine.replace(params={"PROGRAMS_PER_UNIT": 1}, num_stages=5, num_warps=16)
    monkeypatch.setattr(situation.backend, "refuse", lambda *args: None)
    monkeypatch.setattr(situation.backend, "default", lambda device, work, variant=None: fine if variant else greedy)
    runtime.plans.clear()
    torch.testing.assert_close(portkern.softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-6)
    reason = runtime.bad.pop((device.slug, situation.problem.key, greedy))
    runtime.plans.clear()
    assert "out of resource" in reason.lower()


def test_too_many_waiting_programs_are_refused_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait for each other and do not all fit never start; fewer of them answer instead."""
    op, runtime = all_ops()["softmax"], current()
    device, x = runtime.device(0), torch.randn(512, 131072, device="cuda")
    situation = dispatch.situate(runtime, op, metas_of((x, 1, torch.float32)), device)
    fine = situation.backend.default(device, situation.work, "coresident_row")
    # One more than a unit has warps for: registers would be cut until it fits.
    greedy = fine.replace(params={"PROGRAMS_PER_UNIT": device.max_warps_per_unit // fine.num_warps + 1})
    monkeypatch.setattr(situation.backend, "refuse", lambda *args: None)
    monkeypatch.setattr(situation.backend, "default", lambda device, work, variant=None: greedy)
    runtime.plans.clear()
    torch.testing.assert_close(portkern.softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-6)
    refused = [config for (_, _, config) in runtime.bad if config.variant == "coresident_row"]
    answer = dispatch.resolve(runtime, situation)
    runtime.bad.clear()
    runtime.plans.clear()
    assert greedy in refused and answer.config.variant == "coresident_row"
    assert answer.config.params["PROGRAMS_PER_UNIT"] < greedy.params["PROGRAMS_PER_UNIT"]


def test_pinned_config_answers_or_says_why() -> None:
    op, runtime = all_ops()["softmax"], current()
    device, x = runtime.device(0), torch.randn(64, 4096, device="cuda")
    situation = dispatch.situate(runtime, op, metas_of((x, 1, torch.float32)), device)
    config = situation.backend.default(device, situation.work, "looped_row")
    with portkern.pin("softmax", config):
        assert portkern.explain("softmax", x).layer == "pinned"
        torch.testing.assert_close(portkern.softmax(x), torch.softmax(x, -1))
    with portkern.pin("softmax", config.replace(num_warps=64)), pytest.raises(Infeasible, match="warps"):
        portkern.softmax(x)


def test_explain_names_this_gpu() -> None:
    answer = portkern.explain("softmax", torch.randn(8, 64, device="cuda"))
    assert torch.cuda.get_device_name(0) in answer.device and "present" in answer.device
    assert answer.layer in ("exact", "near", "default", "sibling exact", "sibling near")
    assert lookup.MAX_DISTANCE == 1.0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graph(dynamic: bool) -> None:
    compiled = torch.compile(lambda x: portkern.softmax(x * 2), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((4, 6), (300, 5000)):
        x = torch.randn(shape, device="cuda")
        torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1), rtol=1e-5, atol=1e-6)
