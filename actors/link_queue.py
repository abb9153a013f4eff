"""What the links have to tell their actor, in order, each in a turn of its own.

The handler is never called from inside a call that it made: everything is queued, and the loop empties the queue.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.actors.carrier import Path
from kvferry.actors.complaints import Complaints
from kvferry.actors.ports import LinkHandler, LostReason
from kvferry.protocol.address import Address
from kvferry.protocol.link import Delivered, LinkSession, Lost, Up
from kvferry.protocol.messages import BadFrame, decode


@dataclass(eq=False)
class Link:
    """A session and the paths that carry it."""

    session: LinkSession
    path: Path | None = None  # where our frames go; None while it is broken
    dialled: Path | None = None  # the path that we made, to be given up at the end
    dialled_at_s: float = 0.0
    redial_at_s: float | None = None
    refused_at_s: float | None = None  # when a refusal becomes the end, unless the kernel says more before
    due_s: float = math.inf  # its next deadline, or an earlier time to look again
    dropped: bool = False  # from this side: what still lies in the queue is not wanted

    @property
    def peer(self) -> Address:
        return self.session.peer

    def next_deadline_s(self) -> float:
        """When something must be done for it; `inf`: nothing waits for a time."""
        due_s = self.session.next_tick_s
        if due_s is None:
            due_s = math.inf
        if self.redial_at_s is not None and self.redial_at_s < due_s:
            due_s = self.redial_at_s
        if self.refused_at_s is not None and self.refused_at_s < due_s:
            due_s = self.refused_at_s
        return due_s


@dataclass(frozen=True)
class Exited:
    """The kernel says that the process has ended."""


@dataclass(frozen=True)
class Failure:
    """The link's timer has failed in a way that nobody expected."""

    error: Exception


Event = Up | Delivered | Lost | Exited | Failure


class LinkQueue:
    """`on_full(link)` is called when the handler could not take a message of that link."""

    def __init__(self, counts: Counter[str], complain: Complaints, on_full: Callable[[Link], None]) -> None:
        self.handler: LinkHandler | None = None
        self._counts, self._complain, self._on_full = counts, complain, on_full
        self._events: deque[tuple[Event, Address, Link | None]] = deque()
        self._scheduled = False

    def put(self, event: Event, peer: Address, link: Link | None) -> None:
        self._events.append((event, peer, link))
        self._schedule()

    def drain(self) -> None:
        """Hand everything over. What the handler raises comes out; the rest then follows in another turn."""
        self._scheduled = False
        try:
            while self._events:
                self._hand_over(*self._events.popleft())
        finally:
            if self._events:
                self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.drain)

    def _hand_over(self, event: Event, peer: Address, link: Link | None) -> None:
        assert self.handler is not None
        if type(event) is Delivered:
            if link is not None and not link.dropped:
                self._deliver(link, event.payload, self.handler)
        elif isinstance(event, Up):
            self.handler.on_link_up(peer)
        elif isinstance(event, Lost):
            self.handler.on_link_lost(peer, LostReason(event.ending.value))
        elif isinstance(event, Exited):
            self.handler.on_exited(peer)
        elif isinstance(event, Failure):
            self.handler.on_failure(event.error)

    def _deliver(self, link: Link, payload: bytes, handler: LinkHandler) -> None:
        try:
            message = decode(payload)
        except BadFrame as error:
            self._complain.about(
                "undecodable_message", "dropped a message of %.200r: %.200r", link.peer.name, str(error)
            )
            return
        if not handler.on_message(link.peer, message):
            self._counts["mailbox_full"] += 1
            self._on_full(link)
