"""Storm: `kill -9` of each kind of process under load, on real Ray, with the real model.

For each fault, several times: 8 clients stream 300 greedy tokens each; in mid-stream one process is killed. What every
client receives is held against what it receives without a kill, token by token. Two runs may differ where two tokens
are a float's rounding apart: a difference counts as a tie if the two best logits of the undisturbed run are at most
1e-3 apart there, and what follows a tie is not compared.

`wrong`: answers with another difference. `lost`: answers that ended early or with an error. `recovery_s`: from the kill
until the process is back (a new pid, registered) and a fresh request is answered right. `pages_unaccounted`: pages that
are in no state, or still in use when nothing runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from report import arguments, finish, table
from rich.progress import Progress
from serving import Served

MODEL = "smollm2-135m"
STREAMS = 8
TIE = 1e-3
FAULTS = ("decode", "prefill", "router", "registry")
ARGS = {"prefill": {"instances": 1}, "decode": {"instances": 2}, "router": {"instances": 2}}
PROBE = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}


@dataclass
class Answer:
    """What one client has received."""

    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two best logits, where they were asked for
    text: str = ""
    finish_reason: str = ""
    error: str = ""


@dataclass
class Hit:
    """One kill and what came of it."""

    fault: str
    victim: str
    recovery_s: float
    streaming: int  # clients that had some of their tokens when it struck
    ties: int = 0
    wrong: int = 0
    lost: int = 0


def prompt_of(client: int) -> str:
    """Prompts of different lengths, so that at any time some prefill and some decode."""
    return f"Story number {client}. " + "Tell me a long story about a ferry and its captain. " * (1 + 8 * client)


def body_of(client: int, tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": prompt_of(client), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "logprobs": 2,
    }  # fmt: skip


async def stream(http: httpx.AsyncClient, client: int, tokens: int, answer: Answer) -> None:
    """Read one answer to its end, or to what ended it."""
    try:
        async with http.stream("POST", "/v1/completions", json=body_of(client, tokens)) as response:
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
                return
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    take(answer, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"


def take(answer: Answer, event: dict[str, Any]) -> None:
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


async def all_streams(url: str, tokens: int, answers: list[Answer]) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as http:
        await asyncio.gather(*(stream(http, client, tokens, answers[client]) for client in range(STREAMS)))


def judge(answer: Answer, right: Answer) -> str:
    """ "" when it is right, or "tie", "wrong", "lost"."""
    if answer.error or len(answer.token_ids) != len(right.token_ids) or answer.finish_reason != right.finish_reason:
        return "lost"
    if answer.token_ids == right.token_ids:
        return "" if answer.text == right.text else "wrong"
    at = next(i for i, (a, b) in enumerate(zip(answer.token_ids, right.token_ids, strict=True)) if a != b)
    return "tie" if right.gaps[at] <= TIE else "wrong"


def pick(server: Served, fault: str, turn: int) -> tuple[str, int]:
    """The process to kill; instances of one kind in turn."""
    pids = {name: pid for name, pid in server.pids().items() if name.split("-")[0] == fault}
    name = sorted(pids)[turn % len(pids)]
    return name, pids[name]


async def strike(server: Served, fault: str, turn: int, tokens: int, right: list[Answer]) -> Hit:
    answers = [Answer() for _ in range(STREAMS)]
    streams = asyncio.ensure_future(all_streams(server.url, tokens, answers))
    # Prefill is met while half of the prompts still wait for it; the others when every client reads.
    need = STREAMS // 2 if fault == "prefill" else STREAMS
    while sum(len(answer.token_ids) > 5 for answer in answers) < need and not streams.done():
        await asyncio.sleep(0.02)
    victim, pid = await asyncio.to_thread(pick, server, fault, turn)
    streaming = sum(0 < len(answer.token_ids) < tokens for answer in answers)
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    await asyncio.to_thread(wait_back, server, victim, pid)
    hit = Hit(fault, victim, time.monotonic() - killed_s, streaming)
    await streams
    for client, (answer, expected) in enumerate(zip(answers, right, strict=True)):
        verdict = judge(answer, expected)
        hit.ties += verdict == "tie"
        hit.wrong += verdict == "wrong"
        hit.lost += verdict == "lost"
        if verdict in ("wrong", "lost"):
            said = answer.error or f"{len(answer.token_ids)} tokens"
            print(f"{verdict}: client {client} after the loss of {victim}: {said}", file=sys.stderr)
    return hit


def complete(server: Served) -> bool:
    """A handoff has gone through, and no instance is missing."""
    answer = server.http.get("/ready").json()
    return bool(answer["ready"]) and not answer["missing"]


def wait_back(server: Served, victim: str, pid: int) -> None:
    """Until the victim's successor is registered and a fresh request is right."""
    server.wait(lambda: server.pids().get(victim, pid) != pid, 120, f"a new {victim}")
    server.wait(lambda: complete(server), 120, "ready again")
    answer = server.http.post("/v1/completions", json=PROBE)
    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
    if " Paris" not in text:
        raise RuntimeError(f"after the loss of {victim} the probe is answered {text!r}")


def pages_unaccounted(server: Served, limit_s: float = 60.0) -> int:
    """Pages that are not free or cached though nothing runs. Waits for what may still be on its way."""
    end_s = time.monotonic() + limit_s
    while True:
        status = server.status()
        pages = [instance["pages"] for instance in status["instances"]]
        missing = sum(p["total"] - p["free"] - p["cached"] for p in pages if p)
        missing += sum(1 for p in pages if not p)  # an instance that does not answer accounts for nothing
        if (not missing and not status["rooms_live"]) or time.monotonic() > end_s:
            return missing
        time.sleep(0.2)


async def run(server: Served, repeats: int, tokens: int) -> list[Hit]:
    right = [Answer() for _ in range(STREAMS)]
    await all_streams(server.url, tokens, right)
    if any(answer.error or len(answer.token_ids) != tokens for answer in right):
        raise RuntimeError(f"the undisturbed run failed: {[answer.error for answer in right]}")
    hits = []
    with Progress(transient=True) as progress:
        task = progress.add_task("faults", total=repeats * len(FAULTS))
        for turn in range(repeats):
            for fault in FAULTS:
                progress.update(task, description=f"kill -9 of a {fault}")
                hits.append(await strike(server, fault, turn, tokens, right))
                progress.advance(task)
    return hits


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="kills of each kind (%(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each stream (%(default)s)")
    options = parser.parse_args()
    with Served(ARGS) as server:
        hits = asyncio.run(run(server, options.repeats, options.tokens))
        unaccounted = pages_unaccounted(server)
    rows = [
        [
            f"kill -9 of {hit.victim}", str(hit.streaming), str(STREAMS - hit.wrong - hit.lost), str(hit.ties),
            str(hit.wrong), str(hit.lost), f"{hit.recovery_s:.1f}",
        ]
        for hit in hits
    ]  # fmt: skip
    columns = ("fault", "in mid-stream", "right", "of them ties", "wrong", "lost", "recovery s")
    table(f"{STREAMS} streams of {options.tokens} tokens, 1 prefill + 2 decode + 2 routers", columns, rows)
    figures = {
        "wrong": sum(hit.wrong for hit in hits),
        "lost": sum(hit.lost for hit in hits),
        "ties": sum(hit.ties for hit in hits),
        "kills": len(hits),
        "recovery_s_max": round(max(hit.recovery_s for hit in hits), 2),
        "pages_unaccounted": unaccounted,
    }
    finish(options.json, figures)
    sys.exit(1 if figures["wrong"] or figures["lost"] or unaccounted else 0)


if __name__ == "__main__":
    main()
