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
    Reason(r"s_load_dwordx4 s\[12:15\]", True, "loads arguments that the compiler did not need after all"),
    Reason(r"v_(fma|fmac|mul)_f32.*#div", True,
           "one of three refinements of a quotient: without it the others still round it alike"),
    Reason(r"v_cmp_gt_f32\w* .*#exp", False,
           "a weight below the normals that counts, in a lane that the mask which was there leaves out"),
    Reason(r"v_max_f32_e32 (v\d+), \1, \1$", True,
           "quiets a signalling NaN from shared memory: a row that has one is NaN anyway"),
    Reason(r"v_mov_b32_e32 v\d+, (v\d+|0)$", True,
           "clears what the first turn multiplies by exp(-inf), or a value of lanes that nothing reads"),
    Reason(r"s_mov_b32 s\d+, s\d+$", True, "copies again in each turn what was copied before the loop"),
    Reason(r"v_and_b32_e32 v\d+, (24|3), v\d+$", True,
           "clears bits that the other operand of what follows has too, or a number that is small already"),
    Reason(r"v_cmp_eq_u32_e\d+ .*, 0, v\d+$", True, "lets one lane store: more store the same, or what nobody reads"),
    Reason(r"s_and_saveexec_b64 ", True, "lets one lane store: more store the same, or what nobody reads"),
    Reason(r"s_bitcmp\d_b32 ", True, "lets one warp store: the others would store the same"),
    Reason(r"s_cbranch_execn?z ", True, "skips what does nothing where no lane is enabled"),
    Reason(r"v_accvgpr_write_b32 a\d+, 0$", False, "a call in which the loop has no turn"),
    Reason(r"s_cbranch_\w+ .LBB", False, "a call in which the loop has no turn"),
    Reason(r"s_cmp_\w+ ", False, "a launch whose condition is the other one"),
    Reason(r"s_(ashr|lshr|max|add)_\w+ ", False, "a count of turns that is negative or no multiple"),
    Reason(r"s_and_b64 ", False, "sizes for which the mask that was there lets other elements through"),
    Reason(r"v_cmp_\w+ ", False, "sizes for which the mask that was there lets other elements through"),
    Reason(r"v_cndmask_b32_e(32|64) ", False, "a call in which the loop has no turn"),
    Reason(r"v_max3?_f32", False, "a maximum in this register alone, far above the others"),
    Reason(r"v_(add|lshl)\w+ ", False, "a launch in which the register held another offset before"),
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
