"""Tokens on their way from leaders to fronts, and what is said about them there."""

from __future__ import annotations

import msgspec

from kvferry.protocol.message import Message


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
