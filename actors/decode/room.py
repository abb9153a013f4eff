"""A room's record at decode's leader."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.actors.decode.checks import RoomChecks
from kvferry.actors.leg_room import LegRoom
from kvferry.engine.contract import TextStream
from kvferry.engine.history import Past
from kvferry.memory.admission import Claim
from kvferry.memory.proof import NeverGiven, Quiet
from kvferry.protocol.address import Address
from kvferry.protocol.offer import Offer
from kvferry.protocol.receiver import ReceiverMachine
from kvferry.transfer.contract import Proofs


@dataclass(kw_only=True)
class DecodeRoom(LegRoom):
    """`peer` is prefill's leader; `sources` are its ranks that write, `offers` what their processes (by incarnation)
    have, and `routes` the ranks here that each writes to.
    `awaited` are the (source, target) pairs whose notification has not come. `generated` counts the answer's tokens,
    frozen ones and prefill's included; `last_token` is the one to feed next; `expecting` while the data plane looks out
    for the room's notification; `claim` is its place in the batch, from the moment that the leg is open; `admitted_s`
    when it got its pages, and `quarantined_s` when it had no more use for them. `agents` are those that the destination
    names, once it has left: (the writer's incarnation, target rank) -> the generation of the agent that it was
    given; `closed` are those of them by which nothing can come any more, and `proofs` says for each what proves that.
    `checks` is about what has arrived.
    """

    machine: ReceiverMachine
    text: TextStream
    past: Past
    sources: dict[int, Address]
    routes: dict[int, tuple[int, ...]]
    offers: dict[int, Offer]
    awaited: set[tuple[int, int]] = field(default_factory=set)
    claim: Claim | None = None
    expecting: bool = False
    admitted_s: float = 0.0
    quarantined_s: float = 0.0
    agents: dict[tuple[int, int], int] = field(default_factory=dict)
    closed: set[tuple[int, int]] = field(default_factory=set)
    checks: RoomChecks = field(default_factory=RoomChecks)
    proofs: dict[tuple[int, int], Proofs] = field(default_factory=dict)
    generated: int = 0
    last_token: int = -1

    def __post_init__(self) -> None:
        self.awaited = {(source, target) for source, targets in self.routes.items() for target in targets}

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(writer's process, target rank) of all that are to be written."""
        writers = self.machine.writers
        return [(writers[source], target) for source, targets in self.routes.items() for target in targets]

    def source_of(self, peer: Address) -> int | None:
        """The number of the source rank that `peer` is, if it is one that writes for this room."""
        for rank, address in self.sources.items():
            if address.incarnation == peer.incarnation:
                return rank
        return None

    @property
    def total_tokens(self) -> int:
        """What the request can come to."""
        return len(self.spec.prompt_ids) + self.spec.sampling.max_tokens

    @property
    def quiet(self) -> Quiet:
        """What the machine knows of those that write to the pages; the ledger checks it."""
        machine = self.machine
        return Quiet(frozenset(machine.acks), frozenset(machine.exited), frozenset(machine.revoked))

    @property
    def peer_proof(self) -> NeverGiven | Quiet:
        return self.quiet if self.holding is not None and self.holding.was_given else NeverGiven()
