"""The router actor: it admits requests, and each gets a room. Rooms live in its process: when it dies they go with it,
and leaders notice by their links.

Not here: who is there to serve them (watching.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from kvferry.actors.leaving import DrainRequested, Leaving
from kvferry.actors.ports import Clock, LostReason, Network, Random, Resolve
from kvferry.actors.room.journal import Journal
from kvferry.actors.room.room import HEARD, AbortRequested, FromLeg, LegLost, Room, RoomTick
from kvferry.actors.router.breaker import Verdict, verdict
from kvferry.actors.router.choice import Homes, View, choose
from kvferry.actors.router.guest import Guest, RoomOver, RoomResolved, Submit, Withdraw
from kvferry.actors.router.policies import POLICIES
from kvferry.actors.router.retry_after import Lives, RetryAfter
from kvferry.actors.router.view import Ask
from kvferry.actors.router.watching import Watching
from kvferry.actors.settings import ClockSettings, RouterSettings
from kvferry.memory.admission import refusal
from kvferry.obs.rooms import RoomStatistics
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause, Draining
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.messages import Admitted, Message, Opened, PrefillDone, RegisterDpRank, Released, UnknownRoom
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec
from kvferry.protocol.room import RoomMachine

ROOM_MAILBOX = 4096


class Router(Watching):
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
        super().__init__(network, clock, mailbox, resolve, settings)
        self.guests: dict[int, Guest] = {}
        self.ended: OrderedDict[int, Journal] = OrderedDict()
        self._random = random
        self._backend = backend
        self._limits = limits.limits()
        self._statistics = RoomStatistics()
        self._lives = Lives()
        self._policy = POLICIES[settings.policy]
        self._homes = Homes()
        self._leaving = Leaving(network.address.name, "router")
        self._room_places, self._queue_places = RetryAfter(), RetryAfter()
        self._on_message |= dict.fromkeys(HEARD, self._room_message)

    # --- calls, from the host; they only post ---

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        """Open an attempt; resolves to the room's outcome. Cancelling the call aborts the room."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if not self._mailbox.post(Submit(spec, attempt, answer)):
            return Outcome(0, False, Cause("overloaded", "the router's mailbox is full", "router"), retry_after_s=1.0)
        try:
            return await answer
        except asyncio.CancelledError:
            self._mailbox.put(Withdraw(spec.request, attempt))
            raise

    async def withdraw(self, request: int, attempt: int) -> bool:
        """Abort an attempt, as cancelling its `submit` does. False when it is not here: it has ended, or that call is
        still to come."""
        known: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._mailbox.put(Withdraw(request, attempt, known))
        return await known

    async def journal(self, room: int) -> dict[str, Any] | None:
        """The journal of a live or recently ended room."""
        guest = self.guests.get(room)
        journal = guest.room.journal if guest else self.ended.get(room)
        return journal.as_object(self.clock.now_s()) if journal else None

    async def drain(self, limit_s: float) -> None:
        """Take no new requests. Rooms that still live after `limit_s` go with the process, as when it dies: their
        fronts go on elsewhere."""
        self._mailbox.put(DrainRequested(limit_s))

    async def drained(self) -> dict[str, Any]:
        """How far that is (`Leaving.state`); `linked`: it can serve, if anybody can."""
        return self._leaving.state(len(self.guests), self.clock.now_s()) | {"linked": self.linked}

    async def status(self) -> dict[str, Any]:
        live = sum(not guest.answer.done() for guest in self.guests.values())
        address, now_s = self.network.address, self.clock.now_s()
        names = {info.address.incarnation: info.instance for info in self.roster.ranks}
        return {
            "id": address.name,
            "incarnation": f"{address.incarnation:016x}",
            "pid": address.pid,
            "rooms_live": len(self.guests),
            "attempts_open": live,
            "counts": dict(self.counts),
            "ready": self.roster.ready,
            "missing": list(self.roster.missing),
            "policy": self.settings.policy,
            "waiting": self._view(now_s).waiting,
            "instances": self.fleet.status(now_s),
            "breakers": self.breakers.status(names, now_s),
            "breakers_opened": self.breakers.opened,
            "rooms": self._statistics.as_object(),
            "draining": bool(self._leaving),
        }

    # --- items ---

    def receive_other(self, item: Any) -> None:
        match item:
            case Submit(spec, attempt, answer):
                self._submit(spec, attempt, answer)
            case Withdraw(request, attempt, known):
                found = self._withdraw(request, attempt)
                if known is not None and not known.done():
                    known.set_result(found)
            case RoomResolved(guest, cause):
                self._room_resolved(guest, cause)
            case RoomOver(room, error):
                self._room_over(room, error)
            case DrainRequested(limit_s):
                self._leaving.begin(limit_s, self.clock.now_s())
            case _:
                super().receive_other(item)

    def busy(self) -> bool:
        return bool(self.guests) or bool(self._leaving) or not self.settled

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        for guest in self.guests.values():
            if guest.room.is_due(now_s):
                guest.room.post(RoomTick())
        self._leaving.time_is_over(not self.guests, now_s)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        for guest in self.guests.values():
            if guest.room.is_leg(peer):
                guest.room.post(LegLost(peer, reason))

    def _room_message(self, peer: Address, message: Any) -> None:
        guest = self.guests.get(message.room)
        if guest is not None and guest.room.is_leg(peer):
            self._note(guest, peer, message)
            if not guest.room.post(FromLeg(peer, message)):
                self.network.drop(peer.incarnation)
        elif isinstance(message, Released):
            self._released(message)
        else:
            self._stray(peer, message)

    def _stray(self, peer: Address, message: Any) -> None:
        self.counts["messages for unknown rooms"] += 1
        if not isinstance(message, UnknownRoom):
            self.network.send(peer.incarnation, UnknownRoom(message.room, "router"))

    def _released(self, message: Released) -> None:
        """Late news for the journal of a room that has ended."""
        journal = self.ended.get(message.room)
        if journal is not None:
            journal.released(self.clock.now_s(), message)

    def _note(self, guest: Guest, peer: Address, message: Any) -> None:
        """What the choice of later pairs needs to know of a room's progress."""
        if isinstance(message, Opened):
            self.fleet.opened(message.room, peer.incarnation)
            is_decode = peer.incarnation == guest.decode.address.incarnation
            guest.queued = is_decode and not guest.prefill.computes_first
        elif isinstance(message, PrefillDone):
            guest.queued = message.awaits_destination
        elif isinstance(message, Admitted):
            guest.queued = False

    # --- admission ---

    def _submit(self, spec: RequestSpec, attempt: int, answer: asyncio.Future[Outcome]) -> None:
        if answer.cancelled():
            return None
        if (leaves := self._leaving.refusal(0)) is not None:
            return self._refuse(answer, leaves, 0.0)
        now_s, settings = self.clock.now_s(), self.settings
        if len(self.guests) >= settings.max_requests:
            text = f"{len(self.guests)} requests are live; router.max_requests is {settings.max_requests}"
            wait_s = self._room_places.seconds(self._lives.ending_per_s(len(self.guests)), now_s)
            return self._refuse(answer, Cause("overloaded", text, "router"), wait_s)
        view, home = self._view(now_s), self._homes.home(spec.group)
        ask = Ask(self._new_room_id(), len(spec.fed_ids), spec.prefer, home, spec.avoid)
        pair = choose(view, ask, self._policy, settings.dp_choice, self._random)
        if pair is None:
            return self._refuse_unavailable(answer, view, now_s)
        # What was admitted once is served to its end: a next attempt is not refused for the queue's length.
        if attempt == 0 and view.waiting >= settings.queue_limit and not pair[1].takes_at_once(ask):
            pair = choose(view.free_for(ask), ask, self._policy, settings.dp_choice, self._random)
        if pair is None:
            text = f"{view.waiting} requests wait for a place at decode; router.queue_limit is {settings.queue_limit}"
            return self._refuse(answer, Cause("overloaded", text, "router"), self._queue_wait_s(now_s))
        prefill, decode = pair[0].info, pair[1].info
        limits = (prefill.max_prompt_tokens, decode.max_total_tokens)
        if (cause := refusal(len(spec.prompt_ids), spec.sampling.max_tokens, *limits)) is not None:
            return self._refuse(answer, cause, 0.0)
        self._homes.sent(spec.group, prefill.address.incarnation)
        self._open_room(ask, spec, attempt, answer, prefill, decode)
        return None

    def _new_room_id(self) -> int:
        """63 random bits that no room of ours has or had, as far as we remember; never 0, which stands for no room."""
        while not (room_id := self._random.bits(63)) or room_id in self.guests or room_id in self.ended:
            self.counts["room ids drawn again"] += 1
        return room_id

    def _view(self, now_s: float) -> View:
        return View(self.fleet.prefills(now_s), self.fleet.decodes(), self.breakers.blocked(now_s))

    def _queue_wait_s(self, now_s: float) -> float:
        """Until the queue is shorter by one: a place becomes free with each request that ends at a decode."""
        return self._queue_places.seconds(self.fleet.finished_per_s(), now_s)

    def _refuse_unavailable(self, answer: asyncio.Future[Outcome], view: View, now_s: float) -> None:
        """Nobody can serve now: say what is missing, or that breakers are open. A router that has just been started
        can't know that; it is not back yet, and another one may serve."""
        if self.book.is_new(self.fleet.all_linked, now_s):
            text = "the router has just been started and knows nobody yet"
            return self._refuse(answer, Cause("peer_lost", text, "router", peer=self.network.address.name), 0.0)
        lines, probe_s = [*self.roster.missing, *self.fleet.missing()], 0.0
        if not self.fleet.missing():  # somebody is, perhaps, but there are pairs
            why, probe_s = self.breakers.why_none(view.pairs, now_s)
            lines.insert(0, why)
        return self._refuse(answer, Cause("unavailable", f"no pair can serve: {'; '.join(lines)}", "router"), probe_s)

    def _refuse(self, answer: asyncio.Future[Outcome], cause: Cause, retry_after_s: float) -> None:
        self.counts[f"refused {cause.code}"] += 1
        answer.set_result(Outcome(0, False, cause, retry_after_s=retry_after_s))

    # --- rooms ---

    def _open_room(
        self, ask: Ask, spec: RequestSpec, attempt: int, answer: asyncio.Future[Outcome], prefill: RankInfo,
        decode: RankInfo,
    ) -> None:  # fmt: skip
        now_s, room_id, legs = self.clock.now_s(), ask.room, (prefill.address, decode.address)
        machine = RoomMachine(
            room_id, attempt, spec, *legs, self._limits, now_s, prefill.computes_first, prefill.sources
        )
        journal = Journal(
            room_id, spec.request, attempt, prefill.instance, decode.instance, self._backend,
            len(spec.fed_ids), now_s,
        )  # fmt: skip

        def resolve(cause: Cause | None) -> None:
            self._mailbox.put(RoomResolved(guest, cause))
            if not answer.done():
                full = cause is not None and cause.code == "overloaded"
                wait_s = self._queue_wait_s(self.clock.now_s()) if full else 0.0
                answer.set_result(Outcome(room_id, cause is None, cause, *legs, wait_s, room.front_link))

        room = Room(machine, journal, self.clock, self._send, resolve, ROOM_MAILBOX)
        guest = self.guests[room_id] = Guest(room, answer, prefill, decode, now_s)
        guest.era = self.breakers.dispatched(guest.pair)
        self.fleet.dispatched(ask, *guest.pair)
        if prefill.dp_size > 1 and self.settings.dp_choice != "follow_bootstrap_room":
            self.membership.tell(RegisterDpRank(room_id, prefill.dp_rank, prefill.instance))
        self._run_room(room_id, room)

    def _run_room(self, room_id: int, room: Room) -> None:
        """Give the room a task of its own; `RoomOver` follows."""
        task = asyncio.get_running_loop().create_task(room.run())
        self._tasks.add(task)

        def over(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            self._mailbox.put(RoomOver(room_id, None if ended.cancelled() else ended.exception()))

        task.add_done_callback(over)

    def _send(self, address: Address, message: Message) -> bool:
        return self.network.send(address.incarnation, message)

    def _withdraw(self, request: int, attempt: int) -> bool:
        for room_id, guest in self.guests.items():
            machine = guest.room.machine
            if (machine.spec.request, machine.attempt) == (request, attempt):
                cause = Cause("aborted", "the front has cancelled the attempt", "front", room=room_id)
                guest.room.post(AbortRequested(cause))
                return True
        return False

    def _room_resolved(self, guest: Guest, cause: Cause | None) -> None:
        """The front has its answer; the pair's breaker hears it too."""
        guest.committed = cause is None
        self.counts["rooms failed" if cause else "rooms committed"] += 1
        if cause is not None and cause.code == Draining.code:  # its roster entry may not say so yet
            self.fleet.leaves((guest.decode if cause.leg == "decode" else guest.prefill).address.incarnation)
        what = verdict(cause, guest.prefill.address.name, guest.decode.address.name, guest.queued)
        self.counts["rooms that spoke against their pair"] += what is Verdict.BAD
        self.breakers.ended(guest.pair, guest.era, what, self.clock.now_s())

    def _room_over(self, room_id: int, error: BaseException | None) -> None:
        """Supervision: keep the journal; a room that crashed fails its request and aborts both legs."""
        guest = self.guests.pop(room_id)
        now_s = self.clock.now_s()
        if error is not None:
            self.counts["rooms crashed"] += 1
            cause = Cause("handoff_failed", f"the room crashed: {error!r}", "router", room=room_id)
            guest.room.crashed(cause)
        self.fleet.over(room_id, *guest.pair, guest.committed)
        self._lives.ended(now_s - guest.began_s)
        journal = self.ended[room_id] = guest.room.journal
        journal.end(now_s)
        code = "" if guest.room.machine.kvpoll is KVPoll.SUCCESS else guest.room.code
        self._statistics.ended(journal.durations(now_s), journal.kv_bytes, code, journal.transfers)
        while len(self.ended) > self.settings.journal_rooms:
            self.ended.popitem(last=False)
