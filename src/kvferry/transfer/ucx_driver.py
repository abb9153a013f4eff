"""The driver of NIXL's agents. Each turn takes the commands that are there, polls the agents once, and gives every peer
with work one turn.

There is one agent for each writer, and one for each target; two or three where a post copies by itself (`ucx_copying`
says why).
Making one takes 70 ms, in which nothing else moves; the first is made at the start, so that a transport that does not
work shows then, and the first peer gets it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from kvferry.transfer.contract import Descriptor, TransferError
from kvferry.transfer.driver import DriverParts, describe
from kvferry.transfer.polling import PollingDriver
from kvferry.transfer.second_hand import SecondHand
from kvferry.transfer.spans import in_device, total_bytes
from kvferry.transfer.ucx_agent import BACKEND, Agent, add_peer, transport
from kvferry.transfer.ucx_copying import CopyingPeer, Hand
from kvferry.transfer.ucx_lane import Lane
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite

_log = logging.getLogger(__name__)

#: Turns that writes get to end by themselves when the endpoint is closed.
_LAST_TURNS = 64

#: Fast turns after a notification, to carry it off: NIXL does not say when it has left.
_PARTING_TURNS = 64


#: While writes are under way, those of our agents that need it least are driven once in so many turns.
_ALL_TURNS = 16

#: What is worth a second hand: copying it takes several times what it takes to wake a thread.
_WORTH_BYTES = 1 << 20


class UcxDriver(PollingDriver[UcxPeer, UcxWrite, Agent]):
    """`devices`: those that UCX may use, "" for the one that has our address. `hands`: threads that copy, 1 or 2, where
    a post copies by itself.
    """

    _backend: ClassVar[str] = BACKEND

    def __init__(
        self, parts: DriverParts, *, devices: str, poll_busy_ms: float, poll_idle_ms: float, hands: int
    ) -> None:
        self._transport = transport(parts.transports, in_device(parts.regions))
        super().__init__(parts, self._transport.proofs, poll_busy_ms=poll_busy_ms, poll_idle_ms=poll_idle_ms)
        self._devices, self.copies = devices, self._transport.copies
        self._spare: Agent | None = None
        self._receiving: dict[int, Agent] = {}  # by the writer's incarnation
        self._parting = self._turns = 0
        self._copying: tuple[CopyingPeer, ...] = ()  # for the second hand
        self._second = None
        if self.copies and hands > 1:
            self._second = SecondHand(f"{self._name}-second", self._second_turn, self._second_waits, self._busy_s)

    # --- the thread ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._spare = self._new_agent()

    def _poll(self) -> bool:
        progressed = False
        self._turns += 1
        for agent in self._driven():
            for sender, payload in agent.notifications():
                self._tell(partial(self._on_notify, sender, payload))
                progressed = True
        for name, peer in list(self._peers.items()):
            if peer.broken:
                peer.bury()
            elif peer.busy:
                progressed |= peer.serve()
                self._parting = _PARTING_TURNS
            if peer.gone:
                self._forget(name)
        return progressed

    def _forget(self, name: str) -> None:
        del self._peers[name]
        self._copying = tuple(peer for peer in self._peers.values() if isinstance(peer, CopyingPeer))

    def _second_turn(self) -> bool:
        """On the second hand's thread."""
        moved = [peer.turn(Hand.SECOND) for peer in self._copying]
        return any(moved)

    def _second_waits(self) -> bool:
        return any(peer.waits(Hand.SECOND) for peer in self._copying)

    def _driven(self) -> list[Agent]:
        """Those by which something may come, and those with something to carry off. All must be driven at times."""
        all_of_them = self._turns % _ALL_TURNS == 0 or not self._at_work
        sending = (agent for peer in self._peers.values() for agent in (peer.agents if all_of_them else peer.driven))
        return [*self._receiving.values(), *sending]

    def _pause_s(self) -> float:
        if self._parting > 0 and not self._at_work:
            self._parting -= 1
            return self._busy_s
        return super()._pause_s()

    # --- agents ----------------------------------------------------------------------------------------------

    def _make(self, generation: int) -> Agent:
        return Agent(
            self._incarnation, generation, self._transports, self._host, self._regions, self._devices
        )  # fmt: skip

    @property
    def _live(self) -> int:
        return len(self._receiving) + len(self._peers)

    def _new_agent(self) -> Agent:
        agent, self._spare = self._spare, None
        return agent or super()._new_agent()

    # --- commands --------------------------------------------------------------------------------------------

    def _agent_for(self, writer: int) -> tuple[Agent, bytes]:
        agent = self._receiving.get(writer)
        if agent is None:
            agent = self._receiving[writer] = self._next_agent()
        return agent, agent.metadata

    def _shut_out(self, writer: int) -> None:
        agent = self._receiving.pop(writer, None)
        if agent is not None:
            agent.delete()

    def _connected(self, descriptor: Descriptor) -> UcxPeer:
        peer = self._peers.get(descriptor.agent)
        if peer is not None and peer.broken:
            if not peer.gone:
                raise TransferError(f"{descriptor.agent}: broken, and its last writes have not ended: {peer.broken}")
            self._forget(descriptor.agent)
        peer = super()._connected(descriptor)
        if isinstance(peer, CopyingPeer) and peer not in self._copying:
            self._copying += (peer,)
        return peer

    def submit(self, peer: UcxPeer, write: UcxWrite) -> None:
        """Where a post copies by itself the peer takes it at once, for a hand that may be free."""
        if not isinstance(peer, CopyingPeer):
            super().submit(peer, write)
            return
        peer.write(write)
        self.put(_nothing)
        if self._second is not None and total_bytes(write.spans) >= _WORTH_BYTES:
            self._second.wake()

    def _connect(self, descriptor: Descriptor) -> UcxPeer:
        agent = self._next_agent()
        try:
            add_peer(agent.nixl, self._transports, descriptor)
        except TransferError:
            self._spare = agent
            raise
        regions, batch_bytes, over = self._regions, self._batch_bytes, self._transport
        if not over.copies:
            return UcxPeer(descriptor, agent, regions, batch_bytes, self._now_s, self._tell, over)
        notes = self._notes_agent(descriptor, agent)
        self._generation += 1
        make_lane = partial(self._second_lane, self._generation, descriptor)
        return CopyingPeer(
            descriptor, agent, notes, regions, batch_bytes, self._now_s, self._tell, over, self._second, make_lane
        )

    def _second_lane(self, generation: int, descriptor: Descriptor) -> Lane | None:
        """On the second hand's thread."""
        agent = None
        try:
            agent = self._make(generation)
            add_peer(agent.nixl, self._transports, descriptor)
        except Exception as error:  # noqa: BLE001  (their errors have no base; one lane is enough)
            _log.info("%s: one hand only for %s: %s", self._name, descriptor.agent, describe(error))
            if agent is not None:
                agent.delete()
            return None
        return Lane(agent, descriptor, self._regions)

    def _notes_agent(self, descriptor: Descriptor, agent: Agent) -> Agent:
        """A second agent to the same target, without regions, beside the one that writes."""
        self._generation += 1
        notes = None
        try:
            notes = Agent(self._incarnation, self._generation, self._transports, self._host, (), self._devices)
            add_peer(notes.nixl, self._transports, descriptor)
        except Exception as error:  # noqa: BLE001  (their errors have no base; the caller must hear of any)
            for made in (agent, notes):
                if made is not None:
                    made.delete()
            raise TransferError(f"{self._name}: no agent for what {descriptor.agent} is told: {error}") from None
        return notes

    def disconnect(self, peer: UcxPeer, on_done: Callable[[], None]) -> None:
        peer.end("disconnected")
        if peer.gone and self._peers.get(peer.descriptor.agent) is peer:
            self._forget(peer.descriptor.agent)
        self._deliver(on_done)

    def _delete_all(self) -> None:
        for peer in self._peers.values():
            peer.end(self._failure)
        for _ in range(_LAST_TURNS):  # what ends by itself does so now
            left = [peer for peer in self._peers.values() if not peer.gone]
            if not left:
                break
            for peer in left:
                for agent in peer.agents:
                    agent.notifications()
                peer.bury()
        for peer in self._peers.values():
            peer.destroy(self._failure)
        if self._second is not None:
            self._second.close()
        for agent in self._receiving.values():
            agent.delete()
        if self._spare is not None:
            self._spare.delete()
        self._peers, self._receiving, self._spare, self._copying = {}, {}, None, ()


def _nothing() -> None:
    """To be woken."""
