"""Who may write here, and by which agents: each process of prefill has one of its own at each rank that it writes to,
until it is shut out.

Agents take their time to be made and to be destroyed, by the rank whose they are; what becomes of it comes back as
items for the leader.

A process that has ended may have left something at a rank that is still to be put into its place (staging). So its end
counts at a rank once every revocation that was asked of that rank, one of them after the end was known, is answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.ranks.team import Team
from kvferry.protocol.instance import Accept, Revoke
from kvferry.protocol.offer import Offer
from kvferry.protocol.rank import LEADER, Member
from kvferry.protocol.receiver import ReceiverState
from kvferry.transfer.contract import Descriptor, Endpoint, Revoked, TransferError
from kvferry.transfer.ranks import routes

#: A writer's process (its incarnation), and the target rank that it writes to.
Pair = tuple[int, int]


@dataclass(frozen=True)
class Accepted:
    """Item: target rank `target` has (or has not) an agent for that process. `turn` tells it from one that was revoked
    meanwhile.
    """

    writer: int
    target: int
    turn: int
    descriptor: Descriptor | None
    error: str = ""


@dataclass(frozen=True)
class ShutOut:
    """Item: the agent of that process at `target` is gone. `proof` is None where that alone proves nothing."""

    writer: int
    target: int
    proof: Revoked | None


async def accept(endpoint: Endpoint, writer: int, offer: Offer, target: int, turn: int) -> Accepted:
    """This rank's agent for the process `writer`, which offers that."""
    try:
        return Accepted(writer, target, turn, await endpoint.accept(writer, offer))
    except TransferError as error:
        return Accepted(writer, target, turn, None, str(error))


async def revoke(endpoint: Endpoint, writer: int, ended: bool) -> Revoked | None:
    """Destroy this rank's agent for that process, if there is one. `ended`: the process has."""
    proof = await endpoint.revoke(writer)
    if ended:
        endpoint.writer_exited(writer)
    return proof


class Writers:
    """`spawn` and `post` are the leader's."""

    def __init__(
        self,
        endpoint: Endpoint,
        team: Team,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        post: Callable[[Accepted | ShutOut], None],
    ) -> None:
        self._endpoint, self._team, self._spawn, self._post = endpoint, team, spawn, post
        self._turns = 0
        self._asked: dict[Pair, int] = {}  # pair -> turn; an endpoint does what it is asked in this order
        self._known: dict[Pair, Descriptor] = {}
        self._closing: Counter[Pair] = Counter()  # revocations that have not been answered
        self._left: set[Pair] = set()  # revoked, and that proved nothing: the rank must hear of the process's end
        self._ended: set[int] = set()  # processes

    @property
    def incarnations(self) -> set[int]:
        """Those that have an agent here, or will have one."""
        return {writer for writer, _ in self._asked.keys() | self._known.keys()}

    def backends(self) -> dict[str, int]:
        """How many ways into our memory there are over each of them."""
        return dict(sorted(Counter(known.path for known in self._known.values()).items()))

    def reasons(self) -> dict[str, str]:
        """Why it was each of them, for one of the writers."""
        return {known.path: known.why for _, known in sorted(self._known.items())}

    def routes(self, sources: Sequence[Member]) -> dict[int, tuple[int, ...]]:
        """Source rank -> the ranks here that it writes to. Raises TransferError for layouts that don't fit."""
        if len(sources) == 1 and self._team.size == 1:
            return {LEADER: (LEADER,)}
        return routes({source.rank: (source.slice,) for source in sources}, self._team.slices())

    def descriptors(self, pairs: Iterable[Pair], offers: Mapping[int, Offer]) -> dict[Pair, Descriptor] | None:
        """What each is to be told, or None: then `Accepted` follows for those that have no agent yet. `offers` says
        what each writer has.
        """
        wanted = list(pairs)
        missing = [pair for pair in wanted if pair not in self._known]
        for pair in missing:
            if pair not in self._asked:
                self._turns += 1
                self._asked[pair] = self._turns
                self._ask(pair, offers[pair[0]], self._turns)
        return None if missing else {pair: self._known[pair] for pair in wanted}

    def _ask(self, pair: Pair, offer: Offer, turn: int) -> None:
        writer, target = pair
        if target == LEADER:
            self._spawn(self._accept(writer, offer, turn))
        else:
            self._team.send(target, Accept(writer, turn, offer))

    async def _accept(self, writer: int, offer: Offer, turn: int) -> None:
        self._post(await accept(self._endpoint, writer, offer, LEADER, turn))

    def accepted(self, item: Accepted) -> bool:
        """False when it was revoked before it was known."""
        pair = (item.writer, item.target)
        if self._asked.get(pair) != item.turn:
            return False
        del self._asked[pair]
        if item.descriptor is not None:
            self._known[pair] = item.descriptor
        return True

    def can_be_shut_out(self, writer: int) -> bool:
        """By destroying an agent of that process here, something is proved."""
        return any(pair[0] == writer and known.proofs.revoked for pair, known in self._known.items())

    def shut_out(self, writer: int) -> bool:
        """Destroy that process's agents: `ShutOut` follows for each. False when it has none, or is being shut out."""
        return self._close([pair for pair in self._asked.keys() | self._known.keys() if pair[0] == writer])

    def shut_out_of(self, room: DecodeRoom, writer: int) -> bool:
        """As `shut_out`, as far as the agents that the room's destination names are those that there are. They may be
        gone already, and others in use by rooms that have nothing to do with this one.
        """
        mine = [pair for pair in room.agents if pair[0] == writer and pair in self._known]
        return self._close([pair for pair in mine if room.agents[pair] == self._known[pair].generation])

    def exited(self, writer: int) -> None:
        """That process has ended. Every rank that has, or had, an agent of it is told: `ShutOut` follows for each."""
        self._ended.add(writer)
        pairs = self._asked.keys() | self._known.keys() | self._closing.keys() | self._left
        self._close([pair for pair in pairs if pair[0] == writer])

    def has_ended(self, writer: int) -> bool:
        return writer in self._ended

    def is_over(self, pair: Pair) -> bool:
        """The process has ended, and so has all that it has left at that rank."""
        open_there = pair in self._asked or pair in self._known or pair in self._closing
        return pair[0] in self._ended and not open_there

    def _close(self, pairs: list[Pair]) -> bool:
        for pair in sorted(pairs):
            writer, target = pair
            self._asked.pop(pair, None)
            self._known.pop(pair, None)
            self._closing[pair] += 1
            ended = writer in self._ended
            if target == LEADER:
                self._spawn(self._revoke(writer, ended))
            else:
                self._team.send(target, Revoke(writer, ended))
        return bool(pairs)

    async def _revoke(self, writer: int, ended: bool) -> None:
        self._post(ShutOut(writer, LEADER, await revoke(self._endpoint, writer, ended)))

    def closed(self, item: ShutOut) -> None:
        """A rank has answered a revocation."""
        pair = (item.writer, item.target)
        self._closing[pair] -= 1
        if self._closing[pair] <= 0:
            del self._closing[pair]
        if item.proof is None and item.writer not in self._ended:
            self._left.add(pair)
        else:
            self._left.discard(pair)


def awaiting(rooms: Iterable[DecodeRoom], writer: int) -> list[DecodeRoom]:
    """Rooms that are admitted, and whose destination waits for that writer's agent."""
    receiving = [room for room in rooms if room.machine.state is ReceiverState.RECEIVING and not room.agents]
    return [room for room in receiving if writer in room.machine.writers.values()]


def shuts_out(room: DecodeRoom, target: int, proof: Revoked) -> bool:
    """The room's destination names an agent of that writer at `target` that is gone; and now nothing comes by any of
    that writer's that it names.
    """
    if room.agents.get((proof.writer, target)) != proof.generation:
        return False
    room.closed.add((proof.writer, target))
    return _is_closed(room, proof.writer)


def exits(room: DecodeRoom, writer: int, writers: Writers) -> bool:
    """That process has ended. True when nothing comes by any way that the room's destination gave it. The end is no
    proof for a way over which bytes may still be on theirs: there the agent's is.
    """
    ways = {pair for pair, proofs in room.proofs.items() if pair[0] == writer and proofs.exited}
    room.closed |= {pair for pair in ways if writers.is_over(pair)}
    return _is_closed(room, writer)


def _is_closed(room: DecodeRoom, writer: int) -> bool:
    return all(pair in room.closed for pair in room.agents if pair[0] == writer)
