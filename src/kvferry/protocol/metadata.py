"""What a handoff says on the data path: the metadata row, which goes with the last chunk, and the notification
that follows a rank's last write.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

ROW_BYTES = 256
_ROW = struct.Struct("<QQIiQ")  # room, writer's incarnation, prompt tokens, first token, bytes of KV


@dataclass(frozen=True)
class Metadata:
    """`first_token` is the token that prefill drew at position `prompt_tokens`."""

    room: int
    incarnation: int
    prompt_tokens: int
    first_token: int
    kv_bytes: int

    def pack_into(self, row: memoryview) -> None:
        """Write the row; the rest of it becomes zero."""
        row[:] = bytes(len(row))
        _ROW.pack_into(row, 0, self.room, self.incarnation, self.prompt_tokens, self.first_token, self.kv_bytes)

    @staticmethod
    def unpack(row: memoryview) -> Metadata:
        return Metadata(*_ROW.unpack_from(row, 0))


class Notification(msgspec.Struct, frozen=True, array_like=True):
    """Source rank -> target rank, after its last write is flushed. `incarnation` is the source process's."""

    room: int
    rank: int
    incarnation: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notification)


def encode_notification(notification: Notification) -> bytes:
    return _encoder.encode(notification)


def decode_notification(payload: bytes) -> Notification | None:
    """None when the payload is not a notification of ours."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError:
        return None
