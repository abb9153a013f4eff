"""Whether what lies here is what was written: digests of received chunks, taken where they lie and compared with those
that their source ranks have taken.

A chunk is checked as soon as its source rank says that it is flushed, while the next one is still on its way. Digests
are taken by the rank in whose memory the chunk lies; the leader compares. What comes of a room that has ended
meanwhile, whose pages may be another's by then, is dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

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
from kvferry.transfer.plan import Pairing, pair_common, plan_pages, plan_row


class DigestTaken(msgspec.Struct, frozen=True):
    """Item: of the chunk that begins with the prompt's page number `first`, as it lies at rank `target`."""

    room: int
    source: int
    target: int
    first: int
    digest: int = 0
    error: str = ""


#: Source rank, target rank, number of the prompt's page that the chunk begins with.
Part = tuple[int, int, int]


@dataclass
class RoomChecks:
    """`told`: what source ranks have said to be placed; `open`: the parts of it that are not checked yet."""

    told: dict[Part, Placed] = field(default_factory=dict)
    open: set[Part] = field(default_factory=set)

    def gap(self, pairs: Sequence[tuple[int, int]], pages: int) -> str | None:
        """What the pairs of ranks have not told of a prompt of so many pages, or None when they have told all."""
        for source, target in pairs:
            placed = sorted(
                (part for key, part in self.told.items() if key[:2] == (source, target)), key=lambda part: part.first
            )
            end = 0
            for part in placed:
                if part.first != end:
                    break
                end += part.pages
            if end != pages:
                return f"rank {source} has told of {end} pages that it wrote to rank {target}; there are {pages}"
            if (source, target) == (LEADER, LEADER) and not any(part.row for part in placed):
                return "prefill's leader has not told of a metadata row"
        return None


class OwnDigests:
    """Digests of what lies in this rank's memory. What each source process writes from is known from the first message
    on its path; it is forgotten with that process's agent.
    """

    def __init__(self, engine: Engine, digests: Digests) -> None:
        self._regions, self._digests = engine.regions(), digests
        self._sources: dict[int, tuple[Region, ...]] = {}
        self._pairings: dict[int, Pairing] = {}

    def introduced(self, news: Introduction) -> None:
        """Raises TransferError for what is no list of regions."""
        self._sources[news.incarnation] = decode_regions(news.regions)
        self._pairings.pop(news.incarnation, None)

    def forget(self, incarnation: int) -> None:
        self._sources.pop(incarnation, None)
        self._pairings.pop(incarnation, None)

    async def take(self, incarnation: int, pages: Sequence[int], row: int | None = None) -> int:
        """Of what that process has written to these pages, and to that metadata row behind them, in the order of its
        write. Raises TransferError when it is not known what that is.
        """
        pairing = self._pairing(incarnation)
        spans = plan_pages(pairing, np.arange(len(pages)), np.asarray(pages, dtype=np.int64))
        if row is not None:
            spans = np.concatenate([spans, plan_row(pairing, METADATA, 0, row)])
        return await self._digests.of(spans, "target")

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
        spawn: Callable[[Awaitable[None]], None],
        post: Callable[[DigestTaken], None],
    ) -> None:
        self.own, self._team, self._spawn, self._post = own, team, spawn, post

    def begin(self, room: int, checks: RoomChecks, key: Part, incarnation: int, pages: Sequence[int], row: int) -> None:
        """Check one more part of the room: `DigestTaken` follows. `pages` is the room's whole list."""
        (source, target, first), placed = key, checks.told[key]
        checks.open.add(key)
        part = tuple(pages[first : first + placed.pages])
        if target == LEADER:
            self._spawn(self._take(room, source, first, incarnation, part, row if placed.row else None))
        else:
            self._team.send(target, TakeDigest(room, source, incarnation, first, part))

    async def _take(
        self, room: int, source: int, first: int, incarnation: int, pages: Sequence[int], row: int | None
    ) -> None:
        try:
            taken = DigestTaken(room, source, LEADER, first, await self.own.take(incarnation, pages, row))
        except TransferError as error:
            taken = DigestTaken(room, source, LEADER, first, error=str(error))
        self._post(taken)
