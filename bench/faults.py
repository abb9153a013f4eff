"""`kill -9` of each kind of process under load, on real Ray, with the real model.

For each fault, several times: 8 clients stream 300 greedy tokens each; in mid-stream one process is killed. What every
client receives is held against what it receives without a kill, token by token (`answers.py` says what a tie is).

`wrong`: answers with another difference. `lost`: answers that ended early or with an error. `recovery_s`: from the kill
until the process is back (a new pid, registered) and a fresh request is answered right. `pages_unaccounted`: pages that
are in no state, or still in use when nothing runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import accounts
import httpx
from answers import Answer, ask, compare
from report import arguments, finish, table
from rich.progress import Progress
from serving import Served

MODEL = "smollm2-135m"
STREAMS = 8
FAULTS = ("decode", "prefill", "router", "registry")
ARGS = {"prefill": {"instances": 1}, "decode": {"instances": 2}, "router": {"instances": 2}}
PROBE = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}


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


async def all_streams(url: str, tokens: int, answers: list[Answer]) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as http:
        await asyncio.gather(*(ask(http, body_of(client, tokens), answers[client]) for client in range(STREAMS)))


def judge(answer: Answer, right: Answer) -> str:
    """ "" when it is right, or "tie", "wrong", "lost"."""
    if answer.error or len(answer.token_ids) != len(right.token_ids) or answer.finish_reason != right.finish_reason:
        return "lost"
    if answer.token_ids == right.token_ids:
        return "" if answer.text == right.text else "wrong"
    return compare(answer.token_ids, right.token_ids, right.gaps)


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
        unaccounted = accounts.settled(server, 60.0).unaccounted
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
