"""What a client has received, and whether it is right: token by token, against what is known to be.

Two runs may differ where two tokens are a float's rounding apart: a difference is a *tie* if the two best logits of the
right answer are at most `TIE` apart there, and what follows a tie is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIE = 1e-3


@dataclass
class Answer:
    """One client's. `gaps`: between the two best logits of each token, where they are known."""

    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    room: str = ""


async def ask(http: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    """Read one completion to its end, or to what ended it; `answer` has at any time what has come so far."""
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            answer.room = response.headers.get("x-kvferry-room", "")
            if response.status_code != 200:
                answer.error = f"HTTP {response.status_code}: {(await response.aread()).decode()}"
            elif not body.get("stream"):
                take(answer, json.loads(await response.aread()))
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        take(answer, json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"


def take(answer: Answer, event: dict[str, Any]) -> None:
    """Add an event of the stream, or a whole answer."""
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.token_ids += choice["token_ids"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        for best in (choice["logprobs"] or {}).get("top_logprobs") or []:
            first, second = sorted(best.values(), reverse=True)[:2]
            answer.gaps.append(first - second)


def compare(ids: Sequence[int], right: Sequence[int], gaps: Sequence[float]) -> str:
    """ "" when `ids` are right as far as they go, "tie", or "wrong". `gaps` are those of `right`."""
    for at, token in enumerate(ids):
        if at >= len(right):
            return "wrong"
        if token != right[at]:
            return "tie" if gaps[at] <= TIE else "wrong"
    return ""
