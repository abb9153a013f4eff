"""KVPoll of a handoff from its three machines: one table, in the order of a handoff that nothing disturbs.

News between the machines takes its time, so each of them may be a row or two behind; what it reports is then the KVPoll
of the row where it is. A machine that has failed is in none of these rows. Then the rule of `combined` decides: commit
at decode outweighs everything, and any other end that has failed fails the handoff.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.kvpoll import KVPoll
from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.protocol.receiver import ReceiverState as D
from kvferry.protocol.room import RoomState as R
from kvferry.protocol.sender import SenderState as P


@dataclass(frozen=True)
class Phase:
    """`sender` and `receiver` are None while the leg has not been opened. `waits_for` names the room's clock beside *no
    progress*.
    """

    what: str
    room: R
    sender: P | None
    receiver: D | None
    kvpoll: KVPoll
    waits_for: str = ""


_B, _W, _T, _S = KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS
_OPENING = Phase("prefill is being opened", R.OPENING_PREFILL, None, None, _B)
_END = (
    Phase("the last pages are on their way", R.TRANSFERRING, P.FLUSHING, D.RECEIVING, _T, "transfer"),
    Phase("all is flushed", R.TRANSFERRING, P.DONE, D.RECEIVING, _T, "transfer"),
    Phase("decode checks what it has got", R.TRANSFERRING, P.DONE, D.CHECKING, _T, "transfer"),
    Phase("decode has committed", R.SUCCEEDED, P.DONE, D.RUNNING, _S),
)
HANDOFF: dict[str, tuple[Phase, ...]] = {
    EARLY: (
        _OPENING,
        Phase("decode is being opened", R.OPENING_DECODE, P.AWAITING_DESTINATION, None, _B),
        Phase("decode has no room yet", R.BOOTSTRAPPED, P.AWAITING_DESTINATION, D.QUEUED, _B, "admission"),
        Phase("decode has allocated; prefill has no pages", R.AWAITING_INPUT, P.QUEUED, D.RECEIVING, _W, "prefill"),
        Phase("the first chunk is computed", R.AWAITING_INPUT, P.COMPUTING, D.RECEIVING, _W, "prefill"),
        Phase("chunks are computed and written", R.TRANSFERRING, P.COMPUTING, D.RECEIVING, _T, "transfer"),
        *_END,
    ),
    PREFILL_COMPLETE: (
        _OPENING,
        Phase("decode is being opened", R.OPENING_DECODE, P.AWAITING_PAGES, None, _B),
        Phase("prefill has no pages", R.BOOTSTRAPPED, P.AWAITING_PAGES, D.AWAITING_PREFILL, _B, "prefill"),
        Phase("chunks are computed", R.BOOTSTRAPPED, P.COMPUTING_AHEAD, D.AWAITING_PREFILL, _B, "prefill"),
        Phase("all is computed; decode has no room yet", R.BOOTSTRAPPED, P.KEPT, D.QUEUED, _B, "admission"),
        Phase("decode has allocated", R.AWAITING_INPUT, P.QUEUED, D.RECEIVING, _W, "transfer"),
        Phase("what was displaced is computed again", R.AWAITING_INPUT, P.COMPUTING, D.RECEIVING, _W, "transfer"),
        Phase("and written", R.TRANSFERRING, P.COMPUTING, D.RECEIVING, _T, "transfer"),
        *_END,
    ),
}
