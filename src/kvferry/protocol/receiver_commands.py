"""What a receiver machine orders: decode's leader carries it out."""

from __future__ import annotations

import msgspec

from kvferry.protocol.errors import Cause


class LineUp(msgspec.Struct, frozen=True):
    """The prompt is computed: from now on the request is a candidate for admission, and its age counts."""


class HandOut(msgspec.Struct, frozen=True):
    """Lease the pages to the writer and send it the `Destination`; tell the room."""


class NoteReceived(msgspec.Struct, frozen=True):
    """Tell the room that `rank`'s notification is in."""

    rank: int


class Check(msgspec.Struct, frozen=True):
    """All is written. Say whether it is what was to come: CHECKED or CHECK_FAILED, now or when the checks are done."""


class Commit(msgspec.Struct, frozen=True):
    """End the lease, tell the room, publish the first token, join the running batch."""


class AbortWriter(msgspec.Struct, frozen=True):
    """Ask each rank that has not acked to stop and to say Drained, as far as it can be asked; the pages are quarantined
    until there is proof about all of them.
    """


class Report(msgspec.Struct, frozen=True):
    """Tell the room of a failure that decode has found."""

    cause: Cause


class Ack(msgspec.Struct, frozen=True):
    """Tell the room that decode has stopped."""


class AnswerCommitted(msgspec.Struct, frozen=True):
    """Tell the room that decode has committed."""


class LeaveBatch(msgspec.Struct, frozen=True):
    """Take the request out of the running batch."""


class Retract(msgspec.Struct, frozen=True):
    """Tell the front, behind the tokens, that the attempt is over; remember the request's age."""


class Release(msgspec.Struct, frozen=True):
    """Release the pages with the proof at hand (if there are any) and forget the room."""


ReceiverCommand = (
    LineUp | HandOut | NoteReceived | Check | Commit | AbortWriter | Report | Ack | AnswerCommitted | LeaveBatch
    | Retract | Release
)  # fmt: skip
