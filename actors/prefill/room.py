"""A room's record at prefill's leader."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.actors.leg_room import LegRoom
from kvferry.protocol.messages import Destination, Logprobs
from kvferry.protocol.sender import SenderMachine
from kvferry.transfer.contract import Peer, WriteHandle


@dataclass(kw_only=True)
class PrefillRoom(LegRoom):
    """`peer` is decode's leader and `target` its end of the data plane. `computed` and `posted` count prompt tokens
    (computed; in pages whose writes have been posted); `chunk` counts chunks computed.
    """

    machine: SenderMachine = field(default_factory=SenderMachine)
    destination: Destination | None = None
    target: Peer | None = None
    computed: int = 0
    posted: int = 0
    chunk: int = 0
    kv_bytes: int = 0
    metadata_bytes: int = 0
    first_token: int = -1
    first_logprobs: Logprobs | None = None
    handles: list[WriteHandle] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.prompt_tokens - self.computed
