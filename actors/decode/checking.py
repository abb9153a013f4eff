"""The part of decode's leader that checks what has arrived, before anything is committed.

Not here: how digests are taken and which bytes they are about (checks.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvferry.actors.decode.arrival import problem_of
from kvferry.actors.decode.checks import Checks, DigestTaken, OwnDigests, Part, chunk_of
from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.leader import Leader
from kvferry.actors.parts import Parts
from kvferry.obs.rooms import CHECKS_FAILED
from kvferry.protocol.address import Address
from kvferry.protocol.instance import Digested
from kvferry.protocol.messages import Distrust
from kvferry.protocol.metadata import Introduction, Placed
from kvferry.protocol.rank import LEADER
from kvferry.protocol.receiver import ReceiverEvent, ReceiverState
from kvferry.transfer.contract import TransferError

logger = logging.getLogger("kvferry.decode")

_CHECKED_IN = (ReceiverState.RECEIVING, ReceiverState.CHECKING)


class Checking(Leader[DecodeRoom]):
    """Base of `Receiving`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._checks: Checks | None = None
        if self.digests is not None:
            own = OwnDigests(self.engine, self.digests)
            self._checks = Checks(own, self.team, self.spawn, self._mailbox.put)
        self._on_message |= {Digested: self._digested}

    def receive_other(self, item: Any) -> None:
        if isinstance(item, DigestTaken):
            self._digest_taken(item)
        else:
            super().receive_other(item)

    def introduced(self, news: Introduction) -> None:
        """A source process has said what it writes from."""
        if self._checks is not None:
            try:
                self._checks.own.introduced(news)
            except TransferError:
                self.counts["notifications that do not decode"] += 1

    def forget_source(self, incarnation: int) -> None:
        """Its agent here is gone."""
        if self._checks is not None:
            self._checks.own.forget(incarnation)

    def begin_checks(self, room: DecodeRoom, source: int, target: int, told: Sequence[Placed]) -> None:
        """A source rank has said what it has placed at one of ours; what it has said before is being checked."""
        if self._checks is not None:
            for placed in told:
                self._begin_check(self._checks, room, (source, target, placed.first), placed)

    def _begin_check(self, checks: Checks, room: DecodeRoom, key: Part, placed: Placed) -> None:
        receives = room.machine.state is ReceiverState.RECEIVING
        if not receives or room.holding is None or key in room.checks.told:
            return
        room.checks.told[key] = placed
        prompt_tokens, row = room.prompt_tokens, room.holding.rows[0] if placed.row else None
        end = placed.first + placed.tokens
        if end > prompt_tokens or (placed.row and (key[:2] != (LEADER, LEADER) or end != prompt_tokens)):
            text = f"rank {key[0]} says that it has written {placed}, of a prompt of {prompt_tokens} tokens"
            self._check_failed(room, text)
            return
        room.checks.open.add(key)
        tokens = chunk_of(placed, prompt_tokens)
        pages = room.holding.pages[tokens.pages_in(self.page_size)]
        checks.begin(room.room, key, room.machine.writers[key[0]], tokens, pages, row)

    def _digested(self, peer: Address, message: Digested) -> None:
        """A follower's."""
        if (rank := self.team.rank_of(peer)) is not None:
            part = message.room, message.source, rank, message.first
            self._digest_taken(DigestTaken(*part, message.digest, message.error))

    def _digest_taken(self, taken: DigestTaken) -> None:
        """Of a room that is over it says nothing: its pages may be another's."""
        room, key = self.rooms.get(taken.room), (taken.source, taken.target, taken.first)
        if room is None or key not in room.checks.open or room.machine.state not in _CHECKED_IN or not room.holding:
            self.counts["checks of rooms that had ended"] += 1
            return
        room.checks.open.discard(key)
        placed = room.checks.told[key]
        if not taken.error and taken.digest == placed.digest:
            self._clear(room)
            room.clocks.progress(self.clock.now_s())
            self.settle_checks(room)
            return
        where = f"chunk {placed.chunk} (tokens {placed.first} to {placed.first + placed.tokens - 1} of the prompt"
        where += ", and the metadata row)" if placed.row else ")"
        ranks = f"from rank {taken.source} of {room.peer.name} to rank {taken.target}"
        found = taken.error or f"its digest is {taken.digest:016x} here, and was {placed.digest:016x} at its source"
        pages = room.holding.pages[chunk_of(placed, room.prompt_tokens).pages_in(self.page_size)]
        self._check_failed(room, f"{where} {ranks}: {found}", pages if not taken.error else ())

    def _clear(self, room: DecodeRoom) -> None:
        """Pages of which all has passed are no suspects any more."""
        if self.ledger.suspects and room.holding is not None:
            proven = room.checks.proven(_pairs_of(room), room.prompt_tokens, self.page_size)
            self.ledger.clear(room.holding.pages[index] for index in proven)

    def settle_checks(self, room: DecodeRoom) -> None:
        """Commit, or fail, once all is written and every check has been made."""
        if room.machine.state is not ReceiverState.CHECKING or room.checks.open:
            return
        problem = None
        if self._checks is not None:
            problem = room.checks.gap(_pairs_of(room), room.prompt_tokens)
        problem = problem or problem_of(self.engine, room)
        if problem is None:
            self.act(room, room.machine.handle(ReceiverEvent.CHECKED))
        else:
            self._check_failed(room, problem)

    def _check_failed(self, room: DecodeRoom, problem: str, blamed: Sequence[int] = ()) -> None:
        """`blamed`: the pages in which what differs lies."""
        self.counts[CHECKS_FAILED] += 1
        logger.warning("room %016x: %s", room.room, problem)
        self.ledger.blame(blamed)
        if room.spec.group:
            self.network.send(room.peer.incarnation, Distrust(room.spec.group))
        self.fail(room, ReceiverEvent.CHECK_FAILED, problem, room.peer.name, "handoff_failed")


def _pairs_of(room: DecodeRoom) -> list[tuple[int, int]]:
    """The (source rank, target rank) that write, and are written to."""
    return [(source, target) for source, targets in room.routes.items() for target in targets]
