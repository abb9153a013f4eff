"""Which ranks of two instances meet, and what a pair of ranks has in common: against a count of every place by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvferry.protocol.rank import Layout, Slice, slice_of
from kvferry.transfer.contract import Region, RegionKind, TransferError
from kvferry.transfer.layout import slices_in
from kvferry.transfer.plan import pair_common, plan_pages, plan_row
from kvferry.transfer.ranks import Slices, routes

LAYOUT = Layout("model", "1", "float32", 16, layers=7, kv_heads=4, head_dim=8)
PAGE = 2


def instance(tp: int, pp: int, cp: int = 1, layout: Layout = LAYOUT) -> dict[int, Slice]:
    ranks = [(c, p, t) for c in range(cp) for p in range(pp) for t in range(tp)]
    return {rank: slice_of(layout, t, tp, p, pp, c, cp) for rank, (c, p, t) in enumerate(ranks)}


def slices(tp: int, pp: int, cp: int = 1, layout: Layout = LAYOUT) -> dict[int, Slices]:
    return {rank: (part,) for rank, part in instance(tp, pp, cp, layout).items()}


def regions(part: Slice, items: int = 5) -> tuple[Region, ...]:
    """K and V of each layer, and a row of metadata; a token's head is three bytes."""
    at = [(name, layer) for layer in range(part.first_layer, part.first_layer + part.layers) for name in "kv"]
    size = PAGE * part.heads * 3
    pages = [
        Region(
            RegionKind.PAGES, name, layer, 10_000 * number, size, items, part.first_head, part.heads, tokens=PAGE,
            replica=part.replica, replicas=part.replicas,
        )
        for number, (name, layer) in enumerate(at)
    ]  # fmt: skip
    return (*pages, Region(RegionKind.ROWS, "metadata", -1, 0, 256, 2))


def test_layers_are_dealt_out_in_order_and_heads_evenly() -> None:
    parts = instance(tp=2, pp=3)
    assert [(part.first_layer, part.layers) for part in parts.values()] == [(0, 3)] * 2 + [(3, 2)] * 2 + [(5, 2)] * 2
    assert [(part.first_head, part.heads) for part in parts.values()] == [(0, 2), (2, 2)] * 3


def test_more_ranks_than_heads_have_replicas() -> None:
    """Case 46: 2 KV heads on 6 ranks are 1 head each, three times, and not 0 heads, nor 6 of them."""
    two = Layout("model", "1", "float32", 16, layers=1, kv_heads=2, head_dim=8)
    found = [slice_of(two, rank, 6, 0, 1) for rank in range(6)]
    assert [(part.first_head, part.heads, part.replica, part.replicas) for part in found] == [
        (0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3), (1, 1, 0, 3), (1, 1, 1, 3), (1, 1, 2, 3),
    ]  # fmt: skip


def test_stages_may_be_given() -> None:
    assert [slice_of(LAYOUT, 0, 1, p, 3, stages=(1, 5, 1)) for p in range(3)] == [
        Slice(0, 1, 0, 4), Slice(1, 5, 0, 4), Slice(6, 1, 0, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "pp", "stages", "message"),
    [
        (3, 1, (), "tp is 3; allowed: what divides the model's 4 KV heads, or is a multiple of them"),
        (6, 1, (), "tp is 6; allowed: what divides the model's 4"),
        (1, 8, (), "pp is 8; allowed: at most the model's 7 layers"),
        (1, 2, (3, 3), r"stages are \(3, 3\); wanted 2 of at least 1 layer, 7 layers in all"),
        (1, 2, (7, 0), r"stages are \(7, 0\)"),
        (1, 3, (3, 4), r"stages are \(3, 4\); wanted 3"),
    ],
)
def test_what_does_not_divide_is_refused(tp: int, pp: int, stages: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slice_of(LAYOUT, 0, tp, 0, pp, stages=stages)


def test_smollm2_takes_3_ranks_and_not_2() -> None:
    """It has 9 query heads and 3 KV heads."""
    smol = Layout("smollm2", "1", "float32", 16, layers=30, kv_heads=3, head_dim=64)
    assert [slice_of(smol, rank, 3, 0, 1).first_head for rank in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="tp is 2; allowed: what divides the model's 3 KV heads"):
        slice_of(smol, 0, 2, 0, 1)


def test_stages_of_different_sizes_meet_by_global_layer() -> None:
    """Case 47: 7 layers in stages of 4 and 3, and of 3, 2 and 2: the first of two spans two of three."""
    assert routes(slices(1, 2), slices(1, 3)) == {0: (0, 1), 1: (1, 2)}
    assert routes(slices(1, 3), slices(1, 2)) == {0: (0,), 1: (0, 1), 2: (1,)}
    assert routes(slices(1, 1), slices(1, 2)) == {0: (0, 1)}
    assert routes(slices(2, 1), slices(2, 1)) == {0: (0,), 1: (1,)}


def test_case_47_fifteen_layers_from_stages_of_seven_and_eight() -> None:
    """Case 47: each layer of the target comes from the stage that has that layer, wherever it stands there."""
    deep = Layout("model", "1", "float32", 16, layers=15, kv_heads=4, head_dim=8)
    stages = [slice_of(deep, 0, 1, p, 2, stages=(7, 8)) for p in range(2)]
    (target,) = instance(1, 1, layout=deep).values()
    there, found = regions(target), Counter[tuple[str, int]]()
    for stage in stages:
        for span in plan_pages(pair_common(regions(stage), there), [1], [2]):
            ours, theirs = regions(stage)[span["source_region"]], there[span["target_region"]]
            assert (ours.part, ours.layer) == (theirs.part, theirs.layer)
            found[theirs.part, theirs.layer] += 1
    assert found == {(part, layer): 1 for part in "kv" for layer in range(15)}


def test_heads_meet_by_range() -> None:
    """4 heads over 4, 2 and 1 ranks, both ways."""
    assert routes(slices(4, 1), slices(2, 1)) == {0: (0,), 1: (0,), 2: (1,), 3: (1,)}
    assert routes(slices(2, 1), slices(4, 1)) == {0: (0, 1), 1: (2, 3)}
    assert routes(slices(1, 1), slices(4, 1)) == {0: (0, 1, 2, 3)}


def test_of_the_replicas_one_writes_and_the_work_is_shared() -> None:
    """Case 46: 4 heads. Over 8 ranks each head is there twice: the target's only replica has it from the first of them,
    two replicas have it from one each, and four from each of them twice.
    """
    assert routes(slices(8, 1), slices(1, 1)) == {0: (0,), 2: (0,), 4: (0,), 6: (0,)}
    assert routes(slices(8, 1), slices(8, 1)) == {rank: (rank,) for rank in range(8)}
    assert routes(slices(8, 1), slices(16, 1)) == {rank: (2 * rank, 2 * rank + 1) for rank in range(8)}
    assert routes(slices(16, 1), slices(8, 1)) == {2 * rank: (rank,) for rank in range(8)}


def test_what_is_not_divided_by_heads_comes_from_one_rank() -> None:
    """A latent has no heads: all ranks have it, and all targets need it."""
    latent = Layout("model", "1", "float32", 16, layers=7, kv_heads=0, head_dim=8)
    assert routes(slices(4, 1, layout=latent), slices(1, 1, layout=latent)) == {0: (0,)}
    assert routes(slices(1, 1, layout=latent), slices(4, 1, layout=latent)) == {0: (0, 1, 2, 3)}
    assert routes(slices(4, 1, layout=latent), slices(2, 1, layout=latent)) == {0: (0,), 2: (1,)}
    assert routes(slices(2, 1, layout=latent), slices(4, 1, layout=latent)) == {0: (0, 1), 1: (2, 3)}


def test_each_rank_of_a_shared_out_prompt_writes() -> None:
    assert routes(slices(2, 1, cp=2), slices(1, 1)) == dict.fromkeys(range(4), (0,))
    with pytest.raises(TransferError, match="cp_size is 2 at the target; allowed: 1"):
        routes(slices(1, 1), slices(1, 1, cp=2))
    mixed = {0: (Slice(0, 7, 0, 4, cp_size=2),), 1: (Slice(0, 7, 0, 4),)}
    with pytest.raises(TransferError, match="cp_size is 1 at one source rank, 2 at another"):
        routes(mixed, slices(1, 1))
    lone = {0: (Slice(0, 7, 0, 4, cp_rank=1, cp_size=2),)}
    with pytest.raises(TransferError, match="no source rank has heads 0 to 3 of kv of layer 0, for target rank 0"):
        routes(lone, slices(1, 1))


def test_the_leaders_meet_even_where_they_have_no_layer_in_common() -> None:
    """The metadata goes from leader to leader."""
    sources = {0: (Slice(4, 3, 0, 4),), 1: (Slice(0, 4, 0, 4),)}
    targets = {0: (Slice(0, 4, 0, 4),), 1: (Slice(4, 3, 0, 4),)}
    assert routes(sources, targets) == {0: (0, 1), 1: (0,)}


SIZES = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (4, 1), (8, 2)]  # (tp, pp)


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
def test_every_byte_of_every_page_is_written_once(source: tuple[int, int], target: tuple[int, int]) -> None:
    """What ranks meet for, each by its own regions, is what the routes say."""
    ours, theirs = instance(*source), instance(*target)
    found = {rank: slices_in(regions(part)) for rank, part in theirs.items()}
    assert found == slices(*target)
    written = {rank: np.zeros((2 * part.layers, 5, PAGE * part.heads * 3), int) for rank, part in theirs.items()}
    wrote = set()
    for rank, part in ours.items():
        for to, there in theirs.items():
            for span in plan_pages(pair_common(regions(part), regions(there)), [0, 3], [4, 1]):
                one, other = regions(part)[span["source_region"]], regions(there)[span["target_region"]]
                assert (one.part, one.layer) == (other.part, other.layer)
                page, byte = divmod(int(span["target_offset"]), other.item_bytes)
                written[to][span["target_region"], page, byte : byte + span["length"]] += 1
                wrote.add((rank, to))
    for counts in written.values():
        assert (counts[:, [4, 1]] == 1).all() and not counts[:, [0, 2, 3]].any()
    assert wrote | {(0, 0)} == {
        (rank, to) for rank, targets in routes(slices(*source), found).items() for to in targets
    }


def test_ranks_that_share_no_layer_have_rows_in_common_only() -> None:
    pairing = pair_common(regions(Slice(0, 3, 0, 4)), regions(Slice(3, 4, 0, 4)))
    assert len(plan_pages(pairing, [0], [1])) == 0
    (row,) = plan_row(pairing, "metadata", 1, 0)
    assert (row["source_offset"], row["target_offset"], row["length"]) == (256, 0, 256)


ALL = {0: (Slice(0, 7, 0, 4),)}


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ({0: (Slice(0, 7, 0, 4),), 1: (Slice(6, 1, 0, 4),)}, ALL, "more than one source rank has heads 0 to 3 of kv"),
        ({0: (Slice(0, 5, 0, 4),)}, ALL, "no source rank has heads 0 to 3 of kv of layer 5, for target rank 0"),
        (ALL, {0: (Slice(0, 5, 0, 4),)}, "no target rank has heads 0 to 3 of kv of layer 5"),
        ({0: (Slice(0, 7, 1, 3),)}, ALL, "no source rank has heads 0 to 0 of kv of layer 0"),
        (ALL, {0: (Slice(0, 7, 0, 2),)}, "has heads 2 to 3 of kv of layer 0 .*heads 0 to 3; target: .*heads 0 to 1"),
        ({0: (Slice(0, 7, 0, 4, 1, 2),)}, ALL, "no source rank has heads 0 to 3"),
        ({0: (Slice(0, 7, 0, 0),)}, ALL, "kv: divided .*source: .*, not divided; target: .*, heads 0 to 3"),
        ({0: (Slice(0, 7, 0, 4, 2, 2),)}, ALL, "rank 0 is replica 2 of 2, cp_rank 0 of 1; wanted numbers below"),
        ({0: (Slice(0, 7, 0, 4, cp_size=-1),)}, ALL, "cp_rank 0 of -1"),
        ({0: (Slice(0, 7, 0, 4), Slice(0, 7, 0, 0, part="index"))}, ALL, "no target rank has index of layer 0"),
    ],
)  # fmt: skip
def test_what_a_side_lacks_or_has_twice_is_refused(
    sources: dict[int, Slices], targets: dict[int, Slices], words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        routes(sources, targets)
