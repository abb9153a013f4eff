"""What a leader tells the routers that watch it, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kvferry.actors.ports import Network
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Load

LOAD_EVERY_S = 1.0
LOAD_GAP_S = 0.1


class Recent:
    """The last `count` measurements of an amount and the seconds that it took."""

    def __init__(self, count: int = 32) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=count)

    def add(self, amount: float, duration_s: float) -> None:
        self._kept.append((amount, duration_s))

    @property
    def per_s(self) -> float:
        """Amount per second; 0 while nothing is known."""
        amount, duration_s = self._sums()
        return amount / duration_s if duration_s > 0 else 0.0

    @property
    def mean_s(self) -> float:
        """Seconds per amount; 0 while nothing is known."""
        amount, duration_s = self._sums()
        return duration_s / amount if amount > 0 else 0.0

    def _sums(self) -> tuple[float, float]:
        amounts = durations_s = 0.0
        for amount, duration_s in self._kept:
            amounts += amount
            durations_s += duration_s
        return amounts, durations_s


class LoadReports:
    """Routers say `Watch` over their link to the leader, and hear its `Load` at once, then every `LOAD_EVERY_S`, and
    after a change of what is queued or held, at most every `LOAD_GAP_S`. A link that ends ends the watch.

    A link keeps the order of messages: a `Load` that comes after a room's `Opened` counts that room, one that comes
    before does not. Leaders rely on it too: rooms that have not said `Opened` are in no `Load`.
    """

    def __init__(self, network: Network, measure: Callable[[], Load]) -> None:
        self._network, self._measure = network, measure
        self._watchers: set[int] = set()
        self._last: Load | None = None  # without the measured rates, which change all the time
        self._last_s = 0.0
        self.is_late = False  # a turn was too soon after the last report to tell what has changed

    def watch(self, peer: Address) -> None:
        self._watchers.add(peer.incarnation)
        self._network.send(peer.incarnation, self._measure())

    def link_lost(self, peer: Address) -> None:
        self._watchers.discard(peer.incarnation)

    def turn(self, now_s: float) -> None:
        """Called after each turn of the leader, when it has admitted what it could."""
        elapsed_s = now_s - self._last_s
        self.is_late = bool(self._watchers) and self._last is not None and elapsed_s < LOAD_GAP_S
        if not self._watchers or self.is_late:
            return
        load = self._measure()
        counts = msgspec.structs.replace(load, tokens_per_s=0.0, place_s=0.0)
        if elapsed_s < LOAD_EVERY_S and counts == self._last:
            return
        self._last, self._last_s = counts, now_s
        for incarnation in self._watchers:
            self._network.send(incarnation, load)
