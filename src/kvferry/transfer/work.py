"""What an endpoint is given to write: spans, or the blocks of a plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.transfer.blocks import Block, Side, spans_of
from kvferry.transfer.contract import Region, Spans, TransferError
from kvferry.transfer.spans import check_spans

Blocks = tuple[Block, ...]
#: An endpoint that does not stage takes blocks as the spans that they are.
Work = Spans | Blocks


def spans_in(work: Work) -> Spans:
    return work if isinstance(work, np.ndarray) else spans_of(work)


def check_work(work: Work, source: Sequence[Region], target: Sequence[Region]) -> None:
    """Raises TransferError for what lies outside a region of either side."""
    if isinstance(work, np.ndarray):
        check_spans(work, source, target)
        return
    for block in work:
        check_slices("source", block.source, source)
        check_slices("target", block.target, target)


def check_slices(name: str, side: Side, regions: Sequence[Region]) -> None:
    """Of the side of that name. Raises TransferError, naming pair and values, for a slice that is empty or does not lie
    in its region.
    """
    at, count = side.at, side.count
    if not len(count) or not len(side.width):
        return
    if int(count.min()) < 1 or int(at.min()) < 0:
        raise TransferError(f"{name}: a run of {count.min()} entries from {at.min()} on; the least is 1 from 0 on")
    # In Python's integers, which don't overflow whatever a peer says.
    last = max(first + entries for first, entries in zip(at.tolist(), count.tolist(), strict=True)) - 1
    columns = side.region, side.start, side.stride, side.width
    table = zip(*(column.tolist() for column in columns), strict=True)
    for pair, (index, first, step, length) in enumerate(table):
        if not 0 <= index < len(regions):
            raise TransferError(f"pair {pair}: {name} region {index}; there are {len(regions)}")
        size = regions[index].item_bytes * regions[index].items
        if first < 0 or step < 1 or length < 1 or first + step * last + length > size:
            raise TransferError(
                f"pair {pair}: {name} region {index} has {size} bytes; entry {last} of {step} bytes, from byte {first} "
                f"on {length} bytes, lies outside"
            )
