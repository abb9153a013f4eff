"""What a rank is made of: all that its host puts together."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.actors.ports import Clock, Network, Resolve
from kvferry.actors.settings import ClockSettings
from kvferry.engine.contract import Combine, Engine, TextFactory
from kvferry.protocol.address import Address
from kvferry.protocol.rank import RankInfo
from kvferry.transfer.contract import Endpoint
from kvferry.transfer.digest import Digests


@dataclass(frozen=True)
class Parts:
    """`mailbox` is its limit in messages; `max_rooms` in rooms of any phase. `combine` makes a leader's result of a
    forward where its ranks' engines don't exchange their parts among themselves. Without `digests` nothing that is
    transferred is checked. `leader`: the process that a follower's engine is bound to; without it any leader of the
    instance's name will do.
    """

    network: Network
    clock: Clock
    mailbox: int
    resolve: Resolve
    engine: Engine
    texts: TextFactory
    endpoint: Endpoint
    info: RankInfo
    limits: ClockSettings
    max_rooms: int
    combine: Combine | None = None
    digests: Digests | None = None
    leader: Address | None = None
