"""What bench/staging.py makes of its figures."""

import numpy as np
import pytest
from staging import limit, summary
from staging_parts import HEAD_BYTES, HEADS, PAGE_TOKENS, REGIONS, REQUEST_BYTES, blocks_of, digest, regions_of


def test_the_limit_is_the_slowest_step_or_all_of_them_on_the_cores():
    assert limit(9.0, 4.0, 6.0, 64) == 4.0
    assert limit(6.0, 6.0, 6.0, 2) == pytest.approx(4.0)  # three steps of one unit each, two cores
    assert limit(2.0, 20.0, 20.0, 2) == 2.0


def test_the_worse_layout_counts():
    rates = {"equal": 4.0, "wire": 8.0}
    for layout, staged, slices in (("4 to 1", 2.0, 0.25), ("1 to 4", 3.0, 0.1)):
        rates |= {f"{layout}, {name}": 4.0 for name in ("gather", "scatter", "at once")}
        rates |= {f"{layout}, staged": staged, f"{layout}, slices": slices}
    wire = {"equal, slices": 1000, "4 to 1, staged": 1002, "1 to 4, staged": 1001}
    found = summary(rates, wire, 2)
    assert (found["staged_vs_slices"], found["wire_bytes_vs_equal_tp"]) == (8.0, 1.002)
    # 2 / (1/4 + 1/8 + 1/4) = 3.2
    assert found["staged_vs_copy_limit"] == pytest.approx(2 / 3.2, abs=1e-3)
    assert found["layouts"]["1 to 4"]["staged_vs_slices"] == 30.0


@pytest.mark.parametrize(("layout", "pairs"), [("4 to 1", 4), ("1 to 4", 4), ("equal", 1)])
def test_all_ranks_together_move_the_request(layout, pairs):
    ranks = {"4 to 1": (4, 1), "1 to 4": (1, 4), "equal": (1, 1)}[layout]
    blocks = [blocks_of(layout, source, target) for source in range(ranks[0]) for target in range(ranks[1])]
    assert len(blocks) == pairs and sum(block.size_bytes for some in blocks for block in some) == REQUEST_BYTES
    assert all(block.sliced == (layout != "equal") for some in blocks for block in some)


def test_regions_of_all_ranks_lie_one_behind_the_other():
    regions = [region for rank in range(4) for region in regions_of(4, rank, 4096)]
    ends = [region.base + region.items * region.item_bytes for region in regions]
    assert [region.base for region in regions] == [4096, *ends[:-1]] and ends[-1] == 4096 + 2 * REQUEST_BYTES
    assert len(regions) == 4 * REGIONS and regions[0].item_bytes == PAGE_TOKENS * HEADS // 4 * HEAD_BYTES


def test_a_word_in_another_place_changes_the_digest():
    held = np.arange(64, dtype=np.uint64).view(np.uint8)
    moved = held.copy()
    moved[8:16], moved[16:24] = held[16:24], held[8:16]
    assert digest(held) != digest(moved) and digest(held) == digest(held.copy())
