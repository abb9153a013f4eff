"""A rank that is not its instance's leader: it joins, runs the leader's plans, and does not outlive it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.actors.forward import StepDone, StepLost, run_step
from kvferry.actors.membership import RETRY_S
from kvferry.actors.parts import Parts
from kvferry.actors.ports import LostReason
from kvferry.actors.ranks.rank import Rank
from kvferry.engine.contract import StepPlan, decode_plan
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Join, Joined, RunStep, Stepped
from kvferry.protocol.messages import Message, Register


@dataclass(frozen=True)
class LeaderFound:
    """Item: the leader's address, or None while there is none."""

    address: Address | None


class Follower(Rank):
    """Base of the followers. It registers its rank by itself. Its leader is the process that its engine is bound to, or
    else whoever has the instance's name.
    """

    role = ""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, Register(parts.info))
        self.leader: Address | None = None
        self.joined = False
        self.steps_done = 0
        self._resolve, self._bound_to = parts.resolve, parts.leader
        self._looking = False
        self._retry_at_s = 0.0
        self._join = Join(self.info)
        self._on_message |= {Joined: self._taken_in, RunStep: self._run_step}

    def receive_other(self, item: Any) -> None:
        match item:
            case LeaderFound(address):
                self._found(address)
            case StepDone(result):
                self.steps_done = result.step
                self.tell_leader(Stepped(result.step, result.part))
            case StepLost():
                self.counts["forwards that lack a rank"] += 1  # the leader's end is ours
            case _:
                super().receive_other(item)

    # --- the leader ---

    def tell_leader(self, message: Message) -> None:
        """If that link is gone, the instance ends, and LinkLost says so."""
        if self.leader is not None:
            self.network.send(self.leader.incarnation, message)

    def is_leader(self, peer: Address) -> bool:
        """Only what the leader says is obeyed."""
        known = self.leader is not None and self.leader.incarnation == peer.incarnation
        if not known:
            self.counts["orders from a stranger"] += 1
        return known

    async def _look(self) -> None:
        if self._bound_to is not None:
            self._mailbox.put(LeaderFound(self._bound_to))
            return
        try:
            self._mailbox.put(LeaderFound(await self._resolve(self.info.instance)))
        except LookupError:
            self._mailbox.put(LeaderFound(None))

    def _found(self, address: Address | None) -> None:
        self._looking = False
        self.leader = address
        if address is not None:
            self.network.dial(address)
            self._ask_in()

    def _ask_in(self) -> None:
        if self.leader is not None and self.network.is_up(self.leader.incarnation):
            self.tell_leader(self._join)

    def _taken_in(self, peer: Address, _message: Joined) -> None:
        if self.is_leader(peer):
            self.joined = True

    def link_up(self, peer: Address) -> None:
        super().link_up(peer)
        if not self.joined and self.leader is not None and self.leader.incarnation == peer.incarnation:
            self._ask_in()

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        super().link_lost(peer, reason)
        if self.leader is None or self.leader.incarnation != peer.incarnation:
            return
        answers_no_more = reason.ended or reason is LostReason.REFUSED
        if not self.joined and (self._bound_to is None or not answers_no_more):
            self.leader = None  # it was on its way out, or another one has its name now
            return
        text = f"{self.network.address.name} has lost its leader {peer.name}: {reason.value}"
        if self.ending.begin(text, self.clock.now_s()):
            self.leader_lost(peer, text)

    def leader_lost(self, leader: Address, why: str) -> None:
        """Stop posting; what is posted drains. The process ends by itself when `quiet`."""

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        if self.joined or self._looking or now_s < self._retry_at_s:
            return
        self._retry_at_s = now_s + RETRY_S
        if self.leader is None:
            self._looking = True
            self.spawn(self._look())
        else:
            self._ask_in()

    # --- forwards ---

    def _run_step(self, peer: Address, message: RunStep) -> None:
        if self.is_leader(peer):
            self.spawn(self._run(decode_plan(message.plan)))

    async def _run(self, plan: StepPlan) -> None:
        self._mailbox.put(await run_step(self.engine, plan))

    # --- status ---

    async def status(self) -> dict[str, Any]:
        """One rank of the instance."""
        address = self.info.address
        return {
            "instance": self.info.instance,
            "role": self.info.role,
            "rank": self.info.rank,
            "incarnation": f"{address.incarnation:016x}",
            "pid": address.pid,
            "joined": self.joined,
            "step": self.steps_done,
            "counts": dict(self.counts),
        }
