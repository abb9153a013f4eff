"""How an attempt's room ended, as the front's `submit` call resolves."""

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause


class Outcome(msgspec.Struct, frozen=True):
    """`ok` = decode has committed: its leader now streams the tokens, over the session `front_link` with the front, for
    as long as that is open. Otherwise `cause` says why not.
    """

    room: int
    ok: bool
    cause: Cause | None = None
    prefill: Address | None = None
    decode: Address | None = None
    retry_after_s: float = 0.0
    front_link: int = 0
