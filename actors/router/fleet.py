"""The instances that the router knows: each one's last `Load`, and the rooms that this router has opened since.

Between two reports a burst would see the same idle instance again and again, so each room counts from the moment when
it is opened here, until a report that must know it: one that comes after the room's `Opened` on the same link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.actors.router.view import ASSUMED_PLACE_S, ASSUMED_TOKENS_PER_S, UNIFIED, Ask, DecodeView, PrefillView
from kvferry.memory.admission import pages_needed
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Load
from kvferry.protocol.rank import RankInfo


@dataclass
class Sent:
    """A room that no report knows yet; `tokens` are what prefill has to compute for it."""

    ask: Ask
    tokens: int
    opened: bool = False


@dataclass
class Instance:
    """One leader. `load` is what it is taken to be like until it has reported: idle."""

    info: RankInfo
    load: Load
    reported: bool = False
    loaded_s: float = 0.0
    turn: int = 0
    sent: dict[int, Sent] = field(default_factory=dict)
    sent_tokens: int = 0
    _decode: DecodeView | None = None  # made when it is asked for, then kept up to date

    def report(self, load: Load, now_s: float) -> None:
        self.load, self.reported, self.loaded_s = load, True, now_s
        self._keep({room: sent for room, sent in self.sent.items() if not sent.opened})

    def dispatched(self, ask: Ask, turn: int) -> None:
        self.turn = turn
        tokens = ask.tokens_to_compute(self.info)
        self.sent[ask.room] = Sent(ask, tokens)
        self.sent_tokens += tokens
        if self._decode is not None:
            self._decode = _with(self._decode, ask, turn)

    def over(self, room: int) -> None:
        if room in self.sent:
            self._keep({other: sent for other, sent in self.sent.items() if other != room})

    def prefill_view(self, now_s: float, tokens_per_s: float) -> PrefillView:
        """What was queued has been worked off at the instance's own speed since the report."""
        queued = max(0.0, self.load.queued_tokens - (now_s - self.loaded_s) * tokens_per_s)
        return PrefillView(self.info, self.turn, queued + self.sent_tokens, tokens_per_s)

    def decode_view(self) -> DecodeView:
        if self._decode is None:
            load = self.load
            counts = (load.waiting, load.running, load.free_pages, load.total_pages, load.free_places)
            self._decode = DecodeView(self.info, self.turn, *counts, load.place_s or ASSUMED_PLACE_S)
            for sent in self.sent.values():
                self._decode = _with(self._decode, sent.ask, self.turn)
        return self._decode

    def registered(self, info: RankInfo) -> None:
        self.info, self._decode = info, None

    def _keep(self, sent: dict[int, Sent]) -> None:
        self.sent, self._decode = sent, None
        self.sent_tokens = sum(one.tokens for one in sent.values())


def _with(view: DecodeView, ask: Ask, turn: int) -> DecodeView:
    """After one more room."""
    counts = (view.waiting + 1, view.running, view.free_pages, view.total_pages, view.free_places)
    if view.takes_at_once(ask):
        pages = pages_needed(ask.fed_tokens + 1, view.info.layout.page_size)
        counts = (0, view.running + 1, view.free_pages - pages, view.total_pages, view.free_places - 1)
    return DecodeView(view.info, turn, *counts, view.place_s)


def is_leader(info: RankInfo) -> bool:
    """Of an instance that serves rooms: all coordinates within it are 0."""
    return info.role in ("prefill", "decode", UNIFIED) and not (info.cp_rank or info.tp_rank or info.pp_rank)


class Fleet:
    """`usable` instances are linked (as `is_up` says) and not draining."""

    def __init__(self, is_up: Callable[[int], bool]) -> None:
        self._is_up = is_up
        self._instances: dict[int, Instance] = {}  # by incarnation
        self._leaving: set[int] = set()  # those that have refused a room for it
        self._turn = 0

    def registered(self, ranks: Iterable[RankInfo], complete: bool = True) -> None:
        """The roster has changed. What is known of an instance that stays is kept.

        `complete` False: the registry is new, and ranks are still registering again. Those that it does not know yet
        stay, unless another process has their place.
        """
        known, self._instances = self._instances, {}
        leaders = [info for info in ranks if is_leader(info)]
        if not complete:
            places = {(info.instance, info.dp_rank) for info in leaders}
            others = (instance.info for instance in known.values())
            leaders += [info for info in others if (info.instance, info.dp_rank) not in places]
        for info in leaders:
            instance = known.get(info.address.incarnation)
            if instance is None:
                idle = Load(info.role, free_pages=info.pages, total_pages=info.pages, free_places=info.pages)
                instance = Instance(info, idle)
            instance.registered(info)
            self._instances[info.address.incarnation] = instance
        self._leaving &= self._instances.keys()

    def leaves(self, incarnation: int) -> None:
        """It drains, as its roster entry will say; that is never taken back."""
        self._leaving.add(incarnation)

    def addresses(self) -> list[Address]:
        return [instance.info.address for instance in self._instances.values()]

    @property
    def all_linked(self) -> bool:
        return all(map(self._is_up, self._instances))

    # --- news ---

    def reported(self, incarnation: int, load: Load, now_s: float) -> None:
        """An instance that has left the roster may still report."""
        if incarnation in self._instances:
            self._instances[incarnation].report(load, now_s)

    def dispatched(self, ask: Ask, prefill: int, decode: int) -> None:
        """A room is being opened at a pair."""
        self._turn += 1
        for incarnation in {prefill, decode}:  # one, where a unified instance is both
            self._instances[incarnation].dispatched(ask, self._turn)

    def opened(self, room: int, incarnation: int) -> None:
        """A leg has said `Opened`: its next report knows the room."""
        instance = self._instances.get(incarnation)
        if instance is not None and room in instance.sent:
            instance.sent[room].opened = True

    def over(self, room: int, prefill: int, decode: int, committed: bool) -> None:
        """The room has ended. A decode that runs its request keeps it in the count until it reports."""
        for incarnation in (prefill, decode):
            instance = self._instances.get(incarnation)
            if instance is not None and not (incarnation == decode and committed and instance.reported):
                instance.over(room)

    # --- what to choose from ---

    def prefills(self, now_s: float) -> list[PrefillView]:
        usable = self._usable("prefill")
        speeds = [instance.load.tokens_per_s for instance in usable if instance.load.tokens_per_s > 0]
        mean = sum(speeds) / len(speeds) if speeds else ASSUMED_TOKENS_PER_S
        return [instance.prefill_view(now_s, instance.load.tokens_per_s or mean) for instance in usable]

    def decodes(self) -> list[DecodeView]:
        return [instance.decode_view() for instance in self._usable("decode")]

    def finished_per_s(self) -> float:
        """Requests that end at all decodes, by their own measurements; 0 while nothing is known."""
        loads = [instance.load for instance in self._usable("decode")]
        return sum(load.running / load.place_s for load in loads if load.place_s > 0)

    def _usable(self, role: str) -> list[Instance]:
        return [instance for instance in self._able(role) if self._problem(instance) is None]

    def _able(self, role: str) -> list[Instance]:
        """Those that can play `role`; a unified instance plays both."""
        return [instance for instance in self._instances.values() if instance.info.role in (role, UNIFIED)]

    def _problem(self, instance: Instance) -> str | None:
        if instance.info.draining or instance.info.address.incarnation in self._leaving:
            return "is draining"
        return None if self._is_up(instance.info.address.incarnation) else "is not linked"

    def missing(self) -> list[str]:
        """Why a role has nobody, for each role that has nobody."""
        lines = []
        for role in ("prefill", "decode"):
            problems = [(instance.info.instance, self._problem(instance)) for instance in self._able(role)]
            if all(problem is not None for _, problem in problems):
                lines.append("; ".join(f"{name} {problem}" for name, problem in problems) or f"no {role} is registered")
        return lines

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """Each instance as the router sees it."""
        return [
            {
                "id": instance.info.instance,
                "dp_rank": instance.info.dp_rank,
                "usable": self._problem(instance) is None,
                "report_age_s": round(now_s - instance.loaded_s, 3) if instance.reported else None,
                "rooms_not_reported": len(instance.sent),
            }
            for instance in self._instances.values()
        ]
