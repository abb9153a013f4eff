"""The ledger: which proof frees which holding (a table made by hand), and conservation under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.memory.ledger import Holding, PageCounts, PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Quiet, Stepped
from kvferry.protocol.errors import LedgerError

FIRST, SECOND, STRANGER = 0xAB, 0xAC, 0xCD
WRITERS = {0: FIRST, 1: SECOND}
OURSELVES = {0: 0, 1: 0}
ACKS = frozenset({0, 1})
Peers = NeverGiven | Quiet


def held(kind: str) -> tuple[PageLedger, Holding]:
    """A ledger of 8 pages and 2 rows with one holding of 3 pages and 1 row. Forward 7 names its pages."""
    ledger = PageLedger(8, rows=2)
    holding = ledger.reserve(100, 3, rows=1)
    assert holding is not None
    ledger.name_in_step(holding, 7)
    if kind == "writes leased":
        ledger.lease(holding, WRITERS)
    if kind == "reads leased":
        ledger.lease(holding, OURSELVES)
    if kind == "was leased":
        ledger.lease(holding, WRITERS)
        ledger.end_lease(holding, Quiet(ACKS))
    return ledger, holding


def gone(*incarnations: int) -> frozenset[int]:
    return frozenset(incarnations)


PROOFS: dict[str, Peers] = {
    "never": NeverGiven(),
    "all drained": Quiet(ACKS),
    "more drained": Quiet(ACKS | {5}),
    "some drained": Quiet(gone(1)),
    "nobody is quiet": Quiet(),
    "all exited": Quiet(exited=gone(FIRST, SECOND)),
    "all revoked": Quiet(revoked=gone(FIRST, SECOND)),
    "one exited": Quiet(exited=gone(FIRST)),
    "one revoked": Quiet(revoked=gone(SECOND)),
    "one drained, the other exited": Quiet(gone(1), exited=gone(FIRST)),
    "one drained, the same exited": Quiet(gone(0), exited=gone(FIRST)),
    "one exited, the other revoked": Quiet(exited=gone(FIRST), revoked=gone(SECOND)),
    "strangers exited": Quiet(exited=gone(STRANGER), revoked=gone(STRANGER)),
    "nobody exited": Quiet(exited=gone(0), revoked=gone(0)),
}
DRAINED = {"all drained", "more drained"}
#: The proofs that free a holding of each kind; every other one is refused.
FREES = {
    "owned": set(PROOFS),  # no peer has ever had it: there is nothing to prove about peers
    "writes leased": DRAINED
    | {"all exited", "all revoked", "one drained, the other exited", "one exited, the other revoked"},
    "reads leased": DRAINED,  # the end of a process proves nothing about our own reads
    "was leased": set(PROOFS) - {"never"},  # the lease has ended on proof; but it was given away
}


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("kind", FREES)
@pytest.mark.parametrize("quarantined", [False, True])
def test_a_proof_frees_what_it_covers_and_nothing_else(kind: str, proof: str, quarantined: bool) -> None:
    ledger, holding = held(kind)
    if quarantined:
        ledger.quarantine(holding)
    evidence = Quiescent(holding.id, Stepped(7), PROOFS[proof])
    before = ledger.counts()
    if proof in FREES[kind]:
        ledger.release(holding, evidence)
        assert ledger.counts() == PageCounts(8, 8, 0, 0, 0, 0)
        with pytest.raises(LedgerError, match="has been released"):
            ledger.release(holding, evidence)
        again = ledger.reserve(101, 8, rows=2)
        assert again is not None and sorted(again.pages) == list(range(8)) and sorted(again.rows) == [0, 1]
    else:
        with pytest.raises(LedgerError, match="room 100"):
            ledger.release(holding, evidence)
        assert ledger.counts() == before and ledger.audit({100: holding.pages}) == before


@pytest.mark.parametrize("kind", FREES)
def test_a_forward_that_may_still_run_holds_the_pages(kind: str) -> None:
    ledger, holding = held(kind)
    with pytest.raises(LedgerError, match="forward 7 names the pages, and only 6 is done"):
        ledger.release(holding, Quiescent(holding.id, Stepped(6), Quiet(ACKS)))
    ledger.name_in_step(holding, 9)
    ledger.name_in_step(holding, 8)  # the latest counts
    with pytest.raises(LedgerError, match="forward 9"):
        ledger.release(holding, Quiescent(holding.id, Stepped(8), Quiet(ACKS)))
    ledger.release(holding, Quiescent(holding.id, Stepped(9), Quiet(ACKS)))


def test_a_proof_is_about_one_holding() -> None:
    ledger, holding = held("owned")
    other = ledger.reserve(101, 1)
    assert other is not None
    with pytest.raises(LedgerError, match=f"about holding {other.id}, not {holding.id}"):
        ledger.release(holding, Quiescent(other.id, Stepped(7), NeverGiven()))


@pytest.mark.parametrize(
    ("acks", "ends"), [(ACKS, True), (ACKS | {2}, True), ({0}, False), (set(), False), ({2, 3}, False)]
)
def test_a_lease_ends_when_every_required_rank_has_acked(acks: set[int], ends: bool) -> None:
    ledger, holding = held("writes leased")
    if ends:
        ledger.end_lease(holding, Quiet(frozenset(acks)))
        assert (ledger.counts().owned, ledger.counts().leased) == (3, 0)
    else:
        with pytest.raises(LedgerError, match="may still write"):
            ledger.end_lease(holding, Quiet(frozenset(acks)))
        assert (ledger.counts().owned, ledger.counts().leased) == (0, 3)


@pytest.mark.parametrize(
    ("proof", "names"),
    [
        (Quiet(ACKS), "drained"),
        (Quiet(exited=gone(FIRST, SECOND)), "exited"),
        (Quiet(gone(0), revoked=gone(SECOND, STRANGER)), "drained and revoked"),
        (Quiet(gone(1), exited=gone(FIRST), revoked=gone(FIRST)), "drained and exited"),
        (Quiet(gone(5)), ""),
    ],
)
def test_a_journal_can_name_the_proof(proof: Quiet, names: str) -> None:
    assert proof.names(WRITERS) == names


def test_the_state_of_a_page_is_the_first_that_fits() -> None:
    ledger, holding = held("owned")
    assert ledger.counts() == PageCounts(8, 5, 3, 0, 0, 0)
    ledger.lease(holding, WRITERS)
    assert ledger.counts() == PageCounts(8, 5, 0, 3, 0, 0)
    ledger.quarantine(holding)
    assert ledger.counts() == PageCounts(8, 5, 0, 0, 0, 3)
    assert not ledger.counts().at_baseline and ledger.counts().conserved
    assert PageCounts(8, 8, 0, 0, 0, 0).at_baseline and PageCounts(8, 5, 0, 0, 3, 0).at_baseline
    assert not PageCounts(8, 5, 0, 0, 2, 0).at_baseline, "a page is nowhere"


def test_reserve_is_all_or_nothing() -> None:
    ledger = PageLedger(4, rows=1)
    assert ledger.reserve(1, 5) is None and ledger.reserve(1, 1, rows=2) is None
    assert ledger.free == 4
    first = ledger.reserve(1, 3, rows=1)
    assert first is not None and len(set(first.pages)) == 3
    assert ledger.reserve(2, 1, rows=1) is None and ledger.reserve(2, 2) is None and ledger.free == 1
    for pages, rows in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(LedgerError, match=f"{pages} pages and {rows} rows"):
            ledger.reserve(3, pages, rows)


def test_a_holding_grows_at_its_end_and_returns_as_a_whole() -> None:
    ledger = PageLedger(6, rows=1)
    first, other = ledger.reserve(1, 2, rows=1), ledger.reserve(2, 1)
    assert first is not None and other is not None
    assert ledger.extend(first, 1) and ledger.extend(first, 1) and ledger.extend(first, 0)
    assert first.pages == (0, 1, 3, 4) and ledger.audit({1: first.pages, 2: other.pages}).owned == 5
    assert not ledger.extend(first, 2) and first.pages == (0, 1, 3, 4) and ledger.free == 1, "all or none"
    ledger.release(first, Quiescent(first.id, Stepped(0), NeverGiven()))
    assert ledger.audit({2: other.pages}) == PageCounts(6, 5, 1, 0, 0, 0)


def test_what_a_peer_may_write_to_does_not_grow() -> None:
    ledger, holding = held("writes leased")
    for change in (lambda: None, lambda: ledger.quarantine(holding)):
        change()
        with pytest.raises(LedgerError, match=r"room 100: (leased|quarantined) pages can't be extended by 1"):
            ledger.extend(holding, 1)
    ledger, holding = held("was leased")
    with pytest.raises(LedgerError, match="can't be extended by -1"):
        ledger.extend(holding, -1)
    assert ledger.extend(holding, 5) and len(holding.pages) == 8 and not ledger.extend(holding, 1)


def test_what_is_over_or_double_is_refused() -> None:
    ledger, holding = held("writes leased")
    with pytest.raises(LedgerError, match="leased already"):
        ledger.lease(holding, WRITERS)
    ledger.release(holding, Quiescent(holding.id, Stepped(7), Quiet(exited=gone(FIRST, SECOND))))
    for late in (
        lambda: ledger.lease(holding, WRITERS),
        lambda: ledger.quarantine(holding),
        lambda: ledger.name_in_step(holding, 8),
        lambda: ledger.extend(holding, 1),
        lambda: ledger.end_lease(holding, Quiet(ACKS)),
    ):
        with pytest.raises(LedgerError, match="has been released"):
            late()
    assert ledger.counts() == PageCounts(8, 8, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({100: (0, 1)}, "1 pages are nowhere, the first is 2"),
        ({}, "3 pages are nowhere, the first is 0"),
        ({100: (0, 1, 2, 2)}, "page 2 of room 100 is also owned"),
        ({100: (0, 1, 2, 3)}, "page 3 of room 100 is also free"),
        ({100: (0, 1), 101: (2,)}, "differs from the ledger's"),
        ({100: (0, 1, 8)}, "page 8 of room 100"),
        ({100: (0, 1, -1)}, "page -1 of room 100"),
    ],
)
def test_the_audit_finds_a_block_table_that_disagrees(tables: dict[int, tuple[int, ...]], problem: str) -> None:
    ledger, holding = held("owned")
    assert holding.pages == (0, 1, 2)
    with pytest.raises(LedgerError, match=problem):
        ledger.audit(tables)


class Conservation(RuleBasedStateMachine):
    """Random use of a ledger by rooms that keep block tables of their own; proofs are right or wrong at random."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(12, rows=4)
        self.rooms: dict[int, Holding] = {}
        self.tables: dict[int, tuple[int, ...]] = {}
        self.kinds: dict[int, str] = {}
        self.named: dict[int, int] = {}
        self.next_room = 1
        self.step = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.rooms)))

    @rule(pages=st.integers(1, 6), rows=st.integers(0, 2))
    def reserve(self, pages: int, rows: int) -> None:
        holding = self.ledger.reserve(self.next_room, pages, rows)
        free = 12 - sum(map(len, self.tables.values()))
        free_rows = 4 - sum(len(other.rows) for other in self.rooms.values())
        assert (holding is not None) == (pages <= free and rows <= free_rows)
        if holding is not None:
            self.rooms[self.next_room], self.tables[self.next_room] = holding, holding.pages
            self.kinds[self.next_room], self.named[self.next_room] = "owned", -1
        self.next_room += 1

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), pages=st.integers(1, 3))
    def extend(self, data: st.DataObject, pages: int) -> None:
        room = self.pick(data)
        holding, free = self.rooms[room], 12 - sum(map(len, self.tables.values()))
        if self.kinds[room] == "writes leased" or holding.quarantined:
            with pytest.raises(LedgerError, match="can't be extended"):
                self.ledger.extend(holding, pages)
            return
        assert self.ledger.extend(holding, pages) == (pages <= free)
        if pages <= free:
            assert holding.pages[: len(self.tables[room])] == self.tables[room]
            self.tables[room] = holding.pages

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        room = self.pick(data)
        self.step += 1
        self.named[room] = self.step
        self.ledger.name_in_step(self.rooms[room], self.step)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        room = self.pick(data)
        if self.kinds[room] == "owned":
            self.ledger.lease(self.rooms[room], WRITERS)
            self.kinds[room] = "writes leased"

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        room = self.pick(data)
        if self.kinds[room] == "writes leased":
            self.ledger.end_lease(self.rooms[room], Quiet(ACKS))
            self.kinds[room] = "was leased"

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        self.ledger.quarantine(self.rooms[self.pick(data)])

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), proof=st.sampled_from(sorted(PROOFS)), lag=st.integers(0, 3))
    def release(self, data: st.DataObject, proof: str, lag: int) -> None:
        room = self.pick(data)
        done = self.step - lag
        right = proof in FREES[self.kinds[room]] and done >= self.named[room]
        evidence = Quiescent(self.rooms[room].id, Stepped(done), PROOFS[proof])
        if not right:
            with pytest.raises(LedgerError):
                self.ledger.release(self.rooms[room], evidence)
            return
        self.ledger.release(self.rooms[room], evidence)
        for record in (self.rooms, self.tables, self.kinds, self.named):
            del record[room]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        recount = self.ledger.audit(self.tables)
        assert recount.conserved and recount.free == 12 - sum(map(len, self.tables.values()))
        assert recount.at_baseline == (not self.rooms)
        rows = [row for holding in self.rooms.values() for row in holding.rows]
        assert len(rows) == len(set(rows)) and set(rows) <= set(range(4))


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestConservation = Conservation.TestCase


def failed_on(ledger: PageLedger, *pages: int) -> None:
    """A room that holds these pages and no others, and whose check fails."""
    taken = []
    while not set(pages) <= {page for holding in taken for page in holding.pages}:
        holding = ledger.reserve(1, 1)
        assert holding is not None
        taken.append(holding)
    ledger.blame(pages)
    for holding in taken:
        ledger.release(holding, Quiescent(holding.id, Stepped(0), NeverGiven()))


def test_a_page_that_is_blamed_twice_alone_is_retired() -> None:
    ledger = PageLedger(4)
    failed_on(ledger, 2)
    ledger.clear([2])  # it passes a check in between: where nobody else can have been at fault, that clears nothing
    assert ledger.counts() == PageCounts(4, 4, 0, 0, 0, 0)
    failed_on(ledger, 2)
    assert ledger.counts() == PageCounts(4, 3, 0, 0, 0, 0, retired=1)
    assert ledger.audit({}).conserved and ledger.audit({}).at_baseline
    assert (ledger.retired, ledger.lasting, ledger.free) == (1, 3, 3)
    rest = ledger.reserve(5, 3)
    assert rest is not None and set(rest.pages) == {0, 1, 3} and ledger.reserve(6, 1) is None


def test_of_several_suspects_those_that_pass_a_check_are_cleared() -> None:
    ledger = PageLedger(4)
    failed_on(ledger, 0, 1, 2)
    ledger.clear([0, 1])
    failed_on(ledger, 0, 1, 2)
    assert ledger.counts().retired == 1 and ledger.audit({}).conserved
    failed_on(ledger, 0)
    assert ledger.counts().retired == 2, "suspected once, and blamed alone"


def test_a_retired_page_in_a_block_table_is_found() -> None:
    ledger = PageLedger(2)
    failed_on(ledger, 1)
    failed_on(ledger, 1)
    with pytest.raises(LedgerError, match="page 1 of room 7 is also retired"):
        ledger.audit({7: (1,)})


def test_only_pages_that_somebody_holds_are_blamed() -> None:
    ledger = PageLedger(2)
    with pytest.raises(LedgerError, match="page 0 can't be blamed: nobody holds it"):
        ledger.blame([0])
