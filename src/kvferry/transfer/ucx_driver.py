"""The thread that owns NIXL's agents: it makes, drives and deletes them, and so it alone can say that one is gone.

Commands come in through a queue, as calls; results go back through `deliver`, which runs a call on the endpoint's
loop. Each turn takes the commands that are there, polls the agents once, and gives every peer with work one turn.

There is one agent for each writer, and one for each target. Making one takes 70 ms, in which nothing else moves; the
first is made at the start, so that a transport that does not work shows then, and the first peer gets it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from kvferry.transfer.contract import Descriptor, OnNotify, Proofs, Region, Revoked, TransferError
from kvferry.transfer.threaded import Deliver
from kvferry.transfer.ucx_agent import BACKEND, Agent, add_peer, describe, transport
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite

#: Turns that writes get to end by themselves when the endpoint is closed.
_LAST_TURNS = 64

#: Fast turns after a notification, to carry it off: NIXL does not say when it has left.
_PARTING_TURNS = 64

_log = logging.getLogger(__name__)


class Driver:
    """See the module. All methods but `run` are commands, put into `commands` and called by `run` on its thread."""

    def __init__(
        self,
        *,
        incarnation: int,
        transports: str,
        host: str,
        devices: str,
        batch_bytes: int,
        poll_busy_ms: float,
        poll_idle_ms: float,
        max_agents: int,
        regions: tuple[Region, ...],
        on_notify: OnNotify,
        now_s: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._incarnation, self._name = incarnation, f"kvferry-{incarnation:016x}"
        self._transports, self._host, self._devices, self._regions = transports, host, devices, regions
        self._proofs: Proofs = transport(transports).proofs
        self._batch_bytes, self._max_agents = batch_bytes, max_agents
        self._busy_s, self._idle_s = poll_busy_ms / 1000, poll_idle_ms / 1000
        self._on_notify = on_notify
        self._now_s = now_s
        self._deliver = deliver
        self._generation = -1  # of the last agent that was made
        self._spare: Agent | None = None
        self._receiving: dict[int, Agent] = {}  # by the writer's incarnation
        self._accepted: dict[int, int] = {}  # the generation of each; kept when a failure has ended all agents
        self._peers: dict[str, UcxPeer] = {}  # by the target's agent
        self._expecting = 0
        self._parting = 0
        self._closing = False
        self._failure = ""

    def put(self, command: Callable[[], None]) -> None:
        self.commands.put(command)

    # --- the thread ------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[TransferError | None], None]) -> None:
        """The thread's whole life. `on_ready`, called here, gets None, or why there can be no agent."""
        try:
            self._spare = self._make()
        except Exception as error:  # noqa: BLE001  (whatever it is, the endpoint's loop must hear of it)
            self._failure = f"{self._name}: no agent over {self._transports!r}: {describe(error)}"
        on_ready(TransferError(self._failure) if self._failure else None)
        try:
            while not self._failure and not self._closing:
                self._turn()
        except Exception as error:  # noqa: BLE001  (the same)
            self._failure = f"{self._name}: the driver failed: {describe(error)}"
            _log.exception("%s: the driver failed", self._name)
        self._failure = self._failure or "the endpoint is closed"
        self._delete_all()
        while not self._closing:  # answer what still comes: every write ends
            self.commands.get()()
        while not self.commands.empty():
            self.commands.get()()

    def _turn(self) -> None:
        progressed = False
        for agent in self._driven():
            for sender, payload in agent.notifications():
                self._deliver(partial(self._on_notify, sender, payload))
                progressed = True
        for name, peer in list(self._peers.items()):
            if peer.broken:
                peer.bury()
            elif peer.busy:
                progressed |= peer.serve()
                self._parting = _PARTING_TURNS
            if peer.gone:
                del self._peers[name]
        self._take_commands(0.0 if progressed else self._pause_s())

    def _driven(self) -> list[Agent]:
        """Peers with writes under way drive themselves, when they look after them; all must be driven at times."""
        return [*self._receiving.values(), *(peer.agent for peer in self._peers.values())]

    def _pause_s(self) -> float:
        if self._expecting > 0 or any(peer.busy for peer in self._peers.values()):
            return self._busy_s
        if self._parting > 0:
            self._parting -= 1
            return self._busy_s
        return self._idle_s

    def _take_commands(self, pause_s: float) -> None:
        try:
            command = self.commands.get(timeout=pause_s) if pause_s > 0 else self.commands.get_nowait()
            while True:
                command()
                command = self.commands.get_nowait()
        except Empty:
            return

    # --- agents ----------------------------------------------------------------------------------------------

    def _make(self) -> Agent:
        self._generation += 1
        return Agent(
            self._incarnation, self._generation, self._transports, self._host, self._regions, self._devices
        )  # fmt: skip

    def _next_agent(self) -> Agent:
        """Raises TransferError when there are too many, or UCX gives no more."""
        if self._failure:
            raise TransferError(self._failure)
        live = len(self._receiving) + len(self._peers)
        if live >= self._max_agents:
            raise TransferError(f"{self._name}: has {live} agents; transfer.max_agents is {self._max_agents}")
        agent, self._spare = self._spare, None
        if agent is not None:
            return agent
        try:
            return self._make()
        except Exception as error:  # noqa: BLE001  (NIXL's errors have no base; the caller must hear of any)
            raise TransferError(f"{self._name}: no agent over {self._transports!r}: {describe(error)}") from None

    # --- commands --------------------------------------------------------------------------------------------

    def accept(self, writer: int, on_done: Callable[[Descriptor | TransferError], None]) -> None:
        answer: Descriptor | TransferError
        try:
            agent = self._receiving.get(writer)
            if agent is None:
                agent = self._receiving[writer] = self._next_agent()
                self._accepted[writer] = agent.generation
            answer = Descriptor(
                BACKEND, agent.name, self._incarnation, agent.generation, agent.metadata, self._regions,
                self._proofs,
            )  # fmt: skip
        except TransferError as error:
            answer = TransferError(str(error))
        self._deliver(lambda: on_done(answer))

    def revoke(self, writer: int, on_done: Callable[[Revoked | None], None]) -> None:
        agent, generation = self._receiving.pop(writer, None), self._accepted.pop(writer, None)
        if agent is not None:
            agent.delete()
        # Here, on the thread that drives, there is no agent any more that could place a byte of that writer's.
        proof = None if generation is None or not self._proofs.revoked else Revoked(writer, generation)
        self._deliver(lambda: on_done(proof))

    def connect(self, descriptor: Descriptor, on_done: Callable[[UcxPeer | TransferError], None]) -> None:
        answer: UcxPeer | TransferError
        try:
            answer = self._connected(descriptor)
        except TransferError as error:
            # A new one: the frames in this one's traceback would keep the agent alive as long as it is kept.
            answer = TransferError(str(error))
        self._deliver(lambda: on_done(answer))

    def _connected(self, descriptor: Descriptor) -> UcxPeer:
        peer = self._peers.get(descriptor.agent)
        if peer is not None and peer.broken and not peer.gone:
            raise TransferError(f"{descriptor.agent}: broken, and its last writes have not ended: {peer.broken}")
        if peer is None or peer.gone:
            agent = self._next_agent()
            try:
                add_peer(agent.nixl, self._transports, descriptor)
            except TransferError:
                self._spare = agent
                raise
            waits = not self._proofs.revoked
            peer = UcxPeer(descriptor, agent, self._regions, self._batch_bytes, self._now_s, self._deliver, waits)
            self._peers[descriptor.agent] = peer
        elif peer.descriptor != descriptor:
            raise TransferError(f"{descriptor.agent}: connected already, with another descriptor")
        return peer

    def write(self, peer: UcxPeer, write: UcxWrite) -> None:
        peer.write(write)

    def notify(self, peer: UcxPeer, payload: bytes) -> None:
        peer.notify(payload)

    def cancel(self, write: UcxWrite) -> None:
        for peer in self._peers.values():
            peer.cancel(write)

    def expect(self, change: int) -> None:
        self._expecting += change

    def disconnect(self, peer: UcxPeer, on_done: Callable[[], None]) -> None:
        peer.end("disconnected")
        if peer.gone and self._peers.get(peer.descriptor.agent) is peer:
            del self._peers[peer.descriptor.agent]
        self._deliver(on_done)

    def close(self) -> None:
        self._closing = True

    def _delete_all(self) -> None:
        for peer in self._peers.values():
            peer.end(self._failure)
        for _ in range(_LAST_TURNS):  # what ends by itself does so now
            left = [peer for peer in self._peers.values() if not peer.gone]
            if not left:
                break
            for peer in left:
                peer.agent.notifications()
                peer.bury()
        for peer in self._peers.values():
            peer.destroy(self._failure)
        for agent in self._receiving.values():
            agent.delete()
        if self._spare is not None:
            self._spare.delete()
        self._peers, self._receiving, self._spare = {}, {}, None
