"""The page ledger: who owns which page, and the one way back to the free list.

Each page is in exactly one state, the first that fits: quarantined, leased (a peer may write or read it), owned,
cached, free. A page changes hands only as part of a *holding*: pages (and metadata rows) reserved together for
one room and released together, on proof.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvferry.memory.proof import Drained, Exited, NeverGiven, Quiescent
from kvferry.protocol.errors import LedgerError


class PageCounts(msgspec.Struct, frozen=True):
    """Pages by state; the five states add up to `total`."""

    total: int
    free: int
    owned: int
    leased: int
    cached: int
    quarantined: int

    @property
    def conserved(self) -> bool:
        return self.total == self.free + self.owned + self.leased + self.cached + self.quarantined

    @property
    def at_baseline(self) -> bool:
        """Nothing in use: owned = leased = quarantined = 0 and free + cached = total."""
        return self.conserved and not (self.owned or self.leased or self.quarantined)


@dataclass(frozen=True)
class Lease:
    """A peer may write (or read) until each of `required_acks` has drained, or process `writer` has ended.

    `writer` is 0 where the end of a process proves nothing (our own reads).
    """

    required_acks: frozenset[int]
    writer: int


@dataclass
class Holding:
    """Pages and rows reserved together for one owner. Only the ledger changes it."""

    id: int
    owner: int
    pages: tuple[int, ...]
    rows: tuple[int, ...]
    last_step: int = -1  # the last forward whose plan names the pages
    lease: Lease | None = None
    was_given: bool = False
    quarantined: bool = False
    released: bool = field(default=False, repr=False)


class PageLedger:
    """`pages` pages (ids from 0) and `rows` metadata rows. Not thread-safe: one actor owns it."""

    def __init__(self, pages: int, rows: int = 0) -> None:
        self.total = pages
        self._free: deque[int] = deque(range(pages))
        self._free_rows: deque[int] = deque(range(rows))
        self._holdings: dict[int, Holding] = {}
        self._next = 1

    @property
    def free(self) -> int:
        return len(self._free)

    def reserve(self, owner: int, pages: int, rows: int = 0) -> Holding | None:
        """Take `pages` pages and `rows` rows for `owner`, all or none: None when either runs short."""
        if pages < 1 or rows < 0:
            raise LedgerError(f"room {owner}: {pages} pages and {rows} rows can't be reserved; at least 1 and 0")
        if pages > len(self._free) or rows > len(self._free_rows):
            return None
        holding = Holding(
            self._next,
            owner,
            tuple(self._free.popleft() for _ in range(pages)),
            tuple(self._free_rows.popleft() for _ in range(rows)),
        )
        self._next += 1
        self._holdings[holding.id] = holding
        return holding

    def name_in_step(self, holding: Holding, step: int) -> None:
        """Forward `step` will read or write the pages."""
        self._must_be_live(holding)
        holding.last_step = max(holding.last_step, step)

    def lease(self, holding: Holding, required_acks: Iterable[int], writer: int) -> None:
        """Hand the pages to peers. From here on they need a peer's proof."""
        self._must_be_live(holding)
        if holding.lease is not None:
            raise LedgerError(f"room {holding.owner}: the pages are leased already")
        holding.lease = Lease(frozenset(required_acks), writer)
        holding.was_given = True

    def end_lease(self, holding: Holding, proof: Drained) -> None:
        """The peers are done with the pages; the owner keeps them. Raises LedgerError without every ack."""
        self._must_be_live(holding)
        self._check_peers(holding, proof)
        holding.lease = None
        holding.quarantined = False

    def quarantine(self, holding: Holding) -> None:
        """The owner has no more use for the pages, and there is no proof yet."""
        self._must_be_live(holding)
        holding.quarantined = True

    def release(self, holding: Holding, proof: Quiescent) -> None:
        """Return the pages and rows to the free lists. Raises LedgerError, with nothing changed, if the proof does
        not cover the holding's last forward or its lease.
        """
        self._must_be_live(holding)
        if proof.holding != holding.id:
            raise LedgerError(f"room {holding.owner}: the proof is about holding {proof.holding}, not {holding.id}")
        if proof.own.step < holding.last_step:
            raise LedgerError(
                f"room {holding.owner}: forward {holding.last_step} names the pages, and only {proof.own.step} is done"
            )
        self._check_peers(holding, proof.peers)
        holding.released = True
        del self._holdings[holding.id]
        self._free.extend(holding.pages)
        self._free_rows.extend(holding.rows)

    def counts(self) -> PageCounts:
        by_state: Counter[str] = Counter()
        for holding in self._holdings.values():
            by_state[state_of(holding)] += len(holding.pages)
        owned, leased, quarantined = by_state["owned"], by_state["leased"], by_state["quarantined"]
        return PageCounts(self.total, len(self._free), owned, leased, cached=0, quarantined=quarantined)

    def audit(self, tables: Mapping[int, Iterable[int]]) -> PageCounts:
        """Recount every page from the owners' own block tables (room -> pages) and compare.

        Raises LedgerError naming the first page that is missing, counted twice or held by nobody.
        """
        seen: dict[int, str] = dict.fromkeys(self._free, "free")
        if len(seen) != len(self._free):
            raise LedgerError("a page lies twice in the free list")
        states = {holding.owner: state_of(holding) for holding in self._holdings.values()}
        for room, pages in tables.items():
            for page in pages:
                if not 0 <= page < self.total:
                    raise LedgerError(f"page {page} of room {room} is outside 0 .. {self.total - 1}")
                if page in seen:
                    raise LedgerError(f"page {page} of room {room} is also {seen[page]}")
                seen[page] = states.get(room, "held by a room that the ledger does not know")
        if len(seen) != self.total:
            missing = sorted(set(range(self.total)) - seen.keys())
            raise LedgerError(f"{len(missing)} pages are nowhere, the first is {missing[0]}")
        count = Counter(seen.values())
        recount = PageCounts(self.total, count["free"], count["owned"], count["leased"], 0, count["quarantined"])
        if recount != self.counts():
            raise LedgerError(f"recount {recount} differs from the ledger's {self.counts()}")
        return recount

    def _must_be_live(self, holding: Holding) -> None:
        if self._holdings.get(holding.id) is not holding:
            raise LedgerError(f"room {holding.owner}: holding {holding.id} has been released")

    @staticmethod
    def _check_peers(holding: Holding, peers: NeverGiven | Drained | Exited) -> None:
        lease, room = holding.lease, holding.owner
        if lease is None:
            if isinstance(peers, NeverGiven) and holding.was_given:
                raise LedgerError(f"room {room}: the pages were given away once")
            return
        match peers:
            case NeverGiven():
                raise LedgerError(f"room {room}: the pages are leased, so they were given away")
            case Drained(acks) if not acks >= lease.required_acks:
                missing = sorted(lease.required_acks - acks)
                raise LedgerError(f"room {room}: ranks {missing} have not drained")
            case Exited(incarnation) if not lease.writer or incarnation != lease.writer:
                raise LedgerError(f"room {room}: the end of process {incarnation:016x} says nothing about the writer")
            case _:
                return


def state_of(holding: Holding) -> str:
    """The state of a holding's pages: the first that fits."""
    if holding.quarantined:
        return "quarantined"
    return "leased" if holding.lease is not None else "owned"
