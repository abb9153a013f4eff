"""A room's record at prefill's leader."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.actors.chunks import ChunkedRoom
from kvferry.protocol.messages import Destination, Logprobs
from kvferry.protocol.sender import SenderMachine
from kvferry.transfer.contract import Peer, WriteHandle


@dataclass(kw_only=True)
class PrefillRoom(ChunkedRoom):
    """`peer` is decode's leader and `target` its end of the data plane. `posted` counts the prompt's tokens in pages
    whose writes have been posted. `drawn`: the first token is drawn, and the front has been told; it stays what it is
    when pages that were displaced are computed again.
    """

    machine: SenderMachine = field(default_factory=SenderMachine)
    destination: Destination | None = None
    target: Peer | None = None
    posted: int = 0
    kv_bytes: int = 0
    metadata_bytes: int = 0
    drawn: bool = False
    first_token: int = -1
    first_logprobs: Logprobs | None = None
    handles: list[WriteHandle] = field(default_factory=list)
