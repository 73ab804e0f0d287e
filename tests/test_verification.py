"""``verify``: what is right passes, and each kind of wrong is found and named."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from portkern import verification, verification_child, verification_public
from portkern.cli.main import portkern
from portkern.errors import BadArgument, UnknownName, UnsupportedDtype
from portkern.op import Op
from portkern.registry import all_ops, get, load_file, public_names
from portkern.runtime import Runtime, using
from portkern.tuning_db import Database
from portkern.verification import Report, verify
from portkern.verification_row import Request, Row

FAULTY = str(Path(__file__).parent / "ops" / "faulty.py")
WRONG = {  # the variant "blocks" of each op, and what must be said about it
    "off": "error 1 at (6,)",
    "stray": "it wrote outside its outputs and scratch",
    "alters": "it altered its inputs",
    "aborts": "ended by signal 6",
    "raises": "RuntimeError: no such kernel",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Iterator[Path]:
    with using(Runtime(database=Database(tmp_path / "home", tmp_path / "shipped"))):
        yield tmp_path


def row_of(report: Report, op: str, variant: str) -> Row:
    (row,) = [row for row in report.rows if (row.op, row.variant) == (op, variant)]
    return row


def test_reference_route() -> None:
    report = verify(["softmax", "log_softmax_backward"], device="cpu", dtypes=["float32", "bfloat16"])
    assert report.failures == 0, [row.first_failure for row in report.rows]
    assert report.route == "reference" and "No kernel ran" in report.statement
    assert {row.variant for row in report.rows} == {"reference", "gradient", "public function"}
    assert all(row.cases and 0 < row.worst <= 1 for row in report.rows if row.variant == "reference")


def test_every_fault_is_found_and_named() -> None:
    load_file(FAULTY)
    names = [f"faulty::{name}" for name in ("right", *WRONG, "gradient")]
    seen: list[str] = []
    report = verify(
        names, device="interpreter", ops_files=[FAULTY], jobs=2, progress=lambda count, place: seen.append(place)
    )
    right = row_of(report, "faulty::right", "blocks")
    assert right.failures == 0 and right.cases > 10 and right.refused and "contiguous" in right.why
    for name, expected in WRONG.items():
        row = row_of(report, f"faulty::{name}", "blocks")
        assert row.failures and expected in row.first_failure and row.first_failure.startswith("7 contiguous normal")
        other = row_of(report, f"faulty::{name}", "large_blocks")
        assert other.failures == 0 and other.cases == right.cases, "one bad variant must cost itself only"
    assert row_of(report, "faulty::gradient", "blocks").failures == 0
    assert row_of(report, "faulty::gradient", "gradient").failures
    assert "faulty::right float32 blocks" in seen and report.route == "interpreted"


def test_the_public_function_is_called() -> None:
    load_file(FAULTY)
    names = ["faulty::right", "faulty::many", "faulty::particular"]
    report = verify(names, device="cpu", ops_files=[FAULTY])
    many = row_of(report, "faulty::many", "public function")
    assert many.failures == many.cases == 6 and "7 contiguous normal: RuntimeError" in many.first_failure
    assert row_of(report, "faulty::particular", "public function").failures == 0
    assert not [row for row in report.rows if row.op == "faulty::right" and row.variant == "public function"]
    report = verify(["faulty::particular"], device="interpreter", ops_files=[FAULTY])
    row = row_of(report, "faulty::particular", "public function")
    assert (row.cases, row.failures, row.refused) == (0, 0, 2) and "make the input contiguous" in row.why


def test_some_case_of_every_op_is_one_of_its_public_function() -> None:
    called = set()
    for op in all_ops().values():
        for case in op.cases if op.signature is not None and "::" not in op.name else ():
            args = op.inputs(case.sizes, getattr(torch, op.dtypes[0]), device="cpu", **case.options)
            with contextlib.suppress(verification_public.NotCalled):
                assert verification_public.check_public(op, args).right, (op.name, str(case))
                called.add(op.name)
                break
    assert set(public_names()) - called == {"quantize_fp8"}, "whose signature calls ops itself"


def test_what_the_public_function_gives_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = iter([lambda **given: torch.zeros(2, 3), lambda **given: torch.zeros(4), lambda **given: ()])
    monkeypatch.setattr(verification_public, "function_of", lambda op: next(given))
    for wrong in (
        "other values than the op as result 0",
        "torch.float32 of shape [4] as result 0",
        "0 results, the op",
    ):
        verdict = verification_public.check_public(get("softmax"), (torch.randn(2, 3), 1, torch.float32))
        assert not verdict.right and wrong in verdict.reason


def test_the_arguments_of_a_public_function_are_told_from_canonical_ones() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    told = verification_public.public_arguments
    assert told(get("softmax"), (x, 1, torch.float32)) == {"input": x, "dim": 1, "dtype": torch.float32}
    found = told(get("add"), (x, y, 0, 0, 1, torch.float32))
    assert found["input"] is x and found["other"] is y
    found = told(get("layer_norm"), (x, None, None, 1e-5, torch.float32))
    assert found["normalized_shape"] == (3,) and found["eps"] == 1e-5
    with pytest.raises(
        verification_public.NotCalled, match="no canonical argument is its 'other': give the Op public="
    ):
        told(get("add"), (x, None, 0, 0, 1, torch.float32))


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    load_file(FAULTY)
    boot = verification_child.BOOT.replace(
        "; main()", "; import portkern.verification_child as c; c.HANG_S = 3; main()"
    )
    monkeypatch.setattr(verification_child, "BOOT", boot)
    report = verify(["faulty::hangs"], device="interpreter", ops_files=[FAULTY])
    assert "nothing happened" in row_of(report, "faulty::hangs", "blocks").first_failure
    assert row_of(report, "faulty::hangs", "large_blocks").failures == 0


def test_an_interrupt_ends_the_children_at_once() -> None:
    """Else a run that was interrupted goes on, unseen, until its children are done."""
    load_file(FAULTY)

    def interrupt(count: int, place: str) -> None:
        if "right" in place:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        verify(["faulty::right", "faulty::hangs"], device="interpreter", jobs=2, ops_files=[FAULTY], progress=interrupt)
    assert time.monotonic() - start < 60, "faulty::hangs was waited for"


def test_a_budget_ends_the_children_and_keeps_what_they_found(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_file(FAULTY)
    whole = verification.wait

    def wait(futures: Sequence[Future[list[Row]]], limit_s: float, until: str) -> Any:
        """The budget ends as soon as the first op is done, however fast the machine is."""
        assert limit_s == 25 and futures[0].result(60)
        return whole(futures, 0.1, until)

    monkeypatch.setattr(verification, "wait", wait)
    start = time.monotonic()
    report = verify(
        ["faulty::right", "faulty::hangs"], device="interpreter", jobs=2, budget="25s", ops_files=[FAULTY]
    )  # fmt: skip
    assert time.monotonic() - start < 60 and report.left == ("faulty::hangs float32",)
    assert {row.op for row in report.rows} == {"faulty::right"} and not report.failures
    monkeypatch.undo()
    result = cli("verify", "--device", "interpreter", "--budget", "0.1s", "silu", "--dtype", "fp32")
    assert result.exit_code == 1 and "ended before 1 ops and dtypes: silu float32" in result.stdout
    assert cli("verify", "--budget", "soon").exit_code == 2
    assert cli("verify", "--device", "cpu", "--budget", "5s").exit_code == 2


def test_the_reference_route_runs_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked: list[str] = []

    def rows(request: Request, children: object, progress: object) -> list[Row]:
        asked.append(request.route)
        return []

    monkeypatch.setattr(verification, "in_child", rows)
    monkeypatch.setattr(verification, "reference_rows", lambda *args: pytest.fail("ran in this process"))
    assert "No kernel ran" in verify(["softmax"], device="cpu", dtypes=["float32"]).statement
    assert asked == ["reference"], "a child of its own, without the variable"


def test_variants_that_wait_are_not_interpreted() -> None:
    load_file(FAULTY)
    report = verify(["faulty::waits"], device="interpreter", ops_files=[FAULTY])
    waiting = row_of(report, "faulty::waits", "large_blocks")
    assert waiting.cases == 0 and waiting.refused and "wait for one another" in waiting.why
    assert row_of(report, "faulty::waits", "blocks").cases and report.failures == 0


def test_bfloat16_is_interpreted_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def rows(request: Request, children: object, progress: object) -> list[Row]:
        asked.append(request)
        return []

    monkeypatch.setattr(verification, "in_child", rows)
    report = verify(["softmax"], device="interpreter")
    assert "bfloat16" not in {each.dtype for each in asked} and "bfloat16" in report.notes[0]
    asked.clear()
    assert verify(["softmax"], device="interpreter", dtypes=["bfloat16"]).notes == () and len(asked) == 1


def test_a_child_that_cannot_start_is_a_failure() -> None:
    load_file(FAULTY)
    (row,) = verify(["faulty::right"], device="interpreter").rows  # the child is not told of the file
    assert row.failures == 1 and "faulty::right" in row.first_failure


def test_mistakes() -> None:
    with pytest.raises(UnknownName, match="absent architecture"):
        verify(["softmax"], device="sm80")
    with pytest.raises(UnsupportedDtype, match="they take"):
        verify(["softmax"], device="cpu", dtypes=["int8"])
    with pytest.raises(UnsupportedDtype, match="takes 'floot16'; they take"):  # beside one that is taken
        verify("softmax", device="cpu", dtypes=["float16", "floot16"])
    with pytest.raises(UnknownName, match="softmax"):
        verify(["sofmax"], device="cpu")
    with pytest.raises(BadArgument, match="jobs"):
        verify(["softmax"], device="interpreter", jobs=-1)
    if not torch.cuda.is_available():
        with pytest.raises(UnknownName, match="no GPU 0"):
            verify(["softmax"], device="cuda:0")


@pytest.fixture
def cli() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(portkern, list(map(str, args)))


def test_report_is_one_bundle(cli: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = cli("verify", "softmax_backward", "--device", "cpu", "--dtype", "fp32", "--report", file, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["schema"] == "portkern.verify/1" and answer["data"]["rows"][0]["failures"] == 0
    bundle = json.loads(file.read_text())
    assert bundle["schema"] == "portkern.report/1"
    assert set(bundle["data"]) == {"report", "device", "checks", "facts"}
    assert bundle["data"]["report"]["versions"]["torch"] == torch.__version__


def test_the_command_names_what_failed(cli: Callable[..., Result]) -> None:
    result = cli("--ops", FAULTY, "verify", "faulty::off", "--device", "interpreter")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout and "error 1 at (6,)" in result.stdout and "compiler" in result.stdout


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    report = verify(["softmax"], device="cuda:0", dtypes=["bfloat16"])
    assert report.failures == 0 and report.route == "launched"
    assert {row.variant for row in report.rows} >= {"resident_row", "coresident_row", "gradient"}


def test_cases_of_an_op_are_never_none() -> None:
    ops: tuple[Op, ...] = load_file(FAULTY)
    assert all(op.cases for op in ops)


def test_nothing_verified_is_no_success(cli: Callable[..., Result]) -> None:
    """bfloat16 products are refused in the interpreter: each case, and so the command."""
    result = cli("verify", "matmul", "--device", "interpreter", "--dtype", "bf16")
    assert result.exit_code == 1, result.output
    assert "NO case ran, and nothing is shown" in result.stdout and "multiplies bfloat16 matrices" in result.stdout


@pytest.mark.parametrize("device", ["cpu", "interpreter"])
def test_what_an_op_writes_over_has_a_place_for_each_element(device: str) -> None:
    report = verify(["cross_entropy_backward_rescale"], device=device, dtypes=["float32"])
    assert report.cases > 40 and report.failures == 0, [row.first_failure for row in report.rows]
