"""Read the ``amdgcn`` text that Triton's compiler gives: instructions, labels, directives, argument layout.

Nothing here knows what an instruction does. The text has labels, so no ELF loader is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from portkern.errors import EmulationError

_LABEL = re.compile(r"^([\w.$]+):")
_MODIFIER = re.compile(r"([a-z_0-9]+):(\[[^\]]*\]|swizzle\([^)]*\)|[-\w.]+)")
_FLAGS = frozenset(
    "offen idxen addr64 lds sc0 sc1 nt glc slc dlc clamp gds row_mirror row_half_mirror done vm tfe unorm "
    "mul:2 mul:4 div:2".split()
)


@dataclass(frozen=True)
class Instruction:
    """One instruction as written. ``line`` counts from 1 in the text; ``source`` is ``file:line`` of the kernel."""

    name: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str]
    line: int
    source: str
    text: str


@dataclass(frozen=True)
class Argument:
    """One entry of the argument block: byte ``offset``, ``size`` and the compiler's ``kind`` of value."""

    offset: int
    size: int
    kind: str


@dataclass
class Program:
    """A kernel: its code, where its labels point, its ``.amdhsa_*`` directives and its arguments."""

    kernel: str
    target: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    directives: dict[str, int] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    constants: dict[str, bytes] = field(default_factory=dict)
    kernarg_bytes: int = 0
    threads: int = 0

    def directive(self, name: str) -> int:
        """The value of ``.amdhsa_<name>``; 0 where the text has none."""
        return self.directives.get(name, 0)


def parse(text: str) -> Program:
    """The one kernel in ``text``. Raises EmulationError where the text has none."""
    found = re.search(r"\.amdhsa_kernel\s+(\S+)", text)
    target = re.search(r'\.amdgcn_target\s+"([^"]*)"', text)
    if found is None or target is None:
        raise EmulationError(
            "this text holds no kernel (.amdhsa_kernel): pass what Triton's compiler gives as 'amdgcn'"
        )
    program = Program(found[1], target[1])
    _directives(text, program)
    _code(text, program)
    _metadata(text, program)
    return program


def _directives(text: str, program: Program) -> None:
    start = text.index(".amdhsa_kernel")
    block = text[start : text.index(".end_amdhsa_kernel", start)]
    for name, value in re.findall(r"\.amdhsa_(\w+)[ \t]+(-?\w+)", block):
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", value):
            program.directives[name] = int(value, 0)


def _code(text: str, program: Program) -> None:
    """Instructions between the kernel's label and its ``.Lfunc_end``, and constant data of other sections."""
    inside, source, files, data = False, "", {}, None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(";", 1)[0].rstrip() if '"' not in raw else raw.rstrip()
        if not line:
            continue
        label = _LABEL.match(line)
        if label:
            inside = (inside or label[1] == program.kernel) and not label[1].startswith(".Lfunc_end")
            data = None if inside or label[1].startswith(".L") else label[1]
            program.labels[label[1]] = len(program.code)
            continue
        line = line.strip()
        if line.startswith("."):
            found = re.match(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', line)
            if found:
                files[found[1]] = found[2]
            found = re.match(r"\.loc\s+(\d+)\s+(\d+)", line)
            if found and found[2] != "0":
                source = f"{files.get(found[1], '?')}:{found[2]}"
            if data:
                _constant(program, data, line)
        elif inside:
            program.code.append(_instruction(line, number, source))


def _constant(program: Program, name: str, line: str) -> None:
    """Data directives after a label outside the code: what the kernel reads through its address."""
    sizes = {".byte": 1, ".short": 2, ".long": 4, ".quad": 8}
    word, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
    if word in sizes and re.fullmatch(r"[-\w, ]+", rest.strip()):
        try:
            values = [int(each, 0) for each in rest.split(",")]
        except ValueError:
            return
        size = sizes[word]
        packed = b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in values)
        program.constants[name] = program.constants.get(name, b"") + packed


def _instruction(line: str, number: int, source: str) -> Instruction:
    name, _, rest = line.partition(" ")
    parts = split(rest.strip())
    modifiers: dict[str, str] = {}
    operands: list[str] = []
    for position, part in enumerate(parts):
        words = part.split() if name.startswith(("s_waitcnt", "s_delay")) is False else [part]
        if not words:
            continue
        # Modifiers follow the last operand, after blanks; a lone flag may stand where an operand would.
        if position == len(parts) - 1:
            kept = [word for word in words if not _modifier(word, modifiers)]
        else:
            kept = words
        operands += [" ".join(kept)] if kept else []
    return Instruction(name, tuple(operands), modifiers, number, source, " ".join(line.split()))


def _modifier(word: str, modifiers: dict[str, str]) -> bool:
    if word in _FLAGS:
        key, _, value = word.partition(":")
        modifiers[key] = value or "1"
        return True
    found = _MODIFIER.fullmatch(word)
    if found:
        modifiers[found[1]] = found[2]
        return True
    return False


def split(text: str) -> list[str]:
    """Operands, at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "[(":
            depth += 1
        elif char in "])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _metadata(text: str, program: Program) -> None:
    start = text.find(".amdgpu_metadata")
    block = text[start : text.find(".end_amdgpu_metadata", start)] if start >= 0 else ""
    block = block[block.find(".args:") :] if ".args:" in block else block
    entries = re.split(r"^\s+- ", block.split(".group_segment_fixed_size")[0], flags=re.MULTILINE)
    for entry in entries[1:]:
        values = dict(re.findall(r"\.(\w+):\s+(\S+)", entry))
        if {"offset", "size", "value_kind"} <= set(values):
            program.arguments.append(Argument(int(values["offset"]), int(values["size"]), values["value_kind"]))
    found = re.search(r"\.kernarg_segment_size:\s+(\d+)", text)
    program.kernarg_bytes = int(found[1]) if found else program.directive("kernarg_size")
    found = re.search(r"\.max_flat_workgroup_size:\s+(\d+)", text)
    program.threads = int(found[1]) if found else 0
