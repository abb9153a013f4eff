"""The link session as data: its states, its events, and what each state does with each event.

One cell for every state and kind of frame; `kvferry.protocol.link` has the actions and says the rules.
"""

from __future__ import annotations

from enum import Enum, auto

from kvferry.protocol.machine import IGNORED, Go, Symbol, Table


class LinkState(Symbol):
    CONNECTING = auto()  # dialled; the peer's Welcome is awaited
    OPEN = auto()
    OVER = auto()


class LinkEvent(Symbol):
    HELLO = auto()  # of this session: the peer takes it up on another path, or our Welcome was lost
    LOWER_HELLO = auto()  # the peer dials a session of its own, whose id is lower than ours
    HIGHER_HELLO = auto()  # the same, with a higher id
    WELCOME = auto()
    NOT_ME = auto()  # another incarnation answers, or the peer does not have this session
    DATA = auto()
    ACK = auto()
    BYE = auto()
    STRAY = auto()  # any other frame of another session
    SEND = auto()  # local: a message to queue
    END = auto()  # local: closed, silent, overflown, refused, replaced or exited


class Ending(Enum):
    """Why a session is over; the values are those of `kvferry.actors.ports.LostReason`."""

    EXITED = "exited"
    REPLACED = "replaced"
    REFUSED = "refused"
    SILENT = "silent"
    OVERFLOW = "overflow"
    CLOSED = "closed"


S, E = LinkState, LinkEvent

TABLE: Table[LinkState, LinkEvent] = {
    S.CONNECTING: {
        E.HELLO: Go(S.OPEN, "open_and_welcome"),
        E.LOWER_HELLO: Go(S.OPEN, "adopt"),
        E.HIGHER_HELLO: IGNORED,
        E.WELCOME: Go(S.OPEN, "open"),
        E.NOT_ME: Go(S.OVER, "not_there"),
        E.DATA: IGNORED,  # the Welcome is late; the Data will come again
        E.ACK: IGNORED,
        E.BYE: Go(S.OVER, "told"),
        E.STRAY: IGNORED,
        E.SEND: Go(S.CONNECTING, "queue"),
        E.END: Go(S.OVER, "abandon"),
    },
    S.OPEN: {
        E.HELLO: Go(S.OPEN, "welcome_again"),
        E.LOWER_HELLO: Go(S.OVER, "redialled"),
        E.HIGHER_HELLO: Go(S.OVER, "redialled"),
        E.WELCOME: Go(S.OPEN, "resume"),
        E.NOT_ME: Go(S.OVER, "not_there"),
        E.DATA: Go(S.OPEN, "data"),
        E.ACK: Go(S.OPEN, "acknowledged"),
        E.BYE: Go(S.OVER, "told"),
        E.STRAY: IGNORED,
        E.SEND: Go(S.OPEN, "queue"),
        E.END: Go(S.OVER, "end"),
    },
    S.OVER: dict.fromkeys(E, IGNORED),
}
