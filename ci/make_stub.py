"""Write portkern/__init__.pyi, so that editors see the ops that ``portkern.__getattr__`` loads.

python ci/make_stub.py            write the file
python ci/make_stub.py --check    exit 1 if it is not current
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portkern.op import Op

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "portkern" / "__init__.pyi"

HEADER = '''"""Made by ci/make_stub.py from the ops' signatures. Do not edit."""

from collections.abc import Sequence

import torch
from torch import Tensor

'''


def stub() -> str:
    """The text of the stub for the ops that ship with portkern."""
    import portkern
    from portkern import ops

    imports = [
        f"from {module} import {name} as {name}\n"
        for name, module in sorted(portkern._PUBLIC.items(), key=lambda item: (item[1], item[0]))
    ]
    shipped = {name: op for name, op in sorted(ops.public().items()) if "::" not in name}
    names = sorted({*portkern.__all__, *shipped})
    functions = "".join(function(op) for _, op in sorted(shipped.items()))
    everything = "".join(f'    "{name}",\n' for name in names)
    text = "".join(imports) + "\n__version__: str\n" + functions
    header = HEADER
    if not re.search(r"\bSequence\b", text):
        header = header.replace("from collections.abc import Sequence\n\n", "")
    if not re.search(r"\btorch\.", functions):
        header = header.replace("import torch\n", "")
    return f"{header}{text}\n__all__ = [\n{everything}]\n"


def function(op: Op) -> str:
    """One op's public function, a parameter a line."""
    signature = op.signature
    assert signature is not None
    lines, star = [], False
    for parameter in inspect.signature(signature).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            lines.append("*,")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        lines.append(f"{_parameter(parameter)},")
    body = "".join(f"    {line}\n" for line in lines)
    summary = (inspect.getdoc(signature) or "").partition("\n")[0]
    rest = f'\n    """{summary}"""' if summary else " ..."
    return f"\ndef {op.name}(\n{body}) -> {returns(op.schema)}:{rest}\n"


def returns(schema: str) -> str:
    """The Python type of a torch.library schema's result."""
    result = re.sub(r"\([a-z]!?\)", "", schema.rpartition("->")[2]).strip()  # no alias marks
    kinds = [_result(part) for part in result.strip("()").split(",") if part]
    if not result.startswith("("):
        return kinds[0]
    return f"tuple[{', '.join(kinds)}]" if kinds else "None"


def _result(part: str) -> str:
    kind = part.split()[0]
    if kind.endswith("?"):
        return f"{_result(kind[:-1])} | None"
    return f"list[{kind[:-2]}]" if kind.endswith("[]") else kind


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}: {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    plain = parameter.default is None or isinstance(parameter.default, (bool, int, float, str))
    shown = json.dumps(parameter.default) if isinstance(parameter.default, str) else repr(parameter.default)
    return f"{text} = {shown}" if plain else f"{text} = ..."


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        raise TypeError("a public signature has a parameter without annotation")
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write portkern/__init__.pyi.")
    parser.add_argument("--check", action="store_true", help="exit 1 if the file is not current")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT))
    text = stub()
    current = STUB.exists() and STUB.read_text(encoding="utf-8") == text
    if check:
        if not current:
            print("portkern/__init__.pyi is out of date: run python ci/make_stub.py")
        return 0 if current else 1
    STUB.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
