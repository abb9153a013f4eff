"""The production room as a Ray actor of its own: the peer that shows why a room is no process."""

from __future__ import annotations

import re
import time
from pathlib import Path

from kvferry.actors.room.journal import Journal
from kvferry.actors.room.room import FromLeg, Room
from kvferry.actors.settings import ClockSettings
from kvferry.cluster.clock import SystemClock
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause
from kvferry.protocol.messages import (
    Admitted,
    Committed,
    Drained,
    Message,
    OpenDecode,
    Opened,
    OpenPrefill,
    PrefillDone,
    Progress,
    Received,
)
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.protocol.room import RoomMachine

PREFILL, DECODE = Address("prefill-0", "", 1, "", 0), Address("decode-0", "", 2, "", 0)


def private_bytes() -> int:
    """Memory that is this process's alone."""
    rows = re.findall(r"^Private_\w+:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, rows))


class RoomProcess:
    """The production room as a Ray actor of its own. Its legs answer from within the process, so what it costs beside
    the room itself is the process and the call alone."""

    def _answer(self, leg: Address, message: Message) -> bool:
        number, post = self._room.machine.room, self._room.post
        if isinstance(message, OpenPrefill):
            post(FromLeg(leg, Opened(number, "prefill")))
        elif isinstance(message, OpenDecode):
            news: list[tuple[Address, Message]] = [(DECODE, Opened(number, "decode")), (DECODE, Admitted(number, 2))]
            news += [(PREFILL, Progress(number, "prefill", event)) for event in ("queued", "started", "computed")]
            news += [(PREFILL, PrefillDone(number, 1)), (PREFILL, Drained(number, 0, True))]
            news += [(DECODE, Received(number, 0)), (DECODE, Committed(number))]
            for peer, answer in news:
                post(FromLeg(peer, answer))
        return True

    async def hand_over(self, number: int) -> dict[str, float]:
        """A whole handoff; what the process has used for it since it began, and what memory is its own."""
        clock = SystemClock()
        spec = RequestSpec(number, tuple(range(16)), Sampling(max_tokens=1), Address("front", "", 3, "", 0))
        machine = RoomMachine(number, 0, spec, PREFILL, DECODE, ClockSettings().limits(), clock.now_s())
        journal = Journal(number, number, 0, "prefill-0", "decode-0", "fake", 16, clock.now_s())
        ended: list[Cause | None] = []
        self._room = Room(machine, journal, clock, self._answer, ended.append, 4096)
        await self._room.run()
        assert ended == [None], ended
        return {"cpu_s": time.process_time(), "private_bytes": float(private_bytes())}
