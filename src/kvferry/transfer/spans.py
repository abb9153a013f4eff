"""Span tables: making them, checking them, cutting them into bounded batches. Pure numpy, no loops over pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.transfer.contract import SPAN_DTYPE, Region, Spans, TransferError

#: So many spans, or pages, are faster one by one than as arrays.
FEW = 32
_LARGEST = np.iinfo(np.int64).max


def make_spans(
    source_region: ArrayLike,
    target_region: ArrayLike,
    source_offset: ArrayLike,
    target_offset: ArrayLike,
    length: ArrayLike,
) -> Spans:
    """A span table from its columns (each int, broadcast against `length`, whose size is the number of rows)."""
    lengths = np.asarray(length, dtype=np.int64).reshape(-1)
    spans = np.empty(lengths.size, dtype=SPAN_DTYPE)
    spans["source_region"] = source_region
    spans["target_region"] = target_region
    spans["source_offset"] = source_offset
    spans["target_offset"] = target_offset
    spans["length"] = lengths
    return spans


def no_spans() -> Spans:
    return np.empty(0, dtype=SPAN_DTYPE)


def total_bytes(spans: Spans) -> int:
    return int(spans["length"].sum()) if len(spans) else 0


def check_spans(spans: Spans, source: Sequence[Region], target: Sequence[Region]) -> None:
    """Raises TransferError naming the first span that is empty, or that lies outside a region of either side."""
    if spans.dtype != SPAN_DTYPE or spans.ndim != 1:
        raise TransferError(f"spans have dtype {spans.dtype} and {spans.ndim} axes; wanted SPAN_DTYPE, one axis")
    check_side(spans, source, "source")
    check_side(spans, target, "target")


def _lies_within(spans: Spans, regions: Sequence[Region], side: str) -> bool:
    """As `check_side`, one by one, which is faster for few of them."""
    sizes = _of(regions)[2]
    columns = (spans[name].tolist() for name in (f"{side}_region", f"{side}_offset", "length"))
    for index, offset, length in zip(*columns, strict=True):
        if length < 1 or not 0 <= index < len(sizes) or offset < 0 or offset + length > sizes[index]:
            return False
    return True


def check_side(spans: Spans, regions: Sequence[Region], side: str) -> None:
    """Raises TransferError naming the first span that is empty, or that lies outside a region of that side ("source" or
    "target").
    """
    if len(spans) <= FEW and _lies_within(spans, regions, side):
        return
    bad = np.flatnonzero(spans["length"] <= 0)
    if bad.size:
        raise TransferError(f"span {bad[0]}: length {spans['length'][bad[0]]} bytes; the least is 1")
    index, offset = spans[f"{side}_region"], spans[f"{side}_offset"]
    bad = np.flatnonzero((index < 0) | (index >= len(regions)))
    if bad.size:
        raise TransferError(f"span {bad[0]}: {side} region {index[bad[0]]}; there are {len(regions)}")
    size = region_bytes(regions)[index]
    # `offset > size - length` and not `offset + length > size`: the sum could overflow.
    bad = np.flatnonzero((offset < 0) | (offset > size - spans["length"]))
    if bad.size:
        at = bad[0]
        raise TransferError(
            f"span {at}: {side} region {index[at]} has {size[at]} bytes; "
            f"offset {offset[at]} with length {spans['length'][at]} lies outside"
        )


def region_bytes(regions: Sequence[Region]) -> NDArray[np.int64]:
    """Size of each region in bytes, int64[regions]."""
    return _of(regions)[1]


def in_device(regions: Sequence[Region]) -> bool:
    """Some of them lie in a device's memory."""
    return any(region.device >= 0 for region in regions)


def by_memory(spans: Spans, source: Sequence[Region], target: Sequence[Region]) -> list[Spans]:
    """The same spans, in tables each of whose sides lies in one kind of memory; each table in the order given."""
    if not (in_device(source) or in_device(target)):
        return [spans]
    here, there = (np.array([region.device >= 0 for region in regions]) for regions in (source, target))
    kinds = 2 * here[spans["source_region"]] + there[spans["target_region"]]
    return [spans[kinds == kind] for kind in np.unique(kinds)]


def addresses(spans: Spans, regions: Sequence[Region], side: str) -> NDArray[np.uint64]:
    """Absolute address of each span's first byte on one side ("source" or "target"), uint64[spans]."""
    bases = _of(regions)[0]
    start: NDArray[np.uint64] = bases[spans[f"{side}_region"]] + spans[f"{side}_offset"].astype(np.uint64)
    return start


_Arrays = tuple[NDArray[np.uint64], NDArray[np.int64], list[int]]
#: By identity, and kept with what they are of: every write asks for those of the same few tuples.
_known: dict[int, tuple[tuple[Region, ...], _Arrays]] = {}
_MOST_KNOWN = 256


def _of(regions: Sequence[Region]) -> _Arrays:
    """(bases, sizes) of the regions, and the sizes as a list."""
    known = _known.get(id(regions))
    if known is not None and known[0] is regions:
        return known[1]
    bases = np.array([region.base for region in regions], dtype=np.uint64)
    sizes = [region.item_bytes * region.items for region in regions]
    arrays = bases, np.array(sizes, dtype=np.int64), sizes
    if isinstance(regions, tuple):
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[id(regions)] = regions, arrays
    return arrays


def split(spans: Spans, batch_bytes: int) -> list[Spans]:
    """Batches of at most `batch_bytes`, in order. A span above the bound is cut; smaller ones stay whole.

    Raises TransferError when the bound is below 1.
    """
    if batch_bytes < 1:
        raise TransferError(f"batch_bytes is {batch_bytes}; the least is 1")
    if len(spans) and total_bytes(spans) <= batch_bytes:
        return [spans]
    pieces = cut(spans, batch_bytes)
    ends = np.cumsum(pieces["length"])
    batches: list[Spans] = []
    first, sent = 0, 0
    while first < len(pieces):
        limit = min(sent + batch_bytes, _LARGEST)
        after = int(np.searchsorted(ends, limit, side="right"))
        batches.append(pieces[first:after])
        first, sent = after, int(ends[after - 1])
    return batches


def cut(spans: Spans, limit_bytes: int) -> Spans:
    """Every span longer than `limit_bytes` replaced, in place, by pieces of at most that."""
    if not len(spans) or int(spans["length"].max()) <= limit_bytes:
        return spans
    counts = -(-spans["length"] // limit_bytes)
    pieces = np.repeat(spans, counts)
    # Number of the piece within its own span: 0, 1, 2, 0, 0, 1, ...
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * limit_bytes
    pieces["source_offset"] += skipped
    pieces["target_offset"] += skipped
    pieces["length"] = np.minimum(pieces["length"] - skipped, limit_bytes)
    return pieces
