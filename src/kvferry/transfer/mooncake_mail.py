"""Notifications of the `mooncake` backend: messages that the writer puts into memory of the target's, by writes as any
other. (The engine's own notifications are sent by calls that block for as long as a stopped peer stands still.)

A mailbox begins with its owner's identity and the number of messages that were taken; then come SLOTS slots. A message
is written into its slot, and when that is flushed, its mark; the target reads what is marked with the next number. A
new sending agent begins a session at slot 0; its mark has a higher generation than those before. Messages carry a
checksum: what an earlier session still had on its way may be placed over one of this session's, and is then refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.contract import TransferError
from kvferry.transfer.names import is_agent_of

#: Messages that may be there untaken; what a notification may have; what a slot has for a message: that and its frame.
SLOTS, NOTE_BYTES = 16, 64 * 1024
_FRAME_BYTES = 512
_SLOT_BYTES = NOTE_BYTES + _FRAME_BYTES
#: int64: incarnation (its bits), generation, taken.
HEAD_WORDS = 3
_MARKS = 8 * HEAD_WORDS
_FIRST_SLOT = _MARKS + 8 * SLOTS
MAIL_BYTES = _FIRST_SLOT + SLOTS * _SLOT_BYTES
TAKEN_AT, TAKEN_BYTES = 16, 8


class Letter(msgspec.Struct, frozen=True, array_like=True):
    sender: str
    payload: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Letter)


def signed(incarnation: int) -> int:
    """The same 64 bits as an int64."""
    return incarnation - 2**64 if incarnation >= 2**63 else incarnation


def mark(generation: int, number: int) -> int:
    """Of message `number` (from 0 on) of the session of that agent; never 0."""
    return generation << 32 | (number + 1) % 2**32


def slot_at(number: int) -> int:
    """Offset of the slot of that message in a mailbox."""
    return _FIRST_SLOT + number % SLOTS * _SLOT_BYTES


def mark_at(number: int) -> int:
    """Offset of its mark."""
    return _MARKS + number % SLOTS * 8


def letter_bytes(sender: str, payload: bytes) -> bytes:
    """What is written into a slot: checksum and length (4 bytes each), message."""
    message = _encoder.encode(Letter(sender, payload))
    return zlib.crc32(message).to_bytes(4, "little") + len(message).to_bytes(4, "little") + message


class Mailbox:
    """One writer's, at the target. `memory`: uint8[MAIL_BYTES], to be registered."""

    def __init__(self, incarnation: int, generation: int, writer: int) -> None:
        self.memory: NDArray[np.uint8] = np.zeros(MAIL_BYTES, np.uint8)
        self._writer = writer
        self._head = self.memory[:_MARKS].view(np.int64)
        self._head[:] = signed(incarnation), generation, 0
        self._marks = self.memory[_MARKS:_FIRST_SLOT].view(np.int64)
        self._session, self._next = -1, 0
        self._closed = False

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def take(self) -> Iterator[tuple[str, bytes]]:
        """(sender, payload) of what has come, in order. Raises TransferError for what is no message of the writer, and
        takes nothing more then.
        """
        if self._closed:
            return
        first = int(self._marks[0])
        if first & 0xFFFFFFFF == 1 and first >> 32 > self._session:
            self._session, self._next, self._head[2] = first >> 32, 0, 0
        while int(self._marks[self._next % SLOTS]) == mark(self._session, self._next):
            self._closed = True  # unless it is one
            letter = self._letter(slot_at(self._next))
            self._closed = False
            self._next += 1
            self._head[2] = self._next
            yield letter.sender, letter.payload

    def _letter(self, at: int) -> Letter:
        check, size = self.memory[at : at + 8].view(np.uint32).tolist()
        message = self.memory[at + 8 : at + 8 + size].tobytes()
        if size > _SLOT_BYTES - 8 or zlib.crc32(message) != check:
            raise TransferError(f"a notification of {size} bytes is not what was sent")
        try:
            letter = _decoder.decode(message)
        except msgspec.DecodeError as error:
            raise TransferError(f"not a notification: {error}") from None
        if not is_agent_of(letter.sender, self._writer):
            raise TransferError(f"the mailbox is for {self._writer:016x}, not for {letter.sender}")
        return letter
