"""The plan against a dense reference: memory as one byte array per side, pages copied one by one."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transfer import runs
from kvferry.transfer.contract import SPAN_DTYPE, Region, RegionKind, TransferError
from kvferry.transfer.plan import pair, plan_pages, plan_row, split, total_bytes
from kvferry.transfer.spans import by_memory, check_spans, make_spans

GAP = 13  # bytes between regions, so that no two touch


@dataclass
class Side:
    regions: tuple[Region, ...]
    memory: np.ndarray

    def at(self, index, page):
        region = self.regions[index]
        start = region.base + page * region.item_bytes
        return self.memory[start : start + region.item_bytes]


def side(order, item_bytes, items, rows=2, fill=None):
    """A side whose regions lie in `order` (indices into the layers' parts); addresses are offsets in `memory`."""
    places = [(part, layer) for layer in range(len(item_bytes)) for part in "kv"]
    regions, base = [], GAP
    for index in order:
        part, layer = places[index]
        regions.append(Region(RegionKind.PAGES, part, layer, base, item_bytes[layer], items, 0, 2))
        base += item_bytes[layer] * items + GAP
    regions.append(Region(RegionKind.ROWS, "metadata", -1, base, 7, rows))
    base += 7 * rows + GAP
    memory = np.zeros(base, np.uint8) if fill is None else fill.integers(1, 256, base, dtype=np.uint8)
    return Side(tuple(regions), memory)


def move(spans, source, target):
    """Carry spans out, counting how often each target byte is written."""
    written = np.zeros(len(target.memory), np.int64)
    for span in spans:
        start = source.regions[span["source_region"]].base + span["source_offset"]
        end = target.regions[span["target_region"]].base + span["target_offset"]
        length = span["length"]
        target.memory[end : end + length] = source.memory[start : start + length]
        written[end : end + length] += 1
    return written


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 3))
    item_bytes = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    orders = [draw(st.permutations(range(2 * layers))) for _ in range(2)]
    source = side(orders[0], item_bytes, draw(st.integers(6, 9)), fill=seed)
    target = side(orders[1], item_bytes, draw(st.integers(6, 9)))
    count = draw(st.integers(0, 6))
    source_pages = draw(st.permutations(range(6)))[:count]
    target_pages = draw(st.permutations(range(6)))[:count]
    if draw(st.booleans()):  # neighbours, so that runs do merge
        source_pages, target_pages = sorted(source_pages), sorted(target_pages)
    return source, target, source_pages, target_pages, draw(st.integers(1, 40))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_exactly_the_right_bytes_move_and_none_twice(case):
    source, target, source_pages, target_pages, batch_bytes = case
    pairing = pair(source.regions, target.regions)
    expected = target.memory.copy()
    dense = Side(target.regions, expected)
    for mine, region in enumerate(source.regions[:-1]):
        theirs = next(
            index for index, peer in enumerate(target.regions) if (peer.part, peer.layer) == (region.part, region.layer)
        )
        for here, there in zip(source_pages, target_pages, strict=True):
            dense.at(theirs, there)[:] = source.at(mine, here)
    dense.at(len(target.regions) - 1, 0)[:] = source.at(len(source.regions) - 1, 1)

    spans = np.concatenate([plan_pages(pairing, source_pages, target_pages), plan_row(pairing, "metadata", 1, 0)])
    check_spans(spans, source.regions, target.regions)
    batches = split(spans, batch_bytes)
    written = move(np.concatenate(batches), source, target)

    assert np.array_equal(target.memory, expected)
    assert written.max() == 1
    assert written.sum() == total_bytes(spans) == len(source_pages) * pairing.page_bytes + 7
    assert all(0 < total_bytes(batch) <= batch_bytes for batch in batches)


def test_runs_contiguous_on_both_sides_merge():
    source, target = side(range(2), [4], 10), side(range(2), [4], 10)
    spans = plan_pages(pair(source.regions, target.regions), [1, 2, 3, 5, 6], [4, 5, 6, 7, 9])
    # 1-3 -> 4-6 is one run; 5 -> 7 breaks at the source, 6 -> 9 at the target.
    rows = [tuple(int(value) for value in span) for span in spans]
    assert rows == [(r, r, 4 * s, 4 * t, 4 * n) for r in (0, 1) for s, t, n in ((1, 4, 3), (5, 7, 1), (6, 9, 1))]


def test_no_pages_no_spans():
    regions = side(range(2), [4], 10).regions
    spans = plan_pages(pair(regions, regions), [], [])
    assert spans.dtype == SPAN_DTYPE and len(spans) == 0 and split(spans, 5) == []


def test_a_span_above_the_bound_is_cut_and_smaller_ones_stay_whole():
    spans = make_spans([0, 1], [1, 0], [100, 0], [200, 0], [7, 2])
    assert [[tuple(map(int, span)) for span in batch] for batch in split(spans, 3)] == [
        [(0, 1, 100, 200, 3)],
        [(0, 1, 103, 203, 3)],
        [(0, 1, 106, 206, 1), (1, 0, 0, 0, 2)],
    ]
    with pytest.raises(TransferError, match="batch_bytes is 0"):
        split(spans, 0)


K0 = Region(RegionKind.PAGES, "k", 0, 0, 64, 4, 0, 2)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ([K0], [Region(RegionKind.PAGES, "k", 0, 0, 32, 4, 0, 2)], "64 at the source, 32 at the target"),
        ([K0], [Region(RegionKind.PAGES, "k", 0, 0, 64, 4, 2, 2)], r"\(0, 2\) at the source, \(2, 2\) at the target"),
        ([K0], [Region(RegionKind.PAGES, "k", 1, 0, 64, 4, 0, 2)], "target lacks pages of k of layer 0"),
        ([], [K0], "source lacks pages of k of layer 0: source has 0 parts of layers, target 1"),
        ([K0, K0], [K0], "source regions 0 and 1 both hold"),
        ([K0], [K0, Region(RegionKind.ROWS, "metadata", -1, 0, 8, 4)], "source lacks rows"),
    ],
)
def test_regions_that_do_not_match_are_refused(source, target, words):
    with pytest.raises(TransferError, match=words):
        pair(source, target)


@pytest.mark.parametrize(
    ("source_pages", "target_pages", "words"),
    [
        ([1, 2], [1], "2 source pages but 1 target"),
        ([4], [0], r"source page 4 is outside 0 \.\. 3"),
        ([0], [-1], r"target page -1 is outside 0 \.\. 3"),
        ([0, 1], [2, 2], "named twice"),
        ([0.5], [1], "integers"),
        ([[0]], [[1]], "2 axes"),
    ],
)
def test_page_lists_are_checked(source_pages, target_pages, words):
    with pytest.raises(TransferError, match=words):
        plan_pages(pair([K0], [K0]), source_pages, target_pages)


def test_rows_are_checked():
    row = Region(RegionKind.ROWS, "metadata", -1, 0, 8, 4)
    pairing = pair([row], [row])
    with pytest.raises(TransferError, match=r"target slot 4 is outside 0 \.\. 3"):
        plan_row(pairing, "metadata", 0, 4)
    with pytest.raises(TransferError, match=r"no rows of part 'state'.*metadata"):
        plan_row(pairing, "state", 0, 0)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((1, 0, 0, 0, [1]), "source region 1; there are 1"),
        ((0, -1, 0, 0, [1]), "target region -1"),
        ((0, 0, 250, 0, [7]), "source region 0 has 256 bytes; offset 250 with length 7"),
        ((0, 0, 0, -1, [1]), "offset -1"),
        ((0, 0, 0, 0, [0]), "length 0"),
        ((0, 0, 2**62, 2**62, [2**62]), "lies outside"),
    ],
)
def test_spans_outside_a_region_are_refused(columns, words):
    with pytest.raises(TransferError, match=words):
        check_spans(make_spans(*columns), [K0], [K0])


def test_spans_of_two_kinds_of_memory_are_parted_each_in_its_order():
    """KV in a device's memory and a row beside it in the host's: a batch has one kind on each side."""

    def region(device):
        return Region(RegionKind.PAGES, "k", 0, 0, 8, 8, device=device)

    source, target = (region(0), region(-1)), (region(-1), region(3))
    spans = make_spans([0, 1, 0, 1, 0], [1, 0, 0, 0, 1], [0, 1, 2, 3, 4], 0, [1] * 5)
    assert [table["source_offset"].tolist() for table in by_memory(spans, source, target)] == [[1, 3], [2], [0, 4]]
    (same,) = by_memory(spans, (region(-1),) * 2, (region(-1),) * 2)
    assert same is spans


@pytest.mark.parametrize("seed", range(40))
def test_few_runs_are_those_that_the_tokens_give_one_by_one(seed: int) -> None:
    """For few items and for many there are two ways to the runs: both must come to what merging entry by entry does."""
    random = Random(seed)
    sizes = random.choice([1, 2, 3, 8]), random.choice([1, 2, 3, 8])
    end = random.choice([0, 1, 7, 30, 200])
    first = random.randint(0, end)
    lists = [_numbers(random, -(-end // size)) for size in sizes]
    wanted: list[list[int]] = []
    for entry in range(first, end):
        at = [pages[entry // size] * size + entry % size for pages, size in zip(lists, sizes, strict=True)]
        if wanted and all(last + wanted[-1][2] == here for last, here in zip(wanted[-1], at, strict=False)):
            wanted[-1][2] += 1
        else:
            wanted.append([*at, 1])
    source, target = (np.array(pages, dtype=np.int64) for pages in lists)
    for way in (runs._few_runs, runs._many_runs, runs.entry_runs):
        made = way(first, end, source, sizes[0], target, sizes[1])
        assert np.array([made.source_at, made.target_at, made.count]).T.tolist() == wanted
        assert {column.dtype for column in (made.source_at, made.target_at, made.count)} == {np.dtype(np.int64)}


def _numbers(random: Random, count: int) -> list[int]:
    """Page numbers, of which some follow each other."""
    numbers = list(range(0, 2 * count, 2)) if random.random() < 0.3 else list(range(count))
    for _ in range(random.choice([0, 1, count])):
        a, b = random.randrange(count or 1), random.randrange(count or 1)
        if count:
            numbers[a], numbers[b] = numbers[b], numbers[a]
    return numbers
