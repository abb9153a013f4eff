"""Everything that is said over a link, as frozen tagged structs.

Rules: a field added later has a default, so that a peer one version older still decodes; a frame over
`MAX_MESSAGE_BYTES` is refused before it is decoded; room ids are made by the router and never by a client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.instance import (
    AbortConfirmed,
    Accept,
    Accepted,
    Arrived,
    CancelRoom,
    ConfirmAbort,
    Digested,
    Expect,
    Join,
    Joined,
    RankFailed,
    Revoke,
    RevokedAt,
    RunStep,
    Stepped,
    TakeDigest,
    WriteChunk,
    WriteTo,
    Wrote,
)
from kvferry.protocol.message import Message as Message
from kvferry.protocol.rank import Member, RankInfo
from kvferry.protocol.request import RequestSpec
from kvferry.protocol.tokens import Logprobs as Logprobs
from kvferry.protocol.tokens import Retracted as Retracted
from kvferry.protocol.tokens import Stop as Stop
from kvferry.protocol.tokens import Token as Token
from kvferry.protocol.tokens import TokenBatch as TokenBatch
from kvferry.protocol.transferring import AbortTransfer as AbortTransfer
from kvferry.protocol.transferring import DataPath as DataPath
from kvferry.protocol.transferring import Destination as Destination
from kvferry.protocol.transferring import Distrust as Distrust
from kvferry.protocol.transferring import Drained as Drained
from kvferry.protocol.transferring import Draining as Draining
from kvferry.protocol.transferring import Measured as Measured
from kvferry.protocol.transferring import Reconcile as Reconcile
from kvferry.protocol.transferring import Way as Way

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


# --- Room <-> legs -----------------------------------------------------------------------------------------


class OpenPrefill(Message, frozen=True):
    room: int
    attempt: int
    spec: RequestSpec
    decode: Address


class OpenDecode(Message, frozen=True):
    """`sources` are prefill's ranks, where there are several: those that will write."""

    room: int
    attempt: int
    spec: RequestSpec
    prefill: Address
    sources: tuple[Member, ...] = ()


class Opened(Message, frozen=True):
    """A leg holds the room, and its link to the request's front is open: `front_link` is that session. When it ends the
    leg ends the room, or leaves the request if it had committed.
    """

    room: int
    leg: str
    front_link: int = 0


class Admitted(Message, frozen=True):
    """Decode has allocated the target pages and sent `Destination`."""

    room: int
    pages: int


class Progress(Message, frozen=True):
    """News for the journal and the no-progress clock.

    `event`: "queued", "started", "computed" (chunk, whose write is posted), "written" (chunk); under prefill_complete
    also "prepared" (a chunk that is not written yet) and "sending" (what was prepared is being written). `position` is
    the place in the leg's queue (0 = being served), `step` its engine's step counter (decode adds the news of rooms
    that receive), `kv_bytes` the bytes of this event, `offset_s` seconds since the leg opened the room, by the leg's
    own clock.
    """

    room: int
    leg: str
    event: str
    position: int = 0
    step: int = 0
    chunk: int = -1
    tokens: int = 0
    kv_bytes: int = 0
    offset_s: float = 0.0


class PrefillDone(Message, frozen=True):
    """The last chunk has been computed and the first token sent to the front.

    `awaits_destination`: the policy is prefill_complete. The room then says it to decode, without the numbers, and
    decode takes the request for a candidate.
    """

    room: int
    chunks: int
    offset_s: float = 0.0
    awaits_destination: bool = False


class Received(Message, frozen=True):
    """Decode has a source rank's data-path notification."""

    room: int
    rank: int


class Committed(Message, frozen=True):
    """Decode's leader has committed: KVPoll is Success for good. Also the answer to anything that comes later."""

    room: int


class Failed(Message, frozen=True):
    room: int
    leg: str
    cause: Cause


class Abort(Message, frozen=True):
    """Room -> leg. `stop_running` also ends a request that decode has committed (the client has gone)."""

    room: int
    cause: Cause
    stop_running: bool = False


class AbortAck(Message, frozen=True):
    """Leg -> room: the leg has stopped. Pages that still wait for proof remain the leg's own record."""

    room: int
    leg: str
    rank: int = 0


class UnknownRoom(Message, frozen=True):
    """Answer to any message about a room that is not here."""

    room: int
    leg: str = ""


class Released(Message, frozen=True):
    """Decode -> room, perhaps long after its end: quarantined pages are free again, and by which proof."""

    room: int
    proof: str
    pages: int
    quarantined_s: float


# --- Leaders -> routers ------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """A leader's word to every router that watches it, about once a second and soon after a change.

    Prefill: `queued_tokens` of prompts not yet computed, `tokens_per_s` measured over recent forwards (0: unknown).
    Decode: `waiting` rooms not admitted (under prefill_complete also those that will wait once they are computed),
    `running` ones (those that receive included), `free_pages` of `total_pages`,
    `free_places` in the batch, `place_s` for how long recent requests held a place (0: unknown).
    """

    role: str
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    total_pages: int = 0
    free_places: int = 0
    place_s: float = 0.0


# --- Registry ----------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    info: RankInfo


class Registered(Message, frozen=True):
    version: int


class RegistrationRefused(Message, frozen=True):
    """`retry`: the place may become free (its last holder is not yet known to be dead)."""

    reason: str
    retry: bool


class RegisterDpRank(Message, frozen=True):
    """Router -> registry: the room's prefill is this rank of the DP group `instance`. Said where rooms don't follow
    their id."""

    room: int
    dp_rank: int
    instance: str


class Watch(Message, frozen=True):
    """Router -> registry: tell me the roster now and at every change. Router -> leader: the same for its `Load`."""

    name: str


class OverBudget(Message, frozen=True):
    """Decode -> registry, for the controller, once a second: pages here wait for the end of a process of `instance`,
    more of them or longer than the configuration allows.
    """

    instance: str
    incarnation: int
    pages: int
    quarantined_s: float


class Roster(Message, frozen=True):
    """Every registered rank, and whether each role that is wanted is complete. `missing` says what is not."""

    version: int
    ranks: tuple[RankInfo, ...]
    ready: bool
    missing: tuple[str, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    OpenPrefill | OpenDecode | Opened | Admitted | Progress | PrefillDone | Received | Committed | Failed
    | Abort | AbortAck | UnknownRoom | Destination | AbortTransfer | Drained | Reconcile | Draining | Distrust
    | DataPath | Released | TokenBatch | Stop | Retracted
    | Load | Register | Registered | RegistrationRefused | RegisterDpRank | Watch | OverBudget | Roster
    | Join | Joined | RunStep | Stepped | WriteTo | WriteChunk | Wrote | CancelRoom | RankFailed | ConfirmAbort
    | AbortConfirmed | Accept | Accepted | Revoke | RevokedAt | Expect | Arrived | TakeDigest | Digested
)  # fmt: skip


class BadFrame(ValueError):
    """Bytes that are not one of our messages: too large, not msgpack, unknown tag, wrong field."""


def encode(message: Message) -> bytes:
    """Wire form of a message. Raises BadFrame when it is over `MAX_MESSAGE_BYTES`."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadFrame(f"{type(message).__name__} is {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """The message in `data`. Raises BadFrame; never creates anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadFrame(f"frame of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from None
    return message
