"""The unified actor: admit, compute chunks and decode steps in one forward, publish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.actors.chunks import next_chunk
from kvferry.actors.mailbox import Mailbox
from kvferry.engine.contract import Engine, Sequence, StepPlan, StepResult, TextFactory, TextStream
from kvferry.engine.history import Past
from kvferry.memory.admission import Admission, Claim, Phase, refusal
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Stepped
from kvferry.protocol.errors import error_from
from kvferry.protocol.messages import Token
from kvferry.protocol.request import RequestSpec


@dataclass
class Member:
    """A request. It prefills until all of `fed_ids` is computed (its prompt, and after a retraction what it has made);
    then each step feeds the last of `generated`. `claim` is its place among the others.
    """

    key: int
    spec: RequestSpec
    text: TextStream
    past: Past
    tokens: asyncio.Queue[Token | BaseException]
    fed_ids: tuple[int, ...] = ()
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    claim: Claim | None = None
    holding: Holding | None = None
    over: bool = False

    @property
    def total_ids(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.spec.prompt_ids) + len(self.generated)

    @property
    def decodes(self) -> bool:
        return self.computed == len(self.fed_ids)


class Unified:
    """`run` is the actor's task; `generate` may be called by anyone on the same loop."""

    def __init__(
        self,
        engine: Engine,
        texts: TextFactory,
        chunk_tokens: int = 256,
        batch_tokens: int = 512,
        max_running: int = 32,
        mailbox: int = 4096,
    ) -> None:
        self.engine, self._texts = engine, texts
        self.chunk_tokens, self.batch_tokens = chunk_tokens, batch_tokens
        self.ledger = PageLedger(engine.limits.pages)
        self.step_done = 0
        self._page_size = engine.limits.page_size
        self._mailbox: Mailbox[Member] = Mailbox(mailbox)
        self._admission = Admission(self.ledger, self._page_size, max_running, receives=False)
        self._members: dict[int, Member] = {}
        self._next = 1
        self._retracted = 0
        self._failure: BaseException | None = None

    async def generate(self, spec: RequestSpec) -> AsyncIterator[Token]:
        """The request's tokens. Closing the iterator early stops the request.

        Raises InvalidRequest when it can never fit, and what ended the actor when it has ended.
        """
        if self._failure is not None:
            raise self._failure
        limit = self.engine.limits.tokens
        cause = refusal(len(spec.prompt_ids), spec.sampling.max_tokens, limit, limit)
        if cause is not None:
            raise error_from(cause)
        member = Member(self._next, spec, self._texts.stream(spec.sampling), Past(spec), asyncio.Queue())
        self._next += 1
        self._mailbox.put(member)
        try:
            while True:
                item = await member.tokens.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finish_reason:
                    return
        finally:
            member.over = True

    async def answer(self, spec: RequestSpec) -> list[Token]:
        """All of the request's tokens, for a caller that does not stream."""
        return [token async for token in self.generate(spec)]

    async def run(self) -> None:
        """Receive, schedule, forward, publish, until cancelled."""
        try:
            while True:
                if not self._members or len(self._mailbox):
                    for member in await self._mailbox.take():
                        self._members[member.key] = member
                        self._arrive(member)
                self._retire()
                self._admit()
                self._make_room()
                plan = self._plan()
                if plan is not None:
                    self._publish(plan, await self.engine.step(plan))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            await self.engine.close()

    def _fail(self, error: BaseException) -> None:
        """Tell everyone who waits, and everyone who comes later, why the actor has ended."""
        gone = isinstance(error, asyncio.CancelledError)
        self._failure = RuntimeError("the unified actor has been stopped") if gone else error
        for member in (*self._members.values(), *self._mailbox.drain()):
            member.tokens.put_nowait(self._failure)

    async def status(self) -> dict[str, Any]:
        tables = {m.key: m.holding.pages for m in self._members.values() if m.holding is not None}
        queues = {"waiting": len(self._admission.waiting), "running": len(self._admission.running)}
        counts, pages = {"retracted": self._retracted}, msgspec.to_builtins(self.ledger.audit(tables))
        return {"role": "unified", "queues": queues, "pages": pages, "counts": counts}

    def _arrive(self, member: Member) -> None:
        """To the waiting ones, at its place: a retracted request keeps its age."""
        member.fed_ids, member.computed = (*member.spec.prompt_ids, *member.generated), 0
        most = len(member.spec.prompt_ids) + member.spec.sampling.max_tokens
        member.claim = self._admission.arrive(member.key, member.key, member.total_ids + 1, most, now_s=0.0)

    def _admit(self) -> None:
        """By the rules of decode, except that what comes in runs at once: nobody else writes to the pages here."""
        while (claim := self._admission.admit()) is not None:
            self._members[claim.key].holding = claim.holding

    def _make_room(self) -> None:
        """A page for each next token, the oldest first; when none is free, the youngest computes its tokens again."""
        for claim in list(self._admission.running):
            while claim.phase is Phase.RUNNING:
                victim = self._admission.grow(claim, self._members[claim.key].total_ids)
                if victim is None:
                    break
                member = self._members[victim.key]
                self._admission.retract(victim, now_s=0.0)
                self._release(member)
                self._retracted += 1
                self._arrive(member)

    def _plan(self) -> StepPlan | None:
        """One token of each request that decodes, and prompt chunks within the rest of the budget."""
        step, sequences = self.step_done + 1, []
        running = [self._members[claim.key] for claim in self._admission.running]
        budget = self.batch_tokens - sum(member.decodes for member in running)
        for member in running:
            if member.decodes:
                sequences.append(self._sequence(member, (member.generated[-1],), member.total_ids - 1, step, True))
                continue
            remaining = len(member.fed_ids) - member.computed
            size = next_chunk(remaining, min(self.chunk_tokens, budget), self._page_size)
            if size == 0:
                continue
            budget -= size
            fed = member.fed_ids[member.computed : member.computed + size]
            sequences.append(self._sequence(member, fed, member.computed, step, size == remaining))
        return StepPlan(step, tuple(sequences)) if sequences else None

    def _sequence(self, member: Member, fed: tuple[int, ...], start: int, step: int, draw: bool) -> Sequence:
        assert member.holding is not None
        self.ledger.name_in_step(member.holding, step)
        pages = member.holding.pages
        if not draw:
            return Sequence(member.key, fed, start, pages)
        return Sequence(member.key, fed, start, pages, member.spec.sampling, member.past.history())

    def _publish(self, plan: StepPlan, result: StepResult) -> None:
        self.step_done = plan.step
        for sequence, drawn in zip(plan.sequences, result.drawn, strict=True):
            member = self._members[sequence.key]
            if not member.decodes:
                member.computed += len(sequence.token_ids)
            if drawn is None or member.over:
                continue
            emission = member.text.push(drawn.token_id)
            member.generated.append(drawn.token_id)
            member.past.add(drawn.token_id)
            request, text, reason = member.spec.request, emission.text, emission.finish_reason
            token = Token(request, 0, 0, len(member.generated) - 1, drawn.token_id, text, reason, drawn.logprobs)
            member.tokens.put_nowait(token)
            member.over = bool(emission.finish_reason)

    def _retire(self) -> None:
        """Requests that are over give their pages back: no forward is running here."""
        for member in [member for member in self._members.values() if member.over]:
            assert member.claim is not None
            self._admission.leave(member.claim)
            self._release(member)
            del self._members[member.key]

    def _release(self, member: Member) -> None:
        if member.holding is not None:
            proof = Quiescent(member.holding.id, Stepped(self.step_done), NeverGiven())
            self.ledger.release(member.holding, proof)
            member.holding = None
