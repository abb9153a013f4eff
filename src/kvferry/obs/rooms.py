"""What a router adds up over its ended rooms: how long each phase took, how they ended, what they moved.

It travels in the router's status as plain numbers, and becomes metrics where they are scraped (`obs.metrics`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvferry.protocol.kvpoll import KVPoll

#: Upper bounds of the buckets, in seconds; one more bucket takes the rest.
PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

#: KVPoll states that last; the two last ones are ends.
PHASES = (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING)

COMMITTED = "committed"


class Durations:
    """A histogram: `buckets[i]` counts what is at most `PHASE_BUCKETS_S[i]` and above the bound before."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(PHASE_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self.buckets[bisect_left(PHASE_BUCKETS_S, duration_s)] += 1
        self.sum_s += duration_s

    def as_object(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "sum_s": self.sum_s}


class RoomStatistics:
    """Fed with each room that has ended."""

    def __init__(self) -> None:
        self._phases = {phase: Durations() for phase in PHASES}
        self._outcomes: Counter[str] = Counter()
        self._kv_bytes = 0

    def ended(self, durations: Mapping[KVPoll, float], kv_bytes: int, code: str) -> None:
        """`durations` in seconds; a phase that was not reached is absent and counts nowhere. `code`: of the cause, ""
        for a room whose decode has committed.
        """
        for phase in PHASES:
            if phase in durations:
                self._phases[phase].observe(durations[phase])
        self._outcomes[code or COMMITTED] += 1
        self._kv_bytes += kv_bytes

    def as_object(self) -> dict[str, Any]:
        return {
            "phases": {phase.name: durations.as_object() for phase, durations in self._phases.items()},
            "outcomes": dict(self._outcomes),
            "kv_bytes": self._kv_bytes,
        }
