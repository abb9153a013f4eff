"""What pairs, what is refused, and what small plans look like, against tables made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.transfer.contract import Region, RegionKind, Segment, TransferError
from kvferry.transfer.cost import Costs
from kvferry.transfer.pairing import check_given, pair, pair_common
from kvferry.transfer.plan import Chunk, Held, Pairing, cp_range, plan, plan_pages, plan_row

PAGES, ROWS, RINGS = RegionKind.PAGES, RegionKind.ROWS, RegionKind.RINGS


def test_the_kinds_on_the_wire_never_change() -> None:
    assert {kind.name: kind.value for kind in RegionKind} == {"PAGES": "pages", "ROWS": "rows", "RINGS": "rings"}


def k(heads: int = 4, first: int = 0, tokens: int = 4, head_bytes: int = 8, **more: Any) -> Region:
    fields: dict[str, Any] = {"kind": PAGES, "part": "k", "layer": 3, "base": 0, "items": 10} | more
    size = tokens * max(heads, 1) * head_bytes // more.get("entry_tokens", 1)
    fields = {"item_bytes": size, "tokens": tokens} | fields
    return Region(first_head=first, heads=heads, **fields)


def rows(part: str = "ssm", size: int = 32, heads: int = 4, first: int = 0, **more: Any) -> Region:
    return Region(ROWS, part, 3, 0, size, 5, first, heads, **more)


def lines(spans: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(line) for line in spans.tolist()]


def chunk_plan(pairing: Pairing, chunk: Chunk, source: Any, target: Any) -> list[tuple[int, ...]]:
    return lines(plan(pairing, chunk, Held(source), Held(target)).spans)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (k(), k(head_bytes=4), "k of layer 3: bytes per head is 8 at the source, 4 at the target"),
        (k(), k(heads=0), "divided by heads is True at the source, False at the target"),
        (k(window=4), k(window=8), "window is 4 at the source, 8 at the target"),
        (k(window=4), k(), "window is 4 at the source, 0 at the target"),
        (k(entry_tokens=4), k(), "entry_tokens is 4 at the source, 1 at the target"),
        (k(entry_tokens=4), k(tokens=8, entry_tokens=8), "entry_tokens is 4 at the source, 8 at the target"),
        (k(), k(tokens=0, item_bytes=128), "tokens is 4 at the source, 0 at the target"),
        (k(), k(kind=RINGS, window=2), "kind is pages at the source, rings at the target"),
        (k(), rows("k"), "kind is pages at the source, rows at the target"),
        (k(tokens=0, item_bytes=128), k(tokens=0, item_bytes=64), "item_bytes is 128 at the source, 64 at the target"),
        (k(2, tokens=0, item_bytes=64), k(4, tokens=0, item_bytes=64), r"heads are \(0, 2\) .*\(0, 4\) .*tokens is 0"),
        (rows(), rows(size=64), "ssm of layer 3: bytes per head is 8 at the source, 16 at the target"),
    ],
)
def test_case_44_what_cannot_be_copied_is_refused_with_both_values(source: Region, target: Region, words: str) -> None:
    """Case 44: when the pair is formed, whether the ranks are alone or of many."""
    for meet in (pair, pair_common) if source.heads == target.heads else (pair_common,):
        with pytest.raises(TransferError, match=words):
            meet([source], [target])


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (k(kind=RINGS, window=5), "a ring of 4 tokens for a window of 5"),
        (k(kind=RINGS), "a ring of 4 tokens for a window of 0"),
        (k(tokens=6, entry_tokens=4), "tokens is 6, and entry_tokens 4"),
        (k(item_bytes=127), "item_bytes is 127; it has 4 entries"),
        (k(heads=3, item_bytes=128), "an entry has 32 bytes for 3 heads"),
        (k(replica=2, replicas=2), "replica is 2 of 2 replicas"),
        (k(segments=(Segment(0, 4, 8),)), "pages have no segments"),
        (rows(segments=(Segment(0, 4, 4), Segment(0, 0, 3))), "item_bytes is 32; its segments have 19"),
        (rows(tokens=4), "rows have tokens 4, entry_tokens 1, window 0; wanted 0, 1, 0"),
    ],
)
def test_a_region_that_contradicts_itself_is_refused(region: Region, words: str) -> None:
    for sides in (([region], []), ([], [region])):
        with pytest.raises(TransferError, match=words):
            pair_common(*sides)


def test_what_only_one_of_two_lone_ranks_has_is_refused() -> None:
    draft = k(stack="draft")
    with pytest.raises(TransferError, match="target lacks pages of k of draft layer 3"):
        pair([k(), draft], [k()])
    with pytest.raises(TransferError, match="source lacks rows of conv of layer 3"):
        pair([k()], [k(), rows("conv")])
    assert pair_common([draft], [k()]).groups == ()


def test_a_rank_gives_all_that_it_alone_has() -> None:
    halves = [pair_common([k(4)], [k(2, first)]) for first in (0, 2)]
    check_given([k(4)], halves)
    check_given([k(4, replica=1, replicas=2)], [])  # another rank has it, too
    with pytest.raises(TransferError, match=r"of the 32 bytes .* of k of layer 3 .* targets have 16"):
        check_given([k(4)], [halves[0], halves[0]])


def test_case_46_each_rank_gets_its_heads_and_no_others() -> None:
    """Case 46: 2 heads of 8 bytes, pages of 2 tokens. 1 -> 4: each head to two ranks. 4 -> 1: each from the first of
    the two that have it. 2 -> 4: the rank of the head to both.
    """

    def rank(tp: int, number: int) -> Region:
        if tp <= 2:
            return k(2 // tp, number * 2 // tp, tokens=2)
        return k(1, number // 2, tokens=2, replica=number % 2, replicas=2)

    def moved(source: int, target: int) -> dict[tuple[int, int], list[tuple[int, ...]]]:
        found = {
            (s, t): lines(plan_pages(pair_common([rank(source, s)], [rank(target, t)]), [1], [2]))
            for s in range(source)
            for t in range(target)
        }
        return {ranks: spans for ranks, spans in found.items() if spans}

    # (source region, target region, source offset, target offset, length); a page has 32 or 16 bytes.
    first, second = [(0, 0, 32, 32, 8), (0, 0, 48, 40, 8)], [(0, 0, 40, 32, 8), (0, 0, 56, 40, 8)]
    assert moved(1, 4) == {(0, 0): first, (0, 1): first, (0, 2): second, (0, 3): second}
    first, second = [(0, 0, 16, 64, 8), (0, 0, 24, 80, 8)], [(0, 0, 16, 72, 8), (0, 0, 24, 88, 8)]
    assert moved(4, 1) == {(0, 0): first, (2, 0): second}
    page = [(0, 0, 16, 32, 16)]
    assert moved(2, 4) == {(0, 0): page, (0, 1): page, (1, 2): page, (1, 3): page}


def test_replicas_share_the_work() -> None:
    """An undivided latent on 4 source ranks and 8, 4, 2 or 1 target ranks."""

    def givers(targets: int) -> list[int]:
        return [
            source
            for target in range(targets)
            for source in range(4)
            if pair_common([k(0, replica=source, replicas=4)], [k(0, replica=target, replicas=targets)]).pages
        ]

    assert givers(8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert givers(4) == [0, 1, 2, 3]
    assert givers(2) == [0, 2]
    assert givers(1) == [0]


def test_pages_of_other_sizes_and_a_start_within_a_page() -> None:
    """Tokens 3 to 9 of 8 bytes, pages of 4 tokens into pages of 3: cut at 4 and 8, and at 6 and 9."""
    pairing = pair_common([k(1, tokens=4)], [k(1, tokens=3)])
    found = chunk_plan(pairing, Chunk(3, 10, 12), [5, 2, 7], [9, 0, 6, 4])
    at = [(3, 5 * 4 + 3, 0 * 3 + 0, 1), (4, 2 * 4, 0 * 3 + 1, 2), (6, 2 * 4 + 2, 6 * 3, 2), (8, 7 * 4, 6 * 3 + 2, 1),
          (9, 7 * 4 + 1, 4 * 3, 1)]  # fmt: skip
    assert found == [(0, 0, 8 * source, 8 * target, 8 * count) for _, source, target, count in at]


def test_runs_of_tokens_merge_across_pages() -> None:
    pairing = pair_common([k(1, tokens=4)], [k(1, tokens=2)])
    assert chunk_plan(pairing, Chunk(0, 8, 8), [3, 4], [0, 1, 2, 3]) == [(0, 0, 96, 0, 64)]
    assert chunk_plan(pairing, Chunk(0, 7, 8), [3, 4], [0, 1, 2, 9]) == [(0, 0, 96, 0, 48), (0, 0, 144, 144, 8)]


def test_of_a_window_go_the_pages_from_its_start_on() -> None:
    """The last 5 of 20 tokens begin at 15: in the page from 12 on. Nothing before it is looked at."""
    pairing = pair_common([k(1, window=5)], [k(1, window=5)])
    none = [-1, -1, -1]
    assert chunk_plan(pairing, Chunk(0, 20, 20), [*none, 4, 6], [*none, 1, 3]) == [
        (0, 0, 128, 32, 32), (0, 0, 192, 96, 32),
    ]  # fmt: skip
    assert chunk_plan(pairing, Chunk(0, 12, 20), [*none, 4, 6], [*none, 1, 3]) == []
    wide = pair_common([k(1, window=5)], [k(1, tokens=16, window=5)])  # the target's page is from 0 on
    assert chunk_plan(wide, Chunk(0, 20, 20), [*none, 4, 6], [0, 2]) == [(0, 0, 128, 96, 32), (0, 0, 192, 256, 32)]


def test_a_ring_lies_at_the_position_modulo_its_slots() -> None:
    """The last 4 of 10 positions are 6 to 9: slots 2, 3 and 0, 1 of 4; 0 to 3 of 6."""
    source, target = (k(1, tokens=size, kind=RINGS, window=4, pool="ring") for size in (4, 6))
    pairing = pair_common([source], [target])

    def spans(chunk: Chunk) -> list[tuple[int, ...]]:
        return lines(plan(pairing, chunk, Held(slots={"ring": 2}), Held(slots={"ring": 1})).spans)

    first, second = (0, 0, (2 * 4 + 2) * 8, 6 * 8, 16), (0, 0, 2 * 4 * 8, (6 + 2) * 8, 16)
    assert spans(Chunk(0, 10, 10)) == [first, second]
    assert spans(Chunk(10, 10, 10)) == [first, second], "a prefix at the target has no ring"
    assert spans(Chunk(0, 8, 10)) == []
    assert spans(Chunk(8, 10, 10, own=(8, 10))) == [second]


def test_segments_of_a_row_are_sliced_each_by_its_own_heads() -> None:
    """A convolution's row: 4 heads of 2 bytes, 2 groups of 3, and one byte that all have; 2 ranks of the target."""
    source = rows("conv", 15, segments=(Segment(0, 4, 2), Segment(0, 2, 3), Segment(0, 0, 1)))
    first, second = (
        rows("conv", 8, segments=(Segment(2 * r, 2, 2), Segment(r, 1, 3), Segment(0, 0, 1, r, 2))) for r in range(2)
    )
    assert lines(plan_row(pair_common([source], [first]), "conv", 2, 1)) == [
        (0, 0, 30, 8, 4), (0, 0, 38, 12, 3), (0, 0, 44, 15, 1),
    ]  # fmt: skip
    assert lines(plan_row(pair_common([source], [second]), "conv", 0, 0)) == [(0, 0, 4, 0, 4), (0, 0, 11, 4, 4)]
    assert lines(plan_row(pair_common([source], [source]), "conv", 1, 0)) == [(0, 0, 15, 0, 15)], (
        "all of it is one span"
    )
    assert len(plan_row(pair_common([first], [source]), "conv", 0, 0)) == 3
    assert lines(plan_row(pair_common([second], [source]), "conv", 0, 0)) == [(0, 0, 0, 4, 4), (0, 0, 4, 11, 3)]


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ((Held([0, 1]), Held([0])), "1 target pages of 4 tokens; 6 tokens need more"),
        ((Held([0]), Held([0, 1])), "1 source pages of 4 tokens"),
        ((Held([0, 10]), Held([0, 1])), r"source page 10 is outside 0 \.\. 9"),
        ((Held([0, 1]), Held([0, -1])), r"target page -1 is outside 0 \.\. 9"),
        ((Held([0, 1]), Held([4, 4])), "named twice"),
        ((Held({"other": [0]}), Held([0, 1])), r"no source pages of pool ''; there are \['other'\]"),
        ((Held([0.5, 1]), Held([0, 1])), "integers"),
    ],
)
def test_pages_that_do_not_fit_the_chunk_are_refused(held: tuple[Held, Held], words: str) -> None:
    with pytest.raises(TransferError, match=words):
        plan(pair([k()], [k()]), Chunk(0, 6, 6), *held)


def test_what_is_asked_wrongly_is_refused() -> None:
    state = pair([rows()], [rows()])
    with pytest.raises(TransferError, match=r"no target slot of pool 'ssm'; there are \[\]"):
        plan(state, Chunk(0, 1, 1), Held(slots={"ssm": 0}), Held())
    with pytest.raises(TransferError, match=r"source slot 5 is outside 0 \.\. 4"):
        plan(state, Chunk(0, 1, 1), Held(slots={"ssm": 5}), Held(slots={"ssm": 0}))
    apart = pair([k(pool="swa")], [k()])
    with pytest.raises(TransferError, match="source pages of pool 'swa' are wanted, beside the main one's"):
        plan(apart, Chunk(0, 1, 1), Held([0]), Held([0]))
    with pytest.raises(
        TransferError, match="pages of 4 tokens at the source, 8 at the target: they are planned by tok"
    ):
        plan_pages(pair([k()], [k(tokens=8)]), [0], [0])
    opaque = k(tokens=0, item_bytes=128)
    with pytest.raises(TransferError, match="tokens is 0"):
        plan(pair([opaque], [opaque]), Chunk(0, 1, 1), Held([0]), Held([0]))
    for wrong in ((2, 1, 3, None), (0, 4, 3, None), (-1, 1, 3, None), (0, 1, 3, (2, 4))):
        with pytest.raises(TransferError, match="wanted 0 <= first <= end <= prompt"):
            Chunk(*wrong)
    with pytest.raises(TransferError, match="cp_rank is 2; allowed: 0 to 1"):
        cp_range(10, 4, 2, 2)


@pytest.mark.parametrize("prompt", [1, 5, 16, 17, 63])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_prompt_is_shared_out_in_pages(prompt: int, size: int) -> None:
    """In order, none twice; the numbers of pages differ by one at most; the last rank has the prompt's last token."""
    parts = [cp_range(prompt, 4, rank, size) for rank in range(size)]
    assert [token for first, end in parts for token in range(first, end)] == list(range(prompt))
    pages = [-(-(end - first) // 4) for first, end in parts]
    assert max(pages) - min(pages) <= 1 and all(first % 4 == 0 or first == end for first, end in parts)
    assert parts[-1][0] < parts[-1][1] == prompt


def test_slices_are_staged_where_that_costs_less() -> None:
    """8 tokens of 2 of 4 heads: 8 spans of 16 bytes. By hand: 8 us straight at 1 us a span; staged 128 bytes in and out
    at 1 GB/s and 0.5 GB/s, 0.128 + 0.256 us, and a descriptor.
    """
    halves = pair_common([k(4)], [k(2)])
    held = Held([0, 1]), Held([3, 7])
    cheap = plan(halves, Chunk(0, 8, 8), *held, costs=Costs(span_us=1, gather_gb_s=1, scatter_gb_s=0.5))
    assert (cheap.estimate.slice_spans, cheap.estimate.slice_bytes, cheap.size_bytes) == (8, 128, 128)
    assert cheap.estimate.slices_s == pytest.approx(8e-6) and cheap.estimate.staged_s == pytest.approx(1.384e-6)
    assert cheap.staged and cheap.reason == (
        "staged: 8 slices of 16 bytes (128 bytes) cost 0.00138 ms beside the wire, 0.008 ms direct"
    )
    slow = plan(halves, Chunk(0, 8, 8), *held, costs=Costs(span_us=1, gather_gb_s=0.01, scatter_gb_s=0.01))
    assert not slow.staged and slow.reason.startswith("direct: 8 slices of 16 bytes")
    whole = plan(pair([k()], [k()]), Chunk(0, 8, 8), *held)
    assert not whole.staged and whole.reason == "direct: no slices; 2 spans, 256 bytes"
    both = plan(pair_common([k(), k(0, part="index")], [k(2), k(0, part="index")]), Chunk(0, 8, 8), *held)
    assert [len(both.sliced), len(both.straight)] == [1, 1] and both.estimate.slice_spans == 8


def test_the_order_is_that_of_the_content_and_not_of_the_lists() -> None:
    """By layer, then part, then token: whatever order either side has registered its regions in."""
    regions = [k(layer=layer, part=part) for layer in (1, 0) for part in ("v", "k")]
    spans = plan(pair(regions, regions[::-1]), Chunk(0, 8, 8), Held([5, 1]), Held([2, 0])).spans
    assert [(regions[line[0]].layer, regions[line[0]].part, line[3]) for line in lines(spans)] == [
        (layer, part, offset) for layer in (0, 1) for part in "kv" for offset in (2 * 128, 0)
    ]
