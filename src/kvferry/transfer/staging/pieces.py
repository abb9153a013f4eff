"""The blocks of a write, cut into pieces that fit a staging buffer. Pure.

A piece is some pairs of a block, with all of its runs; or one pair with some of its entries, where all of them are too
many. Pieces in their order are the packed stream of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.transfer.blocks import Block, Columns, Runs
from kvferry.transfer.contract import TransferError
from kvferry.transfer.work import Blocks

#: Of a piece, so that its bytes in a buffer are whole words wherever the next one begins.
ALIGN = 64


class Piece(Block, frozen=True, eq=False):
    """A block that fits."""

    @property
    def room_bytes(self) -> int:
        """What it takes of a buffer."""
        return -(-self.size_bytes // ALIGN) * ALIGN


def check_fits(blocks: Blocks, most_bytes: int) -> None:
    """Raises TransferError when a slice of one entry is larger than a piece can be."""
    for block in blocks:
        widest = int(block.columns.width.max()) if len(block.columns) else 0
        if widest > most_bytes:
            at = int(block.columns.width.argmax())
            raise TransferError(
                f"an entry of source region {block.columns.source_region[at]} has {widest} bytes; a staged piece has "
                f"at most {most_bytes}"
            )


def cut(blocks: Blocks, most_bytes: int) -> Iterator[Piece]:
    """Pieces of at most `most_bytes`, which must be a multiple of ALIGN and no less than any slice (`check_fits`)."""
    for block in blocks:
        entries = block.runs.entries
        widths = (block.columns.width * entries).tolist()
        first, size = 0, 0
        for at, width in enumerate(widths):
            if size + width > most_bytes:
                if at > first:
                    yield Piece(_some(block, first, at), block.runs)
                first, size = at, 0
            if width > most_bytes:
                yield from _parts(block, at, most_bytes)
                first, size = at + 1, 0
            else:
                size += width
        if size:
            yield Piece(_some(block, first, len(widths)), block.runs)


def _some(block: Block, first: int, end: int) -> Columns:
    c, part = block.columns, slice(first, end)
    return Columns(
        c.source_region[part], c.target_region[part], c.source_start[part], c.target_start[part],
        c.source_stride[part], c.target_stride[part], c.width[part], c.sliced,
    )  # fmt: skip


def _parts(block: Block, at: int, most_bytes: int) -> Iterator[Piece]:
    columns = _some(block, at, at + 1)
    each, total = most_bytes // int(columns.width[0]), block.runs.entries
    ends = np.cumsum(block.runs.count)
    for first in range(0, total, each):
        end = min(first + each, total)
        yield Piece(columns, _within(block.runs, ends, first, end))


def _within(runs: Runs, ends: np.ndarray[tuple[int], np.dtype[np.int64]], first: int, end: int) -> Runs:
    """Entries [first, end) of the runs, counted over all of them; `ends` are their cumulated counts."""
    low, high = int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, end, side="left")) + 1
    begins = ends[low:high] - runs.count[low:high]
    skipped = np.maximum(first - begins, 0)
    count = np.minimum(ends[low:high], end) - begins - skipped
    return Runs(runs.source_at[low:high] + skipped, runs.target_at[low:high] + skipped, count)
