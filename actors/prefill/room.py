"""A room's record at prefill's leader."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.memory.ledger import Holding
from kvferry.protocol.clocks import Clocks
from kvferry.protocol.messages import Address, Destination, RequestSpec
from kvferry.protocol.sender import SenderMachine
from kvferry.transfer.contract import Peer, WriteHandle


@dataclass
class PrefillRoom:
    """`computed` and `written` count prompt tokens; `chunk` counts chunks computed."""

    room: int
    attempt: int
    spec: RequestSpec
    router: Address
    decode: Address
    opened_s: float
    clocks: Clocks
    machine: SenderMachine = field(default_factory=SenderMachine)
    opened: bool = False
    destination: Destination | None = None
    peer: Peer | None = None
    holding: Holding | None = None
    computed: int = 0
    posted: int = 0  # prompt tokens whose pages have been posted
    chunk: int = 0
    kv_bytes: int = 0
    metadata_bytes: int = 0
    first_token: int = -1
    handles: list[WriteHandle] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def remaining(self) -> int:
        return self.prompt_tokens - self.computed
