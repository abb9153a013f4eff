"""The model of the link session: the links of two processes over a carrier that loses, repeats and reorders.

The network is the set of all frames that were ever sent: each may arrive at any time, again, or never. Timers run out
whenever they are armed. So a state is (one end, the other end, the frames so far), and the space is finite as long as
the messages, the dials and the crashes are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvferry.protocol.address import Address
from kvferry.protocol.frames import Frame, decode_frame
from kvferry.sim.explore.local import Event
from kvferry.sim.explore.session_end import IN, OUT, End, SessionState, Turns
from kvferry.sim.explore.snapshot import freeze, thaw
from kvferry.sim.explore.violation import Violation


@dataclass(frozen=True)
class SessionBounds:
    """`messages` that each end sends per session, `dials` of each process; at most so many `faults`, of `kinds`."""

    messages: int = 1
    dials: int = 1
    faults: int = 2
    kinds: tuple[str, ...] = ("crash", "path down")
    drops: bool = True

    def text(self) -> str:
        return (
            f"2 ends, each sends at most {self.messages} message(s) per session, dials at most {self.dials} time(s); "
            "frames lost, repeated and reordered without bound; "
            f"at most {self.faults} fault(s) of: {', '.join(self.kinds)}"
        )


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True, eq=False)
class EndState:
    id: int
    frozen: bytes
    dials: int
    sessions: tuple[SessionState, ...]


class Pair(NamedTuple):
    """`ends`: the number of each process's state (-1: dead). What was sent on any way to it is gathered beside it."""

    ends: tuple[int, int]
    lives: tuple[int, int]
    faults: int


@dataclass
class SessionWorld:
    """Two processes, by slot 0 and 1. It gathers the frames that were ever sent, each a bit by its number."""

    bounds: SessionBounds
    ends: list[EndState] = field(default_factory=list)
    #: (slot of the receiver, path there, bytes, for whom; 0: for whoever lives there)
    frames: list[tuple[int, bytes, bytes, int]] = field(default_factory=list)
    _ids: dict[Hashable, int] = field(default_factory=dict)
    _frame_ids: dict[tuple[int, bytes, bytes, int], int] = field(default_factory=dict)
    _frames_for: dict[tuple[int, int], int] = field(default_factory=dict)
    _turns: dict[tuple[int, Event], tuple[int, int] | Violation] = field(default_factory=dict)
    _deaf: dict[int, int] = field(default_factory=dict)  # by end: frames that change nothing there

    def address(self, slot: int, life: int) -> Address:
        return Address("AB"[slot], f"endpoint-{slot}", (slot + 1) * 16 + life, "", 0)

    def start(self) -> Pair:
        first, second = (self._add(End(self.address(slot, 1)), 1) for slot in (0, 1))
        return Pair((first, second), (1, 1), self.bounds.faults)

    def _add(self, end: End, life: int) -> int:
        key = end.address.incarnation, end.key()
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self.ends)
            self.ends.append(EndState(known, freeze(end), end.links._dials, end.sessions()))
        return known

    # --- events ---

    def own(self, state: Pair) -> Iterator[Event]:
        """What needs no frame."""
        for slot in (0, 1):
            if state.ends[slot] < 0:
                if state.lives[slot] <= self.bounds.faults:
                    yield ("restart", slot)
                continue
            end, other = self.ends[state.ends[slot]], 1 - slot
            linked = {session.peer for session in end.sessions}
            for life in range(1, state.lives[other] + 1):
                if end.dials < self.bounds.dials and self.address(other, life).incarnation not in linked:
                    yield ("dial", slot, life)
            there = self.address(other, state.lives[other]).incarnation if state.ends[other] >= 0 else 0
            for session in end.sessions:
                yield from self._events_of(state, slot, session, there)
        if state.faults and "crash" in self.bounds.kinds:
            for slot in (0, 1):
                if state.ends[slot] >= 0:
                    yield ("crash", slot)

    def brought(self, state: Pair, gathered: int) -> Iterator[Event]:
        """Frames that arrive. One that is known to change nothing is left out."""
        for slot in (0, 1):
            end = state.ends[slot]
            if end >= 0:
                hears = self._heard_by(slot, state.lives[slot]) & ~self._deaf.get(end, 0)
                for frame in _bits(gathered & hears):
                    yield ("frame", slot, frame)

    def _heard_by(self, slot: int, life: int) -> int:
        incarnation = self.address(slot, life).incarnation
        return self._frames_for.get((slot, 0), 0) | self._frames_for.get((slot, incarnation), 0)

    def kept(self, state: Pair, gathered: int) -> int:
        """Without what only a process that has ended could receive."""
        mask = 0
        for slot in (0, 1):
            lives = state.ends[slot] >= 0
            mask |= self._heard_by(slot, state.lives[slot]) if lives else self._frames_for.get((slot, 0), 0)
        return gathered & mask

    def _events_of(self, state: Pair, slot: int, session: SessionState, there: int) -> Iterator[Event]:
        for timer in session.timers:
            yield ("timer", slot, session.peer, timer)
        if session.told < self.bounds.messages:
            yield ("say", slot, session.peer)
        if self.bounds.drops:
            yield ("drop", slot, session.peer)
        if session.path == OUT and not there:
            yield ("refused", slot)
        if state.faults and session.path is not None and "path down" in self.bounds.kinds:
            yield ("down", slot, session.path)

    def turn(self, state: Pair, event: Event) -> tuple[Pair, int]:
        """The state that follows, and the frames that are sent. Raises Violation."""
        name, slot, *rest = event
        if name == "crash":
            ends = (-1, state.ends[1]) if slot == 0 else (state.ends[0], -1)
            return state._replace(ends=ends, faults=state.faults - 1), 0
        if name == "restart":
            lives = tuple(life + (at == slot) for at, life in enumerate(state.lives))
            end = self._add(End(self.address(slot, lives[slot])), lives[slot])
            ends = (end, state.ends[1]) if slot == 0 else (state.ends[0], end)
            return state._replace(ends=ends, lives=(lives[0], lives[1])), 0
        number = state.ends[slot]
        end, sent = self._turn(number, slot, state.lives[slot], event)
        if name == "frame" and end == number and not sent:
            self._deaf[number] = self._deaf.get(number, 0) | 1 << rest[0]
        ends = (end, state.ends[1]) if slot == 0 else (state.ends[0], end)
        return Pair(ends, state.lives, state.faults - (name == "down")), sent

    def after(self, state: Pair, event: Event) -> Pair:
        return self.turn(state, event)[0]

    def _turn(self, number: int, slot: int, life: int, event: Event) -> tuple[int, int]:
        """Each turn of a process is run once. What happens is told to it in its own words."""
        known = self._turns.get((number, event))
        if known is None:
            try:
                known = self._run(number, self._told(event), slot, life)
            except Violation as violation:
                known = violation
            self._turns[(number, event)] = known
        if isinstance(known, Violation):
            raise known
        return known

    def _told(self, event: Event) -> Event:
        match event:
            case ("frame", _, frame):
                return ("frame", *self.frames[frame][1:3])
            case ("down", _, path):
                return ("path_down", path)
            case ("dial", slot, life):
                return ("dial", self.address(1 - slot, life))
        name, _, *rest = event
        return (name, *rest)

    def _run(self, number: int, event: Event, slot: int, life: int) -> tuple[int, int]:
        end: End = thaw(self.ends[number].frozen)
        turns: Any = Turns()
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(turns)
        try:
            getattr(end, event[0])(*event[1:])
            while turns.soon:
                turns.soon.pop(0)()
        except Violation:
            raise
        except Exception as error:
            raise Violation("no-escape", f"{end.address.name}: {type(error).__name__}: {error}") from error
        finally:
            asyncio._set_running_loop(before)
        sent, end.sent = end.sent, []
        frames = 0
        for path, data in sent:
            frames |= 1 << self._frame(end, 1 - slot, path, data)
        return self._add(end, life), frames

    def _frame(self, end: End, to: int, path: bytes, data: bytes) -> int:
        """On a path that we have dialled it reaches whoever lives there; on one that we have accepted, its dialler."""
        if path == OUT:
            frame = (to, IN + b"%d" % end.address.incarnation, data, 0)
        else:
            frame = (to, OUT, data, int(path.removeprefix(IN)))
        known = self._frame_ids.get(frame)
        if known is None:
            known = self._frame_ids[frame] = len(self.frames)
            self.frames.append(frame)
            self._frames_for[(to, frame[3])] = self._frames_for.get((to, frame[3]), 0) | 1 << known
        return known

    # --- what is asked of every state ---

    def check(self, state: Pair) -> None:
        """Messages are checked as they are delivered."""

    def is_quiet(self, state: Pair) -> bool:
        """Both ends have no session, or the same one with nothing left to say."""
        sessions = [session for end in state.ends if end >= 0 for session in self.ends[end].sessions]
        if any(session.state != "OPEN" or session.unacked for session in sessions):
            return False
        return not sessions or (len(sessions) == 2 and sessions[0].session == sessions[1].session)

    def is_fair(self, event: Event) -> bool:
        return event[0] in ("frame", "timer", "refused", "restart")

    def key(self, state: Pair) -> Hashable:
        return state

    def frame_at(self, number: int) -> Frame:
        return decode_frame(self.frames[number][2])
