"""The page ledger: who owns which page, and the one way back to the free list.

Each page is in exactly one state, the first that fits: quarantined, leased (a peer may write or read it), owned,
cached, free; or *retired*, for good: what was written to it was found changed, more than once. A page changes hands
only as part of a *holding*: pages (and metadata rows) reserved together for one room, extended while nobody else may
use them, and released together, on proof. Holdings may share pages that nobody writes any more: each is released on its
own proof, and a page is free when the last holding that has it is gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvferry.memory.proof import NeverGiven, Quiescent, Quiet
from kvferry.protocol.errors import LedgerError


class PageCounts(msgspec.Struct, frozen=True):
    """Pages by state; the states add up to `total`."""

    total: int
    free: int
    owned: int
    leased: int
    cached: int
    quarantined: int
    retired: int = 0

    @property
    def conserved(self) -> bool:
        held = self.owned + self.leased + self.cached + self.quarantined
        return self.total == self.free + held + self.retired

    @property
    def at_baseline(self) -> bool:
        """Nothing in use: owned = leased = quarantined = 0 and free + cached + retired = total."""
        return self.conserved and not (self.owned or self.leased or self.quarantined)


@dataclass(frozen=True)
class Lease:
    """These ranks may write (or read) until each is known to be quiet (`kvferry.memory.proof.Quiet`).

    `writers`: rank -> incarnation of its process, 0 for ourselves (our own reads).
    """

    writers: Mapping[int, int]


@dataclass
class Holding:
    """Pages and rows that one owner holds, `pages` in the order of the tokens. Only the ledger changes it."""

    id: int
    owner: int
    pages: tuple[int, ...]
    rows: tuple[int, ...]
    last_step: int = -1  # the last forward whose plan names the pages
    lease: Lease | None = None
    was_given: bool = False
    quarantined: bool = False
    cached: bool = False  # kept for whoever can use it; given up when pages run short
    released: bool = field(default=False, repr=False)


class PageLedger:
    """`pages` pages (ids from 0) and `rows` metadata rows. Not thread-safe: one actor owns it."""

    def __init__(self, pages: int, rows: int = 0) -> None:
        self.total = pages
        self._free: deque[int] = deque(range(pages))
        self._free_rows: deque[int] = deque(range(rows))
        self._holdings: dict[int, Holding] = {}
        self._holders: Counter[int] = Counter()  # page -> how many holdings have it
        self._blamed: Counter[int] = Counter()  # page -> checks that have failed with it alone
        self._suspected: Counter[int] = Counter()  # page -> checks that have failed with it among others
        self._retired: set[int] = set()
        self._next = 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def quarantined(self) -> int:
        """Pages that wait for proof: they may come back late, or never."""
        return len({page for holding in self._holdings.values() if holding.quarantined for page in holding.pages})

    @property
    def retired(self) -> int:
        """Pages that are not handed out any more."""
        return len(self._retired)

    @property
    def usable(self) -> int:
        """Pages that are handed out: all but the retired ones."""
        return self.total - len(self._retired)

    @property
    def lasting(self) -> int:
        """Pages that can be counted on: neither quarantined nor retired."""
        return self.usable - self.quarantined

    @property
    def suspects(self) -> bool:
        """Some pages may have changed what was written to them; what passes its check may clear them."""
        return bool(self._suspected)

    def blame(self, pages: Iterable[int]) -> None:
        """What was written to these pages, which somebody holds, lies there changed. A page that this happens to for
        the `RETIRED_AT`th time is retired: it is not handed out again when its holders have released it.

        Where it is one of several, nobody knows which of them; those that pass a check before they fail another one
        are cleared.
        """
        pages = tuple(pages)
        for page in pages:
            if not self._holders[page]:
                raise LedgerError(f"page {page} can't be blamed: nobody holds it")
        (self._blamed if len(pages) == 1 else self._suspected).update(pages)

    def clear(self, pages: Iterable[int]) -> None:
        """What was written to these pages, all of it, lies there as it was."""
        for page in pages:
            self._suspected.pop(page, None)

    def reserve(self, owner: int, pages: int, rows: int = 0, shared: tuple[int, ...] = ()) -> Holding | None:
        """Take `pages` pages and `rows` rows for `owner`, all or none: None when either runs short.

        `shared` are pages that other holdings have and nobody writes any more; they come first in this one too.
        """
        if pages + len(shared) < 1 or pages < 0 or rows < 0:
            raise LedgerError(f"room {owner}: {pages} pages and {rows} rows can't be reserved; at least 1 and 0")
        self._must_be_held(owner, shared)
        if pages > len(self._free) or rows > len(self._free_rows):
            return None
        taken = tuple(self._free.popleft() for _ in range(pages))
        return self._hold(owner, shared, taken, tuple(self._free_rows.popleft() for _ in range(rows)))

    def keep(self, owner: int, shared: tuple[int, ...]) -> Holding:
        """A holding of nothing but shared pages, in state *cached*: they stay when the others who have them go."""
        self._must_be_held(owner, shared)
        holding = self._hold(owner, shared, (), ())
        holding.cached = True
        return holding

    def _hold(self, owner: int, shared: tuple[int, ...], taken: tuple[int, ...], rows: tuple[int, ...]) -> Holding:
        holding = Holding(self._next, owner, shared + taken, rows)
        self._next += 1
        self._holdings[holding.id] = holding
        self._holders.update(holding.pages)
        return holding

    def extend(self, holding: Holding, pages: int) -> bool:
        """Append `pages` pages to the end of a holding, all or none: False when so many are not free.

        Raises LedgerError while a peer may use the holding: it knows the pages by the list that it was given.
        """
        self._must_be_live(holding)
        if pages < 0 or state_of(holding) != "owned":
            raise LedgerError(f"room {holding.owner}: {state_of(holding)} pages can't be extended by {pages}")
        if pages > len(self._free):
            return False
        taken = tuple(self._free.popleft() for _ in range(pages))
        self._holders.update(taken)
        holding.pages += taken
        return True

    def name_in_step(self, holding: Holding, step: int) -> None:
        """Forward `step` will read or write the pages."""
        self._must_be_live(holding)
        holding.last_step = max(holding.last_step, step)

    def lease(self, holding: Holding, writers: Mapping[int, int]) -> None:
        """Hand the pages to peers (rank -> incarnation). From here on they need those peers' proof."""
        self._must_be_live(holding)
        if holding.lease is not None:
            raise LedgerError(f"room {holding.owner}: the pages are leased already")
        holding.lease = Lease(dict(writers))
        holding.was_given = True

    def end_lease(self, holding: Holding, proof: Quiet) -> None:
        """The peers are done with the pages; the owner keeps them. Raises LedgerError while one may not be quiet."""
        self._must_be_live(holding)
        self._check_peers(holding, proof)
        holding.lease = None
        holding.quarantined = False

    def quarantine(self, holding: Holding) -> None:
        """The owner has no more use for the pages, and there is no proof yet."""
        self._must_be_live(holding)
        holding.quarantined = True

    def release(self, holding: Holding, proof: Quiescent) -> None:
        """Return the rows, and the pages that no other holding has, to the free lists. Raises LedgerError, with
        nothing changed, if the proof does not cover the holding's last forward or its lease.
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
        for page in holding.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if self._blamed[page] + self._suspected[page] >= RETIRED_AT:
                    self._retired.add(page)
                else:
                    self._free.append(page)
        self._free_rows.extend(holding.rows)

    def counts(self) -> PageCounts:
        states: dict[int, str] = {}
        for holding in self._holdings.values():
            for page in holding.pages:
                states[page] = first_that_fits(states.get(page), state_of(holding))
        return self._counted(Counter(states.values()), len(self._free))

    def _counted(self, count: Counter[str], free: int) -> PageCounts:
        return PageCounts(
            self.total, free, count["owned"], count["leased"], count["cached"], count["quarantined"],
            len(self._retired),
        )  # fmt: skip

    def audit(self, tables: Mapping[int, Iterable[int]]) -> PageCounts:
        """Recount every page from the owners' own block tables (room -> pages) and compare.

        Raises LedgerError naming the first page that is missing, counted twice or held by nobody.
        """
        seen: dict[int, str] = dict.fromkeys(self._free, "free")
        if len(seen) != len(self._free):
            raise LedgerError("a page lies twice in the free list")
        for page in self._retired:
            if page in seen:
                raise LedgerError(f"page {page} is retired, and free")
            seen[page] = "retired"
        states = {holding.owner: state_of(holding) for holding in self._holdings.values()}
        holders: Counter[int] = Counter()
        for room, pages in tables.items():
            for page in pages:
                if not 0 <= page < self.total:
                    raise LedgerError(f"page {page} of room {room} is outside 0 .. {self.total - 1}")
                holders[page] += 1
                if seen.get(page) in ("free", "retired") or holders[page] > self._holders[page] > 0:
                    raise LedgerError(f"page {page} of room {room} is also {seen[page]}")
                state = states.get(room, "held by a room that the ledger does not know")
                seen[page] = first_that_fits(seen.get(page), state)
        if len(seen) != self.total:
            missing = sorted(set(range(self.total)) - seen.keys())
            raise LedgerError(f"{len(missing)} pages are nowhere, the first is {missing[0]}")
        count = Counter(seen.values())
        recount = self._counted(count, count["free"])
        if recount != self.counts():
            raise LedgerError(f"recount {recount} differs from the ledger's {self.counts()}")
        if holders != self._holders:
            page = min(page for page in holders | self._holders if holders[page] != self._holders[page])
            text = f"page {page} is in {holders[page]} block tables; the ledger knows {self._holders[page]} holdings"
            raise LedgerError(text)
        return recount

    def _must_be_held(self, owner: int, pages: tuple[int, ...]) -> None:
        for page in pages:
            if not self._holders[page]:
                raise LedgerError(f"room {owner}: page {page} can't be shared: nobody holds it")

    def _must_be_live(self, holding: Holding) -> None:
        if self._holdings.get(holding.id) is not holding:
            raise LedgerError(f"room {holding.owner}: holding {holding.id} has been released")

    @staticmethod
    def _check_peers(holding: Holding, peers: NeverGiven | Quiet) -> None:
        lease, room = holding.lease, holding.owner
        if lease is None:
            if isinstance(peers, NeverGiven) and holding.was_given:
                raise LedgerError(f"room {room}: the pages were given away once")
        elif isinstance(peers, NeverGiven):
            raise LedgerError(f"room {room}: the pages are leased, so they were given away")
        elif missing := peers.missing(lease.writers):
            raise LedgerError(f"room {room}: ranks {missing} may still write: no ack, and no proof about their process")


#: A page is retired with so many failed checks.
RETIRED_AT = 2
#: A page's states, the first that fits first.
_STATES = ("quarantined", "leased", "owned", "cached")


def state_of(holding: Holding) -> str:
    """The state of a holding's pages, as far as this holding goes."""
    if holding.quarantined:
        return "quarantined"
    if holding.lease is not None:
        return "leased"
    return "cached" if holding.cached else "owned"


def first_that_fits(known: str | None, state: str) -> str:
    """The state of a page that is in both states for two of its holders."""
    if known is None or known not in _STATES or state not in _STATES:
        return state
    return min(known, state, key=_STATES.index)
