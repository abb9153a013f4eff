"""The requests behind one answer: a choice each, with a room, attempts and an abort of its own, read as one stream.

One event wakes the reader for all of them, and it takes whatever they have: tokens that came in one batch go out in
one write, and no choice waits for another. When one fails, the whole answer does: OpenAI's API has a status for an
answer and an error event for a stream, but no error of a choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.protocol.errors import KVFerryError
from kvferry.protocol.messages import Token
from kvferry.protocol.request import Sampling
from kvferry.serve.front import Front
from kvferry.serve.live import LiveRequest


class Choice:
    """One request, its place in the answer, and when its first and its last token came."""

    __slots__ = ("first_token_s", "index", "last_token_s", "live")

    def __init__(self, index: int, live: LiveRequest) -> None:
        self.index, self.live, self.first_token_s, self.last_token_s = index, live, 0.0, 0.0


class Choices:
    """Indexes go prompt by prompt. The caller must `close` it, whatever happens."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._news = asyncio.Event()
        self._all: list[Choice] = []
        self._open: list[Choice] = []
        self._error: KVFerryError | None = None
        self._prompt_tokens = 0

    def open(self, prompt_ids: tuple[int, ...], samplings: Sequence[Sampling]) -> None:
        """One more prompt, with an answer for each of `samplings`. Several share a group, so that the router sends them
        to one prefill, which computes the prompt once."""
        group = self._front.new_id() if len(samplings) > 1 else 0
        for sampling in samplings:
            live = self._front.open(prompt_ids, sampling, group, len(samplings), self._news)
            choice = Choice(len(self._all), live)
            self._all.append(choice)
            self._open.append(choice)
        self._prompt_tokens += len(prompt_ids)
        self._front.metrics.prompt_tokens.inc(len(prompt_ids))

    def close(self) -> None:
        """Abort what is not over."""
        for choice in self._all:
            self._front.close_request(choice.live)

    @property
    def lives(self) -> list[LiveRequest]:
        """By index."""
        return [choice.live for choice in self._all]

    @property
    def over(self) -> bool:
        """Every choice's last token has been taken."""
        return not self._open

    @property
    def rooms(self) -> list[int]:
        """Of the choices whose room is known, in order."""
        return [choice.live.room for choice in self._all if choice.live.room]

    @property
    def finish_reason(self) -> str:
        """Of the answer as a whole: "length" when any choice was cut off."""
        return max((choice.live.stream.finish_reason for choice in self._all), key=lambda reason: reason == "length")

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        return self._prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(choice.live.stream.next_index for choice in self._all)

    async def take(self) -> list[tuple[int, list[Token]]]:
        """(index, next tokens) of the choices that have some, at least one. Must not be called when it is `over`.

        Raises the KVFerryError of the first failure; what came before it is given first.
        """
        while True:
            self._news.clear()
            if parts := self._ready():
                return parts
            await self._news.wait()

    def _ready(self) -> list[tuple[int, list[Token]]]:
        if self._error is not None:
            raise self._error
        parts: list[tuple[int, list[Token]]] = []
        ended = False
        for choice in self._open:
            try:
                tokens = choice.live.ready()
            except KVFerryError as error:
                self._error = error
                continue
            if tokens:
                parts.append((choice.index, tokens))
                self._measure(choice, tokens)
                if tokens[-1].finish_reason:
                    ended = True
        if ended:
            self._open = [choice for choice in self._open if not choice.live.stream.finish_reason]
        if self._error is not None and not parts:
            raise self._error
        return parts

    def _measure(self, choice: Choice, tokens: list[Token]) -> None:
        metrics, now_s = self._front.metrics, self._front.clock.now_s()
        metrics.generated_tokens.inc(len(tokens))
        later = len(tokens)
        if tokens[0].index == 0:
            metrics.first_token.observe(now_s - choice.live.opened_s)
            choice.first_token_s = choice.last_token_s = now_s
            later -= 1
        for _ in range(later):
            metrics.inter_token.observe((now_s - choice.last_token_s) / later)
        choice.last_token_s = now_s
        if tokens[-1].finish_reason:
            metrics.generation.observe(now_s - choice.first_token_s)
            metrics.request_time.observe(now_s - choice.live.opened_s)
