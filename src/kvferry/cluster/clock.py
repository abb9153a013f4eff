"""The real clock and the real randomness, for `kvferry.actors.ports`."""

from __future__ import annotations

import asyncio
import secrets
import time


class SystemClock:
    """Seconds of this host's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class SystemRandom:
    """Random bits of the operating system."""

    def bits(self, count: int) -> int:
        return secrets.randbits(count)
