"""Admission on decode: who may come in, who must make room, and why something always finishes (design §5).

Decode does not reserve max_tokens: a request takes the pages of its prompt when it comes in and the others one by one
as it runs. When none is left, the youngest that runs is *retracted*: its pages go to older ones, and the front opens
its next attempt. One that receives can't be retracted, since a peer writes to its pages. Two rules decide whether the
oldest candidate comes in; one that does not fit holds back the younger ones.

(a) Every request that is in could run to its end if all other running ones were retracted: what is neither
    quarantined, retired nor taken by receiving requests covers its need. A request's own pages count towards its need,
    so a request that needs the whole pool can come in alone. A receiving request that commits takes nothing from the
    others, one that fails turns receiving pages into quarantined ones: so the rule goes on holding by itself, until a
    page is retired.
(b) Nothing that runs is retracted for a candidate: after it there is still a free page for each of them.

With (a), the oldest that runs always gets its next page, and it is never retracted: so it finishes, then the next.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from enum import Enum, auto

from kvferry.memory.ages import Ages
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.protocol.errors import Cause, LedgerError


def pages_needed(tokens: int, page_size: int) -> int:
    """ceil(tokens / page_size)."""
    return -(-tokens // page_size)


def refusal(prompt_tokens: int, max_tokens: int, prefill_tokens: int, decode_tokens: int) -> Cause | None:
    """Why a request can never be served, or None. A later attempt must be able to prefill everything but the last
    token, hence the limit on prompt + max_tokens - 1.
    """
    total = prompt_tokens + max_tokens
    if prompt_tokens < 1:
        return Cause("invalid_request", "the prompt has no tokens; at least 1 is needed", param="messages")
    if max_tokens < 1:
        return Cause("invalid_request", f"max_tokens is {max_tokens}; at least 1 is needed", param="max_tokens")
    if prompt_tokens > prefill_tokens:
        text = f"the prompt has {prompt_tokens} tokens; prefill takes at most {prefill_tokens}"
        return Cause("invalid_request", text, param="messages")
    if total > decode_tokens or total - 1 > prefill_tokens:
        limit = min(decode_tokens, prefill_tokens + 1)
        text = f"{prompt_tokens} prompt tokens + max_tokens {max_tokens} = {total} tokens; at most {limit} fit"
        return Cause("invalid_request", text, param="max_tokens")
    return None


class Phase(Enum):
    WAITING = auto()  # nothing is allocated
    RECEIVING = auto()  # a peer writes to its pages
    RUNNING = auto()  # it takes a page now and then, and may be retracted
    OVER = auto()


@dataclass(eq=False)
class Claim:
    """One attempt's claim on the pool. `initial` are the pages that it comes in with, `need` those that it may come
    to; `key` is the room, `request` what it is an attempt of. Only `Admission` changes it.
    """

    key: int
    request: int
    age: int
    initial: int
    need: int
    phase: Phase = Phase.WAITING
    holding: Holding | None = None

    @property
    def pages(self) -> int:
        return 0 if self.holding is None else len(self.holding.pages)


def by_age(claim: Claim) -> tuple[int, int]:
    return claim.age, claim.key


class Admission:
    """Takes pages out of the ledger, and never gives any back: that is for whoever has the proof.

    `waiting` and `running` are in order of age. At most `max_running` receive or run. With `receives`, what comes in
    holds a metadata row and can't be retracted before `commit`; without, nobody else writes to the pages, and it runs
    at once.
    """

    def __init__(self, ledger: PageLedger, page_size: int, max_running: int, receives: bool = True) -> None:
        self._ledger, self._page_size, self._max_running, self._receives = ledger, page_size, max_running, receives
        self._ages = Ages()
        self.waiting: list[Claim] = []
        self.receiving: dict[int, Claim] = {}
        self.running: list[Claim] = []

    def arrive(self, key: int, request: int, tokens: int, total_tokens: int, now_s: float) -> Claim:
        """A candidate with `tokens` to bring along (its first token included), which may come to `total_tokens`."""
        age, size = self._ages.arrived(request, now_s), self._page_size
        claim = Claim(key, request, age, pages_needed(tokens, size), pages_needed(total_tokens, size))
        insort(self.waiting, claim, key=by_age)
        return claim

    def admit(self) -> Claim | None:
        """Let the oldest candidate in, with its pages, if there is a place for it and both rules hold."""
        if not self.waiting or len(self.receiving) + len(self.running) >= self._max_running:
            return None
        claim = self.waiting[0]
        if not self._all_can_finish(claim) or not self._spares_the_running(claim):
            return None
        claim.holding = self._ledger.reserve(claim.key, claim.initial, rows=int(self._receives))
        if claim.holding is None:
            return None  # no row is free; each comes back when its holder has finished
        del self.waiting[0]
        claim.phase = Phase.RECEIVING
        self.receiving[claim.key] = claim
        if not self._receives:
            self.commit(claim)
        return claim

    def _all_can_finish(self, candidate: Claim) -> bool:
        """Rule (a)."""
        lasting = self._ledger.lasting
        initial = candidate.initial if self._receives else 0
        receiving = initial + sum(claim.pages for claim in self.receiving.values())
        if lasting - receiving + initial < candidate.need:
            return False
        if any(lasting - receiving + claim.pages < claim.need for claim in self.receiving.values()):
            return False
        return all(lasting - receiving >= claim.need for claim in self.running)

    def _spares_the_running(self, candidate: Claim) -> bool:
        """Rule (b)."""
        return self._ledger.free >= candidate.initial + len(self.running)

    def commit(self, claim: Claim) -> None:
        """The peer is done: it runs."""
        del self.receiving[claim.key]
        claim.phase = Phase.RUNNING
        insort(self.running, claim, key=by_age)

    def grow(self, claim: Claim, tokens: int) -> Claim | None:
        """Give a running claim the pages for `tokens`. None: it has them. Otherwise the one to be retracted first,
        which may be itself; its pages must be back before the next call.

        Raises LedgerError, with nothing changed, when there is nobody to retract: a rule has been broken.
        """
        assert claim.phase is Phase.RUNNING and claim.holding is not None
        missing = pages_needed(tokens, self._page_size) - claim.pages
        if missing <= 0 or self._ledger.extend(claim.holding, missing):
            return None
        victim = self._victim()
        if victim is None and self._ledger.retired and self._ledger.lasting < claim.need:
            return claim  # the pool has become too small for it
        if victim is None:
            held = f"{claim.pages} of {claim.need} pages; {self._ledger.counts()}"
            raise LedgerError(f"room {claim.key}: the oldest request that runs finds no page: it has {held}")
        return victim

    def _victim(self) -> Claim | None:
        """The youngest that runs, and never the oldest."""
        return self.running[-1] if len(self.running) > 1 else None

    def retract(self, claim: Claim, now_s: float) -> None:
        """Its next attempt keeps its place."""
        self._ages.retracted(claim.request, claim.age, now_s)
        self.leave(claim)

    def leave(self, claim: Claim) -> None:
        """It has finished, or failed; its pages, if any, are its owner's to release. Safe to call twice."""
        if claim.phase is Phase.WAITING:
            self.waiting.remove(claim)
        elif claim.phase is Phase.RECEIVING:
            del self.receiving[claim.key]
        elif claim.phase is Phase.RUNNING:
            self.running.remove(claim)
        claim.phase = Phase.OVER
