"""One byte that is changed at the target of a write, once it lies there: for fault runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvferry.transfer.contract import Region, Spans
from kvferry.transfer.spans import addresses, make_spans, total_bytes


def byte_at(spans: Spans, at: int) -> tuple[int, int]:
    """Where byte number `at` of the write list lies: the number of its span, and its place in that. Raises IndexError
    for a list that has no such byte.
    """
    if not 0 <= at < total_bytes(spans):
        raise IndexError(f"byte {at} of a write of {total_bytes(spans)} bytes")
    ends = np.cumsum(spans["length"])
    span = int(np.searchsorted(ends, at, side="right"))
    return span, int(at - (ends[span] - spans["length"][span]))


def flipping(spans: Spans, regions: Sequence[Region], at: int) -> Spans | None:
    """A write of one byte, which changes byte number `at` of a write that has ended: its source is another byte of
    ours that differs. None when all bytes of that write are equal. `regions` are those of the source.
    """
    span, within = byte_at(spans, at)
    starts = addresses(spans, regions, "source").tolist()
    byte = ctypes.string_at(starts[span] + within, 1)
    for number, (start, length) in enumerate(zip(starts, spans["length"].tolist(), strict=True)):
        other = next((i for i, b in enumerate(ctypes.string_at(start, length)) if b != byte[0]), None)
        if other is not None:
            return make_spans(
                spans["source_region"][number], spans["target_region"][span],
                spans["source_offset"][number] + other, spans["target_offset"][span] + within, [1],
            )  # fmt: skip
    return None
