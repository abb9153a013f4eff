"""What prefill's and decode's leaders share: rooms and their ends, the forward, registration, clocks, status.

Rule: a leader answers `Opened` only when its link to the request's front is open. So a front that is told of a
commit has been linked to that decode, and hears of its end.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvferry.actors.forward import Forward, StepDone, StepLost
from kvferry.actors.leaving import DrainRequested, Leaving
from kvferry.actors.leg_room import LegRoom
from kvferry.actors.load import LoadReports
from kvferry.actors.outbox import TokenOutbox
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.ranks.rank import PROGRESS_EVERY_S, Rank, RankReplaced
from kvferry.actors.ranks.team import Team
from kvferry.engine.contract import StepPlan, StepResult
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Clocks, Wait, admission_wait
from kvferry.protocol.errors import Cause, Conflict, Draining
from kvferry.protocol.instance import Join, Stepped
from kvferry.protocol.kvpoll import STICKY, KVPoll
from kvferry.protocol.messages import (
    Failed,
    Load,
    Message,
    OpenDecode,
    Opened,
    OpenPrefill,
    Progress,
    Register,
    Stop,
    UnknownRoom,
    Watch,
)

R = TypeVar("R", bound=LegRoom)


class Leader(Rank, Generic[R]):
    """Base of the two leaders; `role` is also the name of its leg. The forward runs on the engine's thread."""

    role = ""
    #: The machine's events for what both legs meet in the same way.
    STOP: Any = None
    EXPIRED: Any = None
    ROOM_LOST: Any = None
    PEER_LOST: Any = None
    FRONT_LOST: Any = None
    FAIL: Any = None

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, Register(parts.info) if parts.info.ranks == 1 else None)
        self.limits, self.texts, self.max_rooms = parts.limits.limits(), parts.texts, parts.max_rooms
        self.team = Team(self.network, self.info, parts.combine)
        self.page_size = self.engine.limits.page_size
        self.ledger = PageLedger(self.engine.limits.pages, self.engine.metadata_rows)
        self.forward = Forward(self.engine, self.limits.no_progress_s)
        self.rooms: dict[int, R] = {}
        self.outbox = TokenOutbox(self.network, self.role)
        self.reports = LoadReports(self.network, self.load)
        self.leaving = Leaving(self.info.instance, self.role)
        self._progress_at_s = 0.0
        self._on_message |= {Stop: self._stop, Watch: self._watch, Join: self._join, Stepped: self._mate_stepped}

    # --- a turn ---

    def receive_other(self, item: Any) -> None:
        match item:
            case StepDone(result):
                self._all_stepped(self.team.stepped(result))
            case StepLost(why):
                self.forward.lost(why)
            case RankReplaced(rank):
                self._rank_lost(rank, "", "its process has been started again")
            case DrainRequested(limit_s):
                self._leave_within(limit_s)
            case _:
                super().receive_other(item)

    def advance(self) -> None:
        """Admit or reserve what fits, start the next forward, publish the tokens."""
        if not self.ending:
            self.admit()
            self._start_forward()
        self.outbox.flush()
        self.reports.turn(self.clock.now_s())

    def _start_forward(self) -> None:
        plan = None if self.forward.running else self.plan_step(self.forward.next)
        if plan is not None:
            self.forward.started(self.clock.now_s())
            self.team.begin(plan)
            self.spawn(self._run(plan))

    async def _run(self, plan: StepPlan) -> None:
        self._mailbox.put(await self.forward.run(plan))

    def _mate_stepped(self, peer: Address, message: Stepped) -> None:
        if (rank := self.team.rank_of(peer)) is not None:
            self._all_stepped(self.team.mate_stepped(rank, message))

    def _all_stepped(self, ended: tuple[StepPlan, StepResult] | None) -> None:
        """A forward has finished, once it has on every rank: a follower that lags still writes."""
        if ended is not None:
            self.forward.finished(ended[0].step)
            self.step_finished(*ended)

    def admit(self) -> None:
        """Give waiting rooms what they need, in order of arrival; the first that does not fit holds back the rest."""

    def plan_step(self, step: int) -> StepPlan | None:
        """The next forward, or None when there is nothing to compute."""
        raise NotImplementedError

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        raise NotImplementedError

    # --- rooms: opening, failing, forgetting ---

    def new_room(self, router: Address, message: OpenPrefill | OpenDecode, peer: Address) -> dict[str, Any]:
        """The fields that a new room's record has in both legs; the clock of its first wait starts now."""
        now_s = self.clock.now_s()
        clocks = Clocks(self.limits, now_s)
        admission = admission_wait(message.spec.was_admitted)
        clocks.wait(Wait.PREFILL if self.info.computes_first else admission, now_s)
        return {
            "room": message.room, "attempt": message.attempt, "spec": message.spec, "router": router, "peer": peer,
            "opened_s": now_s, "clocks": clocks,
        }  # fmt: skip

    def place_refused(self, room: int) -> Cause | None:
        """Why no room can be opened here now, or None."""
        if self.leaving or self.ending:
            return self.leaving.refusal(room) or Cause(Draining.code, self.ending.why, self.role, room=room)
        if room in self.rooms:
            return Cause(Conflict.code, "a room of this id is open here already", self.role, room=room)
        if len(self.rooms) >= self.max_rooms:
            text = f"{self.role} holds {len(self.rooms)} rooms; the limit is {self.max_rooms}"
            return Cause("overloaded", text, self.role, room=room)
        return None

    def refuse_open(self, router: Address, room: int, cause: Cause) -> None:
        self.counts["rooms refused"] += 1
        self.network.send(router.incarnation, Failed(room, self.role, cause))

    def take_in(self, room: R) -> None:
        """Keep the record, and open the links that the room needs."""
        self.rooms[room.room] = room
        for peer in self.links_needed(room):
            self.network.dial(peer)
        self._open_if_linked(room)

    def links_needed(self, room: R) -> list[Address]:
        """The links that must be open before the leg says `Opened`."""
        return [room.spec.front]

    def _open_if_linked(self, room: R) -> None:
        """Say `Opened` once, as soon as every link that the room needs is open."""
        if not room.opened and all(self.network.is_up(peer.incarnation) for peer in self.links_needed(room)):
            room.opened = True
            self.tell_room(room, Opened(room.room, self.role, self.network.session_of(room.spec.front.incarnation)))
            self.leg_opened(room)

    def leg_opened(self, room: R) -> None:
        """The room has just been opened here."""

    def leg_rooms(self) -> list[R]:
        """The rooms as they are now: handling an event may end some of them."""
        return list(self.rooms.values())

    def fail(self, room: R, event: Any, text: str, peer: str, code: str = "peer_lost") -> None:
        """An event that ends the room, with its cause."""
        cause = self.cause(room, code, text, room.machine.state.name, peer)
        self.act(room, room.machine.handle(event, cause))

    def act(self, room: R, commands: list[Any]) -> None:
        """Carry out the machine's commands, in order."""
        raise NotImplementedError

    def of_router(self, router: Address, room_id: int) -> R | None:
        """The room, if it is that router's own: the end of another of this id, refused here, must not end it."""
        room = self.rooms.get(room_id)
        return room if room is not None and room.router.incarnation == router.incarnation else None

    def _stop(self, front: Address, message: Stop) -> None:
        room, meant = self.rooms.get(message.room), (front.incarnation, message.request, message.attempt)
        if room is not None and meant == (room.spec.front.incarnation, room.spec.request, room.attempt):
            self.fail(room, self.STOP, "the client has gone", "", "aborted")
        else:
            self.counts["stops of no room"] += 1

    # --- links ---

    def link_up(self, peer: Address) -> None:
        super().link_up(peer)
        for room in self.leg_rooms():
            self._open_if_linked(room)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        self.reports.link_lost(peer)
        text = f"the link to {peer.name} ended: {reason.value}"
        if (rank := self.team.lost(peer)) is not None:
            self._rank_lost(rank, peer.name, text)
        for room in self.leg_rooms():
            for party, event in (
                (room.router, self.ROOM_LOST),
                (room.peer, self.PEER_LOST),
                (room.spec.front, self.FRONT_LOST),
            ):
                if party.incarnation == peer.incarnation:
                    self.fail(room, event, text, peer.name)

    # --- the other ranks ---

    def _join(self, peer: Address, message: Join) -> None:
        """Others are told of the instance once all its ranks are there."""
        if self.ending or not self.team.join(peer, message):
            self.counts["joins not accepted"] += 1
        elif self.team.complete and not self.info.members:
            self.info = msgspec.structs.replace(self.info, members=self.team.members())
            self.membership.change(Register(self.info))

    def _rank_lost(self, rank: int, peer: str, text: str) -> None:
        """The instance dies as one: its rooms fail with one cause, and the process ends when our writes have."""
        begins = self.ending.begin(f"rank {rank} of {self.info.instance} is lost: {text}", self.clock.now_s())
        for room in self.leg_rooms() if begins else ():
            cause = self.cause(room, "peer_lost", self.ending.why, room.machine.state.name, peer)
            self.end_room(room, msgspec.structs.replace(cause, rank=rank))

    def end_room(self, room: R, cause: Cause) -> None:
        """End a room because the instance ends."""
        self.act(room, room.machine.handle(self.FAIL, cause))

    # --- saying things ---

    def tell_room(self, room: R, message: Message) -> None:
        """Say it to the room, at its router. If that link is gone, the room is, and LinkLost says so."""
        self.network.send(room.router.incarnation, message)

    def tell_both(self, room: R, message: Message) -> None:
        """Say it to the other leg's leader, with a copy to the room."""
        self.network.send(room.peer.incarnation, message)
        self.tell_room(room, message)

    def unknown_room(self, peer: Address, room: int) -> None:
        self.counts["messages for unknown rooms"] += 1
        self.network.send(peer.incarnation, UnknownRoom(room, self.role))

    def cause(self, room: R, code: str, message: str, state: str, peer: str = "") -> Cause:
        elapsed_s = self.clock.now_s() - room.opened_s
        return Cause(code, message, self.role, 0, peer, room.room, state, elapsed_s)

    def progress(self, room: R, event: str, **fields: Any) -> Progress:
        offset_s = self.clock.now_s() - room.opened_s
        return Progress(room.room, self.role, event, step=self.forward.done, offset_s=offset_s, **fields)

    # --- clocks ---

    def busy(self) -> bool:
        return bool(self.rooms) or bool(self.leaving) or self.reports.is_late or not self.membership.accepted

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        if not self.ending:  # it ends in its own time, also where the forward never does
            self.forward.check(now_s)
        self._check_clocks(now_s)
        if self.leaving.time_is_over(not self.rooms and self.membership.accepted, now_s):
            self.hand_over()
        if now_s >= self._progress_at_s:
            self._progress_at_s = now_s + PROGRESS_EVERY_S
            self.report_progress()

    def _check_clocks(self, now_s: float) -> None:
        for room in self.leg_rooms():
            expiry = room.clocks.expired(now_s)
            if expiry is not None and room.machine.kvpoll not in STICKY:
                text = f"{expiry.clock} for {expiry.elapsed_s:.1f} s; the limit is {expiry.limit_s:g} s"
                self.fail(room, self.EXPIRED, text, room.peer.name, "deadline_exceeded")

    def report_progress(self) -> None:
        """Once a second: tell each waiting room and its other leg where it stands."""
        raise NotImplementedError

    # --- leaving ---

    async def drain(self, limit_s: float) -> None:
        """A call: take no new rooms, finish those that are here within `limit_s`, then hand them over."""
        self._mailbox.put(DrainRequested(limit_s))

    async def drained(self) -> dict[str, Any]:
        """How far that is (`Leaving.state`)."""
        return self.leaving.state(len(self.rooms), self.clock.now_s())

    def _leave_within(self, limit_s: float) -> None:
        if self.leaving.begin(limit_s, self.clock.now_s()):
            self.info = msgspec.structs.replace(self.info, draining=True)
            self.membership.change(Register(self.info))

    def hand_over(self) -> None:
        """End every room here, so that its request goes on elsewhere in its next attempt."""
        self.outbox.flush()  # the tokens that are made, before the word that there are no more
        for room in self.leg_rooms():
            self.leaving.handed_over += room.machine.kvpoll is not KVPoll.FAILED
            self.hand_over_room(room)

    def hand_over_room(self, room: R) -> None:
        self.fail(room, self.FAIL, f"{self.info.instance} is leaving", "", Draining.code)

    # --- load and status ---

    def load(self) -> Load:
        """What routers choose by. Counts rooms that have said `Opened`, and no others (see `LoadReports`)."""
        raise NotImplementedError

    def _watch(self, router: Address, _message: Watch) -> None:
        self.reports.watch(router)

    def block_tables(self) -> dict[int, tuple[int, ...]]:
        """Room -> pages, from the rooms' own records."""
        return {room.room: room.holding.pages for room in self.rooms.values() if room.holding is not None}

    def queues(self) -> dict[str, int]:
        raise NotImplementedError

    async def status(self) -> dict[str, Any]:
        """One instance of the `kvferry status` object; the pages are recounted from the block tables."""
        return {
            "id": self.info.instance,
            "role": self.info.role,
            "incarnation": f"{self.info.address.incarnation:016x}",
            "ranks": self.team.status(),
            "queues": self.queues(),
            "pages": msgspec.to_builtins(self.ledger.audit(self.block_tables())),
            "page_size": self.page_size,
            "quarantined": [],  # prefill's own reads end by themselves; decode has rows (actors/decode/unproven.py)
            "data_paths": {},  # those by which prefill writes to decode are decode's to say
            "counts": dict(self.counts),
            "step": self.forward.done,
            "registered": self.membership.accepted,
            "refusal": self.membership.refusal,
            "draining": bool(self.leaving),
        }
