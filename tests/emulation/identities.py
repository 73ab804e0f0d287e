"""Instructions of which the code itself proves that taking them out changes nothing, whatever the input.

Only what the text before an instruction shows, within its basic block; what is not proven stays a mutant.
"""

from __future__ import annotations

import re

from portkern.backends.gfx942_emulator.text import Instruction, Program

_SUFFIX = re.compile(r"_(e32|e64|dpp)$")
_EVERYWHERE = {"row_mask": "0xf", "bank_mask": "0xf", "bound_ctrl": "1"}
# Their results are never signalling NaNs, whatever the operands.
ARITHMETIC = frozenset("v_add_f32 v_sub_f32 v_mul_f32 v_fma_f32 v_fmac_f32 v_max_f32 v_max3_f32 v_min_f32".split())


def changes_nothing(program: Program, position: int) -> str:
    """Why the instruction at ``position`` is without effect; empty where that is not proven."""
    each = program.code[position]
    name, operands = _SUFFIX.sub("", each.name), each.operands
    if name == "s_branch" and program.labels.get(operands[0]) == position + 1:
        return "it jumps to the instruction that follows"
    if each.modifiers:
        return ""
    if name in ("v_add_u32", "v_or_b32", "v_xor_b32") and sorted(operands[1:]) == sorted(["0", operands[0]]):
        return "it adds zero to a register"
    if name == "v_max_f32" and operands[1:] == (operands[0], operands[0]) and _quieting(program):
        return "it quiets a number that is quiet" if _quiet(program, position, operands[0]) else ""
    return ""


def _quieting(program: Program) -> bool:
    """Whether arithmetic quiets NaNs and keeps subnormals, and no jump comes from elsewhere than its label says."""
    jumps = any(each.name.startswith(("s_setpc", "s_swappc", "s_call", "s_setreg")) for each in program.code)
    return program.directive("ieee_mode") == 1 and program.directive("float_denorm_mode_32") == 3 and not jumps


def _quiet(program: Program, position: int, register: str) -> bool:
    """Whether arithmetic gave ``register``, or moves between lanes and registers from such a one, in this block."""
    targets = {program.labels.get(each.operands[0]) for each in program.code if _branches(each)}
    while position > 0 and position not in targets:
        position -= 1
        each = program.code[position]
        if _branches(each) or _enables(each):
            return False
        if each.name.startswith("v_swap"):  # it has two results
            return False
        if not _names(each.operands, register):
            continue
        # Lanes that a move between lanes leaves out keep what was there.
        moves = each.modifiers
        whole = not moves or all(moves.get(key) == value for key, value in _EVERYWHERE.items())
        if not whole and not _quiet(program, position, register):
            return False
        name = _SUFFIX.sub("", each.name)
        if name == "v_mov_b32" and re.fullmatch(r"v\d+", each.operands[1]):
            return _quiet(program, position, each.operands[1])
        return name in ARITHMETIC
    return False


def _branches(each: Instruction) -> bool:
    return each.name.startswith(("s_branch", "s_cbranch"))


def _enables(each: Instruction) -> bool:
    """Whether it may change which lanes are enabled."""
    return (
        "saveexec" in each.name or each.name.startswith("v_cmpx") or any("exec" in text for text in each.operands[:1])
    )


def _names(operands: tuple[str, ...], register: str) -> bool:
    """Whether the first operand, where results go, is or holds ``register``."""
    found = re.fullmatch(r"v\[(\d+):(\d+)\]", operands[0]) if operands else None
    if found:
        return int(found[1]) <= int(register[1:]) <= int(found[2])
    return bool(operands) and operands[0] == register
