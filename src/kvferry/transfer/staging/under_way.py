"""A count of copies under way, kept by whichever thread does them, whose end the loop can wait for."""

from __future__ import annotations

import asyncio
from threading import Lock


class UnderWay:
    """`begin` and `end` on any thread, `over` on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, Lock()
        self._count = 0
        self._waiting: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return self._count > 0

    def begin(self) -> None:
        with self._lock:
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count or not self._waiting:
                return
            waiting, self._waiting = self._waiting, []
        self._loop.call_soon_threadsafe(_wake, waiting)

    async def over(self) -> None:
        """Returns at once when there are none."""
        with self._lock:
            if not self._count:
                return
            ended: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(ended)
        await ended


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for ended in waiting:
        if not ended.done():  # its waiter was cancelled
            ended.set_result(None)
