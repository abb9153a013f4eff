"""Everything that is said over a link, as frozen tagged structs.

Rules: a field added later has a default, so that a peer one version older still decodes; a frame over
`MAX_MESSAGE_BYTES` is refused before it is decoded; room ids are made by the router and never by a client.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


#: A number that becomes an index into memory or a list: what doesn't fit 31 bits is none of ours.
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# --- Room <-> legs -----------------------------------------------------------------------------------------


class OpenPrefill(Message, frozen=True):
    room: int
    attempt: int
    spec: RequestSpec
    decode: Address


class OpenDecode(Message, frozen=True):
    room: int
    attempt: int
    spec: RequestSpec
    prefill: Address


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


# --- Decode leader <-> prefill leader ----------------------------------------------------------------------


class Destination(Message, frozen=True):
    """Where the prompt's KV goes: one target page list for all layers, and the row for the metadata.

    `agent` is the wire form of the target's data-plane descriptor (`kvferry.transfer.contract.Descriptor`);
    `required_acks` are the source ranks with at least one write in the plan.
    """

    room: int
    pages: tuple[Index, ...]
    prefix_tokens: Index
    metadata_slot: Index
    agent: bytes
    generation: int
    required_acks: tuple[Index, ...]


class AbortTransfer(Message, frozen=True):
    """Decode -> prefill: stop posting, and say `Drained` when nothing more can land."""

    room: int
    cause: Cause


class Drained(Message, frozen=True):
    """Source rank -> owner of the target pages, with a copy to the room.

    Every write of the room is flushed or will never be posted. `complete` = everything was written.
    """

    room: int
    rank: int
    complete: bool
    kv_bytes: int = 0
    metadata_bytes: int = 0


# --- Tokens: leaders <-> front -----------------------------------------------------------------------------


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities: the chosen token's, and those of the most likely, (token id, logprob) each,
    most likely first, equals by id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Token(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """One generated token. `text` is what may be shown because of it (stop text and half characters are held back).

    `finish_reason` is "stop" or "length" on the request's last token, else empty.
    """

    request: int
    attempt: int
    room: int
    index: int
    token_id: int
    text: str
    finish_reason: str = ""
    logprobs: Logprobs | None = None


class TokenBatch(Message, frozen=True):
    """All tokens of one engine step for one front."""

    leg: str
    tokens: tuple[Token, ...]


class Stop(Message, frozen=True):
    """Front -> leader: nobody wants tokens of this attempt any more."""

    request: int
    attempt: int
    room: int


class Retracted(Message, frozen=True):
    """Decode -> front, behind the last tokens: the pages are needed by older requests, the attempt is over, and
    token `next_index` is the first that was not sent. Decode remembers the request's age: the next attempt should
    prefer this decode.
    """

    request: int
    attempt: int
    room: int
    next_index: int


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


class Roster(Message, frozen=True):
    """Every registered rank, and whether each role that is wanted is complete. `missing` says what is not."""

    version: int
    ranks: tuple[RankInfo, ...]
    ready: bool
    missing: tuple[str, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    OpenPrefill | OpenDecode | Opened | Admitted | Progress | PrefillDone | Received | Committed | Failed
    | Abort | AbortAck | UnknownRoom | Destination | AbortTransfer | Drained | TokenBatch | Stop | Retracted
    | Load | Register | Registered | RegistrationRefused | RegisterDpRank | Watch | Roster
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
