"""Digests of a simulated process's memory: real ones, which take virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvferry.transfer.contract import Region
from kvferry.transfer.digest import digest_of
from kvferry.transfer.spans import total_bytes
from kvferry.transfer.work import Work, spans_in


class SimDigests:
    """`kvferry.transfer.digest.Digests`. The bytes are those that lie there when the time is over."""

    def __init__(self, regions: Sequence[Region], sleep: Callable[[float], Awaitable[None]], bytes_s: float) -> None:
        self._regions, self._sleep, self._bytes_s = tuple(regions), sleep, bytes_s

    async def of(self, work: Work, side: str) -> int:
        spans = spans_in(work)
        await self._sleep(total_bytes(spans) / self._bytes_s)
        return digest_of(spans, self._regions, side)

    async def close(self) -> None:
        """Nothing to end."""
