"""What a room's record at either leader has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.memory.ledger import Holding
from kvferry.protocol.clocks import Clocks
from kvferry.protocol.errors import Cause
from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.messages import Address, RequestSpec


class LegMachine(Protocol):
    """The sender or the receiver machine, as far as both leaders' code goes."""

    @property
    def state(self) -> Any: ...
    @property
    def kvpoll(self) -> KVPoll: ...
    def handle(self, event: Any, cause: Cause | None = None) -> list[Any]: ...


@dataclass(kw_only=True)
class LegRoom:
    """`peer` is the other leg's leader; `opened` once the leg has said so; times are of the leg's own clock."""

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
