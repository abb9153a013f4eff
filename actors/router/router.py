"""The router actor. Its rooms live in its process: when it dies they go with it, and leaders notice by their links."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from kvferry.actors.actor import Actor
from kvferry.actors.membership import Membership, RegistryFound
from kvferry.actors.ports import Clock, LostReason, Network, Random, Resolve
from kvferry.actors.room.journal import Journal
from kvferry.actors.room.room import AbortRequested, FromLeg, LegLost, Room, RoomTick
from kvferry.actors.router.pairs import choose, leaders
from kvferry.actors.settings import ClockSettings, RouterSettings
from kvferry.memory.admission import refusal
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    AbortAck,
    Address,
    Admitted,
    Committed,
    Drained,
    Failed,
    Message,
    Opened,
    PrefillDone,
    Progress,
    RankInfo,
    Received,
    RequestSpec,
    Roster,
    UnknownRoom,
    Watch,
)
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.room import RoomMachine

ROOM_MAILBOX = 4096
REDIAL_S = 1.0
_ROOM_MESSAGES = (
    Opened, Admitted, Progress, PrefillDone, Received, Drained, Committed, Failed, AbortAck, UnknownRoom,
)  # fmt: skip


@dataclass(frozen=True)
class Submit:
    """Item: a front's call."""

    spec: RequestSpec
    attempt: int
    answer: asyncio.Future[Outcome]


@dataclass(frozen=True)
class Withdraw:
    """Item: the front has cancelled its call."""

    answer: asyncio.Future[Outcome]


@dataclass(frozen=True)
class RoomOver:
    """Item: a room's task has ended, with an error if it crashed."""

    room: int
    error: BaseException | None


@dataclass
class Guest:
    """A live room and what the router remembers of it."""

    room: Room
    answer: asyncio.Future[Outcome]
    prefill: RankInfo
    decode: RankInfo
    began_s: float


class Router(Actor):
    """`backend` is the name of the data plane, for the journals."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        mailbox: int,
        random: Random,
        resolve: Resolve,
        settings: RouterSettings,
        limits: ClockSettings,
        backend: str,
    ) -> None:
        super().__init__(network, clock, mailbox)
        self.settings = settings
        self.roster = Roster(0, (), False, ("the registry has not answered yet",))
        self.guests: dict[int, Guest] = {}
        self.ended: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self.membership = Membership(network, resolve, Watch(network.address.name), self.spawn, self._mailbox.put)
        self._random = random
        self._backend = backend
        self._limits = limits.limits()
        self._redial_at_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=64)
        self._on_message = {Roster: self._new_roster}
        self._on_message |= dict.fromkeys(_ROOM_MESSAGES, self._room_message)

    # --- calls, from the host; they only post ---

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        """Open an attempt; resolves to the room's outcome. Cancelling the call aborts the room."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if not self._mailbox.post(Submit(spec, attempt, answer)):
            return Outcome(0, False, Cause("overloaded", "the router's mailbox is full", "router"), retry_after_s=1.0)
        try:
            return await answer
        except asyncio.CancelledError:
            self._mailbox.put(Withdraw(answer))
            raise

    async def journal(self, room: int) -> dict[str, Any] | None:
        """The journal of a live or recently ended room."""
        guest = self.guests.get(room)
        return guest.room.journal.as_object(self.clock.now_s()) if guest else self.ended.get(room)

    async def status(self) -> dict[str, Any]:
        live = sum(not guest.answer.done() for guest in self.guests.values())
        address = self.network.address
        return {
            "id": address.name,
            "incarnation": f"{address.incarnation:016x}",
            "pid": address.pid,
            "rooms_live": len(self.guests),
            "attempts_open": live,
            "counts": dict(self.counts),
            "ready": self.roster.ready,
            "missing": list(self.roster.missing),
        }

    # --- items ---

    def receive(self, item: Any) -> None:
        match item:
            case Submit(spec, attempt, answer):
                self._submit(spec, attempt, answer)
            case Withdraw(answer):
                self._withdraw(answer)
            case RoomOver(room, error):
                self._room_over(room, error)
            case RegistryFound(address):
                self.membership.found(address)
            case _:
                super().receive(item)

    def tick(self, now_s: float) -> None:
        self.membership.tick(now_s)
        if now_s >= self._redial_at_s:  # a link may break while the roster stays as it is
            self._redial_at_s = now_s + REDIAL_S
            self._dial_leaders()
        for guest in self.guests.values():
            guest.room.post(RoomTick())

    def link_up(self, peer: Address) -> None:
        self.membership.link_up(peer)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        self.membership.link_lost(peer)
        for guest in self.guests.values():
            if guest.room.is_leg(peer):
                guest.room.post(LegLost(peer, reason))

    def _new_roster(self, _registry: Address, roster: Roster) -> None:
        self.membership.accepted = True
        self.roster = roster
        self._dial_leaders()

    def _dial_leaders(self) -> None:
        for address in leaders(self.roster.ranks):
            self.network.dial(address)

    def _room_message(self, peer: Address, message: Any) -> None:
        guest = self.guests.get(message.room)
        if guest is not None and guest.room.is_leg(peer):
            if not guest.room.post(FromLeg(peer, message)):
                self.network.drop(peer.incarnation)
            return
        self.counts["messages for unknown rooms"] += 1
        if not isinstance(message, UnknownRoom):
            self.network.send(peer.incarnation, UnknownRoom(message.room, "router"))

    # --- admission ---

    def _submit(self, spec: RequestSpec, attempt: int, answer: asyncio.Future[Outcome]) -> None:
        if answer.cancelled():
            return None
        if len(self.guests) >= self.settings.max_requests:
            text = f"{len(self.guests)} requests are live; the limit is {self.settings.max_requests}"
            return self._refuse(answer, Cause("overloaded", text, "router"), self.retry_after_s())
        live = Counter[int]()
        for guest in self.guests.values():
            live.update((guest.prefill.address.incarnation, guest.decode.address.incarnation))
        usable = {a.incarnation for a in leaders(self.roster.ranks) if self.network.is_up(a.incarnation)}
        pair = choose(self.roster.ranks, live, usable)
        if pair is None:
            missing = "; ".join(self.roster.missing) or "the links to the instances are not open"
            return self._refuse(answer, Cause("unavailable", f"no pair can serve: {missing}", "router"), 1.0)
        prefill, decode = pair
        sampling = spec.sampling
        limits = (prefill.max_prompt_tokens, decode.max_total_tokens)
        if (cause := refusal(len(spec.prompt_ids), sampling.max_tokens, *limits)) is not None:
            return self._refuse(answer, cause, 0.0)
        self._open_room(spec, attempt, answer, prefill, decode)
        return None

    def retry_after_s(self) -> float:
        """When a place will be free: the mean life of the last rooms over the number of live ones, at least 1 s."""
        if not self._durations_s:
            return 1.0
        mean_s = sum(self._durations_s) / len(self._durations_s)
        return max(1.0, mean_s / max(1, len(self.guests)))

    def _refuse(self, answer: asyncio.Future[Outcome], cause: Cause, retry_after_s: float) -> None:
        self.counts[f"refused {cause.code}"] += 1
        answer.set_result(Outcome(0, False, cause, retry_after_s=retry_after_s))

    # --- rooms ---

    def _open_room(
        self, spec: RequestSpec, attempt: int, answer: asyncio.Future[Outcome], prefill: RankInfo, decode: RankInfo
    ) -> None:
        now_s = self.clock.now_s()
        room_id = self._random.bits(63)
        legs = (prefill.address, decode.address)
        machine = RoomMachine(room_id, attempt, spec, *legs, self._limits, now_s)
        journal = Journal(
            room_id, spec.request, attempt, prefill.instance, decode.instance, self._backend,
            len(spec.fed_ids), now_s,
        )  # fmt: skip

        def resolve(cause: Cause | None) -> None:
            self.counts["rooms failed" if cause else "rooms committed"] += 1
            if not answer.done():
                answer.set_result(Outcome(room_id, cause is None, cause, *legs))

        room = Room(machine, journal, self.clock, self._send, resolve, ROOM_MAILBOX)
        self.guests[room_id] = Guest(room, answer, prefill, decode, now_s)
        task = asyncio.get_running_loop().create_task(room.run())
        self._tasks.add(task)

        def over(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            self._mailbox.put(RoomOver(room_id, None if ended.cancelled() else ended.exception()))

        task.add_done_callback(over)

    def _send(self, address: Address, message: Message) -> bool:
        return self.network.send(address.incarnation, message)

    def _withdraw(self, answer: asyncio.Future[Outcome]) -> None:
        for room_id, guest in self.guests.items():
            if guest.answer is answer:
                cause = Cause("aborted", "the front has cancelled the attempt", "front", room=room_id)
                guest.room.post(AbortRequested(cause))

    def _room_over(self, room_id: int, error: BaseException | None) -> None:
        """Supervision: keep the journal; a room that crashed fails its request and aborts both legs."""
        guest = self.guests.pop(room_id)
        now_s = self.clock.now_s()
        if error is not None:
            self.counts["rooms crashed"] += 1
            cause = Cause("handoff_failed", f"the room crashed: {error!r}", "router", room=room_id)
            guest.room.crashed(cause)
        self._durations_s.append(now_s - guest.began_s)
        self.ended[room_id] = guest.room.journal.as_object(now_s)
        while len(self.ended) > self.settings.journal_rooms:
            self.ended.popitem(last=False)
