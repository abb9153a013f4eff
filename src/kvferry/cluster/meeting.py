"""Where the ranks of an instance come together before their engines can: the leader's host says where, over Ray.

Each life of the leader has a place of its own. A rank whose process has been started again can't enter an engine that
its predecessor is a part of, so then the instance starts again as one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray

from kvferry.actors.ports import Clock
from kvferry.cluster.names import NAMESPACE
from kvferry.protocol.address import Address

#: A follower that finds no leader, or one that is still loading, asks again.
ASK_S, RETRY_S = 10.0, 0.5


@dataclass(frozen=True)
class Meeting:
    """The leader's process, and the port on loopback where its store listens."""

    leader: Address
    port: int


class MeetingPoint:
    """The leader's record of one life. Made on the loop that uses it."""

    def __init__(self) -> None:
        self._meeting: asyncio.Future[Meeting] = asyncio.get_running_loop().create_future()
        self._ranks: dict[int, int] = {}

    def open(self, meeting: Meeting) -> None:
        self._meeting.set_result(meeting)

    def is_replaced(self, rank: int, incarnation: int) -> bool:
        """Another process was that rank before."""
        return self._ranks.setdefault(rank, incarnation) != incarnation

    async def where(self) -> Meeting:
        """Waits until the leader has loaded its weights."""
        return await asyncio.shield(self._meeting)


async def meet_leader(instance: str, rank: int, incarnation: int, clock: Clock) -> Meeting:
    """A follower's call, until there is a leader that answers."""
    while True:
        try:
            host = ray.get_actor(instance, namespace=NAMESPACE)
            found: Meeting = await asyncio.wait_for(host.meet.remote(rank, incarnation), ASK_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            await clock.sleep(RETRY_S)
        else:
            return found
