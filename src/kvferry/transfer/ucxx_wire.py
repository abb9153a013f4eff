"""What two agents of the `ucxx` backend say to each other, and the tags that they say it under.

A tag is kind (8 bits), generation of the sending agent (24 bits), number (32 bits). Messages of one kind from one
sender come in order. The writer opens with `Hello`; then, as often as it likes, `Batch` and the bytes that belong to it
under the tag of the same number, or `Note`. The target answers each batch with `Placed`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.transfer.contract import SPAN_DTYPE, Spans, TransferError

#: Kinds of messages.
CONTROL, DATA, ANSWER = 1, 2, 3
#: Batches that a writer may have under way; each carries at most `UcxxMetadata.piece_bytes` in this many spans.
PIECES, PIECE_SPANS = 4, 4096
#: A control message is never larger: a batch with its spans, or a notification.
CONTROL_BYTES = 1024 * 1024


class UcxxMetadata(msgspec.Struct, frozen=True):
    """`Descriptor.metadata` of this backend. `address` is that of the agent's worker; `pid` is for errors."""

    transports: str
    pid: int
    piece_bytes: Annotated[int, Meta(ge=1, le=2**32)]
    address: Annotated[bytes, Meta(min_length=1, max_length=65536)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who writes, and where the answers go."""

    agent: Annotated[str, Meta(max_length=256)]
    address: Annotated[bytes, Meta(min_length=1, max_length=65536)]


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """`spans`: rows of SPAN_DTYPE; the target reads their target side only."""

    number: Annotated[int, Meta(ge=0, lt=2**32)]
    spans: Annotated[bytes, Meta(max_length=PIECE_SPANS * SPAN_DTYPE.itemsize)]


class Note(msgspec.Struct, frozen=True, tag="note"):
    payload: bytes


class Placed(msgspec.Struct, frozen=True):
    """Every byte of the batch lies at its place; with `error`, none of it was placed, and no other will be."""

    number: int
    error: str = ""


ToTarget = Hello | Batch | Note

encoder = msgspec.msgpack.Encoder()
metadata_decoder = msgspec.msgpack.Decoder(UcxxMetadata)
_target_decoder = msgspec.msgpack.Decoder(ToTarget)
_placed_decoder = msgspec.msgpack.Decoder(Placed)


def tag(kind: int, generation: int, number: int = 0) -> int:
    """Generations above 2^24 begin again: an agent has long been gone when its number is another's."""
    return kind << 56 | (generation & 0xFFFFFF) << 32 | number


def generation_of(value: int) -> int:
    return value >> 32 & 0xFFFFFF


#: Compares the kind and nothing else.
KIND_MASK = 0xFF << 56


def decode_to_target(data: bytes) -> ToTarget:
    """Raises TransferError when it is none of the messages above."""
    try:
        message: ToTarget = _target_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"not a message of a writer: {error}") from None
    return message


def decode_placed(data: bytes) -> Placed:
    """Raises TransferError when it isn't one."""
    try:
        return _placed_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"not an answer of a target: {error}") from None


def spans_of(batch: Batch) -> Spans:
    """The rows of a batch. Raises TransferError when they are not whole rows of positive length."""
    if not batch.spans or len(batch.spans) % SPAN_DTYPE.itemsize:
        raise TransferError(f"batch {batch.number}: {len(batch.spans)} bytes are no rows of {SPAN_DTYPE.itemsize}")
    spans = np.frombuffer(batch.spans, SPAN_DTYPE)
    if int(spans["length"].min()) <= 0:
        raise TransferError(f"batch {batch.number}: a span of {spans['length'].min()} bytes; the least is 1")
    return spans
