"""Pages that several holdings have: free when the last one is gone, each on its own proof (hand-worked table)."""

from __future__ import annotations

import random

import pytest

from kvferry.memory.ledger import Holding, PageCounts, PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Quiet, Stepped
from kvferry.protocol.errors import LedgerError


def shared() -> tuple[PageLedger, Holding, Holding, Holding]:
    """8 pages: `first` has 0-2, `second` has 0, 1 and 3, and pages 0 and 1 are kept besides."""
    ledger = PageLedger(8, rows=2)
    first = ledger.reserve(100, 3, rows=1)
    assert first is not None
    second = ledger.reserve(101, 1, rows=1, shared=first.pages[:2])
    kept = ledger.keep(900, first.pages[:2])
    assert second is not None and second.pages == (0, 1, 3) and kept.pages == (0, 1)
    return ledger, first, second, kept


def release(ledger: PageLedger, holding: Holding, step: int = 0) -> None:
    ledger.release(holding, Quiescent(holding.id, Stepped(step), NeverGiven()))


def test_a_page_is_in_one_state_the_first_that_fits_among_its_holders() -> None:
    ledger, first, second, kept = shared()
    tables = {100: first.pages, 101: second.pages, 900: kept.pages}
    assert ledger.audit(tables) == PageCounts(8, 4, 4, 0, 0, 0)
    ledger.lease(second, {0: 0})
    assert ledger.audit(tables) == PageCounts(8, 4, 1, 3, 0, 0)  # 2 is owned; 0, 1 and 3 are read by a peer
    ledger.quarantine(first)
    assert ledger.audit(tables) == PageCounts(8, 4, 0, 1, 0, 3)


def test_pages_that_were_kept_can_be_reserved_again_without_a_new_one() -> None:
    ledger, first, second, kept = shared()
    for holding in (first, second):
        release(ledger, holding)
    assert ledger.counts() == PageCounts(8, 6, 0, 0, 2, 0) and ledger.free_rows == 2
    again = ledger.reserve(102, 0, rows=1, shared=kept.pages)
    assert again is not None and again.pages == (0, 1) and len(again.rows) == 1
    release(ledger, kept)
    assert ledger.audit({102: again.pages}) == PageCounts(8, 6, 2, 0, 0, 0)
    for pages in (0, -1):
        with pytest.raises(LedgerError, match="can't be reserved"):
            ledger.reserve(103, pages, rows=0, shared=again.pages if pages else ())


def test_a_page_is_free_when_its_last_holding_is_gone() -> None:
    ledger, first, second, kept = shared()
    release(ledger, first)
    assert ledger.audit({101: second.pages, 900: kept.pages}) == PageCounts(8, 5, 3, 0, 0, 0)
    release(ledger, second)
    assert ledger.audit({900: kept.pages}) == PageCounts(8, 6, 0, 0, 2, 0)
    assert ledger.counts().at_baseline
    release(ledger, kept)
    assert ledger.audit({}) == PageCounts(8, 8, 0, 0, 0, 0)


def test_each_holding_needs_its_own_proof() -> None:
    ledger, first, second, kept = shared()
    ledger.name_in_step(second, 9)
    ledger.lease(second, {0: 0})
    release(ledger, first)
    release(ledger, kept)
    with pytest.raises(LedgerError, match="forward 9"):
        ledger.release(second, Quiescent(second.id, Stepped(8), Quiet(frozenset({0}))))
    with pytest.raises(LedgerError, match="are leased"):
        release(ledger, second, step=9)
    assert ledger.free == 5
    ledger.release(second, Quiescent(second.id, Stepped(9), Quiet(frozenset({0}))))
    assert ledger.free == 8


def test_only_held_pages_can_be_shared() -> None:
    ledger, first, second, _ = shared()
    with pytest.raises(LedgerError, match="page 5 can't be shared: nobody holds it"):
        ledger.reserve(102, 1, shared=(0, 5))
    assert ledger.free == 4
    release(ledger, first)
    with pytest.raises(LedgerError, match="page 2 can't be shared"):
        ledger.keep(901, (2,))
    assert ledger.reserve(102, 1, shared=second.pages) is not None


def test_the_audit_counts_the_tables_that_a_page_is_in() -> None:
    ledger, first, second, kept = shared()
    with pytest.raises(LedgerError, match="page 0 is in 2 block tables; the ledger knows 3 holdings"):
        ledger.audit({100: first.pages, 101: second.pages})
    with pytest.raises(LedgerError, match="page 2 of room 101 is also owned"):
        ledger.audit({100: first.pages, 101: (*second.pages, 2), 900: kept.pages})


@pytest.mark.parametrize("seed", range(30))
def test_random_sharing_loses_and_doubles_nothing(seed: int) -> None:
    """A model with plain sets beside the ledger: the free pages are those in nobody's set."""
    chance = random.Random(seed)
    ledger, live = PageLedger(16), dict[int, Holding]()
    for owner in range(1, 200):
        if live and chance.random() < 0.5:
            gone = live.pop(chance.choice(sorted(live)))
            release(ledger, gone)
        source = chance.choice([(), *(holding.pages for holding in live.values())])
        taken = ledger.reserve(owner, chance.randint(1, 4), shared=source[: chance.randint(0, 3)])
        if taken is not None:
            live[owner] = taken
        used = set[int]().union(*(holding.pages for holding in live.values()))
        assert ledger.audit({o: h.pages for o, h in live.items()}).free == 16 - len(used)
