"""A driver whose library has nothing to wait on: it looks at what is there again and again, fast while anybody expects
something, and otherwise rarely.
"""

from __future__ import annotations

from abc import abstractmethod
from queue import Empty
from typing import Any, TypeVar

from kvferry.transfer.contract import Proofs
from kvferry.transfer.driver import Driver, DriverParts
from kvferry.transfer.queued_peer import Agent, QueuedPeer
from kvferry.transfer.write import Write

P = TypeVar("P", bound=QueuedPeer[Any, Any])
W = TypeVar("W", bound=Write)
A = TypeVar("A", bound=Agent)


class PollingDriver(Driver[P, W, A]):
    """Polls every `poll_busy_ms` while something is expected or under way, else every `poll_idle_ms`."""

    def __init__(self, parts: DriverParts, proofs: Proofs, *, poll_busy_ms: float, poll_idle_ms: float) -> None:
        super().__init__(parts, proofs)
        self._busy_s, self._idle_s = poll_busy_ms / 1000, poll_idle_ms / 1000
        self._expecting = 0

    def _turn(self) -> None:
        progressed = self._poll()
        self._take_commands(0.0 if progressed else self._pause_s())

    @abstractmethod
    def _poll(self) -> bool:
        """Look at everybody once, and give whoever has work a turn. True when anything moved."""

    @property
    def _busy(self) -> bool:
        return any(peer.busy for peer in self._peers.values())

    def _pause_s(self) -> float:
        return self._busy_s if self._expecting > 0 or self._busy else self._idle_s

    def _take_commands(self, pause_s: float) -> None:
        try:
            command = self._commands.get(timeout=pause_s) if pause_s > 0 else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return

    def _stir(self, peer: P) -> None:
        """Its turn comes anyway."""

    def expect(self, change: int) -> None:
        self._expecting += change
