"""A prompt in chunks: how much of it the next forward takes, and that forward's part of the engine's plan.

Not here: which rooms are computed, and in what order; that is for the leaders.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.actors.leg_room import LegRoom
from kvferry.engine.contract import Sequence
from kvferry.engine.history import Past
from kvferry.memory.ledger import PageLedger


@dataclass(kw_only=True)
class ChunkedRoom(LegRoom):
    """A room whose prompt is computed here. `computed` counts its tokens, `chunk` the chunks computed."""

    computed: int = 0
    chunk: int = 0

    @property
    def remaining(self) -> int:
        return self.prompt_tokens - self.computed


def next_chunk(remaining: int, most: int, page_size: int) -> int:
    """Tokens of the next chunk, 0 when it has to wait for another forward. `most` may be taken: by the limit of a
    chunk, and by what is left of the forward's budget. Only a prompt's end leaves a page open.
    """
    if remaining <= most:
        return remaining
    return max(most, 0) // page_size * page_size


def chunk_of(room: ChunkedRoom, size: int, step: int, ledger: PageLedger) -> Sequence:
    """The room's next `size` tokens, as forward `step` computes them; with the prompt's end, its first token is drawn.
    From here on the room's pages and its machine wait for that forward. The room has a holding.
    """
    assert room.holding is not None
    ledger.name_in_step(room.holding, step)
    room.machine.step_started()
    start, end, pages = room.computed, room.computed + size, room.holding.pages
    fed = room.spec.fed_ids[start:end]
    if end < room.prompt_tokens:
        return Sequence(room.room, fed, start, pages)
    return Sequence(room.room, fed, start, pages, room.spec.sampling, Past(room.spec).history())
