"""What the mutation test leaves out as proven to change nothing, and what it must not leave out."""

from __future__ import annotations

import pytest

from portkern.backends.gfx942_emulator import text
from tests.emulation.bench import HEAD, TAIL
from tests.emulation.identities import changes_nothing

MODES = "\t\t.amdhsa_ieee_mode 1\n\t\t.amdhsa_float_denorm_mode_32 3\n\t.end_amdhsa_kernel"
QUIETING = "v_max_f32_e32 v5, v5, v5"
SHIFT = "v_mov_b32_dpp v5, v4 row_shr:8 row_mask:0xf bank_mask:0xf bound_ctrl:1"
BROADCAST = "v_mov_b32_dpp v5, v5 row_bcast:15 row_mask:0xa bank_mask:0xf bound_ctrl:1"
MAXIMUM = "v_max_f32_e32 v4, v4, v6"


def proof(*lines: str, modes: str = MODES) -> str:
    """What is said of the last instruction of ``lines``."""
    body = "".join(f"{each}\n" if each.endswith(":") else f"\t{each}\n" for each in lines)
    program = text.parse(HEAD + body + TAIL.replace("\t.end_amdhsa_kernel", modes))
    return changes_nothing(program, sum(not each.endswith(":") for each in lines) - 1)


def test_jumps_and_zeros() -> None:
    program = text.parse(HEAD + "\ts_branch .LNEXT\n.LNEXT:\n\ts_branch .LEND\n\ts_nop 0\n.LEND:\n" + TAIL)
    assert changes_nothing(program, 0) and not changes_nothing(program, 1)
    assert proof("v_add_u32_e32 v4, 0, v4") and proof("v_or_b32_e32 v4, 0, v4")
    for line in ("v_add_u32_e32 v4, 0, v5", "v_add_u32_e32 v4, 1, v4", "v_and_b32_e32 v4, 0, v4",
                 "v_add_u32_e32 v4, v4, v4", "v_add_f32_e32 v4, 0, v4",
                 "v_add_u32_dpp v4, 0, v4 row_shr:1 row_mask:0xf bank_mask:0xf"):  # fmt: skip
        assert not proof(line), line


@pytest.mark.parametrize(
    "before",
    [
        [MAXIMUM, SHIFT],
        [MAXIMUM, "v_add_u32_e32 v9, v4, v4", SHIFT],
        [MAXIMUM, "v_mov_b32_e32 v5, v4", BROADCAST],
        ["v_add_f32_e32 v5, v1, v2"],
    ],
)
def test_a_number_that_is_quiet(before: list[str]) -> None:
    assert proof(*before, QUIETING)
    assert not proof(*before, QUIETING, modes="\t.end_amdhsa_kernel")  # without the mode in which arithmetic quiets


@pytest.mark.parametrize(
    "before",
    [
        [],  # whatever it holds
        [SHIFT],
        ["v_lshlrev_b32_e32 v5, 16, v1"],
        ["global_load_dword v5, v0, s[2:3]"],
        ["ds_read_b64 v[4:5], v0"],
        [MAXIMUM, SHIFT, "v_mov_b32_e32 v5, 0x7f800001"],
        [MAXIMUM, BROADCAST],  # rows that are left out keep what v5 held
        [MAXIMUM, "v_mov_b32_e32 v5, v4", BROADCAST, "v_swap_b32 v1, v5"],
        [MAXIMUM, SHIFT, "s_or_b64 exec, exec, s[2:3]"],  # other lanes
        [MAXIMUM, SHIFT, "s_and_saveexec_b64 s[2:3], vcc"],
        [MAXIMUM, SHIFT, ".LHERE:", "s_nop 0", "s_cbranch_scc0 .LHERE"],
        ["s_cbranch_scc0 .LHERE", MAXIMUM, SHIFT, ".LHERE:"],  # from elsewhere
        [MAXIMUM, SHIFT, "s_setpc_b64 s[2:3]"],
        [MAXIMUM, "v_mov_b32_sdwa v5, v4 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0"],
    ],
)
def test_a_number_that_may_signal(before: list[str]) -> None:
    assert not proof(*before, QUIETING)
