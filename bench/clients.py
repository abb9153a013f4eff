"""Clients of a front without HTTP: when each gets its first token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.actors.ports import Clock
from kvferry.protocol.request import Sampling
from kvferry.serve.front import Front


async def first_tokens_s(
    front: Front, clock: Clock, prompts: Sequence[int], arrivals_s: Sequence[float], max_tokens: int
) -> list[float]:
    """Seconds from each request's arrival to its first token. `prompts`: lengths in tokens; `arrivals_s`: from now.
    Every answer is read to its end, which is `max_tokens` long. The front must have been started.
    """
    began_s = clock.now_s()

    async def ask(tokens: int, at_s: float) -> float:
        await clock.sleep(began_s + at_s - clock.now_s())
        live = front.open(tuple(range(100, 100 + tokens)), Sampling(max_tokens=max_tokens, ignore_eos=True))
        taken = await live.take()
        first_s = clock.now_s() - began_s - at_s
        while not taken[-1].finish_reason:
            taken = await live.take()
        front.close_request(live)
        return first_s

    return list(await asyncio.gather(*(ask(n, at_s) for n, at_s in zip(prompts, arrivals_s, strict=True))))
