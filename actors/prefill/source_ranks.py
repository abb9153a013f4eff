"""A prompt's writes at all ranks of its prefill, as the leader orders them: its own, and those of its followers.

A chunk that the leader has ordered counts as an open write of the room's until the rank has said what became of it. So
the room's machine is done, or quiet, when that is so on every rank, and not before the source pages are.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from kvferry.actors.prefill.data_plane import Connected, DataPlane, WriteEnded
from kvferry.actors.prefill.room import PrefillRoom
from kvferry.actors.prefill.sending import Part, RankWrite, WritePlanner
from kvferry.actors.ranks.team import Team
from kvferry.engine.contract import Engine
from kvferry.protocol.errors import Cause
from kvferry.protocol.instance import CancelRoom, WriteChunk, WriteTo
from kvferry.protocol.messages import Destination
from kvferry.protocol.metadata import Metadata
from kvferry.protocol.rank import LEADER
from kvferry.transfer.chunk import Chunk
from kvferry.transfer.contract import Descriptor, Endpoint, TransferError, decode_descriptor
from kvferry.transfer.digest import Digests
from kvferry.transfer.layout import slices_in
from kvferry.transfer.ranks import routes


class SourceRanks:
    """`spawn` and `post` are the leader's."""

    def __init__(
        self,
        engine: Engine,
        endpoint: Endpoint,
        digests: Digests | None,
        team: Team,
        incarnation: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        post: Callable[[Connected | WriteEnded], None],
    ) -> None:
        self._team, self._incarnation = team, incarnation
        self._page_size = engine.limits.page_size
        self._planner = WritePlanner(engine)
        self._data_plane = DataPlane(endpoint, digests, LEADER, incarnation, spawn, post)

    # --- the destination ---

    def connect(self, room: PrefillRoom) -> None:
        """`Connected` follows; each follower connects by itself. Raises TransferError, with the reason, for a
        destination that can't be written to.
        """
        destination = room.destination
        assert destination is not None
        if destination.prefix_tokens != 0:
            raise TransferError(f"prefix_tokens is {destination.prefix_tokens}; allowed: 0")
        agents = self._agents(room, destination)
        own = {target: decode_descriptor(agent) for target, agent in agents[LEADER].items()}
        alone = self._team.size == 1 and not destination.ways
        tokens, pages = room.prompt_tokens, destination.pages
        self._planner.check(room.peer.incarnation, own, tokens, pages, destination.metadata_slot, alone)
        for rank in agents.keys() - {LEADER}:
            targets = tuple(agents[rank])
            order = WriteTo(room.room, room.peer, tokens, pages, targets, tuple(agents[rank].values()))
            self._team.send(rank, order)
        room.ranks = tuple(sorted(agents.keys() - {LEADER}))
        self._data_plane.connect(room.room, room.peer.incarnation, own)

    def _agents(self, room: PrefillRoom, destination: Destination) -> dict[int, dict[int, bytes]]:
        """Source rank -> target rank -> descriptor in wire form, checked against what must be written."""
        agents = {LEADER: {LEADER: destination.agent}}
        for way in destination.ways:
            agents.setdefault(way.source, {})[way.target] = way.agent
        targets: dict[int, Descriptor] = {}
        for ways in agents.values():
            targets |= {target: decode_descriptor(agent) for target, agent in ways.items()}
        if targets[LEADER].incarnation != room.peer.incarnation:
            text = f"the destination's agent is of process {targets[LEADER].incarnation:016x}, not decode's"
            raise TransferError(text)
        wanted: dict[int, tuple[int, ...]] = {LEADER: (LEADER,)}
        if self._team.size > 1 or len(targets) > 1:
            there = {target: slices_in(descriptor.regions) for target, descriptor in targets.items()}
            wanted = routes(self._team.slices(), there)
        found = {rank: tuple(sorted(ways)) for rank, ways in sorted(agents.items())}
        if found != wanted:
            raise TransferError(f"the destination has ways (source rank: targets) {found}; there must be {wanted}")
        if set(destination.required_acks) != wanted.keys():
            text = f"required_acks is {destination.required_acks}; the ranks that write are {tuple(wanted)}"
            raise TransferError(text)
        return agents

    def connected(self, item: Connected, is_up: bool) -> None:
        self._data_plane.connected(item, is_up)

    def link_lost(self, incarnation: int) -> None:
        """The link to a decode's leader is over."""
        self._data_plane.link_lost(incarnation)

    # --- writing ---

    def writers(self, room: PrefillRoom) -> tuple[int, ...]:
        """The ranks that read the room's source pages in order to write them."""
        return (LEADER, *room.ranks)

    def write(self, room: PrefillRoom, last: bool) -> int:
        """The next write at each rank: the tokens of the pages that have become full here, and with `last` the rest and
        the metadata. A page that is still being filled is not written before. Gives the number of writes that are open
        for it.
        """
        assert room.destination is not None and room.holding is not None
        end = room.computed if last else room.computed // self._page_size * self._page_size
        tokens = Chunk(room.posted, end, room.prompt_tokens)
        room.posted = end
        if tokens.first_token == end and not last:
            return 0
        pages = room.holding.pages[tokens.pages_in(self._page_size)]
        for rank in room.ranks:
            room.asked[rank] += 1
            order = WriteChunk(room.room, room.chunk - 1, tokens.first_token, end - tokens.first_token, pages)
            self._team.send(rank, order)
        writes = self._own_writes(room, tokens, pages)
        for write in writes:
            self._data_plane.write(room.sending, Part(room.chunk - 1, tokens), write)
        return len(room.ranks) + sum(bool(write.blocks) for write in writes)

    def _own_writes(self, room: PrefillRoom, tokens: Chunk, pages: tuple[int, ...]) -> list[RankWrite]:
        assert room.destination is not None and room.holding is not None
        row, slot = room.holding.rows[0], room.destination.metadata_slot
        writes = self._planner.writes(room.sending, tokens, pages, room.destination.pages, (row, slot))
        if tokens.last:
            kv_bytes = room.sending.kv_bytes + sum(write.kv_bytes for write in writes)
            metadata = Metadata(
                room.room, self._incarnation, room.prompt_tokens, room.first_token, kv_bytes, room.first_logprobs
            )
            self._planner.write_row(row, metadata)
        return writes

    def ended(self, room: PrefillRoom, item: WriteEnded) -> None:
        """One of our own writes."""
        self._data_plane.ended(room.sending, item)

    def cancel(self, room: PrefillRoom, cause: Cause) -> None:
        """At every rank: stop posting. Each write still ends."""
        self._data_plane.cancel(room.sending)
        self.cancel_others(room, cause)

    def cancel_others(self, room: PrefillRoom, cause: Cause) -> None:
        for rank in room.ranks:
            self._team.send(rank, CancelRoom(room.room, cause))

    def notify(self, room: PrefillRoom) -> None:
        """Of our own writes; each follower notifies of its own."""
        self._data_plane.notify(room.sending)

    def forget(self, incarnation: int) -> None:
        """The decode whose leader that is has ended."""
        self._planner.forget(incarnation)
        self._data_plane.disconnect(incarnation)
