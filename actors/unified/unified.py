"""The unified actor: admit, compute chunks and decode steps in one forward, publish."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.actors.mailbox import Mailbox
from kvferry.engine.contract import Engine, Sequence, StepPlan, StepResult, TextFactory, TextStream
from kvferry.engine.history import Past
from kvferry.memory.admission import pages_needed, refusal
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.memory.proof import NeverGiven, Quiescent, Stepped
from kvferry.protocol.errors import error_from
from kvferry.protocol.messages import RequestSpec, Token


@dataclass
class Member:
    """A request. It prefills until `computed` reaches the prompt's end; then each step feeds `last_token`."""

    key: int
    spec: RequestSpec
    text: TextStream
    past: Past
    tokens: asyncio.Queue[Token | BaseException]
    holding: Holding | None = None
    computed: int = 0
    generated: int = 0
    last_token: int = -1
    over: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)


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
        self.chunk_tokens, self.batch_tokens, self.max_running = chunk_tokens, batch_tokens, max_running
        self.ledger = PageLedger(engine.limits.pages)
        self.step_done = 0
        self._page_size = engine.limits.page_size
        self._mailbox: Mailbox[Member] = Mailbox(mailbox)
        self._members: dict[int, Member] = {}
        self._waiting: deque[Member] = deque()
        self._next = 1
        self._failure: BaseException | None = None

    async def generate(self, spec: RequestSpec) -> AsyncIterator[Token]:
        """The request's tokens. Closing the iterator early stops the request.

        Raises InvalidRequest when it can never fit, and what ended the actor when it has ended.
        """
        if self._failure is not None:
            raise self._failure
        limit = min(self.ledger.total * self._page_size, self.engine.limits.context_tokens)
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
                if (not self._members and not self._waiting) or len(self._mailbox):
                    self._waiting.extend(await self._mailbox.take())
                self._admit()
                plan = self._plan()
                if plan is not None:
                    self._publish(plan, await self.engine.step(plan))
                self._retire()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            await self.engine.close()

    def _fail(self, error: BaseException) -> None:
        """Tell everyone who waits, and everyone who comes later, why the actor has ended."""
        gone = isinstance(error, asyncio.CancelledError)
        self._failure = RuntimeError("the unified actor has been stopped") if gone else error
        for member in (*self._members.values(), *self._waiting, *self._mailbox.drain()):
            member.tokens.put_nowait(self._failure)

    async def status(self) -> dict[str, Any]:
        tables = {m.key: m.holding.pages for m in self._members.values() if m.holding is not None}
        queues = {"waiting": len(self._waiting), "running": len(self._members)}
        return {"role": "unified", "queues": queues, "pages": msgspec.to_builtins(self.ledger.audit(tables))}

    def _admit(self) -> None:
        """In order of arrival; prompt + max_tokens is reserved, so what is admitted can finish."""
        while self._waiting and len(self._members) < self.max_running:
            member = self._waiting[0]
            if member.over:
                self._waiting.popleft()
                continue
            total = member.prompt_tokens + member.spec.sampling.max_tokens
            member.holding = self.ledger.reserve(member.key, pages_needed(total, self._page_size))
            if member.holding is None:
                return
            self._waiting.popleft()
            self._members[member.key] = member

    def _plan(self) -> StepPlan | None:
        """One token of each running request, and prompt chunks within the rest of the budget."""
        step, sequences = self.step_done + 1, []
        live = [member for member in self._members.values() if not member.over]
        budget = self.batch_tokens - sum(member.computed == member.prompt_tokens for member in live)
        for member in live:
            if member.computed == member.prompt_tokens:
                start = member.prompt_tokens + member.generated - 1
                sequences.append(self._sequence(member, (member.last_token,), start, step, True))
                continue
            remaining = member.prompt_tokens - member.computed
            size = min(self.chunk_tokens, remaining, max(budget, 0))
            if size < remaining:
                size -= size % self._page_size
            if size <= 0:
                continue
            budget -= size
            fed = member.spec.prompt_ids[member.computed : member.computed + size]
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
            if member.computed < member.prompt_tokens:
                member.computed += len(sequence.token_ids)
            if drawn is None or member.over:
                continue
            emission = member.text.push(drawn.token_id)
            index, member.generated, member.last_token = member.generated, member.generated + 1, drawn.token_id
            member.past.add(drawn.token_id)
            request, text, reason = member.spec.request, emission.text, emission.finish_reason
            token = Token(request, 0, 0, index, drawn.token_id, text, reason, drawn.logprobs)
            member.tokens.put_nowait(token)
            member.over = bool(emission.finish_reason)

    def _retire(self) -> None:
        """Requests that are over give their pages back: no forward is running here."""
        for member in [member for member in self._members.values() if member.over]:
            assert member.holding is not None
            proof = Quiescent(member.holding.id, Stepped(self.step_done), NeverGiven())
            self.ledger.release(member.holding, proof)
            del self._members[member.key]
