"""What prefill's and decode's leaders share: registration, the tie to each request's front, progress, status.

Rule: a leader answers `Opened` only when its link to the request's front is open. So a front that is told of a
commit has been linked to that decode, and hears of its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvferry.actors.actor import Actor
from kvferry.actors.membership import Membership, RegistryFound
from kvferry.actors.ports import Clock, LostReason, Network, Resolve
from kvferry.actors.settings import ClockSettings
from kvferry.engine.contract import Engine, StepPlan, StepResult
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.clocks import Limits
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    Address,
    Failed,
    Message,
    Opened,
    Progress,
    RankInfo,
    Register,
    Registered,
    RegistrationRefused,
    RequestSpec,
    Token,
    TokenBatch,
    UnknownRoom,
)

PROGRESS_EVERY_S = 1.0


class StepDone(msgspec.Struct, frozen=True):
    """Item for the mailbox: a forward has finished."""

    plan: StepPlan
    result: StepResult


class LegRoom(Protocol):
    """What the shared code needs to know of a room's record at a leg."""

    room: int
    attempt: int
    spec: RequestSpec
    router: Address
    opened: bool
    opened_s: float


class Leader(Actor):
    """Base of the two leaders. `role` is also the name of its leg."""

    role = ""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        mailbox: int,
        resolve: Resolve,
        engine: Engine,
        info: RankInfo,
        limits: ClockSettings,
    ) -> None:
        super().__init__(network, clock, mailbox)
        self.engine = engine
        self.info = info
        self.limits = Limits(
            limits.admission_wait_s, limits.prefill_wait_s, limits.transfer_wait_s, limits.no_progress_s
        )
        self.ledger = PageLedger(engine.limits.pages, engine.metadata_rows)
        self.step_started = 0  # number of the last forward given to the engine
        self.step_done = 0
        self._stepping = False
        self._stepping_since_s = 0.0
        self._tokens: dict[int, list[Token]] = {}
        self._progress_at_s = 0.0
        self.membership = Membership(network, resolve, Register(info), self.spawn, self._mailbox.put)
        self.refusal: str | None = None

    # --- items ---

    def receive(self, item: Any) -> None:
        match item:
            case RegistryFound(address):
                self.membership.found(address)
            case StepDone(plan, result):
                self._stepping = False
                self.step_done = plan.step
                self.step_finished(plan, result)
            case _:
                super().receive(item)

    def advance(self) -> None:
        """Admit or reserve what fits, start the next forward, publish the tokens."""
        self.admit()
        if not self._stepping:
            plan = self.plan_step(self.step_started + 1)
            if plan is not None:
                self._start(plan)
        self._publish()

    def admit(self) -> None:
        """Give waiting rooms what they need, in order of arrival; the first that does not fit holds back the rest."""

    def plan_step(self, step: int) -> StepPlan | None:
        """The next forward, or None when there is nothing to compute."""
        raise NotImplementedError

    def step_finished(self, plan: StepPlan, result: StepResult) -> None:
        raise NotImplementedError

    def _start(self, plan: StepPlan) -> None:
        self._stepping = True
        self._stepping_since_s = self.clock.now_s()
        self.step_started = plan.step

        async def forward() -> None:
            self._mailbox.put(StepDone(plan, await self.engine.step(plan)))

        self.spawn(forward())

    # --- links ---

    def link_up(self, peer: Address) -> None:
        self.membership.link_up(peer)
        for room in self.leg_rooms():
            self.open_if_linked(room)

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        self.membership.link_lost(peer)

    def leg_rooms(self) -> list[Any]:
        """The rooms' records."""
        raise NotImplementedError

    def links_needed(self, room: Any) -> list[Address]:
        """The links that must be open before the leg says `Opened`."""
        return [room.spec.front]

    def open_if_linked(self, room: LegRoom) -> None:
        """Say `Opened` once, as soon as every link that the room needs is open."""
        if not room.opened and all(self.network.is_up(peer.incarnation) for peer in self.links_needed(room)):
            room.opened = True
            self.tell_room(room, Opened(room.room, self.role))
            self.leg_opened(room)

    def leg_opened(self, room: Any) -> None:
        """The room has just been opened here."""

    # --- saying things ---

    def tell_room(self, room: LegRoom, message: Message) -> None:
        """Say it to the room, at its router. If that link is gone, the room is, and LinkLost says so."""
        self.network.send(room.router.incarnation, message)

    def refuse_open(self, router: Address, room: int, cause: Cause) -> None:
        self.counts["rooms refused"] += 1
        self.network.send(router.incarnation, Failed(room, self.role, cause))

    def unknown_room(self, peer: Address, room: int) -> None:
        self.counts["messages for unknown rooms"] += 1
        self.network.send(peer.incarnation, UnknownRoom(room, self.role))

    def publish(self, room: LegRoom, index: int, token_id: int, text: str, finish_reason: str) -> None:
        """Queue a token for the request's front; all of a turn leave in one message per front."""
        token = Token(room.spec.request, room.attempt, room.room, index, token_id, text, finish_reason)
        self._tokens.setdefault(room.spec.front.incarnation, []).append(token)

    def _publish(self) -> None:
        for front, tokens in self._tokens.items():
            self.network.send(front, TokenBatch(self.role, tuple(tokens)))
        self._tokens.clear()

    def cause(self, room: LegRoom, code: str, message: str, state: str, peer: str = "") -> Cause:
        elapsed_s = self.clock.now_s() - room.opened_s
        return Cause(code, message, self.role, 0, peer, room.room, state, elapsed_s)

    def progress(self, room: LegRoom, event: str, **fields: Any) -> Progress:
        offset_s = self.clock.now_s() - room.opened_s
        return Progress(room.room, self.role, event, step=self.step_done, offset_s=offset_s, **fields)

    def tick(self, now_s: float) -> None:
        self.membership.tick(now_s)
        self._check_engine(now_s)
        self.check_clocks(now_s)
        if now_s >= self._progress_at_s:
            self._progress_at_s = now_s + PROGRESS_EVERY_S
            self.report_progress()

    def _check_engine(self, now_s: float) -> None:
        """A forward that does not end can't be cancelled, and its pages can't be proved quiet: the process must go."""
        elapsed_s = now_s - self._stepping_since_s
        if self._stepping and elapsed_s >= self.limits.no_progress_s:
            limit_s = self.limits.no_progress_s
            raise EngineStalled(
                f"forward {self.step_started} has run for {elapsed_s:.1f} s; the limit is {limit_s:g} s"
            )

    def check_clocks(self, now_s: float) -> None:
        raise NotImplementedError

    def report_progress(self) -> None:
        """Once a second: tell each live room and its other leg where it stands."""
        raise NotImplementedError

    # --- registration ---

    def registered(self, _peer: Address, _message: Registered) -> None:
        self.membership.accepted = True
        self.refusal = None

    def registration_refused(self, _peer: Address, message: RegistrationRefused) -> None:
        """A place that may become free is asked for again (by `Membership.tick`); a mismatch can't mend itself."""
        self.refusal = message.reason
        if not message.retry:
            raise RegistrationError(message.reason)

    # --- status ---

    def block_tables(self) -> dict[int, tuple[int, ...]]:
        """Room -> pages, from the rooms' own records."""
        raise NotImplementedError

    def queues(self) -> dict[str, int]:
        raise NotImplementedError

    async def status(self) -> dict[str, Any]:
        """One instance of the `kvferry status` object; the pages are recounted from the block tables."""
        counts = self.ledger.audit(self.block_tables())
        rank = {"rank": 0, "pid": self.info.address.pid, "host": self.info.address.host}
        return {
            "id": self.info.instance,
            "role": self.role,
            "incarnation": f"{self.info.address.incarnation:016x}",
            "ranks": [rank],
            "queues": self.queues(),
            "pages": msgspec.to_builtins(counts),
            "counts": dict(self.counts),
            "step": self.step_done,
            "registered": self.membership.accepted,
            "refusal": self.refusal,
        }


class EngineStalled(RuntimeError):
    """A forward has outlived the no-progress limit."""


class RegistrationError(RuntimeError):
    """The registry will never take this rank: it contradicts the ranks that are there."""


def drop(queue: deque[int], room: int) -> None:
    """Take a room out of a queue if it is there."""
    if room in queue:
        queue.remove(room)


Handlers = dict[type[Message], Callable[[Address, Any], None]]
