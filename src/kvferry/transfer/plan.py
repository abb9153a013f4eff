"""Which bytes go where: regions are paired once per peer, then pages and rows become spans. Pure.

Regions are paired by what they hold (kind, part, global layer, head range), never by their position in a list.
An item on one side is an item on the other: a pair of regions that hold different heads, or pages of another size, is
refused; `Pairing` is where such layouts will be resolved. Which ranks of two instances meet at all is in
`kvferry.transfer.ranks`; of such a pair of ranks `pair_common` takes what both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.transfer.contract import Region, RegionKind, Spans, TransferError
from kvferry.transfer.spans import make_spans, split, total_bytes

__all__ = ["PairedRegions", "Pairing", "pair", "pair_common", "plan_pages", "plan_row", "split", "total_bytes"]

_Place = tuple[str, int]
#: What regions hold: (kind, part, layer, first head, heads).
_Contents = set[tuple[RegionKind, str, int, int, int]]


@dataclass(frozen=True, eq=False)
class PairedRegions:
    """Regions of one kind, pair by pair: int arrays of one length, in the order of the source's regions."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    item_bytes: NDArray[np.int64]
    source_items: NDArray[np.int64]
    target_items: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def bytes_per_item(self) -> int:
        """Bytes of one item summed over all pairs: what one page weighs in all layers."""
        return int(self.item_bytes.sum())


@dataclass(frozen=True, eq=False)
class Pairing:
    """How a source's regions meet a target's. `rows` by part ("metadata", ...)."""

    pages: PairedRegions
    rows: Mapping[str, PairedRegions]


def pair(source_regions: Sequence[Region], target_regions: Sequence[Region]) -> Pairing:
    """Pair the regions of two sides.

    Raises TransferError, naming both values, on a part and layer that one side lacks, a repeated one, and on
    unequal item bytes or heads.
    """
    return _pair(source_regions, target_regions, None)


def pair_common(source_regions: Sequence[Region], target_regions: Sequence[Region]) -> Pairing:
    """Pair what a source rank and a target rank both have: regions of the same part, layer and heads, and rows; what
    one of them lacks is for other ranks.

    Raises TransferError, naming both values, on a repeated part and layer, and on unequal item bytes.
    """
    common = {_content(region) for region in source_regions} & {_content(region) for region in target_regions}
    return _pair(source_regions, target_regions, common)


def _pair(source_regions: Sequence[Region], target_regions: Sequence[Region], only: _Contents | None) -> Pairing:
    pages = _pair_kind(RegionKind.PAGES, source_regions, target_regions, only=only)
    parts = dict.fromkeys(region.part for region in source_regions if region.kind is RegionKind.ROWS)
    parts |= dict.fromkeys(region.part for region in target_regions if region.kind is RegionKind.ROWS)
    rows = {part: _pair_kind(RegionKind.ROWS, source_regions, target_regions, part, only) for part in parts}
    return Pairing(pages=pages, rows=rows)


def plan_pages(pairing: Pairing, source_pages: ArrayLike, target_pages: ArrayLike) -> Spans:
    """Spans that copy source_pages[i] to target_pages[i] in every paired region of pages, region by region.

    Pages that follow each other on both sides become one span. Raises TransferError on lists of unequal length,
    a page outside a pool, or a target page named twice.
    """
    source, target = _page_list("source", source_pages), _page_list("target", target_pages)
    if source.size != target.size:
        raise TransferError(f"{source.size} source pages but {target.size} target pages")
    regions = pairing.pages
    _check_pages("source", source, regions.source_items)
    _check_pages("target", target, regions.target_items)
    if np.unique(target).size != target.size:
        raise TransferError(f"a target page is named twice in {target.tolist()}")
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    first = np.concatenate(([0], breaks)) if source.size else breaks
    run_pages = np.diff(np.append(first, source.size))
    width = regions.item_bytes[:, None]  # shapes below: [pairs, runs]
    runs = len(first)
    return make_spans(
        source_region=np.repeat(regions.source, runs),
        target_region=np.repeat(regions.target, runs),
        source_offset=(width * source[first]).reshape(-1),
        target_offset=(width * target[first]).reshape(-1),
        length=width * run_pages,
    )


def plan_row(pairing: Pairing, part: str, source_slot: int, target_slot: int) -> Spans:
    """Spans that copy one row of `part` (one per paired region of it). Raises TransferError: unknown part, slot."""
    if part not in pairing.rows:
        raise TransferError(f"no rows of part {part!r}; there are {sorted(pairing.rows)}")
    regions = pairing.rows[part]
    _check_pages("source", np.array([source_slot]), regions.source_items, "slot")
    _check_pages("target", np.array([target_slot]), regions.target_items, "slot")
    return make_spans(
        source_region=regions.source,
        target_region=regions.target,
        source_offset=regions.item_bytes * source_slot,
        target_offset=regions.item_bytes * target_slot,
        length=regions.item_bytes,
    )


def _content(region: Region) -> tuple[RegionKind, str, int, int, int]:
    return (region.kind, region.part, region.layer, region.first_head, region.heads)


def _pair_kind(
    kind: RegionKind,
    source: Sequence[Region],
    target: Sequence[Region],
    part: str | None = None,
    only: _Contents | None = None,
) -> PairedRegions:
    mine, theirs = _by_place("source", kind, source, part, only), _by_place("target", kind, target, part, only)
    for side, here, there in (("target", mine, theirs), ("source", theirs, mine)):
        missing = [place for place in here if place not in there]
        if missing:
            raise TransferError(
                f"{side} lacks {kind.value} of (part, layer) {missing[:4]}: "
                f"source has {len(mine)} regions, target {len(theirs)}"
            )
    for place, index in mine.items():
        _check_equal(place, source[index], target[theirs[place]])
    ours, peers = list(mine.values()), [theirs[place] for place in mine]
    return PairedRegions(
        source=np.array(ours, dtype=np.int32),
        target=np.array(peers, dtype=np.int32),
        item_bytes=np.array([source[index].item_bytes for index in ours], dtype=np.int64),
        source_items=np.array([source[index].items for index in ours], dtype=np.int64),
        target_items=np.array([target[index].items for index in peers], dtype=np.int64),
    )


def _by_place(
    side: str, kind: RegionKind, regions: Sequence[Region], part: str | None, only: _Contents | None
) -> dict[_Place, int]:
    places: dict[_Place, int] = {}
    for index, region in enumerate(regions):
        if region.kind is not kind or (part is not None and region.part != part):
            continue
        if only is not None and _content(region) not in only:
            continue
        place = (region.part, region.layer)
        if place in places:
            raise TransferError(f"{side} regions {places[place]} and {index} both hold {kind.value} of {place}")
        places[place] = index
    return places


def _check_equal(place: _Place, source: Region, target: Region) -> None:
    if source.item_bytes != target.item_bytes:
        raise TransferError(
            f"{place}: item_bytes is {source.item_bytes} at the source, {target.item_bytes} at the target"
        )
    ours, theirs = (source.first_head, source.heads), (target.first_head, target.heads)
    if ours != theirs:
        raise TransferError(f"{place}: (first_head, heads) is {ours} at the source, {theirs} at the target")


def _page_list(side: str, pages: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(pages)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TransferError(f"{side} pages: wanted one axis of integers, got {array.dtype} with {array.ndim} axes")
    return array.astype(np.int64)


def _check_pages(side: str, pages: NDArray[np.int64], items: NDArray[np.int64], noun: str = "page") -> None:
    if not (pages.size and items.size):
        return
    low, high, limit = int(pages.min()), int(pages.max()), int(items.min())
    if low < 0 or high >= limit:
        raise TransferError(f"{side} {noun} {low if low < 0 else high} is outside 0 .. {limit - 1}")
