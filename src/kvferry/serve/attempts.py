"""Whether a failure ends a request or leads to its next attempt.

A request outlives its room: what one process could not finish another can, from the tokens that the client has.
The next attempt is opened at once; while there is nobody to serve it (a process is being started again) it is tried
again every `RETRY_S`, for `recovery_s` at most. A retraction is no failure: decode takes the request again.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.errors import Cause, Conflict, Draining, HandoffFailed, Overloaded, PeerLost, Unavailable

RETRY_S = 0.5
#: Between refusals by what is leaving, from the second in a row on: whoever is left may not be known here yet.
MOVED_S = 0.1


class AttemptPolicy(msgspec.Struct, frozen=True):
    """`max_attempts` in a row may fail without bringing a token: a request that fails wherever it runs must not be
    tried for ever. `recovery_s` without a token end it too. `max_attempts` 1 or `recovery_s` 0: no next attempt, but
    what a leaving process has handed over is no failed attempt.
    """

    max_attempts: int = 3
    recovery_s: float = 30.0


class Attempts:
    """One request's count. Sans-IO."""

    def __init__(self, policy: AttemptPolicy) -> None:
        self._policy = policy
        self._failed = 0
        self._tokens = 0
        self._retracted = False
        self._moved_last = False
        self._since_s: float | None = None
        self._first: Cause | None = None

    def retracted(self) -> None:
        """The request was served, and goes on in another attempt. It is nobody's failure that it did not finish yet,
        so from now on a service that is full or not ready has to be waited for.
        """
        self._retracted = True

    def failed(self, cause: Cause, tokens: int, now_s: float) -> float | None:
        """Seconds until the next attempt may be opened after this failure, or None: the request has failed.

        `tokens` is how many the client has.
        """
        if tokens > self._tokens:
            self._failed, self._tokens, self._since_s, self._first = 0, tokens, None, None
            self._moved_last = False
        waiting, moved_again = _nobody_to_serve(cause), self._moved_last
        self._moved_last = cause.code == Draining.code
        if self._moved_last:
            return self._moved(cause, moved_again, now_s)
        if self._policy.max_attempts == 1:
            return None
        if not waiting and cause.code not in (PeerLost.code, HandoffFailed.code, Conflict.code):
            return None
        if self._since_s is None:
            if waiting and cause.code != PeerLost.code and not self._retracted:
                return None  # nothing was lost: the service is full or not ready, and the client is told so
            self._since_s, self._first = now_s, cause
        self._failed += not waiting
        if self._failed >= self._policy.max_attempts or now_s - self._since_s >= self._policy.recovery_s:
            return None
        return RETRY_S if waiting else 0.0

    def _moved(self, cause: Cause, again: bool, now_s: float) -> float | None:
        """What is leaving has refused or handed over: that is no failure, and counts as none."""
        if self._since_s is None:
            self._since_s, self._first = now_s, cause
        if now_s - self._since_s >= self._policy.recovery_s:
            return None
        return MOVED_S if again else 0.0

    def final(self, cause: Cause) -> Cause:
        """What the client is told: what failed first, because of what failed last."""
        first = self._first
        if first is None or first is cause:
            return cause
        message = f"{first.message}; no later attempt succeeded"
        return msgspec.structs.replace(first, message=message, because=cause)


def _nobody_to_serve(cause: Cause) -> bool:
    """The failure of a call that opened nothing: the service is full or not ready, or its router is gone."""
    return cause.code in (Unavailable.code, Overloaded.code) or (cause.code == PeerLost.code and cause.leg == "router")
