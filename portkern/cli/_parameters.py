"""What several commands take: ops, shapes, dtypes and devices as users spell them."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from portkern.cli._output import prints_to_stderr
from portkern.errors import BadArgument, PortkernError, UnknownName, UnsupportedDtype

if TYPE_CHECKING:
    from portkern.op import Op
    from portkern.target import Device

F = TypeVar("F", bound=Callable[..., Any])
Shape = tuple[int, ...]

OPS_FILES = "portkern.ops_files"  # key in click's meta: what --ops named, for child processes
MAX_ELEMENTS = 1 << 48
SPELLINGS = {
    "bf16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "fp32": "float32", "f32": "float32", "float": "float32",
    "fp64": "float64", "f64": "float64", "double": "float64",
}  # fmt: skip


def _load_ops(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> None:
    for path in value:
        from portkern.registry import load_file

        with prints_to_stderr():
            load_file(path)
        ctx.meta.setdefault(OPS_FILES, []).append(os.path.abspath(path))


def ops_option(function: F) -> F:
    """``--ops FILE``: loads before the command runs."""
    option = click.option(
        "--ops",
        "ops_files",
        metavar="FILE",
        multiple=True,
        expose_value=False,
        callback=_load_ops,
        help="A Python file whose OPS to add; repeatable.",
    )
    return option(function)


def common(function: F) -> F:
    """Options of every command: ``--json`` and ``--ops``."""
    json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return ops_option(json_option(function))


def _parts(text: str, param: click.Parameter) -> list[str]:
    """What commas separate. An empty one is a mistake: ``--device "$UNSET"`` does not mean all of them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise BadArgument(f"{text!r} has an empty part; write names, or leave {param.opts[0]} out for the default")
    return parts


def _shapes(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[Shape, ...]:
    return tuple(parse_shape(part.strip()) for text in value for part in text.split(","))


def _dtypes(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    names = [SPELLINGS.get(part.lower(), part.lower()) for text in value for part in _parts(text, param)]
    return tuple(dict.fromkeys(name.removeprefix("torch.") for name in names))


def _words(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part for text in value for part in _parts(text, param)))


shape_option = click.option(
    "--shape", "shapes", multiple=True, callback=_shapes, metavar="SHAPE",
    help="4096x8192, 1 or scalar; several with commas.",
)  # fmt: skip
dtype_option = click.option(
    "--dtype", "dtypes", multiple=True, callback=_dtypes, metavar="DTYPE",
    help="bf16, fp16, fp32, fp64 or torch's names; several with commas.",
)  # fmt: skip
ops_argument = click.argument("ops", nargs=-1, callback=_words, metavar="[OP]...")
words = _words


def _settings(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in value:
        name, equals, setting = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadArgument(f"--set takes NAME=VALUE, as in --set dim=0, not {text!r}")
        try:
            found[name] = ast.literal_eval(setting)
        except (ValueError, SyntaxError):
            found[name] = setting
    return found


set_option = click.option(
    "--set", "settings", multiple=True, callback=_settings, metavar="NAME=VALUE",
    help="An argument of the op, as in --set dim=0; repeatable.",
)  # fmt: skip


def parse_shape(text: str) -> Shape:
    """``4096x8192`` as sizes; ``scalar`` has none. Raises BadArgument."""
    lowered = text.lower()
    if lowered == "scalar":
        return ()
    if not re.fullmatch(r"\d{1,18}(x\d{1,18})*", lowered):
        raise BadArgument(f"{text!r} is no shape; write sizes from 0 joined by x, as in 4096x8192, or 'scalar'")
    sizes = tuple(map(int, lowered.split("x")))
    if math.prod(sizes) > MAX_ELEMENTS:
        raise BadArgument(f"shape {text} has more than 2^48 elements, the limit; use a smaller one")
    return sizes


def find_ops(names: Iterable[str]) -> list[Op]:
    """The ops called ``names``; every op when there are none. Raises UnknownName."""
    from portkern.registry import all_ops, get

    found = [get(name) for name in names]
    return found or [op for _, op in sorted(all_ops().items())]


def dtypes_of(op: Op, wanted: Sequence[str]) -> tuple[str, ...]:
    """``wanted``, if ``op`` takes all of them; its own when there are none. Raises UnsupportedDtype."""
    for name in wanted:
        if name not in op.dtypes:
            close = difflib.get_close_matches(name, op.dtypes, 1)
            advice = f"; did you mean {close[0]}?" if close else ""
            raise UnsupportedDtype(f"{op.name} takes no dtype {name!r}, only {', '.join(op.dtypes)}{advice}")
    return tuple(wanted) or op.dtypes


def default_dtype(op: Op) -> str:
    """What to show when no dtype is asked for: the narrow type that models run in."""
    return "bfloat16" if "bfloat16" in op.dtypes else op.dtypes[0]


def default_shape(op: Op) -> Shape:
    """What to show when no shape is asked for: the first that ``tune`` would measure."""
    cases = op.tune_cases or op.cases
    return cases[0].sizes if cases else ()


def plan_args(
    op: Op, device: Device | None, shapes: Sequence[Shape], dtypes: Sequence[str], settings: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """The op's canonical arguments without data for each shape and dtype, as calls on ``device`` have them."""
    from portkern.runtime import planning_for

    with planning_for(device):
        return [
            make_args(op, shape, dtype, settings=settings)
            for shape in shapes or (default_shape(op),)
            for dtype in dtypes or (default_dtype(op),)
        ]


def make_args(
    op: Op, sizes: Shape, dtype: str, device: Any = "meta", settings: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """The op's canonical arguments for sizes and dtype. Raises BadArgument for what it cannot make."""
    import torch

    dtypes_of(op, (dtype,))
    known = inspect.signature(op.inputs).parameters
    ours = ("sizes", "dtype", "device", "generator", "style")
    options = [name for name, each in known.items() if name not in ours and each.kind != each.VAR_KEYWORD]
    open_ended = any(each.kind == each.VAR_KEYWORD for each in known.values())
    for name in settings or {}:
        if name in ours or (name not in options and not open_ended):
            takes = f"--set takes {', '.join(options)}" if options else "leave --set out"
            raise BadArgument(f"{op.name} has no argument {name!r} to set; {takes}")
    try:
        return op.inputs(sizes, getattr(torch, dtype), device=device, **(settings or {}))
    except (PortkernError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the op's input maker does with sizes that it did not expect
        shape = "x".join(map(str, sizes)) or "scalar"
        shapes = dict.fromkeys("x".join(map(str, case.sizes)) for case in op.tune_cases or op.cases)
        raise BadArgument(
            f"{op.name} cannot make inputs of shape {shape} and dtype {dtype}: {error}; "
            f"shapes that work: {', '.join(list(shapes)[:4])}"
        ) from error


def find_device(text: str) -> Device:
    """The device that ``text`` means: ``auto``, ``cuda:N``, a slug or UUID, or an architecture,
    whose reference part then stands in. Raises UnknownName."""
    from portkern.plugins import parse_arch, targets
    from portkern.runtime import current

    runtime = current()
    present = runtime.devices
    arches = [target.arch for target in targets(runtime.plugins)]
    if text == "auto":
        if not present:
            raise UnknownName(f"no GPU here to plan for; name one, as in --device {arches[0]}")
        return present[0]
    index = re.fullmatch(r"cuda(?::(\d{1,4}))?", text)
    if index:
        return runtime.device(int(index[1] or 0))
    references = [runtime.backend(target).reference_device() for target in targets(runtime.plugins)]
    for device in (*present, *references):
        if text in (device.slug, device.name) or (device.identity and text == device.identity):
            return device
    try:
        return runtime.backend(parse_arch(runtime.plugins, text)).reference_device()
    except UnknownName:
        known = [*dict.fromkeys(device.slug for device in (*present, *references)), *arches]
        close = difflib.get_close_matches(text.lower(), known, 3)
        advice = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise UnknownName(
            f"no device {text!r}; {advice} (also auto, cuda:N, and neighbours of these architectures)"
        ) from None
