"""Copies in the compact form in which a plan has them: which regions, and which places in them. Pure numpy.

An *entry* is what a region has per token (or per `entry_tokens` tokens; or a row): a region is an array of entries of
`stride` bytes. A `Block` copies the same entries in several pairs of regions: byte
`source_start[p] + source_stride[p] * (source_at[r] + i)` of region `source_region[p]` and the `width[p]` bytes from
there on go to the same place at the target, for each pair p, run r and i < count[r], in this order. The packed stream
of a plan is its blocks' bytes in this order, so it does not depend on page numbers, nor on how runs merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.contract import SPAN_DTYPE, Spans
from kvferry.transfer.spans import no_spans

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Columns:
    """Pairs of regions that are copied alike: arrays [pairs] (regions int32, the rest int64, in bytes).

    `sliced`: on one side at least an entry has more than is taken of it, so that entries are never neighbours.
    """

    source_region: NDArray[np.int32]
    target_region: NDArray[np.int32]
    source_start: Ints
    target_start: Ints
    source_stride: Ints
    target_stride: Ints
    width: Ints
    sliced: bool

    def __len__(self) -> int:
        return len(self.width)

    @cached_property
    def entry_bytes(self) -> int:
        """What an entry has in all pairs of regions together."""
        return int(self.width.sum())


class Runs(msgspec.Struct, frozen=True, eq=False):
    """Runs of entries that follow each other on both sides, int64 [runs]: the first one of each side, and how many."""

    source_at: Ints
    target_at: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.count)

    @property
    def entries(self) -> int:
        return int(np.add.reduce(self.count))

    def each(self) -> Runs:
        """One run per entry."""
        within = np.arange(self.entries) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        source, target = np.repeat(self.source_at, self.count), np.repeat(self.target_at, self.count)
        return Runs(source + within, target + within, np.ones(len(within), dtype=np.int64))


class Side(msgspec.Struct, frozen=True, eq=False):
    """One side of a block: of `Columns` the first four, of `Runs` the others."""

    region: NDArray[np.int32] | Ints
    start: Ints
    stride: Ints
    width: Ints
    at: Ints
    count: Ints


class Block(msgspec.Struct, frozen=True, eq=False):
    columns: Columns
    runs: Runs

    @property
    def source(self) -> Side:
        columns, runs = self.columns, self.runs
        return Side(
            columns.source_region, columns.source_start, columns.source_stride, columns.width,
            runs.source_at, runs.count,
        )  # fmt: skip

    @property
    def target(self) -> Side:
        columns, runs = self.columns, self.runs
        return Side(
            columns.target_region, columns.target_start, columns.target_stride, columns.width,
            runs.target_at, runs.count,
        )  # fmt: skip

    @property
    def sliced(self) -> bool:
        return self.columns.sliced

    @property
    def size_bytes(self) -> int:
        return self.columns.entry_bytes * self.runs.entries

    @property
    def span_count(self) -> int:
        return len(self.columns) * (self.runs.entries if self.sliced else len(self.runs))

    def spans(self) -> Spans:
        columns, runs = self.columns, self.runs.each() if self.sliced else self.runs
        table = np.empty((len(columns), len(runs)), dtype=SPAN_DTYPE)
        table["source_region"] = columns.source_region[:, None]
        table["target_region"] = columns.target_region[:, None]
        table["source_offset"] = columns.source_start[:, None] + columns.source_stride[:, None] * runs.source_at
        table["target_offset"] = columns.target_start[:, None] + columns.target_stride[:, None] * runs.target_at
        table["length"] = columns.width[:, None] * runs.count
        return table.reshape(-1)


def spans_of(blocks: Sequence[Block]) -> Spans:
    """The span table of all blocks, in their order."""
    tables = [block.spans() for block in blocks]
    return np.concatenate(tables) if len(tables) > 1 else tables[0] if tables else no_spans()
