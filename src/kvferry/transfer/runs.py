"""Where the tokens of a prompt lie on both sides, as runs of entries. Pure, no loops over many tokens or pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvferry.transfer.blocks import Ints, Runs
from kvferry.transfer.contract import TransferError
from kvferry.transfer.spans import FEW


def item_list(side: str, items: ArrayLike, noun: str = "page") -> Ints:
    """Page numbers as int64 [pages]. Raises TransferError for what is not one axis of integers."""
    array = np.asarray(items)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TransferError(f"{side} {noun}s: wanted one axis of integers, got {array.dtype} with {array.ndim} axes")
    return array.astype(np.int64)


def check_items(side: str, used: Ints, limit: int, noun: str = "page") -> None:
    """Raises TransferError naming the first number outside a pool of `limit` items."""
    if not used.size:
        return
    if used.size <= FEW:
        few = used.tolist()
        low, high = min(few), max(few)
    else:
        low, high = int(used.min()), int(used.max())
    if low < 0 or high >= limit:
        raise TransferError(f"{side} {noun} {low if low < 0 else high} is outside 0 .. {limit - 1}")


def check_once(target: Ints) -> None:
    """Raises TransferError when a target page is named twice."""
    different = len(set(target.tolist())) if target.size <= FEW else np.unique(target).size
    if different != target.size:
        raise TransferError(f"a target page is named twice in {target.tolist()}")


def page_runs(source: Ints, target: Ints) -> Runs:
    """source[i] to target[i], for items that are copied whole: in units of items."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    first = np.concatenate(([0], breaks)) if source.size else breaks
    return Runs(source[first], target[first], np.diff(np.append(first, source.size)))


def entry_runs(first: int, end: int, source: Ints, source_entries: int, target: Ints, target_entries: int) -> Runs:
    """Entries [first, end) of a prompt: entry e lies in item source[e // source_entries] at e % source_entries, and in
    the same way at the target; the item sizes are free.
    """
    if end - first <= FEW * min(source_entries, target_entries):
        return _few_runs(first, end, source, source_entries, target, target_entries)
    return _many_runs(first, end, source, source_entries, target, target_entries)


def _few_runs(first: int, end: int, source: Ints, source_entries: int, target: Ints, target_entries: int) -> Runs:
    """For few items, of which a step of Python costs less than all the calls of the arrays' way."""
    source_first, target_first = first // source_entries, first // target_entries
    sources = source[source_first : -(-end // source_entries)].tolist()
    targets = target[target_first : -(-end // target_entries)].tolist()
    runs: list[list[int]] = []
    while first < end:
        source_item, source_in = divmod(first, source_entries)
        target_item, target_in = divmod(first, target_entries)
        count = min(source_entries - source_in, target_entries - target_in, end - first)
        source_at = sources[source_item - source_first] * source_entries + source_in
        target_at = targets[target_item - target_first] * target_entries + target_in
        last = runs[-1] if runs else None
        if last is not None and last[0] + last[2] == source_at and last[1] + last[2] == target_at:
            last[2] += count
        else:
            runs.append([source_at, target_at, count])
        first += count
    return Runs(*np.array(runs, dtype=np.int64).reshape(-1, 3).T)


def _many_runs(first: int, end: int, source: Ints, source_entries: int, target: Ints, target_entries: int) -> Runs:
    cuts = [np.arange(-(-first // size) * size, end, size, dtype=np.int64) for size in {source_entries, target_entries}]
    starts = np.unique(np.concatenate([[first], *cuts])) if first < end else np.empty(0, dtype=np.int64)
    source_at = source[starts // source_entries] * source_entries + starts % source_entries
    target_at = target[starts // target_entries] * target_entries + starts % target_entries
    ends = np.append(starts[1:], end) if starts.size else starts
    counts = ends - starts
    joined = (source_at[1:] == source_at[:-1] + counts[:-1]) & (target_at[1:] == target_at[:-1] + counts[:-1])
    kept = np.concatenate(([0], np.flatnonzero(~joined) + 1)) if starts.size else starts
    return Runs(source_at[kept], target_at[kept], np.diff(np.append(starts[kept], end)) if starts.size else starts)
