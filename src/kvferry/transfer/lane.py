"""A lane: items handled strictly one after another, by one task that lives only while there are any."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """`handle(item)` must end on its own or be woken by its owner; `close` cancels it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], Awaitable[None]]) -> None:
        self._loop = loop
        self._handle = handle
        self._items: deque[T] = deque()  # the first is being handled while the task lives
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def items(self) -> tuple[T, ...]:
        """What has not been handled yet, the one being handled included."""
        return tuple(self._items)

    def put(self, item: T) -> None:
        if self._closed:
            return
        self._items.append(item)
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    def close(self) -> tuple[T, ...]:
        """Stop at once; returns what was not handled to its end."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        return self.items

    async def _run(self) -> None:
        while self._items:
            await self._handle(self._items[0])
            self._items.popleft()
        self._task = None
