"""A run as a list of events, in order of time: what each room's journal says, what befell the links, and the faults."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from kvferry.actors.ports import LostReason
from kvferry.actors.router.router import Router
from kvferry.protocol.address import Address
from kvferry.sim.system import SimProcess

#: A journal's own numbers are told to the microsecond, as it tells them itself.
_DIGITS = 6


class Trace:
    """Looks on from the start of the system; `lines` after its end."""

    def __init__(self) -> None:
        self._events: list[tuple[float, str]] = []
        self._routers: list[Router] = []

    def spawned(self, process: SimProcess) -> None:
        actor, name = process.actor, process.address.name
        self._note(f"{name} starts as {process.address.incarnation:016x}")
        if isinstance(actor, Router):
            self._routers.append(actor)
        for what in ("link_up", "peer_exited"):
            setattr(actor, what, partial(self._link, name, what.replace("_", " "), getattr(actor, what)))
        actor.link_lost = partial(self._lost, name, actor.link_lost)  # type: ignore[method-assign]

    def _note(self, text: str) -> None:
        self._events.append((asyncio.get_running_loop().time(), text))

    def _link(self, name: str, what: str, tell: object, peer: Address) -> None:
        self._note(f"{name}: {what} {peer.name}")
        assert callable(tell)
        tell(peer)

    def _lost(self, name: str, tell: object, peer: Address, reason: LostReason) -> None:
        self._note(f"{name}: link to {peer.name} lost: {reason.value}")
        assert callable(tell)
        tell(peer, reason)

    def lines(self, faults: Sequence[str], ends: Mapping[str, int]) -> list[str]:
        """Each "time text", in order. `faults` are lines of the same form."""
        events = [*self._events, *self._journals()]
        for line in faults:
            at_s, _, text = line.partition(" ")
            events.append((float(at_s), f"*** {text}"))
        events.sort(key=lambda event: event[0])  # stable: events of one time stay in their order
        ended = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        return [f"{at_s:11.6f}  {text}" for at_s, text in events] + [f"clients: {ended}"]

    def _journals(self) -> list[tuple[float, str]]:
        found = []
        for router in self._routers:
            journals = [*router.ended.values(), *(guest.room.journal for guest in router.guests.values())]
            for journal in sorted(journals, key=lambda journal: (journal.began_s, journal.room)):
                pair = f"{journal.prefill} and {journal.decode}"
                start = f"request {journal.request:016x} attempt {journal.attempt}, {journal.prompt_tokens} tokens"
                name = f"{router.network.address.name} room {journal.room:016x}"
                found.append((journal.began_s, f"{name}: opened for {pair}: {start}"))
                for event in journal.as_object(journal.began_s)["events"]:
                    at_s = round(journal.began_s + event["at_s"], _DIGITS)
                    detail = " ".join(f"{key}={value}" for key, value in event["detail"].items())
                    found.append((at_s, f"{name}: {event['leg']} {event['event']} {detail}".rstrip()))
        return found
