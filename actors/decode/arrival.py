"""What has arrived for a room beside its KV: the metadata row, and whether it is the one that was to come."""

from __future__ import annotations

import msgspec

from kvferry.actors.decode.room import DecodeRoom
from kvferry.engine.contract import Engine
from kvferry.protocol.metadata import Metadata


class Notified(msgspec.Struct, frozen=True):
    """Item: a notification came on the data path, from the agent of that name."""

    agent: str
    payload: bytes


def metadata_of(engine: Engine, room: DecodeRoom) -> Metadata:
    """The row as it lies here. The room has a holding."""
    assert room.holding is not None
    return Metadata.unpack(engine.metadata_row(room.holding.rows[0]))


def problem_of(engine: Engine, room: DecodeRoom) -> str | None:
    """What is wrong with the row, or None: then the room may be committed."""
    found = metadata_of(engine, room)
    expected = (room.room, room.peer.incarnation, room.prompt_tokens)
    if (found.room, found.incarnation, found.prompt_tokens) != expected:
        return f"the metadata row holds {found}; expected room, incarnation and prompt tokens {expected}"
    return found.token_problem(room.spec.sampling.logprobs, engine.limits.vocab_size)
