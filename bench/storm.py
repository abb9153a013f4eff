"""A storm on a real server: clients that leave, `kill -9`, stopped processes and cut links, for ten minutes.

Two instances of each role serve short greedy requests (prompts of at most 128 tokens, 16 tokens out) over HTTP. Three
of ten clients leave at a random moment. Every 20 s a process is killed or stopped, the roles in turn: prefill, decode,
router, registry and the front's Serve replica are killed, prefill and decode are stopped for shorter and for longer
than the silence that ends a link; in between, links are cut, for as long. Every write is held for a moment, and one
whose room was aborted meanwhile is written all the same, late (`transfer.faults`).

Each token that a client got is compared with plain transformers' greedy output (`tests/engine/reference.json`); at the
end every page must be accounted for by the server's own recount. Then clients of the idle server leave at random
phases.

`wrong`: answers with a wrong token. `lost`: answers that ended without an end or an error, or did not end. `errors`:
those that ended with one. `recovery_s`: from a killed process's registration to the next right answer of a request that
came after it; `registered_s`: from the kill to there; `served_s`: from there to its own first forward (of prefill and
decode). `pages_unaccounted`: in no state, or in use though nothing runs; quarantined ones need a reason in the
status. `cancel_s`: from a client's leaving until all counters are at baseline, or the status gives that reason.
"""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from random import Random

import httpx
from accounts import settled
from cancels import Cancel, cancels
from report import arguments, finish
from rich.progress import Progress, TaskID
from serving import Served
from storm_clients import GIVE_UP_S, TOKENS, Clients, Request, body_of
from storm_report import Storm, document, figures, picture, show
from strikes import Strikes

SILENCE_S = 10.0
#: Chunks that most prompts have several of, so that what strikes and who leaves meet a prompt half written.
ARGS = {
    "prefill": {"instances": 2, "pool_pages": 64, "chunk_tokens": 32},
    "decode": {"instances": 2, "pool_pages": 64},
    "router": {"instances": 2},
    "links": {"silence_s": SILENCE_S},
    "transfer": {"faults": {"delay_ms": 30, "late_after_abort_ms": 100}},
}
#: Shorter and longer than every limit by which a silent peer is given up.
STOPS_S = (SILENCE_S / 3, SILENCE_S + 4)
SCOUT_S = 1.0  # between clients that see whether what is back serves
CALM_S = 120.0  # after which everything must be back
#: One of these every `--every` seconds: what is done, and to which role.
TURNS = (
    ("kill", "prefill"), ("stop", "decode"), ("kill", "router"), ("stop", "prefill"), ("kill", "decode"),
    ("stop", "prefill"), ("kill", "registry"), ("stop", "decode"), ("kill", "front"),
)  # fmt: skip
#: And one of these links between a stop and what comes next.
LINKS = (("decode", "prefill"), ("router", "decode"), ("router", "prefill"), ("decode", "front"))


async def storm(server: Served, options: Namespace) -> Storm:
    began_s = time.monotonic()

    def now_s() -> float:
        return time.monotonic() - began_s

    limits = httpx.Limits(max_connections=2 * options.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=GIVE_UP_S, limits=limits) as http:
        clients = Clients(http, now_s, Random(options.seed), options.rate, options.clients)
        strikes = Strikes(server, now_s, STOPS_S)
        with Progress(transient=True) as progress:
            task = progress.add_task("storm", total=60 * options.minutes)
            await rage(
                clients,
                strikes,
                options,
                lambda: progress.update(task, completed=now_s(), description=told(clients, strikes)),
            )
            lasted_s = now_s()
            after = await asyncio.to_thread(settled, server, 60.0)
            left = await leave(http, clients, options, progress, task)
        last = await asyncio.to_thread(settled, server, 60.0)
    return Storm(lasted_s, options.every, clients.requests, strikes.done, strikes.looks, left, (after, last))


async def rage(clients: Clients, strikes: Strikes, options: Namespace, tell: Callable[[], None]) -> None:
    """The storm itself, until everything that was struck serves again."""
    scout_s = 0.0
    working = [asyncio.create_task(strikes.run()), asyncio.create_task(clients.come())]

    async def until(at_s: float) -> None:
        nonlocal scout_s
        while clients.now_s() < at_s:
            for task in working:
                if task.done():
                    task.result()  # a part of the storm that has failed ends it
            if clients.now_s() >= scout_s and waited_for(strikes, clients.requests, only_back=True):
                scout_s = clients.now_s() + SCOUT_S
                clients.arrive()  # who finds out how soon there are right answers again
            tell()
            await asyncio.sleep(0.2)

    for at_s, strike in schedule(60 * options.minutes, options.every, strikes):
        await until(at_s)
        strike()
    await strikes.finish()
    end_s = clients.now_s() + CALM_S
    while waiting := waited_for(strikes, clients.requests):
        if clients.now_s() > end_s:
            raise TimeoutError(f"not back after {CALM_S} s: {waiting}")
        await until(clients.now_s() + 1.0)
    for task in working:
        task.cancel()
    await clients.gone()


async def leave(
    http: httpx.AsyncClient, clients: Clients, options: Namespace, progress: Progress, task: TaskID
) -> list[Cancel]:
    """The cancels, of requests that are long enough to be met in each phase."""
    if not options.cancels:
        return []
    progress.update(task, description="cancels", total=options.cancels, completed=0)
    longest = max(clients.known, key=lambda known: len(known.prompt_ids))
    body = body_of(longest, True, 4 * TOKENS) | {"ignore_eos": True}
    return await cancels(http, body, options.cancels, options.seed, lambda: progress.advance(task))


def schedule(total_s: float, every_s: float, strikes: Strikes) -> Iterator[tuple[float, Callable[[], None]]]:
    """When to do what: a kill or a stop every `every_s`, a cut half of that after each stop; at the end nothing."""
    turns, links = cycle(TURNS), cycle(LINKS)
    number = 1
    while (at_s := number * every_s) < total_s - every_s / 2:
        kind, role = next(turns)
        yield at_s, lambda kind=kind, role=role: getattr(strikes, kind)(role)  # type: ignore[misc]
        if kind == "stop":
            pair = next(links)
            yield at_s + every_s / 2, lambda pair=pair: strikes.cut(*pair)  # type: ignore[misc]
        number += 1
    yield total_s, lambda: None


def waited_for(strikes: Strikes, requests: list[Request], only_back: bool = False) -> list[str]:
    """What was struck and is not back (`only_back`: is back), and has not been followed by a right answer. Notes the
    answers."""
    waiting = []
    for strike in strikes.done:
        if strike.end_s is not None and strike.right_s is None:
            right = (r.ended_s for r in requests if r.verdict in ("right", "tie") and r.began_s >= strike.end_s)
            strike.right_s = min(right, default=None)
        if strike.right_s is None and not (only_back and strike.end_s is None):
            waiting.append(f"{strike.kind} of {strike.victim} at {strike.at_s:.0f} s")
    return waiting


def told(clients: Clients, strikes: Strikes) -> str:
    wrong = sum(request.verdict in ("wrong", "lost") for request in clients.requests)
    return f"{len(clients.requests)} requests, {wrong} wrong or lost, {len(strikes.done)} faults"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it lasts (%(default)s)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one fault to the next (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.9, help="clients that come per second (%(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="and how many may be there at a time (%(default)s)")
    parser.add_argument("--cancels", type=int, default=200, help="cancels afterwards (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random here (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write storm.md and storm.png there")
    options = parser.parse_args()
    with Served(ARGS) as server:
        found = asyncio.run(storm(server, options))
    numbers = figures(found)
    show(found, numbers)
    if options.report is not None:
        picture(found, options.report / "storm.png")
        document(found, numbers, options.report / "storm.md")
    finish(options.json, numbers)
    sys.exit(0 if numbers["passed"] else 1)


if __name__ == "__main__":
    main()
