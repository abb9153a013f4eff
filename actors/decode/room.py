"""A room's record at decode's leader."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.contract import TextStream
from kvferry.memory.ledger import Holding
from kvferry.protocol.clocks import Clocks
from kvferry.protocol.messages import Address, RequestSpec
from kvferry.protocol.receiver import ReceiverMachine


@dataclass
class DecodeRoom:
    """`generated` counts tokens, the first (prefill's) included; `last_token` is the one to feed next."""

    room: int
    attempt: int
    spec: RequestSpec
    router: Address
    prefill: Address
    opened_s: float
    clocks: Clocks
    machine: ReceiverMachine
    text: TextStream
    opened: bool = False
    holding: Holding | None = None
    expecting: bool = False
    generated: int = 0
    last_token: int = -1

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def total_tokens(self) -> int:
        """What the request can come to: what decode reserves."""
        return self.prompt_tokens + self.spec.sampling.max_tokens
