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
    """`messages` that each end sends per session, `dials` of each process, `faults`: crashes and paths that break."""

    messages: int = 1
    dials: int = 1
    faults: int = 1
    drops: bool = True

    def text(self) -> str:
        return (
            f"2 ends, each sends at most {self.messages} message(s) per session, dials at most {self.dials} time(s); "
            f"frames lost, repeated and reordered without bound; at most {self.faults} fault(s) of: crash, path down"
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
    """`ends`: the number of each process's state (-1: dead); `frames`: all that was ever sent to each, as bits."""

    ends: tuple[int, int]
    lives: tuple[int, int]
    frames: tuple[int, int]
    faults: int


@dataclass
class SessionWorld:
    """Two processes, by slot 0 and 1."""

    bounds: SessionBounds
    ends: list[EndState] = field(default_factory=list)
    frames: list[tuple[bytes, bytes, int]] = field(default_factory=list)  # (path at the receiver, bytes, for whom)
    _ids: dict[Hashable, int] = field(default_factory=dict)
    _frame_ids: dict[tuple[bytes, bytes, int], int] = field(default_factory=dict)
    _turns: dict[tuple[int, Event], tuple[int, int] | Violation] = field(default_factory=dict)
    _met: dict[Hashable, tuple[int, int]] = field(default_factory=dict)

    def address(self, slot: int, life: int) -> Address:
        return Address("AB"[slot], f"endpoint-{slot}", (slot + 1) * 16 + life, "", 0)

    def start(self) -> Pair:
        first, second = (self._add(End(self.address(slot, 1)), 1) for slot in (0, 1))
        return Pair((first, second), (1, 1), (0, 0), self.bounds.faults)

    def _add(self, end: End, life: int) -> int:
        key = end.address.incarnation, end.key()
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self.ends)
            self.ends.append(EndState(known, freeze(end), end.links._dials, end.sessions()))
        return known

    # --- events ---

    def events(self, state: Pair) -> Iterator[Event]:
        for slot in (0, 1):
            if state.ends[slot] < 0:
                if state.lives[slot] <= self.bounds.faults:
                    yield ("restart", slot)
                continue
            end, other = self.ends[state.ends[slot]], 1 - slot
            here = self.address(slot, state.lives[slot]).incarnation
            for frame in _bits(state.frames[slot]):
                if self.frames[frame][2] in (0, here):
                    yield ("frame", slot, frame)
            linked = {session.peer for session in end.sessions}
            for life in range(1, state.lives[other] + 1):
                if end.dials < self.bounds.dials and self.address(other, life).incarnation not in linked:
                    yield ("dial", slot, life)
            there = self.address(other, state.lives[other]).incarnation if state.ends[other] >= 0 else 0
            for session in end.sessions:
                yield from self._events_of(state, slot, session, there)
        if state.faults:
            for slot in (0, 1):
                if state.ends[slot] >= 0:
                    yield ("crash", slot)

    def _events_of(self, state: Pair, slot: int, session: SessionState, there: int) -> Iterator[Event]:
        for timer in session.timers:
            yield ("timer", slot, session.peer, timer)
        if session.told < self.bounds.messages:
            yield ("say", slot, session.peer)
        if self.bounds.drops:
            yield ("drop", slot, session.peer)
        if session.path == OUT and not there:
            yield ("refused", slot)
        if state.faults and session.path is not None:
            yield ("down", slot, session.path)

    def _after(self, state: Pair, event: Event) -> Pair:
        name, slot, *rest = event
        if name == "crash":
            ends = (-1, state.ends[1]) if slot == 0 else (state.ends[0], -1)
            return self._pruned(state._replace(ends=ends, faults=state.faults - 1))
        if name == "restart":
            lives = tuple(life + (at == slot) for at, life in enumerate(state.lives))
            end = self._add(End(self.address(slot, lives[slot])), lives[slot])
            ends = (end, state.ends[1]) if slot == 0 else (state.ends[0], end)
            return state._replace(ends=ends, lives=(lives[0], lives[1]))
        arguments: tuple[Any, ...] = tuple(rest)
        if name == "frame":
            path, data, _ = self.frames[rest[0]]
            return self._turn(state, slot, ("frame", path, data))
        if name == "down":
            return self._turn(state._replace(faults=state.faults - 1), slot, ("path_down", *rest))
        if name == "dial":
            arguments = (self.address(1 - slot, rest[0]),)
        return self._turn(state, slot, (name, *arguments))

    def after(self, state: Pair, event: Event) -> Pair:
        return self._merged(self._after(state, event))

    def _turn(self, state: Pair, slot: int, event: Event) -> Pair:
        known = self._turns.get((state.ends[slot], event))
        if known is None:
            try:
                known = self._run(state.ends[slot], event, slot, state.lives[slot])
            except Violation as violation:
                known = violation
            self._turns[(state.ends[slot], event)] = known
        if isinstance(known, Violation):
            raise known
        end, sent = known
        ends = (end, state.ends[1]) if slot == 0 else (state.ends[0], end)
        to, back = state.frames
        frames = (to, back | sent) if slot == 0 else (to | sent, back)
        return state._replace(ends=ends, frames=frames)

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
            frames |= 1 << self._frame(end, path, data)
        return self._add(end, life), frames

    def _frame(self, end: End, path: bytes, data: bytes) -> int:
        """On a path that we have dialled it reaches whoever lives there; on one that we have accepted, its dialler."""
        if path == OUT:
            frame = (IN + b"%d" % end.address.incarnation, data, 0)
        else:
            frame = (OUT, data, int(path.removeprefix(IN)))
        return self._number(frame)

    def _number(self, frame: tuple[bytes, bytes, int]) -> int:
        known = self._frame_ids.get(frame)
        if known is None:
            known = self._frame_ids[frame] = len(self.frames)
            self.frames.append(frame)
        return known

    def _pruned(self, state: Pair) -> Pair:
        """Without what only a process that has ended could receive."""
        frames = []
        for slot in (0, 1):
            here = self.address(slot, state.lives[slot]).incarnation if state.ends[slot] >= 0 else 0
            frames.append(sum(1 << frame for frame in _bits(state.frames[slot]) if self.frames[frame][2] in (0, here)))
        return state._replace(frames=(frames[0], frames[1]))

    def _merged(self, state: Pair) -> Pair:
        """With every frame that was sent on any way to the same two ends."""
        core = state.ends, state.lives, state.faults
        met = self._met.get(core, (0, 0))
        frames = self._met[core] = state.frames[0] | met[0], state.frames[1] | met[1]
        return state._replace(frames=frames)

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

    def key(self, state: Pair) -> Any:
        to, back = state.frames
        return state.ends, state.lives, state.faults, to.to_bytes(64, "little"), back.to_bytes(64, "little")

    def frame_at(self, number: int) -> Frame:
        return decode_frame(self.frames[number][1])
