"""Everything that is admitted finishes: the production `Admission` and ledger against a world that means ill.

Pools are tiny, arrivals and sizes random, some transfers go on until nothing else runs, some fail and leave their
pages in quarantine for ever. The classic mistakes, planted one by one, are all found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.memory.admission import Admission, Claim, Phase, by_age
from kvferry.memory.ledger import PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Quiet, Stepped
from kvferry.protocol.errors import LedgerError

ACKS = frozenset({0})  # rank 0, of process 7
FOREVER = 3000  # ticks; the longest of the right runs takes some hundreds
Draw = Callable[[int, int], int]  # a number from .. to, both included


@dataclass
class Request:
    """What a client wants, and how its transfers go: `slow` ones end only when nothing runs."""

    id: int
    arrives: int
    prompt: int
    max_tokens: int
    transfer: int
    returns: int  # ticks from a retraction to the next attempt's arrival
    slow: bool
    fails: bool  # its first transfer fails, and nobody can say what it still writes
    generated: int = 0
    age: int = 0  # kept from a retraction on
    claim: Claim | None = None
    ends: int = 0

    @property
    def over(self) -> bool:
        return self.generated >= self.max_tokens


@dataclass
class Scenario:
    pages: int
    page_size: int
    max_running: int
    rows: int
    spoilt: int  # pages that may be lost in quarantine; every need fits into the others
    requests: list[Request] = field(default_factory=list)


def scenario(draw: Draw) -> Scenario:
    page_size, pages = draw(1, 3), draw(2, 14)
    made = Scenario(pages, page_size, draw(1, 6), draw(1, 6), draw(0, pages // 2) if draw(0, 1) else 0)
    most = (pages - made.spoilt) * page_size
    for number in range(draw(2, 8) if most > 1 else 0):
        total = draw(max(2, most // 3), most)
        prompt = draw(1, min(total - 1, 2 * page_size if draw(0, 3) else total))
        request = Request(
            number + 1, draw(0, 5), prompt, total - prompt, draw(0, 3), draw(0, 2), draw(0, 3) == 0, draw(0, 4) == 0
        )
        made.requests.append(request)
    made.rows += sum(request.fails for request in made.requests)  # a room that fails keeps its row as well
    return made


class World:
    """One forward a tick: every running request makes a token."""

    def __init__(self, made: Scenario, kind: type[Admission], receives: bool = True) -> None:
        self.made, self.page_size = made, made.page_size
        self.ledger = PageLedger(made.pages, made.rows)
        self.admission = kind(self.ledger, made.page_size, made.max_running, receives)
        self.by_key: dict[int, Request] = {}
        self.tables: dict[int, Claim] = {}  # who holds pages
        self.tick = self.keys = 0
        self.spared: set[int] = set()  # ran when somebody was admitted since the last forward

    def play(self) -> None:
        while any(not request.over for request in self.made.requests):
            assert self.tick < FOREVER, f"{[r.id for r in self.made.requests if not r.over]} never finish"
            self.tick += 1
            self.arrivals()
            self.admit()
            self.transfers()
            self.forward()
            self.ledger.audit({key: claim.holding.pages for key, claim in self.tables.items() if claim.holding})
        assert self.ledger.counts().owned == self.ledger.counts().leased == 0

    def arrivals(self) -> None:
        for request in self.made.requests:
            if request.claim is None and not request.over and self.tick >= request.arrives:
                self.keys += 1
                tokens, total = request.prompt + request.generated + 1, request.prompt + request.max_tokens
                claim = self.admission.arrive(self.keys, request.id, tokens, total, float(self.tick))
                assert request.age in (0, claim.age), "a retracted request keeps its place"
                request.claim = claim
                self.by_key[self.keys] = request

    def admit(self) -> None:
        while (claim := self.admission.admit()) is not None:
            assert claim.phase in (Phase.RECEIVING, Phase.RUNNING) and claim.holding is not None
            assert all(by_age(claim) < by_age(other) for other in self.admission.waiting), "an older one waits"
            assert len(self.admission.receiving) + len(self.admission.running) <= self.made.max_running
            if claim.phase is Phase.RECEIVING:
                self.ledger.lease(claim.holding, {0: 7})
            request = self.by_key[claim.key]
            request.ends = self.tick + request.transfer
            self.tables[claim.key] = claim
            self.spared |= {other.key for other in self.admission.running}

    def transfers(self) -> None:
        for claim in list(self.admission.receiving.values()):
            request = self.by_key[claim.key]
            if self.tick < request.ends or (request.slow and self.admission.running):
                continue
            assert claim.holding is not None
            if request.fails and self.ledger.quarantined + claim.pages <= self.made.spoilt:
                request.fails = False
                self.admission.leave(claim)
                self.ledger.quarantine(claim.holding)
                request.claim = None
                continue
            self.ledger.end_lease(claim.holding, Quiet(ACKS))
            self.admission.commit(claim)
            self.token(claim)

    def forward(self) -> None:
        for claim in list(self.admission.running):
            request = self.by_key[claim.key]
            while claim.phase is Phase.RUNNING:
                victim = self.admission.grow(claim, request.prompt + request.generated)
                if victim is None:
                    break
                self.retract(victim)
        self.spared.clear()
        for claim in list(self.admission.running):
            assert claim.holding is not None and claim.pages <= claim.need
            request = self.by_key[claim.key]
            assert claim.pages * self.page_size >= request.prompt + request.generated
            self.ledger.name_in_step(claim.holding, self.tick)
        for claim in list(self.admission.running):
            self.token(claim)

    def token(self, claim: Claim) -> None:
        request = self.by_key[claim.key]
        request.generated += 1
        if request.over:
            self.admission.leave(claim)
            self.release(claim)

    def retract(self, claim: Claim) -> None:
        running = sorted(self.admission.running, key=lambda other: other.age)
        assert claim is running[-1] and len(running) > 1, "the youngest, and never the oldest"
        assert claim.key not in self.spared, "nothing that runs is retracted for a candidate"
        request = self.by_key[claim.key]
        self.admission.retract(claim, float(self.tick))
        request.age, request.claim, request.arrives = claim.age, None, self.tick + request.returns
        self.release(claim)

    def release(self, claim: Claim) -> None:
        assert claim.holding is not None
        proof = Quiet(ACKS) if claim.holding.was_given else NeverGiven()
        self.ledger.release(claim.holding, Quiescent(claim.holding.id, Stepped(self.tick), proof))
        del self.tables[claim.key]


@settings(deadline=None, max_examples=400)
@given(data=st.data(), receives=st.booleans())
def test_everything_that_is_admitted_finishes(data: st.DataObject, receives: bool) -> None:
    World(scenario(lambda low, high: data.draw(st.integers(low, high))), Admission, receives).play()


def random_scenario(seed: int) -> Scenario:
    return scenario(Random(seed).randint)


def test_the_scenarios_are_worth_playing() -> None:
    """Retractions, quarantined pages, and requests that need every page there is, in good number."""
    retracted = quarantined = whole = 0
    for seed in range(300):
        world = World(made := random_scenario(seed), Admission)
        world.play()
        retracted += sum(request.age > 0 for request in made.requests)
        quarantined += world.ledger.quarantined
        whole += sum(r.prompt + r.max_tokens > (made.pages - 1) * made.page_size for r in made.requests)
    assert retracted > 50 and quarantined > 50 and whole > 20, (retracted, quarantined, whole)


class WithoutA(Admission):
    def _all_can_finish(self, candidate: Claim) -> bool:
        return True


class WithoutB(Admission):
    def _spares_the_running(self, candidate: Claim) -> bool:
        return self._ledger.free >= candidate.initial


class OnlyTheCandidateCounts(Admission):
    """Rule (a) without the needs of those that are in."""

    def _all_can_finish(self, candidate: Claim) -> bool:
        return self._ledger.total - self._ledger.quarantined >= candidate.need


class QuarantineForgotten(Admission):
    """Rule (a) as if every page came back."""

    def _all_can_finish(self, candidate: Claim) -> bool:
        receiving = sum(claim.pages for claim in self.receiving.values())
        if any(self._ledger.total - receiving - candidate.initial < claim.need for claim in self.running):
            return False
        return self._ledger.total - receiving >= candidate.need


class OwnPagesForgotten(Admission):
    """Rule (a) as if a request's own pages were lost to it while it receives."""

    def _all_can_finish(self, candidate: Claim) -> bool:
        lasting = self._ledger.total - self._ledger.quarantined
        receiving = candidate.initial + sum(claim.pages for claim in self.receiving.values())
        inside = (candidate, *self.running, *self.receiving.values())
        return lasting - receiving >= max(claim.need for claim in inside)


class RetractsTheOldest(Admission):
    def _victim(self) -> Claim | None:
        return self.running[0] if len(self.running) > 1 else None


class ForgetsAges(Admission):
    def retract(self, claim: Claim, now_s: float) -> None:
        self.leave(claim)


class LetsTheYoungPass(Admission):
    def admit(self) -> Claim | None:
        for at in range(len(self.waiting)):
            held, self.waiting[:] = self.waiting[:at], self.waiting[at:]
            claim = super().admit()
            self.waiting[:0] = held
            if claim is not None:
                return claim
        return None


@pytest.mark.parametrize(
    "mistake",
    [WithoutA, WithoutB, OnlyTheCandidateCounts, QuarantineForgotten, OwnPagesForgotten, RetractsTheOldest,
     ForgetsAges, LetsTheYoungPass],
)  # fmt: skip
def test_each_classic_mistake_is_found(mistake: type[Admission]) -> None:
    for seed in range(500):
        try:
            World(random_scenario(seed), mistake).play()
        except (AssertionError, LedgerError):
            return
    pytest.fail(f"{mistake.__name__} is as good as the real thing")
