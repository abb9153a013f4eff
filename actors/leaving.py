"""The way out of an instance or a router: no new rooms, the present ones within a limit, then quiet.

Draining is not taken back: an instance that is wanted again is a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.protocol.errors import Cause, Draining

#: Nothing may have been here for so long: what was said last has arrived, and who chose us late has been refused.
QUIET_S = 0.5
#: What was handed over must be gone after so long; what is left then (pages without proof) goes with the process.
HAND_OVER_S = 10.0


@dataclass(frozen=True)
class DrainRequested:
    """Item: leave within `limit_s`."""

    limit_s: float


class Leaving:
    """One process's record of its draining. Times are of its own clock. `handed_over` counts rooms."""

    def __init__(self, name: str, leg: str) -> None:
        self._name, self._leg = name, leg
        self.handed_over = 0
        self._deadline_s: float | None = None
        self._quiet_since_s: float | None = None
        self._time_is_over = False

    def __bool__(self) -> bool:
        return self._deadline_s is not None

    def begin(self, limit_s: float, now_s: float) -> bool:
        """False when it has begun before: then the earlier end holds."""
        before_s, end_s = self._deadline_s, now_s + limit_s
        self._deadline_s = end_s if before_s is None else min(before_s, end_s)
        return before_s is None

    def refusal(self, room: int) -> Cause | None:
        """For whoever wants to open something here: it is no failure, and another process will take it."""
        if self._deadline_s is None:
            return None
        self._quiet_since_s = None
        return Cause(Draining.code, f"{self._name} is leaving and takes no new rooms", self._leg, room=room)

    def time_is_over(self, idle: bool, now_s: float) -> bool:
        """Call it at each tick. True once: when what is left is to be handed over."""
        if self._deadline_s is None:
            return False
        if not idle:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        due = not self._time_is_over and now_s >= self._deadline_s
        self._time_is_over = self._time_is_over or due
        return due

    def state(self, rooms: int, now_s: float) -> dict[str, Any]:
        """What the controller is told: `done` once the process may end; `left_s` until what is here is handed over."""
        end_s, quiet_s = self._deadline_s, self._quiet_since_s
        quiet = quiet_s is not None and now_s - quiet_s >= QUIET_S
        return {
            "draining": end_s is not None,
            "done": end_s is not None and (quiet or now_s >= end_s + HAND_OVER_S),
            "rooms": rooms,
            "handed_over": self.handed_over,
            "left_s": 0.0 if end_s is None else round(max(0.0, end_s - now_s), 3),
        }
