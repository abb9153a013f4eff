"""A bounded mailbox: many post, one task takes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`post` never waits: it returns False when `limit` items lie here. `take` returns all that came, in order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()

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
        self._filled.set()

    async def take(self) -> list[T]:
        """All items, at least one."""
        await self._filled.wait()
        return self.drain()

    def drain(self) -> list[T]:
        """All items that lie here now, perhaps none."""
        self._filled.clear()
        items = list(self._items)
        self._items.clear()
        return items
