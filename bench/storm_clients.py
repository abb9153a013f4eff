"""The clients of a storm: they ask, leave at random moments, and know what the right answer is.

Each token that a client got is compared with plain transformers' greedy output (`tests/engine/reference.json`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from answers import Answer, ask, compare

MODEL = "smollm2-135m"
TOKENS, MOST_PROMPT = 16, 128
LEAVE = 0.3  # of all clients
GIVE_UP_S = 120.0
REFERENCE = Path(__file__).parents[1] / "tests" / "engine" / "reference.json"


@dataclass
class Request:
    """One client's. `verdict`: right, tie, wrong, left, error or lost."""

    began_s: float
    ended_s: float = 0.0
    verdict: str = ""
    tokens: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Known:
    """A prompt and what plain transformers answer, with the gaps of their two best logits."""

    prompt_ids: list[int]
    ids: list[int]
    gaps: list[float]
    finish_reason: str


def oracle(tokens: int = TOKENS, lengths: Container[int] = range(MOST_PROMPT + 1)) -> list[Known]:
    """The first `tokens` of the answers to prompts of these lengths, in tokens; an answer ends with EOS."""
    found = []
    for entry in json.loads(REFERENCE.read_text())["prompts"]:
        end = entry["first_eos"]
        length = tokens if end is None else min(tokens, end + 1)
        if entry["length"] in lengths:
            reason = "length" if end is None or end >= tokens else "stop"
            found.append(Known(entry["prompt_ids"], entry["output_ids"][:length], entry["margins"][:length], reason))
    return found


def body_of(known: Known, stream: bool, tokens: int = TOKENS) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": known.prompt_ids, "max_tokens": tokens, "temperature": 0, "stream": stream,
        "return_token_ids": True,
    }  # fmt: skip


def judge(answer: Answer, known: Known, left: bool) -> tuple[str, str]:
    """The verdict, and what there is to say about it. What came before a client left, or before an error, must be right
    as well.
    """
    found = compare(answer.token_ids, known.ids, known.gaps)
    if found == "wrong":
        return "wrong", f"{answer.token_ids}, not {known.ids}"
    if left:
        return "left", ""
    if answer.error:
        return "error", answer.error
    if not answer.finish_reason:
        return "lost", f"ended after {len(answer.token_ids)} tokens, without an error"
    if found == "tie":
        return "tie", ""
    if (len(answer.token_ids), answer.finish_reason) != (len(known.ids), known.finish_reason):
        return "wrong", f"{len(answer.token_ids)} tokens and {answer.finish_reason}"
    return "right", ""


@dataclass
class Clients:
    """They come at random moments, `rate` a second, whatever becomes of those before; at most `most` are there at a
    time. `requests` is what came of them.
    """

    http: httpx.AsyncClient
    now_s: Callable[[], float]
    random: Random
    rate: float
    most: int
    requests: list[Request] = field(default_factory=list)
    known: list[Known] = field(default_factory=oracle)
    _here: set[asyncio.Task[None]] = field(default_factory=set)
    _usual_s: float = 1.0  # what an answer takes

    async def come(self) -> None:
        """For ever. Raises what one of them raises."""
        while True:
            await asyncio.sleep(self.random.expovariate(self.rate))
            for task in [task for task in self._here if task.done()]:
                self._here.remove(task)
                task.result()
            if len(self._here) < self.most:
                leaves = self._left() < LEAVE * len(self.requests) and self.random.random() < 2 * LEAVE
                self.arrive(leaves)

    def arrive(self, leaves: bool = False) -> None:
        """One more, now."""
        self._here.add(asyncio.create_task(self._one(leaves)))

    async def gone(self) -> None:
        """All have got their answers."""
        await asyncio.gather(*self._here)

    async def _one(self, leaves: bool) -> None:
        known = self.known[self.random.randrange(len(self.known))]
        request = Request(self.now_s())
        self.requests.append(request)
        await self._ask(request, known, leaves)

    def _left(self) -> int:
        return sum(request.verdict == "left" for request in self.requests)

    async def _ask(self, request: Request, known: Known, leaves: bool) -> None:
        answer, stream = Answer(), self.random.random() < 0.7
        asking = asyncio.create_task(ask(self.http, body_of(known, stream), answer))
        after_tokens = self.random.randrange(TOKENS) if leaves and stream and self.random.random() < 0.5 else -1
        after_s = self.random.uniform(0, self._usual_s) if leaves and after_tokens < 0 else GIVE_UP_S
        await self._wait(asking, answer, after_s, after_tokens)
        left = leaves and not asking.done()
        hung = not leaves and not asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        request.ended_s, request.tokens = self.now_s(), len(answer.token_ids)
        request.verdict, request.detail = judge(answer, known, left)
        if hung:
            request.verdict, request.detail = "lost", f"no end after {GIVE_UP_S} s"
        if request.verdict == "right":
            self._usual_s += 0.1 * (request.ended_s - request.began_s - self._usual_s)

    async def _wait(self, asking: asyncio.Task[None], answer: Answer, after_s: float, after_tokens: int) -> None:
        """Until the answer has ended, or the client leaves."""
        end_s = self.now_s() + after_s
        while not asking.done() and self.now_s() < end_s:
            if 0 <= after_tokens <= len(answer.token_ids):
                return
            await asyncio.wait({asking}, timeout=min(0.01 if after_tokens >= 0 else 1.0, end_s - self.now_s()))
