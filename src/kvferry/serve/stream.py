"""One request's tokens, put together from what its leaders send: each index once, in order."""

from __future__ import annotations

from enum import Enum

from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import Token


class Verdict(Enum):
    """What became of an offered token."""

    TAKEN = "taken"  # in order (it may have freed held ones)
    HELD = "held"  # waits for the gap before it
    DUPLICATE = "duplicate"  # we have this index; normal, since decode's first batch repeats index 0
    STALE = "stale"  # of another attempt than the current one
    BEYOND = "beyond"  # past the end: past finish_reason, past max_tokens, or after a failure


class RequestStream:
    """Sans-IO. `offer` takes tokens as they come, `drain` gives those that are next in order.

    It ends once: with the token that carries a finish_reason, or with a cause. What was in order before a
    failure is still drained; what waited behind a gap is not. `taken_ids` are the tokens in order so far: what the
    client has, and what a later attempt starts from.
    """

    def __init__(self, max_tokens: int) -> None:
        self.attempt = 0
        self.next_index = 0
        self.finish_reason = ""
        self.cause: Cause | None = None
        self._max_tokens = max_tokens
        self.taken_ids: list[int] = []
        self._ready: list[Token] = []
        self._held: dict[int, Token] = {}

    @property
    def over(self) -> bool:
        """No further token will be taken."""
        return bool(self.finish_reason) or self.cause is not None

    def begin(self, attempt: int) -> None:
        """The front has opened a later attempt: only its tokens count from now on; those in order stay."""
        if attempt <= self.attempt or self.over:
            raise ValueError(f"attempt {attempt} can't follow attempt {self.attempt} (over: {self.over})")
        self.attempt = attempt
        self._held.clear()

    def offer(self, token: Token) -> Verdict:
        if token.attempt != self.attempt:
            return Verdict.STALE
        if token.index < self.next_index:
            return Verdict.DUPLICATE
        if self.over or token.index >= self._max_tokens:
            return Verdict.BEYOND
        if token.index > self.next_index:
            return Verdict.DUPLICATE if self._held.setdefault(token.index, token) is not token else Verdict.HELD
        self._take(token)
        while not self.over and (held := self._held.pop(self.next_index, None)) is not None:
            self._take(held)
        if self.over:
            self._held.clear()
        return Verdict.TAKEN

    def drain(self) -> list[Token]:
        """Tokens in order that were not drained before."""
        ready, self._ready = self._ready, []
        return ready

    def fail(self, cause: Cause) -> bool:
        """End with `cause`; False when it is over already, and then nothing changes."""
        if self.over:
            return False
        self.cause = cause
        self._held.clear()
        return True

    def _take(self, token: Token) -> None:
        self._ready.append(token)
        self.taken_ids.append(token.token_id)
        self.next_index = token.index + 1
        self.finish_reason = token.finish_reason
