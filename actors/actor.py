"""The base of all actors: a bounded mailbox, and one task that alone writes the actor's state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvferry.actors.mailbox import Mailbox
from kvferry.actors.ports import Clock, LostReason, Network, Timer
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message


class FromPeer(msgspec.Struct, frozen=True, gc=False):
    peer: Address
    message: Message


class LinkUp(msgspec.Struct, frozen=True):
    peer: Address


class LinkLost(msgspec.Struct, frozen=True):
    peer: Address
    reason: LostReason


class PeerExited(msgspec.Struct, frozen=True):
    peer: Address


class Tick(msgspec.Struct, frozen=True):
    pass


class Crash(msgspec.Struct, frozen=True):
    """A spawned task or the links failed in a way that nobody expected."""

    error: Exception


class Actor:
    """Receives items one by one (`receive`), then acts on the whole (`advance`), for ever.

    Everything that happens elsewhere (links, forwards, writes, calls) arrives as an item in the mailbox, so the
    state needs no lock and a turn sees no change from outside.
    """

    #: Between ticks, and between those of an actor that is not `busy`: it sleeps longer.
    tick_s, idle_tick_s = 0.1, 0.5

    def __init__(self, network: Network, clock: Clock, mailbox: int) -> None:
        self.network = network
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._mailbox: Mailbox[Any] = Mailbox(mailbox)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: Timer | None = None
        self._is_slow = False  # the next tick is that of an idle actor
        self._on_message: dict[type[Message], Callable[[Address, Any], None]] = {}

    # --- LinkHandler: called by the network, on this loop ---

    def on_link_up(self, peer: Address) -> None:
        self._mailbox.put(LinkUp(peer))

    def on_message(self, peer: Address, message: Message) -> bool:
        return self._mailbox.post(FromPeer(peer, message))

    def on_link_lost(self, peer: Address, reason: LostReason) -> None:
        self._mailbox.put(LinkLost(peer, reason))

    def on_exited(self, peer: Address) -> None:
        self._mailbox.put(PeerExited(peer))

    def on_failure(self, error: Exception) -> None:
        self._mailbox.put(Crash(error))

    # --- the actor's own task ---

    async def run(self) -> None:
        """The actor's life. Ends only by cancellation, or by an error that its host must treat as a crash."""
        await self.network.start(self)
        self._set_tick()
        try:
            while True:
                for item in await self._mailbox.take():
                    self.receive(item)
                self.advance()
                if self._is_slow and self.busy():
                    self._set_tick()
        finally:
            if self._ticking is not None:
                self._ticking.cancel()
            for task in self._tasks:
                task.cancel()
            await self.close()

    async def close(self) -> None:
        """Give back what the actor holds; subclasses extend it."""
        await self.network.close()

    def receive(self, item: Any) -> None:
        """One item, most often a peer's message."""
        if type(item) is not FromPeer:
            self.receive_other(item)
        elif (handler := self._on_message.get(type(item.message))) is not None:
            handler(item.peer, item.message)
        else:
            self.counts[f"unexpected {type(item.message).__name__}"] += 1

    def receive_other(self, item: Any) -> None:
        """An item of our own. Subclasses handle their own kinds and pass the others on."""
        match item:
            case LinkUp(peer):
                self.link_up(peer)
            case LinkLost(peer, reason):
                self.link_lost(peer, reason)
            case PeerExited(peer):
                self.peer_exited(peer)
            case Tick():
                self.tick(self.clock.now_s())
            case Crash(error):
                raise error
            case _:
                raise TypeError(f"{type(self).__name__} does not know {item!r}")

    def advance(self) -> None:
        """Act on what has been received. Called after each batch of items."""

    def link_up(self, peer: Address) -> None:
        """A session with `peer` is open."""

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        """A session with `peer` is over. Proves nothing about the process."""

    def peer_exited(self, peer: Address) -> None:
        """The kernel says that the process has ended."""

    def tick(self, now_s: float) -> None:
        """Every `tick_s`; while the actor is not busy, every `idle_tick_s`."""

    def busy(self) -> bool:
        """Something here waits for a time. Asked after each turn, so make it quick."""
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the actor's task; it reports back through the mailbox. If it fails, the actor does."""

        # The task runs `work` itself, with nothing around it: so cancelling ends it even before its first step.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._mailbox.put(Crash(error))

    def _set_tick(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._is_slow = not self.busy()
        self._ticking = self.clock.call_later(self.idle_tick_s if self._is_slow else self.tick_s, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self._mailbox.put(Tick())
        self._set_tick()
