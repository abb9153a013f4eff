"""What decode's leader and prefill's ranks say to each other about a room's transfer."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.protocol.errors import Cause
from kvferry.protocol.message import Index, Message


class Way(msgspec.Struct, frozen=True, array_like=True):
    """How source rank `source` writes to target rank `target`: the wire form of the descriptor that is for it."""

    source: Index
    target: Index
    agent: bytes


class Destination(Message, frozen=True):
    """Where the prompt's KV goes: one target page list for all layers and ranks, and the row for the metadata.

    `agent` is the wire form of the data-plane descriptor (`kvferry.transfer.contract.Descriptor`) by which prefill's
    leader writes to decode's; `ways` are those of all other pairs of ranks that have something to write.
    `required_acks` are the source ranks with at least one write in the plan; the metadata goes from leader to leader,
    so prefill's is always among them.
    """

    room: int
    pages: tuple[Index, ...]
    prefix_tokens: Index
    metadata_slot: Index
    agent: bytes
    generation: int
    required_acks: tuple[Index, ...]
    ways: tuple[Way, ...] = ()


class AbortTransfer(Message, frozen=True):
    """Decode -> prefill: stop posting, and say `Drained` when nothing more can land."""

    room: int
    cause: Cause


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's writes of a room took, added up: seconds between the call and the first post, seconds from there to
    the last flush, and descriptors. None where the backend can't tell.
    """

    wait_s: float | None = None
    wire_s: float | None = None
    descriptors: int | None = None

    def plus(self, other: Measured) -> Measured:
        return Measured(
            _plus(self.wait_s, other.wait_s),
            _plus(self.wire_s, other.wire_s),
            _plus(self.descriptors, other.descriptors),
        )


def _plus(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other


class Drained(Message, frozen=True):
    """Source rank -> owner of the target pages, with a copy to the room (a follower's goes through its leader).

    Every write of the room by this rank is flushed or will never be posted. `complete` = everything was written;
    otherwise `cause` may say why not. The leader's says the last word for all ranks: it comes when none of them has a
    write open. `backend` is what carried them.
    """

    room: int
    rank: int
    complete: bool
    kv_bytes: int = 0
    metadata_bytes: int = 0
    cause: Cause | None = None
    backend: str = ""
    measured: Measured = Measured()


class Reconcile(Message, frozen=True):
    """Decode -> prefill, first in each new session: it has given these rooms up and can't prove that nobody writes to
    their pages. Prefill stops what is left of each and answers for each: `Drained`, `Draining`, or `UnknownRoom`, which
    counts as drained, since a room is forgotten only when its writes have ended.
    """

    rooms: tuple[int, ...]


class Draining(Message, frozen=True):
    """Source rank -> owner of the target pages: the room's writes have not all ended; `Drained` will follow.

    `broken`: it won't, since a write ended without saying what landed. Said again and again, until decode no longer
    knows the room.
    """

    room: int
    rank: int
    broken: bool = False


class Distrust(Message, frozen=True):
    """Decode -> prefill: what came of a room of this group of samples failed its check. What prefill keeps of their
    prompt is to be computed again.
    """

    group: int


class DataPath(Message, frozen=True):
    """Decode -> room: by which backend the KV comes, and why, where there was a choice."""

    room: int
    backend: str
    why: str
