"""Everything that is said over a link, as frozen tagged structs.

Rules: a field added later has a default, so that a peer one version older still decodes; a frame over
`MAX_MESSAGE_BYTES` is refused before it is decoded; room ids are made by the router and never by a client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.protocol.errors import Cause

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Address(msgspec.Struct, frozen=True):
    """A process's place on the network. Two addresses are the same process iff `incarnation` is equal.

    `host` names the kernel and pid namespace (not the machine's name): equal hosts mean that a pidfd works.
    """

    name: str
    endpoint: str
    incarnation: int
    host: str
    pid: int


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# --- What a client asked for -------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling and stop rules. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    The draw for a token is a function of (seed, position) alone, so every attempt, and PD and unified alike,
    give the same tokens. What changes the logits before the draw is applied in this order: `logit_bias` (token id,
    added value), repetition, frequency and presence penalty, then `min_tokens` (end tokens can't be drawn before so
    many). `ignore_eos`: the model's own end tokens end nothing; `stop_token_ids` still do. `logprobs` -1 is off, k asks
    for the chosen token's log-probability and those of the k most likely, of the model's own distribution.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int = -1


class RequestSpec(msgspec.Struct, frozen=True):
    """One attempt of a request as the front hands it to a router. `request` is the front's own id for it (63 random
    bits). `frozen_ids` are the tokens that the client has from earlier attempts: they are fed after the prompt, and
    count towards max_tokens and the stop rules as if this attempt had made them.

    Requests with one `group` (0: none) are `samples` answers to one prompt: the router sends them to one prefill, which
    computes the prompt once. `prefer` is the incarnation of the decode that the router should choose if it can (0:
    any): the one that has retracted the request. `avoid` are the incarnations of the instances at which attempts have
    failed since the client's last token: others are chosen while there are any.
    """

    request: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    front: Address
    frozen_ids: tuple[int, ...] = ()
    group: int = 0
    samples: int = 1
    prefer: int = 0
    avoid: tuple[int, ...] = ()

    @property
    def was_admitted(self) -> bool:
        """Decode has let the request in before, and retracted it. It waits for older ones however long they take: the
        limit of waiting for admission is for those that could still be refused, and *no progress* runs all the same.
        """
        return self.prefer != 0

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """What prefill computes."""
        return self.prompt_ids + self.frozen_ids


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
    """A leg holds the room, and its link to the request's front is open."""

    room: int
    leg: str


class Admitted(Message, frozen=True):
    """Decode has allocated the target pages and sent `Destination`."""

    room: int
    pages: int


class Progress(Message, frozen=True):
    """News for the journal and the no-progress clock.

    `event`: "queued", "started", "computed" (chunk), "written" (chunk), "metadata". `position` is the place in
    the leg's queue (0 = being served), `step` its engine's step counter, `kv_bytes` the bytes of this event,
    `offset_s` seconds since the leg opened the room, by the leg's own clock.
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
    """The last chunk has been computed and the first token sent to the front."""

    room: int
    chunks: int
    offset_s: float = 0.0


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
    pages: tuple[int, ...]
    prefix_tokens: int
    metadata_slot: int
    agent: bytes
    generation: int
    required_acks: tuple[int, ...]


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
    Decode: `waiting` rooms not admitted, `running` ones (those that receive included), `free_pages` of `total_pages`,
    `free_places` in the batch, `step_s` a recent step's time, `place_s` for how long recent requests held a place (0:
    unknown).
    """

    role: str
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    total_pages: int = 0
    step_s: float = 0.0
    free_places: int = 0
    place_s: float = 0.0


# --- Registry ----------------------------------------------------------------------------------------------


class Layout(msgspec.Struct, frozen=True):
    """What two ranks must agree on before KV may pass between them."""

    model: str
    revision: str
    dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    policy: str = "early"


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one instance. `instance` is its name; coordinates count from 0.

    `max_prompt_tokens` and `max_total_tokens` are the limits of this rank's pool and model. `draining`: it takes no new
    rooms, finishes those it has, and leaves.
    """

    instance: str
    role: str
    address: Address
    layout: Layout
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    pages: int = 0
    max_prompt_tokens: int = 0
    max_total_tokens: int = 0
    draining: bool = False


class Register(Message, frozen=True):
    info: RankInfo


class Registered(Message, frozen=True):
    version: int


class RegistrationRefused(Message, frozen=True):
    """`retry`: the place may become free (its last holder is not yet known to be dead)."""

    reason: str
    retry: bool


class Watch(Message, frozen=True):
    """Router -> registry: tell me the roster now and at every change. Router -> leader: the same for its `Load`."""

    name: str


class Roster(Message, frozen=True):
    """Every registered rank, and whether each role that is wanted is complete. `missing` says what is not."""

    version: int
    ranks: tuple[RankInfo, ...]
    ready: bool
    missing: tuple[str, ...] = ()


_ALL: tuple[type[Message], ...] = (
    OpenPrefill, OpenDecode, Opened, Admitted, Progress, PrefillDone, Received, Committed, Failed, Abort,
    AbortAck, UnknownRoom, Destination, AbortTransfer, Drained, TokenBatch, Stop, Retracted, Load, Register, Registered,
    RegistrationRefused, Watch, Roster,
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    OpenPrefill | OpenDecode | Opened | Admitted | Progress | PrefillDone | Received | Committed | Failed
    | Abort | AbortAck | UnknownRoom | Destination | AbortTransfer | Drained | TokenBatch | Stop | Retracted
    | Load | Register | Registered | RegistrationRefused | Watch | Roster
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
