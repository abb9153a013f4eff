"""The room in a ring of the target's memory, kept by the writer to whom the ring is lent. Pure.

Pieces lie one after the other, each in one stretch; one that does not fit before the end goes to the beginning, and so
does one that finds the ring empty. Room is given back in any order, and counts from the oldest on: up to there is the
watermark.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Room:
    """`offset` in the ring; `end`, a count of bytes that never falls, is where the watermark will stand after it."""

    offset: int
    end: int
    free: bool = False


class Ring:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._head = 0  # counts of bytes: what has been taken, and what is free again
        self._watermark = 0
        self._taken: deque[Room] = deque()

    @property
    def taken_bytes(self) -> int:
        return self._head - self._watermark

    def take(self, size_bytes: int) -> Room | None:
        """None when there is not enough room now. `size_bytes` must not be above half the ring, so that there is some
        once everything is free, wherever the last piece ended.
        """
        if not self._taken:  # from the beginning: what was used last is what the caches have
            self._head = self._watermark = -(-self._head // self.size_bytes) * self.size_bytes
        offset = self._head % self.size_bytes
        skipped = self.size_bytes - offset if offset + size_bytes > self.size_bytes else 0
        if self.taken_bytes + skipped + size_bytes > self.size_bytes:
            return None
        self._head += skipped + size_bytes
        room = Room((offset + skipped) % self.size_bytes, self._head)
        self._taken.append(room)
        return room

    def withdraw(self, room: Room) -> None:
        """As if the newest room had not been taken."""
        assert self._taken[-1] is room
        self._taken.pop()
        self._head = self._taken[-1].end if self._taken else self._watermark

    def give_back(self, room: Room) -> None:
        room.free = True
        while self._taken and self._taken[0].free:
            self._watermark = self._taken.popleft().end
