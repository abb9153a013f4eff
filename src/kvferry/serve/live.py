"""One client request while the front holds it."""

from __future__ import annotations

import asyncio

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause, KVFerryError, Overloaded, Unavailable, error_from
from kvferry.protocol.messages import Token
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec
from kvferry.serve.attempts import AttemptPolicy, Attempts
from kvferry.serve.stream import RequestStream


class LiveRequest:
    """The stream, who is known to work on it, and the waiter.

    `leaders` are the incarnations that must hear a Stop; `decode` is whose loss ends the request: known from the
    outcome, or from its first batch (decode sends nothing before it has committed); both are of the current
    attempt. `serial` orders its opening against losses of peers. `reopening` waits to open the next one. `news` wakes
    who reads it; requests that are read together may share one.
    """

    def __init__(
        self, spec: RequestSpec, opened_s: float, policy: AttemptPolicy, news: asyncio.Event | None = None
    ) -> None:
        self.spec, self.opened_s, self.serial = spec, opened_s, 0
        self.attempts = Attempts(policy)
        self.reopening: asyncio.Future[None] | None = None
        self.stream = RequestStream(spec.sampling.max_tokens)
        self.submission: asyncio.Future[Outcome] | None = None
        self.room = 0
        self.leaders: dict[int, Address] = {}
        self.decode: Address | None = None
        self.retry_after_s = 0.0
        self.closed = False
        self.probe = False  # the front's own, not a client's
        self._news = news or asyncio.Event()

    @property
    def attempt(self) -> int:
        return self.stream.attempt

    def begin_next(self, prefer: int = 0) -> None:
        """The attempt is over; the next one starts from what the client has, with nobody known to work on it.

        `prefer` is the decode that keeps the request's place; 0 after a failure: then the one that did so far is
        preferred, and who worked on this attempt is avoided.
        """
        self.stream.begin(self.attempt + 1)
        frozen_ids = tuple(self.stream.taken_ids)
        avoid = self.spec.avoid if len(frozen_ids) == len(self.spec.frozen_ids) else ()
        if not prefer:
            avoid += tuple(incarnation for incarnation in self.leaders if incarnation not in avoid)
        prefer = prefer or self.spec.prefer
        self.spec = msgspec.structs.replace(self.spec, frozen_ids=frozen_ids, prefer=prefer, avoid=avoid)
        self.submission, self.room, self.decode, self.retry_after_s = None, 0, None, 0.0
        self.leaders = {}

    def wake(self) -> None:
        self._news.set()

    def sender_seen(self, peer: Address, leg: str, room: int) -> None:
        self.room = room
        self.leaders.setdefault(peer.incarnation, peer)
        if leg == "decode":
            self.decode = peer

    def outcome_came(self, outcome: Outcome) -> None:
        self.room = outcome.room or self.room
        for leader in (outcome.prefill, outcome.decode):
            if leader is not None:
                self.leaders.setdefault(leader.incarnation, leader)
        if outcome.ok and outcome.decode is not None:
            self.decode = outcome.decode

    def ready(self) -> list[Token]:
        """The next tokens in order, none if there are none yet; the last one carries a finish_reason.

        Raises the KVFerryError of the failure once everything before it has been taken.
        """
        tokens = self.stream.drain()
        if not tokens and self.stream.cause is not None:
            raise self._error(self.stream.cause)
        return tokens

    async def take(self) -> list[Token]:
        """As `ready`, but waits for at least one. Must not be called again after the last token."""
        while True:
            if tokens := self.ready():
                return tokens
            if self.stream.over:
                raise ValueError("all tokens of this request have been taken")
            self._news.clear()
            await self._news.wait()

    def _error(self, cause: Cause) -> KVFerryError:
        error = error_from(cause)
        if isinstance(error, Overloaded | Unavailable) and self.retry_after_s > 0:
            return type(error)(cause, self.retry_after_s)
        return error
