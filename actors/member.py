"""A member of the pools, and how far its life is: placed, started, registered, told to go, left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Phase(Enum):
    PLACING = "placing"  # there is no room for it yet
    STARTING = "starting"  # its process starts, or starts again
    REGISTERED = "registered"
    DRAINING = "draining"
    LEFT = "left"


@dataclass
class Member:
    """`detail` says what it waits for. `going` is never taken back."""

    role: str
    name: str
    number: int
    phase: Phase = Phase.PLACING
    since_s: float = 0.0
    detail: str = ""
    rooms: int = 0
    going: bool = False
    pages: dict[str, int] | None = None  # as recounted when it left
    handed_over: int = 0

    def as_object(self, now_s: float) -> dict[str, Any]:
        """One row of what the pools tell of themselves."""
        row: dict[str, Any] = {
            "name": self.name, "role": self.role, "phase": self.phase.value, "for_s": round(now_s - self.since_s, 3),
            "detail": self.detail,
        }  # fmt: skip
        if self.phase is Phase.LEFT:
            row |= {"pages": self.pages, "handed_over": self.handed_over}
        return row


def who_goes_first(member: Member) -> tuple[int, int, int]:
    """Sorts those of whom some must go: first who serves nobody yet, then the least loaded, then the newest."""
    order = (Phase.PLACING, Phase.STARTING, Phase.REGISTERED)
    return order.index(member.phase), member.rooms, -member.number
