"""Whether what lies here is what was written: digests of received chunks, taken where they lie and compared with those
that their source ranks have taken.

A chunk is checked as soon as its source rank says that it is flushed, while the next one is still on its way. Digests
are taken by the rank in whose memory the chunk lies; the leader compares. What comes of a room that has ended
meanwhile, whose pages may be another's by then, is dropped.

A chunk is tokens: where they lie at their source is not known here and changes nothing, since a digest is taken over
the plan's packed stream, which does not depend on page numbers. A chunk may begin and end within a page here, and then
its digest is about its own part of that page.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvferry.actors.ranks.team import Team
from kvferry.engine.contract import Engine
from kvferry.protocol.instance import TakeDigest
from kvferry.protocol.metadata import Introduction, Placed
from kvferry.protocol.rank import LEADER
from kvferry.transfer.contract import Region, TransferError, decode_regions
from kvferry.transfer.digest import Digests
from kvferry.transfer.layout import METADATA
from kvferry.transfer.plan import Chunk, Held, Pairing, pair_common, plan


class DigestTaken(msgspec.Struct, frozen=True):
    """Item: of the chunk that begins with the prompt's token number `first`, as it lies at rank `target`."""

    room: int
    source: int
    target: int
    first: int
    digest: int = 0
    error: str = ""


#: Source rank, target rank, number of the prompt's token that the chunk begins with.
Part = tuple[int, int, int]
Pairs = Sequence[tuple[int, int]]


def chunk_of(placed: Placed, prompt_tokens: int) -> Chunk:
    """Raises TransferError for tokens that the prompt does not have."""
    return Chunk(placed.first, placed.first + placed.tokens, prompt_tokens)


@dataclass
class RoomChecks:
    """`told`: what source ranks have said to be placed; `open`: the parts of it that are not checked yet."""

    told: dict[Part, Placed] = field(default_factory=dict)
    open: set[Part] = field(default_factory=set)

    def gap(self, pairs: Pairs, tokens: int) -> str | None:
        """What the pairs of ranks have not told of a prompt of so many tokens, or None when they have told all."""
        for source, target in pairs:
            placed = sorted(
                (part for key, part in self.told.items() if key[:2] == (source, target)), key=lambda part: part.first
            )
            end = 0
            for part in placed:
                if part.first != end:
                    break
                end += part.tokens
            if end != tokens:
                return f"rank {source} has told of {end} tokens that it wrote to rank {target}; there are {tokens}"
            if (source, target) == (LEADER, LEADER) and not any(part.row for part in placed):
                return "prefill's leader has not told of a metadata row"
        return None

    def proven(self, pairs: Pairs, tokens: int, page_size: int) -> tuple[int, ...]:
        """Of a prompt of so many tokens, which pages are right as a whole: all of their tokens have passed, as written
        by each of the pairs. A page that two chunks lie in, or that two ranks write to, is not proven by one of them.
        """
        right = np.ones(tokens, dtype=bool)
        for pair in pairs:
            passed = np.zeros(tokens, dtype=bool)
            for key, part in self.told.items():
                if key[:2] == pair and key not in self.open:
                    passed[part.first : part.first + part.tokens] = True
            right &= passed
        return tuple(np.flatnonzero(np.logical_and.reduceat(right, np.arange(0, tokens, page_size))).tolist())


class OwnDigests:
    """Digests of what lies in this rank's memory. What each source process writes from is known from the first message
    on its path; it is forgotten with that process's agent.
    """

    def __init__(self, engine: Engine, digests: Digests) -> None:
        self._regions, self._digests = engine.regions(), digests
        self._page_size = engine.limits.page_size
        self._sources: dict[int, tuple[Region, ...]] = {}
        self._pairings: dict[int, Pairing] = {}

    def introduced(self, news: Introduction) -> None:
        """Raises TransferError for what is no list of regions."""
        self._sources[news.incarnation] = decode_regions(news.regions)
        self._pairings.pop(news.incarnation, None)

    def forget(self, incarnation: int) -> None:
        self._sources.pop(incarnation, None)
        self._pairings.pop(incarnation, None)

    async def take(self, incarnation: int, tokens: Chunk, pages: Sequence[int], row: int | None = None) -> int:
        """Of what that process has written of these tokens, which lie in these pages here, and of that metadata row, in
        the order of its write. Raises TransferError when it is not known what that is.
        """
        pairing = self._pairing(incarnation)
        size = pairing.page_size("source")
        slots: tuple[dict[str, int], ...] = ({}, {}) if row is None else ({METADATA: 0}, {METADATA: row})
        # Any page numbers do for the source: the bytes are in the order of the tokens.
        source = Held(np.arange(tokens.pages_in(size).stop if size else 0), slots[0])
        target = Held(tokens.listed("target", pages, self._page_size), slots[1])
        return await self._digests.of(plan(pairing, tokens, source, target).blocks, "target")

    def _pairing(self, incarnation: int) -> Pairing:
        known = self._pairings.get(incarnation)
        if known is None:
            source = self._sources.get(incarnation)
            if source is None:
                raise TransferError(f"process {incarnation:016x} has not said what it writes from")
            known = self._pairings[incarnation] = pair_common(source, self._regions)
        return known


class Checks:
    """The leader's. `spawn` and `post` are the actor's."""

    def __init__(
        self,
        own: OwnDigests,
        team: Team,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        post: Callable[[DigestTaken], None],
    ) -> None:
        self.own, self._team, self._spawn, self._post = own, team, spawn, post

    def begin(
        self, room: int, key: Part, incarnation: int, tokens: Chunk, pages: Sequence[int], row: int | None
    ) -> None:
        """Check one more part of the room: `DigestTaken` follows. `pages` are those that the tokens lie in; `row` is
        the metadata's, if it is a part of it.
        """
        source, target, first = key
        if target == LEADER:
            self._spawn(self._take(room, source, incarnation, tokens, pages, row))
        else:
            count = tokens.end_token - first
            self._team.send(
                target, TakeDigest(room, source, incarnation, first, count, tokens.prompt_tokens, tuple(pages))
            )

    async def _take(
        self, room: int, source: int, incarnation: int, tokens: Chunk, pages: Sequence[int], row: int | None
    ) -> None:
        first = tokens.first_token
        try:
            taken = DigestTaken(room, source, LEADER, first, await self.own.take(incarnation, tokens, pages, row))
        except TransferError as error:
            taken = DigestTaken(room, source, LEADER, first, error=str(error))
        self._post(taken)
