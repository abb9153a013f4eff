"""Which ranks of two instances meet, and what a pair of ranks has in common: against a count of every place by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.protocol.rank import Layout, Slice, slice_of
from kvferry.transfer.contract import Region, RegionKind, TransferError
from kvferry.transfer.plan import pair_common, plan_pages, plan_row
from kvferry.transfer.ranks import Places, places_in, places_of, routes

LAYOUT = Layout("model", "1", "float32", 16, layers=7, kv_heads=4, head_dim=8)


def instance(tp: int, pp: int) -> dict[int, Slice]:
    return {p * tp + t: slice_of(LAYOUT, t, tp, p, pp) for p in range(pp) for t in range(tp)}


def places(tp: int, pp: int) -> dict[int, Places]:
    return {rank: places_of(part) for rank, part in instance(tp, pp).items()}


def regions(part: Slice, items: int = 5) -> tuple[Region, ...]:
    """K and V of each layer, and a row of metadata; a token's head is a byte."""
    size = 16 * part.heads
    at = [(name, layer) for layer in range(part.first_layer, part.first_layer + part.layers) for name in "kv"]
    pages = [
        Region(RegionKind.PAGES, name, layer, 10_000 * number, size, items, part.first_head, part.heads)
        for number, (name, layer) in enumerate(at)
    ]
    return (*pages, Region(RegionKind.ROWS, "metadata", -1, 0, 256, 2))


def test_layers_are_dealt_out_in_order_and_heads_evenly() -> None:
    parts = instance(tp=2, pp=3)
    assert [(part.first_layer, part.layers) for part in parts.values()] == [(0, 3)] * 2 + [(3, 2)] * 2 + [(5, 2)] * 2
    assert [(part.first_head, part.heads) for part in parts.values()] == [(0, 2), (2, 2)] * 3


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [(3, 1, "tp is 3; allowed: what divides the model's 4"), (1, 8, "pp is 8; allowed: at most")],
)
def test_what_does_not_divide_is_refused(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slice_of(LAYOUT, 0, tp, 0, pp)


def test_stages_of_different_sizes_meet_by_global_layer() -> None:
    """7 layers in stages of 4 and 3, and of 3, 2 and 2: the first stage of two spans the first two of three."""
    assert routes(places(1, 2), places(1, 3)) == {0: (0, 1), 1: (1, 2)}
    assert routes(places(1, 3), places(1, 2)) == {0: (0,), 1: (0, 1), 2: (1,)}
    assert routes(places(1, 1), places(1, 2)) == {0: (0, 1)}
    assert routes(places(2, 1), places(2, 1)) == {0: (0,), 1: (1,)}


def test_the_leaders_meet_even_where_they_have_no_layer_in_common() -> None:
    """The metadata goes from leader to leader."""
    sources = {0: places_of(Slice(4, 3, 0, 4)), 1: places_of(Slice(0, 4, 0, 4))}
    targets = {0: places_of(Slice(0, 4, 0, 4)), 1: places_of(Slice(4, 3, 0, 4))}
    assert routes(sources, targets) == {0: (0, 1), 1: (0,)}


SIZES = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (4, 1)]  # (tp, pp)


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
def test_every_item_of_every_page_is_written_once(source: tuple[int, int], target: tuple[int, int]) -> None:
    ours, theirs = instance(*source), instance(*target)
    found = {rank: places_in(regions(part)) for rank, part in theirs.items()}
    assert found == places(*target)
    if source[0] != target[0]:
        with pytest.raises(TransferError, match=r"no (source|target) rank has heads \d to \d of layer 0 as one range"):
            routes(places(*source), found)
        return
    written = {rank: np.zeros((2 * part.layers, 5), int) for rank, part in theirs.items()}
    for rank, targets in routes(places(*source), found).items():
        for to in targets:
            pairing = pair_common(regions(ours[rank]), regions(theirs[to]))
            for span in plan_pages(pairing, [0, 3], [4, 1]):
                one, other = regions(ours[rank])[span["source_region"]], regions(theirs[to])[span["target_region"]]
                assert (one.part, one.layer, one.first_head) == (other.part, other.layer, other.first_head)
                assert span["length"] == other.item_bytes
                written[to][span["target_region"], span["target_offset"] // other.item_bytes] += 1
    for counts in written.values():
        assert counts[:, [4, 1]].tolist() == [[1, 1]] * len(counts) and not counts[:, [0, 2, 3]].any()


def test_ranks_that_share_no_layer_have_rows_in_common_only() -> None:
    pairing = pair_common(regions(Slice(0, 3, 0, 4)), regions(Slice(3, 4, 0, 4)))
    assert len(plan_pages(pairing, [0], [1])) == 0
    (row,) = plan_row(pairing, "metadata", 1, 0)
    assert (row["source_offset"], row["target_offset"], row["length"]) == (256, 0, 256)


def test_a_place_that_a_side_has_twice_is_refused() -> None:
    twice = {0: places_of(Slice(0, 7, 0, 4)), 1: places_of(Slice(6, 1, 0, 4))}
    with pytest.raises(TransferError, match=r"source ranks 0 and 1 both have \(6, 0, 4\)"):
        routes(twice, places(1, 1))
