"""Cancels at random phases of an otherwise idle server: how long until every counter is at baseline again.

The phase is the room's KVPoll when it ended, as the routers count their ended rooms; moments are drawn so that each
phase is met, from how long the phases of undisturbed requests last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import httpx
from accounts import Account, account
from answers import Answer, ask

#: What is known of a room that has ended, from the furthest on.
PHASES = {
    "running": "committed", "transferring": "TRANSFERRING", "waiting": "WAITING_FOR_INPUT",
    "before admission": "BOOTSTRAPPING", "no room yet": "",
}  # fmt: skip
LOOK_S, STAYS_S = 0.01, 0.15
GIVE_UP_S = 30.0


@dataclass(frozen=True)
class Cancel:
    """One; `took_s` from the client's leaving until the status was at baseline, or told why pages are quarantined.
    `waited_for`: what was still there when that was last not so, whose forward ended with it, and how long the look
    took that found it ended: it has ended at some time within that.
    """

    phase: str
    took_s: float
    account: Account
    waited_for: str = ""


@dataclass(frozen=True)
class Moment:
    """When to leave: so many seconds after the request was sent, or after its first token came."""

    after_s: float
    first_token: bool


async def cancels(
    http: httpx.AsyncClient, body: dict[str, Any], count: int, seed: int, told: Callable[[], None]
) -> list[Cancel]:
    """`count` of them, one at a time; `told` after each. Raises TimeoutError when one never comes to an end."""
    random = Random(seed)
    windows = await _windows(http, body)
    found: list[Cancel] = []
    while len(found) < count:
        low_s, high_s, first_token = windows[random.randrange(len(windows))]
        cancel = await _cancel(http, body, Moment(random.uniform(low_s, high_s), first_token))
        if cancel is not None:
            found.append(cancel)
            told()
    return found


async def _windows(http: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[float, float, bool]]:
    """When a request is in which phase: medians of a few undisturbed ones. The first token shows to its client that
    the prompt has been computed; so what comes behind it is counted from there.
    """
    rows = []
    for _ in range(5):
        began_s = time.monotonic()
        answer = Answer()
        asking = asyncio.create_task(ask(http, body, answer))
        while not answer.token_ids and not asking.done():
            await asyncio.sleep(0.001)
        first_s = time.monotonic() - began_s
        await asking
        if answer.error:
            raise RuntimeError(f"an undisturbed request failed: {answer.error}")
        whole_s = time.monotonic() - began_s
        await _baseline(http)
        journal = (await http.get(f"/rooms/{answer.room}")).json()
        computed_s = max(event["at_s"] for event in journal["events"] if event["event"] == "computed")
        admitted_s, transferring_s, success_s = (poll["at_s"] for poll in journal["kvpoll"][1:4])
        created_s = max(0.0, first_s - computed_s)
        rows.append((created_s, admitted_s, transferring_s, success_s - computed_s, whole_s - first_s))
    created_s, admitted_s, transferring_s, sent_s, told_s = map(median, zip(*rows, strict=True))
    return [
        (0.0, created_s, False),
        (created_s - admitted_s, created_s + 2 * admitted_s, False),  # milliseconds: not all will hit
        (created_s + admitted_s, created_s + transferring_s, False),
        (0.0, sent_s, True),
        (sent_s, told_s, True),
    ]


async def _cancel(http: httpx.AsyncClient, body: dict[str, Any], moment: Moment) -> Cancel | None:
    """None when the answer was complete before the client left."""
    before = _ended(await status_of(http))
    answer = Answer()
    asking = asyncio.create_task(ask(http, body, answer))
    while moment.first_token and not answer.token_ids and not asking.done():
        await asyncio.sleep(0.001)
    await asyncio.sleep(max(0.0, moment.after_s))
    if asking.done():
        await _baseline(http)
        return None
    left_s = time.monotonic()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    status, found, at_s, waited_for = await explained(http, left_s)
    phase = _phase(before, _ended(status))
    await _baseline(http)
    return Cancel(phase, at_s - left_s, found, waited_for)


async def explained(http: httpx.AsyncClient, left_s: float) -> tuple[dict[str, Any], Account, float, str]:
    """Look until everything is accounted for and stays so for `STAYS_S`: a request that the server has only just read
    has no room yet. With it, the time at which it began to be so, and what was there before. A forward that runs can't
    be cancelled, and its pages are not free before it has ended; so where one ends with the wait, it was the reason.
    """
    since_s: float | None = None
    left, steps = "", dict[str, int]()
    while True:
        began_s = time.monotonic()
        status = await status_of(http)
        found, now_s = account(status), time.monotonic()
        if not found.explained:
            since_s, left, steps = None, _left(status), _steps(status)
            if now_s - left_s > GIVE_UP_S:
                raise TimeoutError(f"not at baseline {GIVE_UP_S} s after a cancel: {found}; {status}")
        elif since_s is None:
            since_s = now_s
            if ended := [name for name, step in _steps(status).items() if step > steps.get(name, step)]:
                left += f"; a forward ended: {', '.join(ended)}"
            left += f"; seen by a look of {now_s - began_s:.2f} s"
        elif now_s - since_s >= STAYS_S:
            return status, found, since_s, left
        await asyncio.sleep(LOOK_S)


def _left(status: dict[str, Any]) -> str:
    """Who has rooms, and how many; the rest of it in one line."""
    held = [
        f"{row['id']} {row['queues']['rooms']}" for row in status["instances"] if row.get("queues", {}).get("rooms")
    ]
    found = {"requests": status["requests_live"], "rooms of routers": status["rooms_live"]}
    return ", ".join([f"{name} {number}" for name, number in found.items() if number] + held)


def _steps(status: dict[str, Any]) -> dict[str, int]:
    """How many forwards each instance has made."""
    return {row["id"]: row["step"] for row in status["instances"] if "step" in row}


async def _baseline(http: httpx.AsyncClient) -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while not account(await status_of(http)).baseline:
        if time.monotonic() > end_s:
            raise TimeoutError(f"not at baseline after {GIVE_UP_S} s")
        await asyncio.sleep(LOOK_S)


async def status_of(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get("/status")
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def _ended(status: dict[str, Any]) -> dict[str, int]:
    """Of all routers' ended rooms: how many have reached each phase, and how many have committed."""
    found = dict.fromkeys(PHASES.values(), 0)
    for router in status["routers"]:
        for name, phase in router["rooms"]["phases"].items():
            found[name] += sum(phase["buckets"])
        found["committed"] += router["rooms"]["outcomes"].get("committed", 0)
    return found


def _phase(before: dict[str, int], after: dict[str, int]) -> str:
    """The furthest that one more room has reached."""
    return next((phase for phase, name in PHASES.items() if after[name] > before[name]), "no room yet")
