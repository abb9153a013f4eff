"""Where the tokens of a prompt lie on both sides, as runs of entries. Pure numpy, no loops over pages or tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvferry.transfer.blocks import Ints, Runs
from kvferry.transfer.contract import TransferError


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
    low, high = int(used.min()), int(used.max())
    if low < 0 or high >= limit:
        raise TransferError(f"{side} {noun} {low if low < 0 else high} is outside 0 .. {limit - 1}")


def check_once(target: Ints) -> None:
    """Raises TransferError when a target page is named twice."""
    if np.unique(target).size != target.size:
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
    cuts = [np.arange(-(-first // size) * size, end, size, dtype=np.int64) for size in {source_entries, target_entries}]
    starts = np.unique(np.concatenate([[first], *cuts])) if first < end else np.empty(0, dtype=np.int64)
    source_at = source[starts // source_entries] * source_entries + starts % source_entries
    target_at = target[starts // target_entries] * target_entries + starts % target_entries
    ends = np.append(starts[1:], end) if starts.size else starts
    counts = ends - starts
    joined = (source_at[1:] == source_at[:-1] + counts[:-1]) & (target_at[1:] == target_at[:-1] + counts[:-1])
    kept = np.concatenate(([0], np.flatnonzero(~joined) + 1)) if starts.size else starts
    return Runs(source_at[kept], target_at[kept], np.diff(np.append(starts[kept], end)) if starts.size else starts)
