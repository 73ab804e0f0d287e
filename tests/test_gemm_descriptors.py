"""What products read and store by tensor descriptors, and what they must not."""

from __future__ import annotations

from portkern import dispatch
from portkern.config import Config
from portkern.plan import Desc
from tests.test_gemm import TILES, refusal, situation


def test_no_tile_of_one_row_or_column_is_read_by_descriptors() -> None:
    found = situation((1, 1024, 1024))
    for variant in ("persistent", "split_k"):
        walking = Config(variant, {**TILES.params, "PROGRAMS_PER_UNIT": 1, "SPLITS": 2}, 4, 3)
        assert not refusal(found, walking)
        for name in ("BLOCK_M", "BLOCK_N"):
            assert "16 or more" in refusal(found, walking.replace(params={name: 1}))


def test_no_descriptor_stores_rows_that_end_within_16_bytes() -> None:
    """The hardware would write up to the next 16 bytes, beyond the result: seen on one H200 with a single element."""
    stored = set()
    for sizes, order in [
        ((m, n, 64), order) for m in (1, 2, 64) for n in (1, 2, 7, 8, 24, 1001) for order in ("nn", "nt")
    ]:
        for batch in ((), (3,)):
            found = situation((*batch, *sizes), order=order)
            for config in dispatch.candidates(found):
                if config.variant != "persistent" or refusal(found, config):
                    continue
                plan = found.op.plan(config, found.op.fit(config, found.work, found.device), found.device, *found.args)
                output = plan.launches[-1].args[2]
                if isinstance(output, Desc):
                    assert output.shape[-1] % 8 == 0, f"{batch} {sizes} {order} [{config}]"
                    stored.add(output.shape[-1])
    assert stored == {8, 24}
