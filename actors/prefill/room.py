"""A room's record at prefill's leader."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.actors.chunks import ChunkedRoom
from kvferry.actors.prefill.sending import Sending
from kvferry.protocol.messages import Destination, Logprobs
from kvferry.protocol.sender import SenderMachine


@dataclass(kw_only=True)
class PrefillRoom(ChunkedRoom):
    """`peer` is decode's leader. `sending` are this rank's own writes, `ranks` the followers that write, too, and
    `asked` how many chunks each of them has not answered. `posted` counts the prompt's tokens in pages whose writes
    have been ordered. `drawn`: the first token is drawn, and the front has been told; it stays what it is
    when pages that were displaced are computed again.
    """

    machine: SenderMachine = field(default_factory=SenderMachine)
    destination: Destination | None = None
    ranks: tuple[int, ...] = ()
    asked: Counter[int] = field(default_factory=Counter)
    posted: int = 0
    drawn: bool = False
    first_token: int = -1
    first_logprobs: Logprobs | None = None
    sending: Sending = field(init=False)

    def __post_init__(self) -> None:
        self.sending = Sending(self.room, self.peer.incarnation)
