"""One breaker for each (prefill, decode) pair: a pair that keeps failing gets no requests, only a probe now and then.

    state      failure               success      aborted, refused…   time
    CLOSED     the n-th: OPEN        count = 0    -                   -
    OPEN       -                     -            -                   HALF_OPEN when `open_s` is over
    HALF_OPEN  OPEN, twice as long   CLOSED       probe again         -

HALF_OPEN lets one room pass at a time, the probe. Each change of state begins a new era, and the end of a room that
was opened in an earlier era changes nothing: it tells how the pair was, not how it is. Pairs are of incarnations, so a
process that has been started again begins with a closed breaker.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kvferry.protocol.errors import Cause, DeadlineExceeded, HandoffFailed, PeerLost

#: Incarnations of prefill and decode.
PairId = tuple[int, int]


class BreakerState(Enum):
    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class Verdict(Enum):
    """What a room's end says about its pair."""

    GOOD = auto()
    BAD = auto()
    NOTHING = auto()


def verdict(cause: Cause | None, prefill: str, decode: str, queued: bool) -> Verdict:
    """`prefill` and `decode` are the pair's names; `queued`: decode held the room and had not admitted it.

    Speaks against the pair: a leg that failed, a leg that has lost the other one, a clock that ran out. Not: the
    client's leaving or its bad input, a limit, a front or router that was lost, and waiting too long for a place. Nor a
    link of the router's own that ended: who is not linked is not chosen, and who is again has done nothing wrong (a
    router that stood still for a while loses all its links at once).
    """
    if cause is None:
        return Verdict.GOOD
    if cause.code == PeerLost.code:
        lost = {"prefill": decode, "decode": prefill}.get(cause.leg)  # each leg can lose the other
        return Verdict.BAD if cause.peer == lost and prefill != decode else Verdict.NOTHING
    if cause.code == DeadlineExceeded.code:
        return Verdict.NOTHING if queued else Verdict.BAD
    return Verdict.BAD if cause.code == HandoffFailed.code and cause.leg != "router" else Verdict.NOTHING


@dataclass
class Breaker:
    """`failures` in a row; `until_s` is when an open one becomes half-open; `probing` while a probe is under way."""

    open_s: float
    state: BreakerState = BreakerState.CLOSED
    era: int = 0
    failures: int = 0
    until_s: float = 0.0
    probing: bool = False

    def change(self, state: BreakerState) -> None:
        self.state, self.probing = state, False
        self.era += 1


class Breakers:
    """All breakers of a router. Only pairs that have failed have one."""

    def __init__(self, failures: int, open_s: float, open_max_s: float) -> None:
        self._limit, self._open_s, self._open_max_s = failures, open_s, open_max_s
        self._breakers: dict[PairId, Breaker] = {}
        self.opened = 0

    def blocked(self, now_s: float) -> frozenset[PairId]:
        """Pairs that may not be chosen now."""
        for breaker in self._breakers.values():
            if breaker.state is BreakerState.OPEN and now_s >= breaker.until_s:
                breaker.change(BreakerState.HALF_OPEN)
        return frozenset(pair for pair, breaker in self._breakers.items() if _blocks(breaker))

    def dispatched(self, pair: PairId) -> int:
        """A room is being opened at a pair that is not blocked; its era."""
        breaker = self._breakers.get(pair)
        if breaker is None:
            return 0
        breaker.probing = breaker.state is BreakerState.HALF_OPEN
        return breaker.era

    def ended(self, pair: PairId, era: int, what: Verdict, now_s: float) -> None:
        """The room of that era has ended."""
        breaker = self._breakers.get(pair)
        if breaker is None:
            if what is not Verdict.BAD or era != 0:
                return
            breaker = self._breakers[pair] = Breaker(self._open_s)
        if era != breaker.era:
            return
        if what is Verdict.NOTHING:
            breaker.probing = False
        elif what is Verdict.GOOD:
            breaker.failures = 0
            if breaker.state is BreakerState.HALF_OPEN:
                breaker.open_s = self._open_s
                breaker.change(BreakerState.CLOSED)
        elif breaker.state is BreakerState.HALF_OPEN:
            breaker.open_s = min(2 * breaker.open_s, self._open_max_s)
            self._open(breaker, now_s)
        else:
            breaker.failures += 1
            if breaker.failures >= self._limit:
                self._open(breaker, now_s)

    def _open(self, breaker: Breaker, now_s: float) -> None:
        self.opened += 1
        breaker.failures, breaker.until_s = 0, now_s + breaker.open_s
        breaker.change(BreakerState.OPEN)

    def keep(self, incarnations: Collection[int]) -> None:
        """Forget the pairs that a process which is not among these was part of."""
        self._breakers = {
            pair: breaker for pair, breaker in self._breakers.items() if all(part in incarnations for part in pair)
        }

    def next_probe_s(self, pairs: Collection[PairId], now_s: float) -> float | None:
        """Seconds until the first of these pairs may be probed, or None while one is."""
        waits = []
        for pair in pairs:
            breaker = self._breakers.get(pair)
            if breaker is not None and breaker.state is BreakerState.OPEN:
                waits.append(max(0.0, breaker.until_s - now_s))
        return min(waits, default=None)

    def why_none(self, pairs: Collection[PairId], now_s: float) -> tuple[str, float]:
        """For a client whom none of these pairs may serve; with the seconds until it should ask again (0: unknown)."""
        probe_s = self.next_probe_s(pairs, now_s) or 0.0
        when = f"the next probe is in {probe_s:.1f} s" if probe_s else "a probe is under way"
        return f"the breakers of all {len(pairs)} pairs are open; {when}", probe_s

    def status(self, names: dict[int, str], now_s: float) -> list[dict[str, Any]]:
        """Every breaker that is not closed."""
        return [
            {
                "prefill": names.get(prefill, f"{prefill:016x}"),
                "decode": names.get(decode, f"{decode:016x}"),
                "state": breaker.state.name.lower(),
                "probing": breaker.probing,
                "half_open_in_s": round(max(0.0, breaker.until_s - now_s), 3),
            }
            for (prefill, decode), breaker in self._breakers.items()
            if breaker.state is not BreakerState.CLOSED
        ]


def _blocks(breaker: Breaker) -> bool:
    return breaker.state is BreakerState.OPEN or breaker.probing
