"""A room's journal: every event with its time, every KVPoll transition with its duration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.protocol.kvpoll import STICKY, KVPoll
from kvferry.protocol.messages import Drained, Released

#: When, what, by which leg, and what more is known of it. Kept as it came, and made readable when somebody asks.
_Event = tuple[float, str, str, dict[str, Any] | None]

QUEUED = "queued"


@dataclass(slots=True)
class Journal:
    """Times are seconds since the room began, by its router's monotonic clock. `limit` bounds the events kept."""

    room: int
    request: int
    attempt: int
    prefill: str
    decode: str
    backend: str
    prompt_tokens: int
    began_s: float
    limit: int = 4096
    dropped: int = 0
    kv_bytes: int = 0
    metadata_bytes: int = 0
    transfers: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    ended_s: float | None = None
    _events: list[_Event] = field(default_factory=list)
    _polls: list[tuple[KVPoll, float]] = field(default_factory=list)

    def note(self, now_s: float, event: str, leg: str = "", **detail: Any) -> None:
        if len(self._events) >= self.limit:
            self.dropped += 1
            return
        self._events.append((now_s, event, leg, detail or None))

    def queued(self, now_s: float, leg: str, position: int, offset_s: float) -> None:
        """News from a queue, once a second while a room waits. Of those that follow each other the last is kept."""
        if self._events and self._events[-1][1] == QUEUED and self._events[-1][2] == leg:
            self._events.pop()
        self.note(now_s, QUEUED, leg, position=position, offset_s=offset_s)

    def released(self, now_s: float, message: Released) -> None:
        """Decode's pages came back from quarantine; perhaps long after the room's end."""
        self.note(
            now_s, "released", "decode", proof=message.proof, pages=message.pages, quarantined_s=message.quarantined_s
        )

    def drained(self, message: Drained) -> None:
        """A source rank's writes have ended: what they came to. What its backend can't tell is left out."""
        self.kv_bytes += message.kv_bytes
        self.metadata_bytes += message.metadata_bytes
        size_bytes = message.kv_bytes + message.metadata_bytes
        if size_bytes and message.backend:
            measured = msgspec.structs.asdict(message.measured)
            known = {name: value for name, value in measured.items() if value is not None}
            self.transfers.append({"rank": message.rank, "backend": message.backend, "bytes": size_bytes, **known})

    def poll(self, now_s: float, state: KVPoll) -> None:
        """Write down a change of KVPoll; the same value again changes nothing."""
        if not self._polls or self._polls[-1][0] is not state:
            self._polls.append((state, now_s))

    def end(self, now_s: float) -> None:
        """The room is over: no duration grows any more."""
        self.ended_s = now_s

    def durations(self, now_s: float) -> dict[KVPoll, float]:
        """Seconds in each KVPoll so far, in order: it never comes back to a value that it has left."""
        now_s = now_s if self.ended_s is None else self.ended_s
        ends_s = [at_s for _, at_s in self._polls[1:]] + [now_s]
        return {
            state: 0.0 if state in STICKY else end_s - at_s
            for (state, at_s), end_s in zip(self._polls, ends_s, strict=False)
        }

    def as_object(self, now_s: float) -> dict[str, Any]:
        """The journal as `GET /rooms/{id}` gives it. Room ids are strings: they exceed what JSON readers keep exact."""
        polls = [
            {"state": state.name, "at_s": round(at_s - self.began_s, 6), "duration_s": round(duration_s, 6)}
            for (state, at_s), duration_s in zip(self._polls, self.durations(now_s).values(), strict=True)
        ]
        return {
            "room": str(self.room),
            "request": f"{self.request:016x}",
            "attempt": self.attempt,
            "prefill": self.prefill,
            "decode": self.decode,
            "backend": self.backend,
            "prompt_tokens": self.prompt_tokens,
            "kvpoll": polls,
            "events": [self._readable(event) for event in self._events],
            "events_dropped": self.dropped,
            "kv_bytes": self.kv_bytes,
            "metadata_bytes": self.metadata_bytes,
            "transfers": self.transfers,
            "outcome": self.outcome,
        }

    def _readable(self, event: _Event) -> dict[str, Any]:
        at_s, name, leg, detail = event
        kept = {key: value for key, value in (detail or {}).items() if value not in (None, "", -1)}
        if "offset_s" in kept:
            kept["offset_s"] = round(kept["offset_s"], 6)
        return {"at_s": round(at_s - self.began_s, 6), "event": name, "leg": leg, "detail": kept}
