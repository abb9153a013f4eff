"""Gathers the bytes of spans into one buffer, and scatters them out of one: for backends whose messages are contiguous.

A buffer holds the spans' bytes one behind the other, in the order of the table. Neighbours in the table with the same
region and the same length are copied by one call: pages are, and the slices of one head group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.contract import Region, Spans
from kvferry.transfer.spans import region_bytes

Bytes = NDArray[np.uint8]

#: Below this, one more index for each unit costs more than copying a span by itself.
_LEAST_UNIT_BYTES = 64


class RegionMemory:
    """The memory of regions, for one thread. The spans must lie in the regions, and the buffer hold all their bytes."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._memory = [
            np.frombuffer((ctypes.c_uint8 * size).from_address(region.base), np.uint8)
            for region, size in zip(regions, region_bytes(regions).tolist(), strict=True)
        ]

    def gather(self, spans: Spans, buffer: Bytes) -> None:
        """Source side of the spans -> buffer."""
        for memory, offsets, length, piece in self._runs(spans, "source", buffer):
            if len(offsets) == 1:
                piece[:] = memory[offsets[0] : offsets[0] + length]
            elif unit := _unit(offsets, length):
                np.take(_items(memory, unit), _indices(offsets, length, unit), out=_items(piece, unit), mode="clip")
            else:
                for at, offset in enumerate(offsets.tolist()):
                    piece[at * length : (at + 1) * length] = memory[offset : offset + length]

    def scatter(self, spans: Spans, buffer: Bytes) -> None:
        """Buffer -> target side of the spans."""
        for memory, offsets, length, piece in self._runs(spans, "target", buffer):
            if len(offsets) == 1:
                memory[offsets[0] : offsets[0] + length] = piece
            elif unit := _unit(offsets, length):
                np.put(_items(memory, unit), _indices(offsets, length, unit), _items(piece, unit), mode="clip")
            else:
                for at, offset in enumerate(offsets.tolist()):
                    memory[offset : offset + length] = piece[at * length : (at + 1) * length]

    def _runs(self, spans: Spans, side: str, buffer: Bytes) -> Iterator[tuple[Bytes, NDArray[np.int64], int, Bytes]]:
        """(memory of a region, offsets in it, their common length, their part of the buffer) of each run."""
        regions, lengths = spans[f"{side}_region"], spans["length"]
        breaks = np.flatnonzero((np.diff(regions) != 0) | (np.diff(lengths) != 0)) + 1
        start = 0
        for first, after in zip([0, *breaks.tolist()], [*breaks.tolist(), len(spans)], strict=True):
            if first == after:  # there are no spans
                return
            length = int(lengths[first])
            end = start + length * (after - first)
            yield self._memory[regions[first]], spans[f"{side}_offset"][first:after], length, buffer[start:end]
            start = end


def _unit(offsets: NDArray[np.int64], length: int) -> int:
    """The largest number of bytes that all offsets and the length are multiples of; 0 if it is too small to pay."""
    unit = int(np.gcd.reduce(offsets, initial=length))
    return unit if unit >= _LEAST_UNIT_BYTES or unit == length else 0


def _items(memory: Bytes, unit: int) -> NDArray[np.void]:
    """The memory as items of `unit` bytes; what is left at its end belongs to none."""
    items: NDArray[np.void] = memory[: len(memory) // unit * unit].view(f"V{unit}")
    return items


def _indices(offsets: NDArray[np.int64], length: int, unit: int) -> NDArray[np.int64]:
    """Index of every item of every span, in order."""
    first: NDArray[np.int64] = offsets // unit
    return first if unit == length else (first[:, None] + np.arange(length // unit)).reshape(-1)
