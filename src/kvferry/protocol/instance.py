"""What the ranks of one instance say to each other: a leader to its followers, and they to it.

A leader decides and its followers carry out: they plan nothing, free no page, and tell nobody but the owner of target
pages what has become of their writes. Page numbers are the same in every rank, so one list serves all.
"""

from __future__ import annotations

from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.message import Index, Message
from kvferry.protocol.metadata import Placed
from kvferry.protocol.offer import Offer
from kvferry.protocol.rank import RankInfo


class Join(Message, frozen=True):
    """Follower -> leader, until it is answered."""

    info: RankInfo


class Joined(Message, frozen=True):
    """Leader -> follower: from here on neither lives without the other."""

    rank: int


# --- Forwards ----------------------------------------------------------------------------------------------


class RunStep(Message, frozen=True):
    """Leader -> followers: the plan of a forward, in wire form (`kvferry.engine.contract.StepPlan`)."""

    plan: bytes


class Stepped(Message, frozen=True):
    """Follower -> leader: its part of that forward has ended. `part` is what the leader needs of it for the result."""

    step: int
    part: bytes = b""


# --- Prefill: a room's writes ------------------------------------------------------------------------------


class WriteTo(Message, frozen=True):
    """Leader -> follower: this room's prompt goes to `pages` of the target ranks `targets`, whose descriptors (for this
    follower) are `agents`; `owner` is decode's leader. The target's pages may have another size than ours.
    """

    room: int
    owner: Address
    prompt_tokens: Index
    pages: tuple[Index, ...]
    targets: tuple[Index, ...]
    agents: tuple[bytes, ...]


class WriteChunk(Message, frozen=True):
    """Leader -> follower: write the prompt's tokens number `first` to `first + tokens - 1`, which lie in the source
    pages `pages`. With the prompt's end there will be no more. Each is answered by one `Wrote`.
    """

    room: int
    chunk: int
    first: Index
    tokens: Index
    pages: tuple[Index, ...]


class Wrote(Message, frozen=True):
    """Follower -> leader: nothing of that chunk is on the way any more. `flushed`: all of it lies at the targets."""

    room: int
    chunk: int
    flushed: bool
    kv_bytes: int = 0
    error: str = ""


class CancelRoom(Message, frozen=True):
    """Leader -> follower: stop posting the room's writes. Each chunk is still answered."""

    room: int
    cause: Cause


class RankFailed(Message, frozen=True):
    """Follower -> leader: it can't go on with the room."""

    room: int
    cause: Cause


class ConfirmAbort(Message, frozen=True):
    """Follower -> leader: decode has aborted a room that is not here. Can anything of it still come?"""

    room: int
    cause: Cause


class AbortConfirmed(Message, frozen=True):
    """Leader -> follower: nothing of the room comes after this."""

    room: int


# --- Decode: what arrives ----------------------------------------------------------------------------------


class Accept(Message, frozen=True):
    """Leader -> follower: the process of that incarnation, which offers that, will write here. `turn` comes back with
    the answer.
    """

    writer: int
    turn: int
    offer: Offer = Offer()


class Accepted(Message, frozen=True):
    """Follower -> leader: the wire form of the descriptor that is for that writer, or why there is none."""

    writer: int
    turn: int
    agent: bytes
    error: str = ""


class Revoke(Message, frozen=True):
    """Leader -> follower: destroy the agent by which that process writes here. `ended`: the process has."""

    writer: int
    ended: bool = False


class RevokedAt(Message, frozen=True):
    """Follower -> leader: that writer's agent of this generation is gone; -1: that proves nothing."""

    writer: int
    generation: int


class Expect(Message, frozen=True):
    """Leader -> follower: so many more (or fewer) rooms expect data."""

    change: int


class Arrived(Message, frozen=True):
    """Follower -> leader: a source rank's notification has come to this target rank on the data path. Its fields are
    those of `kvferry.protocol.metadata.Notification`.
    """

    room: int
    source: int
    incarnation: int
    placed: tuple[Placed, ...] = ()
    last: bool = True


class TakeDigest(Message, frozen=True):
    """Leader -> follower: of what the source rank of that process has written of tokens number `first` to
    `first + tokens - 1` of a prompt; here they lie in `pages`. Answered by one `Digested`.
    """

    room: int
    source: int
    incarnation: int
    first: Index
    tokens: Index
    prompt_tokens: Index
    pages: tuple[Index, ...]


class Digested(Message, frozen=True):
    """Follower -> leader: the digest of those bytes as they lie here, or why there is none."""

    room: int
    source: int
    first: int
    digest: int = 0
    error: str = ""
