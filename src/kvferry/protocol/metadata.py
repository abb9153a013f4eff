"""What a handoff says on the data path: the metadata row, which goes with the last chunk, and the notifications that
follow a rank's writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.tokens import Logprobs

#: One row holds the fixed part (32 bytes), the first token's logprob (8) and as many alternatives (8 each); rounded up.
ROW_BYTES = 256
#: Alternatives that a request may ask for per token; the row has room for these and no more.
MAX_TOP_LOGPROBS = 20
_ROW = struct.Struct("<QQIiQ")  # room, writer's incarnation, prompt tokens, first token, bytes of KV
_CHOSEN = struct.Struct("<fI")  # the first token's logprob; how many logprobs follow, itself included (0: none asked)
_ALTERNATIVE = struct.Struct("<If")  # token id, logprob
_CHOSEN_AT = _ROW.size
_ALTERNATIVES_AT = _CHOSEN_AT + _CHOSEN.size


@dataclass(frozen=True)
class Metadata:
    """`first_token` is the token that prefill drew at position `prompt_tokens`; `logprobs` are that token's, where the
    request asked for them. They are float32 numbers, so the row keeps them exactly.
    """

    room: int
    incarnation: int
    prompt_tokens: int
    first_token: int
    kv_bytes: int
    logprobs: Logprobs | None = None

    def pack_into(self, row: memoryview) -> None:
        """Write the row; the rest of it becomes zero. Raises struct.error for more than `MAX_TOP_LOGPROBS`."""
        row[:] = bytes(len(row))
        _ROW.pack_into(row, 0, self.room, self.incarnation, self.prompt_tokens, self.first_token, self.kv_bytes)
        if self.logprobs is None:
            return
        top = self.logprobs.top
        if len(top) > MAX_TOP_LOGPROBS:
            raise struct.error(f"{len(top)} alternatives; the row holds {MAX_TOP_LOGPROBS}")
        _CHOSEN.pack_into(row, _CHOSEN_AT, self.logprobs.logprob, 1 + len(top))
        for at, (token_id, logprob) in enumerate(top):
            _ALTERNATIVE.pack_into(row, _ALTERNATIVES_AT + at * _ALTERNATIVE.size, token_id, logprob)

    @staticmethod
    def unpack(row: memoryview) -> Metadata:
        """Whatever bytes lie there, this answers; decode checks what they say."""
        room, incarnation, prompt_tokens, first_token, kv_bytes = _ROW.unpack_from(row, 0)
        return Metadata(room, incarnation, prompt_tokens, first_token, kv_bytes, _logprobs_in(row))

    def token_problem(self, asked: int, vocab_size: int) -> str | None:
        """What is wrong with the first token and its logprobs, or None. `asked` is the request's `logprobs`."""
        if not 0 <= self.first_token < vocab_size:
            return f"the first token is {self.first_token}; allowed: 0 to {vocab_size - 1}"
        found = -1 if self.logprobs is None else len(self.logprobs.top)
        if found != max(-1, min(asked, MAX_TOP_LOGPROBS, vocab_size)):
            return f"the metadata row has logprobs {found}; the request asked for {asked} (-1: none)"
        strange = [i for i, _ in self.logprobs.top if i >= vocab_size] if self.logprobs is not None else []
        return f"the alternatives have token ids {strange}; allowed: 0 to {vocab_size - 1}" if strange else None


def _logprobs_in(row: memoryview) -> Logprobs | None:
    logprob, count = _CHOSEN.unpack_from(row, _CHOSEN_AT)
    if count == 0:
        return None
    places = range(_ALTERNATIVES_AT, len(row) - _ALTERNATIVE.size + 1, _ALTERNATIVE.size)[: count - 1]
    return Logprobs(logprob, tuple(_ALTERNATIVE.unpack_from(row, at) for at in places))


_Count = Annotated[int, Meta(ge=0, lt=2**32)]


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A chunk's write from one rank to another, which is flushed: the prompt's tokens number `first` to
    `first + tokens - 1`, with `row` also the metadata row behind them, and the digest of those bytes as they lay at the
    source when the write was posted (`kvferry.transfer.digest`). Nothing is said of pages: each side has its own.
    """

    chunk: Annotated[int, Meta(ge=-1, lt=2**32)]
    first: _Count
    tokens: _Count
    row: bool
    digest: Annotated[int, Meta(ge=0)]


class Notification(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Source rank -> target rank, behind a write. `incarnation` is the source process's. With `last`, all that the
    rank writes there for the room is flushed, and `placed` has all of it; before that, the chunk that is. Without
    checksums nothing is said before the last write, and `placed` is empty.
    """

    room: int
    rank: int
    incarnation: int
    placed: Annotated[tuple[Placed, ...], Meta(max_length=2**16)] = ()
    last: bool = True


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Source rank -> target rank, first on their path: the regions that it writes from, in wire form
    (`kvferry.transfer.contract.encode_regions`). With them the target works out by itself what a chunk consists of.
    """

    incarnation: int
    regions: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Notification | Introduction] = msgspec.msgpack.Decoder(Notification | Introduction)


def encode_notification(notification: Notification | Introduction) -> bytes:
    return _encoder.encode(notification)


def decode_notification(payload: bytes) -> Notification | Introduction | None:
    """None when the payload is not a notification of ours."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
