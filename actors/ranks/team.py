"""A leader's followers: who has joined, and the forward that all of them run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.actors.ports import Network
from kvferry.engine.contract import Combine, StepPlan, StepResult, encode_plan
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Join, Joined, RunStep, Stepped
from kvferry.protocol.messages import Message
from kvferry.protocol.rank import LEADER, Member, RankInfo
from kvferry.transfer.ranks import Slices


@dataclass(frozen=True)
class Mate:
    """A follower that has joined."""

    address: Address
    info: RankInfo


@dataclass
class _Step:
    """The forward that runs: the leader's own result, once it is there, and the other ranks' parts."""

    plan: StepPlan
    result: StepResult | None = None
    parts: dict[int, bytes] = field(default_factory=dict)


class Team:
    """The ranks of one instance, as its leader sees them; `info` is the leader's own. An instance of one rank has a
    team, too: it is complete at once and waits for nobody.
    """

    def __init__(self, network: Network, info: RankInfo, combine: Combine | None) -> None:
        self._network, self._info, self._combine = network, info, combine
        self.mates: dict[int, Mate] = {}
        self._step: _Step | None = None

    @property
    def size(self) -> int:
        return self._info.ranks

    @property
    def complete(self) -> bool:
        return len(self.mates) == self.size - 1

    # --- who is there ---

    def join(self, peer: Address, message: Join) -> bool:
        """Take a follower in and tell it so. False for who doesn't belong here, or can't be told from who was there
        before: it asks again, and the old one's end is noticed meanwhile.
        """
        info, rank = message.info, message.info.rank
        known = self.mates.get(rank)
        if known is not None and known.address.incarnation != peer.incarnation:
            return False
        if self._stranger(peer, info):
            return False
        self.mates[rank] = Mate(peer, info)
        self._network.send(peer.incarnation, Joined(rank))
        return True

    def _stranger(self, peer: Address, info: RankInfo) -> bool:
        ours = self._info
        same = (info.instance, info.role, info.layout, info.pages) == (
            ours.instance,
            ours.role,
            ours.layout,
            ours.pages,
        )
        sizes = (info.tp_size, info.pp_size, info.cp_size) == (ours.tp_size, ours.pp_size, ours.cp_size)
        fits = 0 < info.rank < self.size and info.address.incarnation == peer.incarnation
        return not (same and sizes and fits and info.pages == ours.pages)

    def rank_of(self, peer: Address) -> int | None:
        """The follower's number, if it is one."""
        for rank, mate in self.mates.items():
            if mate.address.incarnation == peer.incarnation:
                return rank
        return None

    def lost(self, peer: Address) -> int | None:
        """The link to a follower is over: its number, if the instance was complete. Before that, nothing was entrusted
        to it: its place is open again.
        """
        rank = self.rank_of(peer)
        if rank is not None and not self.complete:
            del self.mates[rank]
            return None
        return rank

    def members(self) -> tuple[Member, ...]:
        """All ranks, for others to know; nothing for an instance of one rank."""
        if self.size == 1:
            return ()
        own = Member(LEADER, self._info.address, self._info.slice, self._info.offer)
        mates = (Member(at, mate.address, mate.info.slice, mate.info.offer) for at, mate in sorted(self.mates.items()))
        return (own, *mates)

    def status(self) -> list[dict[str, Any]]:
        """Where each rank is, and what it offers its peers; the leader's first."""
        ranks = {LEADER: (self._info.address, self._info.offer)}
        ranks |= {rank: (mate.address, mate.info.offer) for rank, mate in sorted(self.mates.items())}
        return [
            {"rank": rank, "pid": at.pid, "host": at.host, "endpoint": at.endpoint, "offer": offer.as_object()}
            for rank, (at, offer) in ranks.items()
        ]

    def slices(self) -> Mapping[int, Slices]:
        """What each rank has of the KV."""
        return {LEADER: (self._info.slice,)} | {rank: (mate.info.slice,) for rank, mate in self.mates.items()}

    def send(self, rank: int, message: Message) -> None:
        """If that link is gone, so is the instance, and LinkLost says so."""
        self._network.send(self.mates[rank].address.incarnation, message)

    def tell_all(self, message: Message) -> None:
        for rank in self.mates:
            self.send(rank, message)

    # --- the forward ---

    def begin(self, plan: StepPlan) -> None:
        """All followers run it, too. Page numbers are the same in every rank."""
        self._step = _Step(plan)
        if self.mates:
            self.tell_all(RunStep(encode_plan(plan)))

    def stepped(self, result: StepResult) -> tuple[StepPlan, StepResult] | None:
        """The leader's own part of the forward has ended. The forward's result, if it has ended on every rank."""
        assert self._step is not None
        self._step.result = result
        return self._all_stepped()

    def mate_stepped(self, rank: int, message: Stepped) -> tuple[StepPlan, StepResult] | None:
        """A follower's part has ended."""
        if self._step is None or self._step.plan.step != message.step:
            return None
        self._step.parts[rank] = message.part
        return self._all_stepped()

    def _all_stepped(self) -> tuple[StepPlan, StepResult] | None:
        step = self._step
        if step is None or step.result is None or step.parts.keys() != self.mates.keys():
            return None
        self._step = None
        if self.mates and self._combine is not None:
            return step.plan, self._combine(step.plan, step.result, [part for _, part in sorted(step.parts.items())])
        return step.plan, step.result
