"""The thread of a backend that drives its agents itself: it makes, drives and deletes them, and so it alone can say
that one is gone.

Commands come in through a queue, as calls; answers go back through `deliver`, which runs a call on the endpoint's loop.
The ends of writes and notifications go through `tell`, which does the same unless they are wanted on this thread.
Here: the thread's life, and the answers. Not here: how bytes move, which is each backend's own (`ucx_driver`,
`ucxx_driver`), and the loop's side (`threaded`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

from kvferry.transfer.contract import Descriptor, OnNotify, Proofs, Region, Revoked, TransferError
from kvferry.transfer.queued_peer import Agent, Deliver, QueuedPeer
from kvferry.transfer.write import Write

_log = logging.getLogger(__name__)


T = TypeVar("T")
P = TypeVar("P", bound=QueuedPeer[Any, Any])
W = TypeVar("W", bound=Write)
A = TypeVar("A", bound=Agent)


def describe(error: BaseException) -> str:
    """Name and text of an error, for `WriteResult.error`."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True)
class DriverParts:
    """What a driver is given. Peers reach it at `host`; `deliver` and `tell` are the endpoint's; agents are numbered
    from `generations_from` on.
    """

    regions: tuple[Region, ...]
    incarnation: int
    on_notify: OnNotify
    now_s: Callable[[], float]
    deliver: Deliver
    tell: Deliver
    transports: str
    host: str
    batch_bytes: int
    max_agents: int
    generations_from: int


class Driver(ABC, Generic[P, W, A]):
    """Everything but `run`, `put` and `submit` is called on its thread, as a command."""

    _backend: ClassVar[str]
    #: To post a write is to copy its bytes.
    copies = False

    def __init__(self, parts: DriverParts, proofs: Proofs) -> None:
        self._incarnation, self._name = parts.incarnation, f"kvferry-{parts.incarnation:016x}"
        self._transports, self._host, self._regions = parts.transports, parts.host, parts.regions
        self._batch_bytes, self._max_agents = parts.batch_bytes, parts.max_agents
        self._on_notify, self._now_s = parts.on_notify, parts.now_s
        self._deliver, self._tell = parts.deliver, parts.tell
        self._proofs = proofs
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._generation = parts.generations_from - 1  # of the last agent that was made
        self._accepted: dict[int, int] = {}  # the generation of each writer's; kept when a failure has ended all agents
        self._peers: dict[str, P] = {}  # by the target's agent
        self._closing = False
        self._failure = ""

    def put(self, command: Callable[[], None]) -> None:
        """From any thread: have `command` called soon on the driver's."""
        self._commands.put(command)

    def submit(self, peer: P, write: W) -> None:
        """From any thread."""
        self.put(partial(self.write, peer, write))

    def close(self) -> None:
        self._closing = True

    # --- the thread ------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[TransferError | None], None]) -> None:
        """The thread's whole life. `on_ready`, called here, gets None, or why there can be no agent. After `close` it
        destroys all agents, ends every write, takes the commands that are left, and returns.
        """
        try:
            self._start()
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
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    @abstractmethod
    def _start(self) -> None:
        """Try to make an agent: a transport that does not work shows now."""

    @abstractmethod
    def _turn(self) -> None:
        """Take the commands that are there and give everybody who has work a turn; or wait for either."""

    @abstractmethod
    def _delete_all(self) -> None:
        """Every write ends; afterwards nothing reads or writes the regions."""

    # --- agents ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _make(self, generation: int) -> A:
        """Another agent. Raises whatever the library raises."""

    @property
    @abstractmethod
    def _live(self) -> int:
        """Agents that writers and peers have."""

    def _new_agent(self) -> A:
        self._generation += 1
        return self._make(self._generation)

    def _next_agent(self) -> A:
        """Raises TransferError when there are too many, or UCX gives no more."""
        if self._failure:
            raise TransferError(self._failure)
        if self._live >= self._max_agents:
            raise TransferError(f"{self._name}: has {self._live} agents; transfer.max_agents is {self._max_agents}")
        try:
            return self._new_agent()
        except Exception as error:  # noqa: BLE001  (their errors have no base; the caller must hear of any)
            raise TransferError(f"{self._name}: no agent over {self._transports!r}: {describe(error)}") from None

    # --- commands --------------------------------------------------------------------------------------------

    def accept(self, writer: int, on_done: Callable[[Descriptor | TransferError], None]) -> None:
        self._answer(partial(self._accept, writer), on_done)

    def connect(self, descriptor: Descriptor, on_done: Callable[[P | TransferError], None]) -> None:
        self._answer(partial(self._connected, descriptor), on_done)

    def revoke(self, writer: int, on_done: Callable[[Revoked | None], None]) -> None:
        generation = self._accepted.pop(writer, None)
        self._shut_out(writer)
        # Here, on the thread that drives, there is nothing any more that could place a byte of that writer's.
        proof = None if generation is None or not self._proofs.revoked else Revoked(writer, generation)
        self._deliver(lambda: on_done(proof))

    def _accept(self, writer: int) -> Descriptor:
        agent, metadata = self._agent_for(writer)
        self._accepted[writer] = agent.generation
        return Descriptor(
            self._backend, agent.name, self._incarnation, agent.generation, metadata, self._regions, self._proofs
        )  # fmt: skip

    @abstractmethod
    def _agent_for(self, writer: int) -> tuple[A, bytes]:
        """The writer's receiving agent, a new one if it has none, and what it needs to know of it. Raises TransferError
        as `_next_agent`.
        """

    @abstractmethod
    def _shut_out(self, writer: int) -> None:
        """Destroy the writer's receiving agent, if there is one: then nothing that comes by it is placed."""

    def _connected(self, descriptor: Descriptor) -> P:
        """The peer of this descriptor, connected now or before. Raises TransferError when it is refused."""
        peer = self._peers.get(descriptor.agent)
        if peer is None:
            peer = self._peers[descriptor.agent] = self._connect(descriptor)
        elif peer.descriptor != descriptor:
            raise TransferError(f"{descriptor.agent}: connected already, with another descriptor")
        return peer

    @abstractmethod
    def _connect(self, descriptor: Descriptor) -> P:
        """A new peer. Raises TransferError as `_next_agent`, and when the descriptor is refused."""

    def write(self, peer: P, write: W) -> None:
        peer.write(write)
        self._stir(peer)

    def notify(self, peer: P, payload: bytes) -> None:
        peer.notify(payload)
        self._stir(peer)

    def cancel(self, write: W) -> None:
        for peer in self._peers.values():
            peer.cancel(write)
            self._stir(peer)

    @abstractmethod
    def _stir(self, peer: P) -> None:
        """There may be something to do for it."""

    @abstractmethod
    def expect(self, change: int) -> None: ...
    @abstractmethod
    def disconnect(self, peer: P, on_done: Callable[[], None]) -> None: ...

    def _answer(self, ask: Callable[[], T], on_done: Callable[[T | TransferError], None]) -> None:
        answer: T | TransferError
        try:
            answer = ask()
        except TransferError as error:
            # A new one: the frames in this one's traceback would keep the agent alive as long as it is kept.
            answer = TransferError(str(error))
        self._deliver(lambda: on_done(answer))
