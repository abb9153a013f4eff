"""What a room's record at either leader has in common."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from kvferry.memory.ledger import Holding
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Clocks
from kvferry.protocol.request import RequestSpec


@dataclass(kw_only=True)
class LegRoom:
    """`machine` is the leg's own (sender or receiver), `peer` the other leg's leader; `opened` once the leg has said
    so; times are of the leg's own clock.
    """

    room: int
    attempt: int
    spec: RequestSpec
    router: Address
    peer: Address
    opened_s: float
    clocks: Clocks
    machine: Any
    opened: bool = False
    holding: Holding | None = None

    @property
    def prompt_tokens(self) -> int:
        """What prefill computes: the prompt, and the tokens frozen by earlier attempts."""
        return len(self.spec.prompt_ids) + len(self.spec.frozen_ids)


def drop(queue: deque[int], room: int) -> None:
    """Take a room out of a queue if it is there."""
    if room in queue:
        queue.remove(room)
