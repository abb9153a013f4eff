"""Digests of write lists: one number for the bytes that a list of spans names, as they lie on one side.

The digest is XXH3 (64 bits) of the spans' bytes one after the other, in the order of the list. Both sides of a write
have the same list, so they get the same number exactly if the same bytes lie at both; how spans are merged or cut
changes nothing. It finds what hardware, drivers and late writers do to bytes; it is no defence against forgery.

The work is done on a thread of its own, without the interpreter's lock where our C was built (`kvferry.transfer.xxh3`),
else for large pieces. The memory must stay mapped until `close` has returned.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import xxhash

from kvferry.transfer.contract import Region, Spans
from kvferry.transfer.spans import addresses, check_side
from kvferry.transfer.work import Work, spans_in
from kvferry.transfer.xxh3 import native_xxh3

#: Of no bytes at all.
EMPTY = xxhash.xxh3_64_intdigest(b"")


class Digests(Protocol):
    """Digests of this process's own memory: `side` ("source" or "target") is the one that `work` has here. Blocks are
    taken as the spans that they are.
    """

    async def of(self, work: Work, side: str) -> int: ...
    async def close(self) -> None: ...


def digest_of(spans: Spans, regions: Sequence[Region], side: str) -> int:
    """XXH3-64 of the spans' bytes on one side, in their order. Raises TransferError for spans that are empty or lie
    outside the regions.
    """
    check_side(spans, regions, side)
    native = native_xxh3()
    if native is None:
        return span_by_span(spans, regions, side)
    return native(addresses(spans, regions, side), spans["length"])


def span_by_span(spans: Spans, regions: Sequence[Region], side: str) -> int:
    """The same in Python, about half as fast. Nothing is checked."""
    digest = xxhash.xxh3_64()
    update, views = digest.update, [_view(region) for region in regions]
    columns = (spans[name].tolist() for name in (f"{side}_region", f"{side}_offset", "length"))
    for region, start, length in zip(*columns, strict=True):
        update(views[region][start : start + length])
    return digest.intdigest()


def _view(region: Region) -> memoryview:
    return memoryview((ctypes.c_char * (region.items * region.item_bytes)).from_address(region.base)).cast("B")


class ThreadDigests:
    """`Digests` by one thread, in the order in which they are asked for."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        self._executor = ThreadPoolExecutor(1, "kvferry-digest")

    async def of(self, work: Work, side: str) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._digest, work, side)

    def _digest(self, work: Work, side: str) -> int:
        return digest_of(spans_in(work), self._regions, side)

    async def close(self) -> None:
        """Waits for the digest that is being taken; those that wait for their turn are given up."""
        await asyncio.to_thread(self._executor.shutdown, True, cancel_futures=True)
