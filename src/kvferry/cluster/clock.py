"""The real clock and the real randomness, for `kvferry.actors.ports`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable


class SystemClock:
    """Seconds of this host's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def call_later(self, delay_s: float, do: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, do)


class SystemRandom:
    """Random bits of the operating system."""

    def bits(self, count: int) -> int:
        return secrets.randbits(count)
