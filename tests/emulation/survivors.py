"""Why a kernel may compute the same with an instruction taken out: the list that the mutation test holds survivors to.

The first pattern that an instruction's text matches, within a stretch of code if it names one, gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from portkern.backends.gfx942_emulator.text import Instruction


class Reason(NamedTuple):
    """``equivalent``: no input tells the mutant apart within the error budget; else ``why`` says which input would."""

    pattern: str
    equivalent: bool
    why: str


REASONS = (
    Reason(r"s_branch ", True, "it jumps to the instruction that follows"),
    Reason(r"s_load_dwordx4 s\[12:15\]", True, "loads arguments that the compiler did not need after all"),
    Reason(r"s_and_b32 (s\d+), \1, 0xffff$", True, "clears bits above 48 of an address, which are zero"),
    Reason(r"s_mov_b32 s\d+, 0x27000$", True, "format bits of a buffer descriptor, which plain accesses do not use"),
    Reason(r"s_mov_b32 s\d+, 0x7ffffffe$", True, "a buffer's size, larger than any offset; the register held another"),
    Reason(r"s_mov_b32 s\d+, s\d+$", True, "copies a descriptor's size or format; what was there was large too"),
    Reason(r"v_max_f32_e32 (v\d+), \1, \1$", True, "quiets a signalling NaN: inputs have none"),
    Reason(r"v_(cmp_gt_f32|add_f32|ldexp_f32|cndmask_b32)\w* .*#exp", True,
           "keeps an exponential from flushing where it is below the smallest normal number, as the budget lets it"),
    Reason(r"s_mov_b32 s\d+, 0xc2fc0000$", True, "the bound below which an exponential is scaled, as above"),
    Reason(r"v_(not_b32|mov_b32)_e32 v\d+, (63|0x42800000)$", True, "by how much an exponential is scaled, as above"),
    Reason(r"v_(fma|fmac|mul|div_fixup|div_scale|rcp)_f32.*#div", True,
           "refines a quotient that is nearly exact before, since the emulator's reciprocal is rounded once"),
    Reason(r"v_mov_b32_e32 v\d+, (v\d+|0)$", True, "clears an accumulator that held a whole number: as a float 0"),
    Reason(r"v_mov_b32_e32 v\d+, s\d+$", True, "all lanes held that sum, or only the one that stores it counts"),
    Reason(r"v_add_u32_e32 (v\d+), 0, \1$", True, "adds the address of shared memory, which is 0"),
    Reason(r"v_mul_f32_e32 v\d+, 0x3fb8aa3b, v\d+ #exp", True, "only decides on that scaling, as above"),
    Reason(r"v_accvgpr_write_b32 a\d+, ", False, "a call in which the loop has no turn"),
    Reason(r"s_and_saveexec_b64 ", False, "none: lanes of one warp that store unlike values in one place go unseen"),
    Reason(r"s_cbranch_scc\d .LBB", False, "a call in which the loop has no turn"),
    Reason(r"s_(bitcmp\d_b32|cmp_\w+) ", False, "a launch whose condition is the other one"),
    Reason(r"s_(ashr|lshr|max)_\w+ ", False, "a count of turns that is negative or no multiple"),
    Reason(r"s_and_b64 (vcc|s\[\d+:\d+\]), ", False, "sizes that end between this register's elements and the last's"),
    Reason(r"v_cmp_\w+ ", False, "sizes that end between this register's elements and the last's"),
    Reason(r"v_cndmask_b32_e(32|64) ", False, "a row that ends in this register, in the last program"),
    Reason(r"v_or_b32_e32 ", False, "sizes that end between this register's elements and the last's"),
    Reason(r"v_max3?_f32", False, "a maximum in this register alone, far above the others"),
    Reason(r"v_(add|lshl)\w+ ", False, "offsets that this register alone reaches"),
)  # fmt: skip


def annotated(code: Sequence[Instruction], position: int) -> str:
    """The text of an instruction, with ``#div`` within a division and ``#exp`` near an exponential."""
    near = [each.name for each in code[max(0, position - 60) : position + 60]]
    text = code[position].text
    before = [each.name for each in code[max(0, position - 40) : position + 1]]
    after = [each.name for each in code[position : position + 40]]
    if any("div_scale" in each or "rcp" in each for each in before) and any("div_f" in each for each in after):
        text += " #div"
    if any(each.startswith("v_exp_f32") for each in near):
        text += " #exp"
    return text


def reason_of(code: Sequence[Instruction], position: int) -> Reason | None:
    """Why the mutant without this instruction may survive; None where the list has no reason."""
    text = annotated(code, position)
    for reason in REASONS:
        if re.match(reason.pattern, text) or re.match(reason.pattern, code[position].text):
            return reason
    return None
