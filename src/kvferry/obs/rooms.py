"""What a router adds up over its ended rooms: how long each phase took, how they ended, what they moved.

It travels in the router's status as plain numbers, and becomes metrics where they are scraped (`obs.metrics`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.protocol.kvpoll import KVPoll

#: Upper bounds of the buckets, in seconds; one more bucket takes the rest.
PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

#: KVPoll states that last; the two last ones are ends.
PHASES = (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING)

COMMITTED = "committed"

#: The name under which decode counts transfers that have failed their check (`kvferry.actors.decode.checking`).
CHECKS_FAILED = "transfers that failed their check"


#: What is known of a transfer, one source rank's writes of a room: the bounds of each figure's buckets.
TRANSFER_BUCKETS: dict[str, tuple[float, ...]] = {
    "wait_s": PHASE_BUCKETS_S,
    "wire_s": PHASE_BUCKETS_S,
    "bytes": tuple(float(4**power) for power in range(6, 20)),  # 4 KiB to 256 GiB
    "descriptors": tuple(float(4**power) for power in range(11)),
}


class Histogram:
    """`buckets[i]` counts what is at most `bounds[i]` and above the bound before."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def as_object(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "sum": self.sum}


class RoomStatistics:
    """Fed with each room that has ended."""

    def __init__(self) -> None:
        self._phases = {phase: Histogram(PHASE_BUCKETS_S) for phase in PHASES}
        self._transfers: dict[str, dict[str, Histogram]] = {}  # by backend, then by figure
        self._outcomes: Counter[str] = Counter()
        self._kv_bytes = 0

    def ended(
        self,
        durations: Mapping[KVPoll, float],
        kv_bytes: int,
        code: str,
        transfers: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """`durations` in seconds; a phase that was not reached is absent and counts nowhere. `code`: of the cause, ""
        for a room whose decode has committed. `transfers` as in the journal: a figure that its backend could not tell
        is absent, and counts nowhere either.
        """
        for phase in PHASES:
            if phase in durations:
                self._phases[phase].observe(durations[phase])
        self._outcomes[code or COMMITTED] += 1
        self._kv_bytes += kv_bytes
        for transfer in transfers:
            figures = self._transfers.setdefault(transfer["backend"], {})
            for name, bounds in TRANSFER_BUCKETS.items():
                if name in transfer:
                    figures.setdefault(name, Histogram(bounds)).observe(transfer[name])

    def as_object(self) -> dict[str, Any]:
        return {
            "phases": {phase.name: durations.as_object() for phase, durations in self._phases.items()},
            "transfers": {
                backend: {name: figure.as_object() for name, figure in figures.items()}
                for backend, figures in self._transfers.items()
            },
            "outcomes": dict(self._outcomes),
            "kv_bytes": self._kv_bytes,
        }
