"""The tables of ``portkern bench``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from portkern.cli._output import table

if TYPE_CHECKING:
    from portkern.baseline import Report
    from portkern.benchmark import Measurement
    from portkern.target import Device

MIB = 1024 * 1024


def measured(found: Sequence[Measurement], peers: Sequence[str], device: Device, ceiling: float) -> str:
    """A line for each measurement, with a time and a ratio for each of ``peers`` that ran; and the means."""
    peers = [name for name in peers if any(name in each.peer_us for each in found)]
    headers = (
        "problem", "us", "+-", *(f"{name} us" for name in peers), "copy us", "GB/s", "of ceiling", "TFLOP/s", "copies",
        *(f"over {name}" for name in peers), "MiB", "torch MiB", "layer", "config", "note",
    )  # fmt: skip
    rows = [
        (each.problem, _number(each.time_us, ".1f"), _number(each.spread_us, ".1f"),
         *(_number(each.peer_us.get(name), ".1f") for name in peers),
         _number(each.copy_us, ".1f"), _number(each.gbps, ".0f"), _number(each.of_ceiling, ".2f"),
         _number(each.tflops, ".0f"), _number(each.copies, ".2f"),
         *(_number(each.over(name), ".2f", "x") for name in peers),
         _mebibytes(each.extra_bytes), _mebibytes(each.torch_extra_bytes), each.layer, each.config, each.note)
        for each in found
    ]  # fmt: skip
    lines = [table(headers, rows, ("note",)), "", f"{device.name}: copy ceiling {ceiling:.0f} GB/s"]
    return "\n".join([*lines, *_means(found, peers)])


def compared(report: Report) -> str:
    """A line for each problem that was measured before, what is in one run only, and the verdict."""
    headers = ("problem", "old us", "new us", "new over old", "by", "slower")
    rows = [
        (each.problem, f"{each.old_us:.1f}", _number(each.new_us, ".1f"), _number(each.ratio, ".3f", "x"), each.by,
         "" if not each.slower else "yes" if each.new_us else "runs no more")
        for each in report.compared
    ]  # fmt: skip
    parts = [table(headers, rows)] if rows else []
    parts += [f"only in {report.file}: {'; '.join(report.only_old)}"] if report.only_old else []
    parts += [f"not in {report.file}: {'; '.join(report.only_new)}"] if report.only_new else []
    count = f"{len(report.slower)} of {len(report.compared)} problems"
    parts.append(f"{count} slower than in {report.file} by more than {report.tolerance:.0%} and the spread")
    return "\n\n".join(parts)


def _means(found: Sequence[Measurement], peers: Sequence[str]) -> list[str]:
    """The geometric means of each op and dtype."""
    from portkern.benchmark import geometric_mean

    groups: dict[str, list[Measurement]] = {}
    for each in found:
        words = each.problem.split()
        groups.setdefault(f"{each.op} {words[2] if len(words) > 2 else ''}".strip(), []).append(each)
    lines = []
    for name, group in groups.items():
        ratios = {peer: [each.over(peer) for each in group] for peer in peers}
        means = [
            f"{geometric_mean(of):.2f}x {peer} over {sum(map(bool, of))}" for peer, of in ratios.items() if any(of)
        ]
        if means:
            lines.append(f"{name}: geometric mean {', '.join(means)} problems")
    return lines


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / MIB:.1f}" if count >= MIB / 10 else f"{count / MIB:.4f}"
