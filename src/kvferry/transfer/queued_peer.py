"""A connected target of a backend with a driver: the agent that writes to it and nobody else, and its queue of work.

Here: the queue, and what ends without having been begun. Not here: how the first of it is done, and when an agent goes,
which is each backend's own (`ucx_peer`, `ucxx_source`, `mooncake_peer`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvferry.transfer.contract import Descriptor, WriteOutcome
from kvferry.transfer.write import Write

#: Runs a call where it is wanted, which is the endpoint's loop unless said otherwise; called on the driver's thread.
Deliver = Callable[[Callable[[], None]], None]

_log = logging.getLogger(__name__)


class Agent(Protocol):
    """What every backend's agent has."""

    @property
    def name(self) -> str: ...
    @property
    def generation(self) -> int: ...


W = TypeVar("W", bound=Write)
A = TypeVar("A", bound=Agent)


class QueuedPeer(Generic[W, A]):
    """The work, writes and the payloads of notifications, is done strictly in order. `broken` says why, once it is, and
    that is for good; a new connection is a new object. All of it happens on the driver's thread.
    """

    def __init__(self, descriptor: Descriptor, agent: A, now_s: Callable[[], float], deliver: Deliver) -> None:
        self._descriptor, self.agent = descriptor, agent
        self._now_s, self._deliver = now_s, deliver
        self._work: deque[W | bytes] = deque()
        self.broken = ""

    @property
    def descriptor(self) -> Descriptor:
        return self._descriptor

    @property
    def busy(self) -> bool:
        return bool(self._work)

    @property
    def _refuses(self) -> bool:
        """Writes end at once."""
        return bool(self.broken)

    def write(self, write: W) -> None:
        if self._refuses:
            self._end(write, WriteOutcome.BROKEN, self.broken)
        else:
            self._work.append(write)

    def notify(self, payload: bytes) -> None:
        if self.broken:
            _log.warning("%s: notification to %s dropped: %s", self.agent.name, self._descriptor.agent, self.broken)
        else:
            self._work.append(payload)

    def cancel(self, write: W) -> None:
        """One that waits behind others has nothing to wait for. The first is ended by its next turn."""
        write.cancelled = True
        if write in self._work and self._work[0] is not write:  # nothing of it is posted
            self._work.remove(write)
            self._end(write, WriteOutcome.CANCELLED)

    def _end_all(self, why: str) -> None:
        """All writes end BROKEN: their source is not read any more."""
        while self._work:
            work = self._work.popleft()
            if not isinstance(work, bytes):
                self._end(work, WriteOutcome.BROKEN, why)

    def _end(self, write: W, outcome: WriteOutcome, error: str = "") -> None:
        write.end(outcome, error, self._now_s(), self._deliver)
