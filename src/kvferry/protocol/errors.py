"""Every error the product raises, and whose fault it is.

    KVFerryError
    ├── LocalError                 a caller in this process broke a rule; nothing was changed
    │   ├── IllegalEvent           a machine was given a command that its state does not allow
    │   ├── LedgerError            a page was moved against the ownership rules
    │   └── ConfigError            configuration: path, value, what is allowed
    ├── RequestError               the client's request can't be served as written
    │   ├── InvalidRequest    400  names field, value and limit
    │   └── ModelNotFound     404
    └── PeerError                  another process, or the wire to it
        ├── Overloaded        429  a configured limit is reached; carries retry_after_s
        ├── Unavailable       503  no pair of instances can serve now; carries retry_after_s if that is known
        │   └── Draining      503  the process is leaving; another one will take the request
        ├── HandoffFailed     502  a leg of the room failed
        ├── Conflict          409  the room's id is taken by another room; the next attempt has another id
        ├── PeerLost          502  the process or the link to it ended
        └── DeadlineExceeded  504  one of the room's clocks ran out

A failure crosses the wire as a `Cause` (below), whose `code` is the `code` of one of these classes.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something failed, in a form that travels. `because` is the cause of this cause."""

    code: str
    message: str
    leg: str = ""  # "prefill", "decode", "router", "front"
    rank: int = -1
    peer: str = ""
    room: int = 0
    state: str = ""
    elapsed_s: float = 0.0
    param: str | None = None
    because: Cause | None = None

    def text(self) -> str:
        """One line for logs and clients: message, where, and the chain of causes."""
        where = [f"room {self.room}"] if self.room else []
        where += [f"leg {self.leg}"] if self.leg else []
        where += [f"rank {self.rank}"] if self.rank >= 0 else []
        where += [f"peer {self.peer}"] if self.peer else []
        where += [f"state {self.state}"] if self.state else []
        where += [f"after {self.elapsed_s:.3f} s"] if self.elapsed_s else []
        line = self.message + (f" ({', '.join(where)})" if where else "")
        return f"{line}; because {self.because.text()}" if self.because else line


class KVFerryError(Exception):
    """Root. `http_status` is what the API answers when this reaches it."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500


class LocalError(KVFerryError):
    """The caller's mistake, in this process."""


class IllegalEvent(LocalError):
    """A local caller gave a machine a command that its state does not allow; the machine is unchanged."""


class LedgerError(LocalError):
    """A page was to be moved against the ownership rules; the ledger is unchanged."""


class ConfigError(LocalError):
    """A configuration value is not acceptable: `path` of the key, its `value`, and what is `allowed`."""

    code = "config_error"

    def __init__(self, path: str, value: object, allowed: str) -> None:
        self.path, self.value, self.allowed = path, value, allowed
        super().__init__(f"{path}: {value!r} is not acceptable; allowed: {allowed}")


class RequestError(KVFerryError):
    """The client's request is at fault."""

    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class InvalidRequest(RequestError):
    """A field of the request is wrong; the message names field, value and limit."""

    code = "invalid_request"


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404


class PeerError(KVFerryError):
    """Another process, or the wire to it, is at fault. Carries the `Cause` that came with it."""

    code = "peer_error"
    http_status = 502

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        super().__init__(cause.text())


class Overloaded(PeerError):
    """Refused by a limit of the configuration (queue, live requests); `retry_after_s` is a computed estimate."""

    code = "overloaded"
    http_status = 429

    def __init__(self, cause: Cause, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(cause)


class Unavailable(PeerError):
    """Nobody can serve: instances are missing, draining, or their breakers are open. `retry_after_s` 0: unknown."""

    code = "unavailable"
    http_status = 503

    def __init__(self, cause: Cause, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(cause)


class Draining(Unavailable):
    """A process that leaves has refused or handed over: nothing has failed, and another process will take it."""

    code = "draining"


class HandoffFailed(PeerError):
    code = "handoff_failed"


class Conflict(PeerError):
    """Two routers have drawn one room id: whoever comes second is refused, and nothing is changed for the first."""

    code = "conflict"
    http_status = 409


class PeerLost(PeerError):
    code = "peer_lost"


class DeadlineExceeded(PeerError):
    code = "deadline_exceeded"
    http_status = 504


BY_CODE: dict[str, type[PeerError]] = {
    cls.code: cls for cls in (Overloaded, Unavailable, Draining, HandoffFailed, Conflict, PeerLost, DeadlineExceeded)
}


def error_from(cause: Cause) -> KVFerryError:
    """The exception for a cause that came over the wire; an unknown code becomes `HandoffFailed`."""
    if cause.code == InvalidRequest.code:
        return InvalidRequest(cause.text(), cause.param)
    if cause.code == ModelNotFound.code:
        return ModelNotFound(cause.text(), cause.param)
    return BY_CODE.get(cause.code, HandoffFailed)(cause)
