"""Pages of rooms that have been given up, while peers may still write to them: how proof is sought, and what it costs.

A new session with a writer starts by asking it. Where we can shut a writer out (`Proofs.revoked`), that is done when
the link to it is lost or when it owes us its word for too long. Where only its end is proof (`Proofs.exited`), it is
killed when that takes too many pages, or too long. No timer frees a page.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse

from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.decode.writers import Writers
from kvferry.actors.ports import Network
from kvferry.actors.settings import DecodeSettings
from kvferry.memory.ledger import PageLedger
from kvferry.protocol.address import Address
from kvferry.protocol.messages import OverBudget, Reconcile, Released
from kvferry.protocol.receiver import ReceiverState

logger = logging.getLogger("kvferry.decode")


class Quarantine:
    """`rooms` are the leader's own, by id. The machines say what is proved; here is what is done for it."""

    def __init__(
        self,
        rooms: Mapping[int, DecodeRoom],
        writers: Writers,
        network: Network,
        ledger: PageLedger,
        settings: DecodeSettings,
        counts: Counter[str],
    ) -> None:
        self._rooms, self._writers, self._network, self._ledger = rooms, writers, network, ledger
        self._settings, self._counts = settings, counts

    def begin(self, room: DecodeRoom, now_s: float) -> None:
        assert room.holding is not None
        room.quarantined_s = now_s
        self._ledger.quarantine(room.holding)

    def new_session(self, peer: Address) -> None:
        """Ask for what we can't prove."""
        if rooms := [room.room for room in self._given_up() if peer.incarnation in room.machine.not_quiet]:
            self._network.send(peer.incarnation, Reconcile(tuple(rooms)))

    def lost(self, peer: Address) -> None:
        """All that it and its fellow ranks were writing has failed."""
        fellows = {writer for room in self._given_up() if room.peer == peer for writer in room.machine.not_quiet}
        for writer in {peer.incarnation} | fellows:
            if self._writers.can_be_shut_out(writer):
                self._writers.shut_out(writer)

    def broken(self, room: DecodeRoom, writer: int) -> None:
        """A write of the room ended without its writer's knowing what landed: no word of its own will come."""
        if writer in room.machine.not_quiet and can_be_revoked(room, writer):
            self._writers.shut_out_of(room, writer)

    def seek(self, now_s: float) -> None:
        """Again and again. Proof comes over a link: if prefill still lives, a new session answers."""
        for room in self._given_up():
            for rank in room.machine.unproven:
                self._network.dial(room.sources[rank])
            if now_s - room.quarantined_s >= self._settings.revoke_after_s:
                for writer in room.machine.not_quiet:
                    if can_be_revoked(room, writer):
                        self._writers.shut_out_of(room, writer)

    def over_budget(self, now_s: float) -> list[OverBudget]:
        """The processes to end, where we can't shut a writer out, and its end is proof."""
        settings = self._settings
        return over_budget(
            self._given_up(),
            self._ledger.total,
            settings.quarantine_budget,
            settings.quarantine_s,
            now_s,
            self._writers.has_ended,
        )

    def end_writer(self, incarnation: int, now_s: float) -> bool:
        """End that very process of this host, if pages still wait for it: never its successor. True when done."""
        found = [overdue for overdue in self.over_budget(now_s) if overdue.incarnation == incarnation]
        if not found or not self._network.kill(incarnation):
            return False
        self._counts["writers killed over the quarantine's budget"] += 1
        logger.warning(
            "%s, process %016x, is killed: %d pages have waited for its word, for %.1f s",
            found[0].instance, incarnation, found[0].pages, found[0].quarantined_s,
        )  # fmt: skip
        return True

    def end(self, room: DecodeRoom, pages: int, now_s: float) -> Released:
        """The pages are free: news for the room's journal."""
        proof, for_s = room.quiet.names(room.machine.writers), now_s - room.quarantined_s
        self._counts[f"pages back from quarantine: {proof}"] += pages
        logger.info("room %d: %d pages are free again after %.3f s: %s", room.room, pages, for_s, proof)
        return Released(room.room, proof, pages, round(for_s, 6))

    def _given_up(self) -> list[DecodeRoom]:
        return [room for room in self._rooms.values() if room.machine.state is ReceiverState.RELEASING]


def can_be_revoked(room: DecodeRoom, writer: int) -> bool:
    """There is a way of that writer's that proves something by being destroyed, and is not closed yet."""
    return any(proofs.revoked and pair not in room.closed for pair, proofs in room.proofs.items() if pair[0] == writer)


def must_exit(room: DecodeRoom, writer: int) -> bool:
    """There is a way of that writer's that we can't close, and its end is proof for it."""
    return any(p.exited and not p.revoked for pair, p in room.proofs.items() if pair[0] == writer)


@dataclass
class _Waiting:
    instance: str
    pages: set[int] = field(default_factory=set)
    since_s: float = float("inf")


def over_budget(
    rooms: Iterable[DecodeRoom],
    total: int,
    budget: float,
    limit_s: float,
    now_s: float,
    has_ended: Callable[[int], bool],
) -> list[OverBudget]:
    """The processes to end: those that keep a page for `limit_s`, and, when more than the share `budget` of `total`
    pages is quarantined, those that keep the most, until the rest would fit. Never one that has ended already.
    """
    waiting: dict[int, _Waiting] = {}
    for room in rooms:
        if room.holding is not None and room.holding.quarantined:
            for writer in filter(partial(must_exit, room), filterfalse(has_ended, room.machine.not_quiet)):
                record = waiting.setdefault(writer, _Waiting(room.peer.name))
                record.pages |= set(room.holding.pages)
                record.since_s = min(record.since_s, room.quarantined_s)
    chosen = {writer for writer, record in waiting.items() if now_s - record.since_s >= limit_s}
    for writer, _ in sorted(waiting.items(), key=lambda item: (-len(item[1].pages), item[0])):
        left = {page for other, record in waiting.items() if other not in chosen for page in record.pages}
        if len(left) <= budget * total:
            break
        chosen.add(writer)
    return [
        OverBudget(waiting[w].instance, w, len(waiting[w].pages), round(now_s - waiting[w].since_s, 3))
        for w in sorted(chosen)
    ]
