"""A live room as the router remembers it, and the items of the router's mailbox."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvferry.actors.room.room import Room
from kvferry.actors.router.breaker import PairId
from kvferry.protocol.errors import Cause
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec


@dataclass(frozen=True)
class Submit:
    """Item: a front's call."""

    spec: RequestSpec
    attempt: int
    answer: asyncio.Future[Outcome]


@dataclass(frozen=True)
class Withdraw:
    """Item: a front wants nothing more of that attempt. `known`: who waits to hear whether it is here."""

    request: int
    attempt: int
    known: asyncio.Future[bool] | None = None


@dataclass
class Guest:
    """`era` is its pair's breaker's at the start; `queued` while decode holds the room and has not admitted it."""

    room: Room
    answer: asyncio.Future[Outcome]
    prefill: RankInfo
    decode: RankInfo
    began_s: float
    era: int = 0
    queued: bool = False
    committed: bool = False

    @property
    def pair(self) -> PairId:
        return self.prefill.address.incarnation, self.decode.address.incarnation


@dataclass(frozen=True)
class RoomResolved:
    """Item: a room has told the front what became of it."""

    guest: Guest
    cause: Cause | None


@dataclass(frozen=True)
class RoomOver:
    """Item: a room's task has ended, with an error if it crashed."""

    room: int
    error: BaseException | None
