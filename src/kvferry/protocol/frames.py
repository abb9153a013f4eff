"""What the two ends of a link say to each other: frames, which carry messages but know nothing about them.

Every frame names its session (64 random bits, drawn by the dialer). Frames are msgpack arrays, so a field that is
added later goes last and has a default.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.messages import MAX_MESSAGE_BYTES, BadFrame

#: A frame holds at least one message of the largest size; several only while they stay below BATCH_BYTES.
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 1024
BATCH_BYTES = 256 * 1024
BATCH_MESSAGES = 256

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all frames."""

    session: Natural


class Hello(Frame, frozen=True, tag="hello"):
    """Dialer -> listener: open `session`, or take it up again after its path broke.

    `dial` counts the dials of the sender's process: a Hello whose count is not above the highest heard is late.
    """

    sender: Address
    expects: Natural
    dial: Natural


class Welcome(Frame, frozen=True, tag="welcome"):
    """The session is open here. `dial` tells which of the sender's own dials are settled by this."""

    sender: Address
    dial: Natural


class NotMe(Frame, frozen=True, tag="notme"):
    """This session is not here; `incarnation` is who answers."""

    incarnation: Natural


class Data(Frame, frozen=True, tag="data"):
    """Messages number `seq`, `seq` + 1, … (from 0). `ack` is the number of messages received in order so far."""

    seq: Natural
    ack: Natural
    payloads: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=BATCH_MESSAGES)]


class Ack(Frame, frozen=True, tag="ack"):
    """Acknowledgement and heartbeat. A peer that reads `ask` answers at once with `answer` equal to it.

    The answer proves that the peer was alive after the question was put.
    """

    ack: Natural
    ask: Natural = 0
    answer: Natural = 0


class Bye(Frame, frozen=True, tag="bye"):
    """The sender has ended the session; `reason` is the value of a `kvferry.protocol.link.Ending`."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Hello | Welcome | NotMe | Data | Ack | Bye)


def encode_frame(frame: Frame) -> bytes:
    """Wire form of a frame. Raises BadFrame when it is over `MAX_FRAME_BYTES`."""
    data = _encoder.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(frame).__name__} frame is {len(data)} bytes; the limit is {MAX_FRAME_BYTES}")
    return data


def decode_frame(data: bytes) -> Frame:
    """The frame in `data`. Raises BadFrame; never creates anything else."""
    if len(data) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(data)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        frame: Frame = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from None
    return frame
