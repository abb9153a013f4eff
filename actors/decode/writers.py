"""Who may write here, and by which agent: each process of prefill has one of its own, until it is shut out.

Agents take their time to be made and to be destroyed; what becomes of it comes back as items for the leader.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from kvferry.actors.decode.room import DecodeRoom
from kvferry.protocol.receiver import ReceiverState
from kvferry.transfer.contract import Descriptor, Endpoint, Revoked, TransferError


@dataclass(frozen=True)
class Accepted:
    """Item: there is (or is not) an agent for that process. `turn` tells it from one that was revoked meanwhile."""

    writer: int
    turn: int
    descriptor: Descriptor | None
    error: str = ""


@dataclass(frozen=True)
class ShutOut:
    """Item: the agent of that process is gone. `proof` is None where that proves nothing."""

    writer: int
    proof: Revoked | None


class Writers:
    """By incarnation. `spawn` and `post` are the leader's."""

    def __init__(
        self,
        endpoint: Endpoint,
        spawn: Callable[[Awaitable[None]], None],
        post: Callable[[Accepted | ShutOut], None],
    ) -> None:
        self._endpoint, self._spawn, self._post = endpoint, spawn, post
        self._turns = 0
        self._asked: dict[int, int] = {}  # writer -> turn; the endpoint does what it is asked in this order
        self._known: dict[int, Descriptor] = {}

    @property
    def incarnations(self) -> set[int]:
        """Those that have an agent here, or will have one."""
        return self._asked.keys() | self._known.keys()

    def descriptors(self, writers: Iterable[int]) -> dict[int, Descriptor] | None:
        """What each is to be told, or None: then `Accepted` follows for those that have no agent yet."""
        missing = [writer for writer in writers if writer not in self._known]
        for writer in missing:
            if writer not in self._asked:
                self._turns += 1
                self._asked[writer] = self._turns
                self._spawn(self._accept(writer, self._turns))
        return None if missing else {writer: self._known[writer] for writer in writers}

    async def _accept(self, writer: int, turn: int) -> None:
        try:
            self._post(Accepted(writer, turn, await self._endpoint.accept(writer)))
        except TransferError as error:
            self._post(Accepted(writer, turn, None, str(error)))

    def accepted(self, item: Accepted) -> bool:
        """False when it was revoked before it was known."""
        if self._asked.get(item.writer) != item.turn:
            return False
        del self._asked[item.writer]
        if item.descriptor is not None:
            self._known[item.writer] = item.descriptor
        return True

    def shut_out(self, writer: int) -> bool:
        """Destroy that process's agent: `ShutOut` follows. False when it has none, or is being shut out."""
        asked, known = self._asked.pop(writer, None), self._known.pop(writer, None)
        if asked is None and known is None:
            return False
        self._spawn(self._revoke(writer))
        return True

    def shut_out_of(self, room: DecodeRoom, writer: int) -> bool:
        """As `shut_out`, if the agent that the room's destination names is the one there is. It may be gone already,
        and another one in use by rooms that have nothing to do with this one.
        """
        known = self._known.get(writer)
        return known is not None and room.agents.get(writer) == known.generation and self.shut_out(writer)

    async def _revoke(self, writer: int) -> None:
        self._post(ShutOut(writer, await self._endpoint.revoke(writer)))


def awaiting(rooms: Iterable[DecodeRoom], writer: int) -> list[DecodeRoom]:
    """Rooms that are admitted, and whose destination waits for that writer's agent."""
    receiving = [room for room in rooms if room.machine.state is ReceiverState.RECEIVING and not room.agents]
    return [room for room in receiving if writer in room.machine.writers.values()]


def is_covered(room: DecodeRoom, proof: Revoked) -> bool:
    """The room's destination was given to that writer, and names an agent that is gone."""
    return room.agents.get(proof.writer) == proof.generation
