"""What the two ends of staging say to each other, in notifications of the endpoint within. Pure.

A notification of the user is passed on behind one byte, USER. Of the others: a writer that has something to stage says
Hello and how it can be reached; the target connects to it and answers Ready, with a ring or without one. For each piece
that lies in the ring the writer says Scatter, and the target answers Scattered when it has been.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from kvferry.transfer.blocks import Ints, Side
from kvferry.transfer.contract import Descriptor, Region, TransferError
from kvferry.transfer.staging.pieces import Piece

USER, OURS = b"\x00", b"\x01"
#: A place to write to for writers that want to know whether their path still stands.
SCRATCH_BYTES = 64
#: What a peer's word is held to.
_MOST_PAIRS, _MOST_RUNS, _MOST_BYTES = 2**20, 2**24, 2**40

_Count = Annotated[int, Meta(ge=0, le=2**62)]
#: Whole numbers, of which the reader knows how many: (first, step), or all of them, little-endian, in 4 or 8 bytes.
Numbers = tuple[int, int] | bytes


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """`Descriptor.metadata` of a staging endpoint. `metadata` is that of the endpoint within, which has `extra` regions
    behind those of the descriptor: the first of them is staging memory. `scratch` is where a word of it can be written
    to try the path, and `size_bytes` how large a ring the writer will get, if one is free when it says Hello.
    """

    metadata: bytes
    extra: tuple[Region, ...]
    scratch: _Count
    size_bytes: _Count

    @property
    def held_bytes(self) -> int:
        return self.extra[0].item_bytes * self.extra[0].items if self.extra else 0


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`generation` of the agent that this is said to; `session` counts the writer's connections to it; `descriptor` is
    the one by which the target reaches the writer.
    """

    generation: _Count
    session: _Count
    descriptor: bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The writer's ring is `size_bytes` from `offset` on of staging memory. 0 bytes: none is free."""

    incarnation: int
    generation: _Count
    session: _Count
    offset: _Count
    size_bytes: _Count


class Scatter(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`size_bytes` at `offset` of the ring are slices of `pairs` pairs and `runs` runs: their target side."""

    generation: _Count
    session: _Count
    number: _Count
    offset: _Count
    size_bytes: Annotated[int, Meta(ge=1, le=_MOST_BYTES)]
    pairs: Annotated[int, Meta(ge=1, le=_MOST_PAIRS)]
    runs: Annotated[int, Meta(ge=1, le=_MOST_RUNS)]
    region: Numbers
    start: Numbers
    stride: Numbers
    width: Numbers
    at: Numbers
    count: Numbers


class Scattered(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """`error`: it was not, and never will be."""

    incarnation: int
    generation: _Count
    session: _Count
    number: _Count
    error: str = ""


Message = Hello | Ready | Scatter | Scattered

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_lent = msgspec.msgpack.Decoder(Lent)


def encode(message: Message) -> bytes:
    return OURS + _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """What follows OURS. Raises TransferError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"not a message of staging: {error}") from None


def wrap(inner: Descriptor, backend: str, regions: int, scratch: int, size_bytes: int) -> Descriptor:
    """The descriptor to hand out: of the first `regions` regions, and with the promise of a ring."""
    lent = Lent(inner.metadata, inner.regions[regions:], scratch, size_bytes)
    return replace(inner, backend=backend, metadata=_encoder.encode(lent), regions=inner.regions[:regions])


def unwrap(outer: Descriptor, backend: str) -> tuple[Descriptor, Lent]:
    """The descriptor for the endpoint within. Raises TransferError for rings that can't lie in their region."""
    try:
        lent = _lent.decode(outer.metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"{outer.agent}: metadata of staging does not decode: {error}") from None
    if lent.size_bytes and lent.scratch + SCRATCH_BYTES + lent.size_bytes > lent.held_bytes:
        raise TransferError(
            f"{outer.agent}: a ring of {lent.size_bytes} bytes behind byte {lent.scratch} of {lent.held_bytes}"
        )
    regions = outer.regions + lent.extra
    return replace(outer, backend=backend, metadata=lent.metadata, regions=regions), lent


def scatter(piece: Piece, generation: int, session: int, number: int, offset: int) -> Scatter:
    side = piece.target
    return Scatter(
        generation, session, number, offset, piece.size_bytes, len(piece.columns), len(piece.runs),
        pack(side.region), pack(side.start), pack(side.stride), pack(side.width), pack(side.at), pack(side.count),
    )  # fmt: skip


def side_in(message: Scatter) -> Side:
    """The target side that it names. Raises TransferError for columns of another length."""
    pairs, runs = message.pairs, message.runs
    return Side(
        region=unpack(message.region, pairs),
        start=unpack(message.start, pairs),
        stride=unpack(message.stride, pairs),
        width=unpack(message.width, pairs),
        at=unpack(message.at, runs),
        count=unpack(message.count, runs),
    )


def pack(numbers: np.ndarray[tuple[int], np.dtype[np.int64]] | np.ndarray[tuple[int], np.dtype[np.int32]]) -> Numbers:
    """Most columns are one number all the way, or count upwards."""
    if len(numbers) < 2:
        return int(numbers[0]) if len(numbers) else 0, 0
    first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0])
    if ((numbers[1:] - numbers[:-1]) == step).all():
        return first, step
    small = int(numbers.min()) >= 0 and int(numbers.max()) < 2**31
    return numbers.astype("<i4" if small else "<i8").tobytes()


def unpack(numbers: Numbers, count: int) -> Ints:
    """int64 [count]. Raises TransferError when they are not so many."""
    if isinstance(numbers, tuple):
        first, step = numbers
        if abs(first) > 2**62 or abs(first + step * (count - 1)) > 2**62:
            raise TransferError(f"{count} numbers from {first} on, each {step} more")
        return first + step * np.arange(count, dtype=np.int64)
    if len(numbers) not in (4 * count, 8 * count):
        raise TransferError(f"{count} numbers in {len(numbers)} bytes")
    return np.frombuffer(numbers, dtype="<i4" if len(numbers) == 4 * count else "<i8").astype(np.int64)
