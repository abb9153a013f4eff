"""A bounded mailbox: many post, one task takes."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`post` never waits: it returns False when `limit` items lie here. `take` returns all that came, in order."""

    __slots__ = ("_items", "_waiting", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: list[T] = []
        self._waiting: asyncio.Future[None] | None = None  # the one task that takes

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: T) -> bool:
        if len(self._items) >= self.limit:
            return False
        self.put(item)
        return True

    def put(self, item: T) -> None:
        """Post an item of our own making (a finished step, a flushed write): never refused, since its number is
        bounded by what we started."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[T]:
        """All items, at least one."""
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self.drain()

    def drain(self) -> list[T]:
        """All items that lie here now, perhaps none."""
        items, self._items = self._items, []
        return items
