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


#: A look at everybody that took longer, and longer for each agent, has moved bytes, of which no library tells.
_LONG_S, _LONG_EACH_S = 30e-6, 10e-6


class PollingDriver(Driver[P, W, A]):
    """Polls without a pause while bytes move, every `poll_busy_ms` while something is expected or under way, else every
    `poll_idle_ms`.
    """

    def __init__(self, parts: DriverParts, proofs: Proofs, *, poll_busy_ms: float, poll_idle_ms: float) -> None:
        super().__init__(parts, proofs)
        self._busy_s, self._idle_s = poll_busy_ms / 1000, poll_idle_ms / 1000
        self._expecting = 0

    def _turn(self) -> None:
        begun_s = self._now_s()
        moved = self._poll()
        if self._at_work and not self.copies:
            moved |= self._now_s() - begun_s > _LONG_S + self._live * _LONG_EACH_S
        self._take_commands(0.0 if moved else self._pause_s())

    @abstractmethod
    def _poll(self) -> bool:
        """Look at everybody once, and give whoever has work a turn. True when anything moved."""

    @property
    def _busy(self) -> bool:
        return any(peer.busy for peer in self._peers.values())

    @property
    def _at_work(self) -> bool:
        """Something is expected or under way."""
        return self._expecting > 0 or self._busy

    def _pause_s(self) -> float:
        return self._busy_s if self._at_work else self._idle_s

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
