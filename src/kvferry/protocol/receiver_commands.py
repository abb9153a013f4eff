"""What a receiver machine orders: decode's leader carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.errors import Cause


@dataclass(frozen=True)
class LineUp:
    """The prompt is computed: from now on the request is a candidate for admission, and its age counts."""


@dataclass(frozen=True)
class HandOut:
    """Lease the pages to the writer and send it the `Destination`; tell the room."""


@dataclass(frozen=True)
class NoteReceived:
    """Tell the room that `rank`'s notification is in."""

    rank: int


@dataclass(frozen=True)
class Check:
    """All is written. Say whether it is what was to come: CHECKED or CHECK_FAILED, now or when the checks are done."""


@dataclass(frozen=True)
class Commit:
    """End the lease, tell the room, publish the first token, join the running batch."""


@dataclass(frozen=True)
class AbortWriter:
    """Ask each rank that has not acked to stop and to say Drained, as far as it can be asked; the pages are quarantined
    until there is proof about all of them.
    """


@dataclass(frozen=True)
class Report:
    """Tell the room of a failure that decode has found."""

    cause: Cause


@dataclass(frozen=True)
class Ack:
    """Tell the room that decode has stopped."""


@dataclass(frozen=True)
class AnswerCommitted:
    """Tell the room that decode has committed."""


@dataclass(frozen=True)
class LeaveBatch:
    """Take the request out of the running batch."""


@dataclass(frozen=True)
class Retract:
    """Tell the front, behind the tokens, that the attempt is over; remember the request's age."""


@dataclass(frozen=True)
class Release:
    """Release the pages with the proof at hand (if there are any) and forget the room."""


ReceiverCommand = (
    LineUp | HandOut | NoteReceived | Check | Commit | AbortWriter | Report | Ack | AnswerCommitted | LeaveBatch
    | Retract | Release
)  # fmt: skip
