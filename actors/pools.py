"""The pools: how many instances of each role there are to be, who comes, who goes, and how far each of them is.

The numbers that are wanted are the truth of one `Pools`; the registry, fronts and status are told them. Every member
has a task of its own, which is its life: start, registered, told to go, drain, leave, ended. Not here: how a process is
placed, started and ended (`Hosting`).

Names are not used twice in the life of a `Pools`: what is told of decode-2 is of one instance (and of its restarts,
each with an incarnation of its own).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol

from kvferry.actors.bootstrap.ranks import group_size
from kvferry.actors.leaving import HAND_OVER_S
from kvferry.actors.member import Member, Phase, who_goes_first
from kvferry.actors.membership import REGISTRY
from kvferry.actors.ports import Clock
from kvferry.actors.reaper import Reaper
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.messages import Roster

#: Roles that scale: the least and the most of each. Without a router no request gets an answer, and one takes no slot;
#: the others may be 0, to free what they hold: requests are then answered 503 until there is one again.
LIMITS: dict[str, tuple[int, int]] = {"prefill": (0, 64), "decode": (0, 64), "unified": (0, 64), "router": (1, 64)}

#: Pauses between two looks, while something changes and while nothing does.
SOON_S, LATER_S = 0.2, 1.0
#: Members that have left and are still told of.
DEPARTED_KEPT = 64


class Hosting(Protocol):
    """Processes, by name. What raises LookupError says that the process is gone, TimeoutError that it does not answer.

    * `start`: asks for the process and gives None; or says what is missing for it. Repeating it is fine, and tells what
      is missing for a process that has ended and is to be started again.
    * `process`: names the process that answers now; one that was started again has another name.
    * `call`: one of the actor's methods for hosts.
    * `leave`: end the actor in order: links closed, memory given back. Gives the last recount of its pages.
    * `remove`: end the process for good and give its place back, however far it is. True once it is gone.
    """

    async def start(self, role: str, name: str) -> str | None: ...
    async def process(self, name: str) -> object: ...
    async def call(self, name: str, method: str, *args: Any) -> Any: ...
    async def leave(self, name: str) -> dict[str, Any]: ...
    async def remove(self, name: str) -> bool: ...


def check_wanted(wanted: object) -> dict[str, int]:
    """The numbers asked for, by role. Raises InvalidRequest naming field, value and what is allowed."""
    if not isinstance(wanted, Mapping) or not wanted:
        raise InvalidRequest(f"{wanted!r} is not acceptable; allowed: a number for one or more of {', '.join(LIMITS)}")
    for role, number in wanted.items():
        if role not in LIMITS:
            raise InvalidRequest(f"{role}: there is no such role; the roles are {', '.join(LIMITS)}", str(role))
        low, high = LIMITS[role]
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            allowed = f"a whole number, at least {low} and at most {high}"
            raise InvalidRequest(f"{role}: {number!r} is not acceptable; allowed: {allowed}", role)
    return dict(wanted)


class Pools:
    """`run` is its task, for ever. `wanted` is by role; `version` rises with each change of it."""

    def __init__(self, hosting: Hosting, clock: Clock, wanted: Mapping[str, int], drain_s: float) -> None:
        self.wanted = dict.fromkeys(LIMITS, 0) | dict(wanted)
        self.version = 0
        self.members: dict[str, Member] = {}
        self.departed: deque[tuple[int, Member]] = deque(maxlen=DEPARTED_KEPT)  # with the version they left under
        self._hosting, self._clock, self._drain_s = hosting, clock, drain_s
        self._next = dict.fromkeys(self.wanted, 0)
        self._missing: tuple[str, ...] = ()
        self._listed: set[str] = set()
        self._reaper = Reaper(hosting, self._spawn)
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    def scale(self, numbers: Mapping[str, int]) -> None:
        """Want other numbers of some roles. The last call wins. Raises InvalidRequest, with nothing changed."""
        self.restore(check_wanted(numbers), self.version + 1)

    def restore(self, numbers: Mapping[str, int], version: int) -> None:
        """What was wanted of our predecessor, told by a front; news that are not newer than ours change nothing."""
        if version > self.version:
            self.version = version
            self.wanted |= check_wanted(numbers)
            self._wake()

    def progress(self) -> dict[str, Any]:
        """For `kvferry scale`: `done` when every role has what is wanted and nobody is leaving. `killed`: how often a
        process of each name was ended by the `Reaper`.
        """
        now_s = self._clock.now_s()
        left = [member for version, member in self.departed if version == self.version]
        roles = {}
        for role, wanted in self.wanted.items():
            ours = [member for member in (*self.members.values(), *left) if member.role == role]
            roles[role] = {"wanted": wanted} | {p.value: sum(m.phase is p for m in ours) for p in Phase}
        return {
            "version": self.version,
            "done": self._done(),
            "wanted": dict(self.wanted),
            "roles": roles,
            "missing": self._shortfalls(),
            "instances": [member.as_object(now_s) for member in self.members.values()],
            "left": [member.as_object(now_s) for member in left],
            "killed": dict(self._reaper.killed),
        }

    # --- the keeper's own loop ---

    async def run(self) -> None:
        """Ends only by cancellation, or by an error that nobody expected: its host must treat that as a crash."""
        self._failed = asyncio.get_running_loop().create_future()
        self._add(REGISTRY, REGISTRY, 0)
        try:
            while True:
                await self._look()
                await self._reaper.look(self.members)
                await self._balance()
                await self._pause()
                if self._failed.done():
                    self._failed.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Tell the registry what is wanted, and see who has registered; ask each router whether it is linked."""
        numbers = {role: number for role, number in self.wanted.items() if role != "router"}
        registry = self.members[REGISTRY]
        try:
            roster: Roster = await self._hosting.call(REGISTRY, "want", numbers, list(self.members))
        except (LookupError, TimeoutError) as error:
            self._enter(registry, Phase.STARTING, str(error))
            self._listed = set()
            return
        self._enter(registry, Phase.REGISTERED)
        self._listed = {rank.instance for rank in roster.ranks}
        self._missing = roster.missing
        routers = [m.name for m in self.members.values() if m.role == "router" and m.phase is not Phase.PLACING]
        states = await self._states(routers)
        here = _complete(roster) | {name for name, state in states.items() if state is not None and state["linked"]}
        for member in self.members.values():
            if member is not registry and member.phase in (Phase.STARTING, Phase.REGISTERED):
                self._enter(member, Phase.REGISTERED if member.name in here else Phase.STARTING)

    async def _balance(self) -> None:
        """Add what is missing; tell who is too many to go."""
        for role in self.wanted:
            staying = [m for m in self._of(role) if not m.going]
            for _ in range(self.wanted[role] - len(staying)):
                number, self._next[role] = self._next[role], self._next[role] + 1
                self._add(role, f"{role}-{number}", number)
            if len(staying) <= self.wanted[role]:
                continue
            states = await self._states([m.name for m in staying if m.phase is Phase.REGISTERED])
            for member in staying:
                member.rooms = (states.get(member.name) or {}).get("rooms", 0)
            # Numbers may have been changed while we asked.
            excess = max(0, len(staying) - self.wanted[role])
            for member in sorted(staying, key=who_goes_first)[:excess]:
                member.going = True
                self._wake()

    async def _states(self, names: list[str]) -> dict[str, dict[str, Any] | None]:
        """What each says of its rooms; None from one that does not answer."""

        async def ask(name: str) -> dict[str, Any] | None:
            try:
                state: dict[str, Any] = await self._hosting.call(name, "drained")
            except (LookupError, TimeoutError):
                return None
            return state

        return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))

    # --- a member's life ---

    def _add(self, role: str, name: str, number: int) -> None:
        member = self.members[name] = Member(role, name, number, since_s=self._clock.now_s())
        self._spawn(self._live(member))

    async def _live(self, member: Member) -> None:
        while not member.going:
            missing = await self._hosting.start(member.role, member.name)
            if missing is None:
                self._enter(member, Phase.STARTING)
                break
            member.detail = missing
            await self._pause()
        while not member.going:
            await self._pause()
            if member.phase is Phase.STARTING:  # again, perhaps, and on a host that has no room
                member.detail = await self._hosting.start(member.role, member.name) or ""
        if member.phase is Phase.REGISTERED:
            await self._drain(member)
        else:
            member.detail = f"before it had registered; it was {member.phase.value}"
        while not await self._hosting.remove(member.name) or member.name in self._listed:
            await self._pause()
        self._enter(member, Phase.LEFT, member.detail)
        self.departed.append((self.version, self.members.pop(member.name)))
        self._wake()  # its place may be what another one waits for

    async def _drain(self, member: Member) -> None:
        """Until it may go, or is gone, or does not answer for longer than its limits allow."""
        self._enter(member, Phase.DRAINING)
        # It ends by itself earlier than this, if it answers.
        end_s = self._clock.now_s() + self._drain_s + 2 * HAND_OVER_S
        process: object = None
        while self._clock.now_s() < end_s:
            try:
                now = await self._hosting.process(member.name)
                if process not in (None, now):
                    raise LookupError("its process ended")
                if process is None:
                    await self._hosting.call(member.name, "drain", self._drain_s)
                process, state = now, await self._hosting.call(member.name, "drained")
                self._note(member, state)
                if state["done"]:
                    member.pages = await self._hosting.leave(member.name)
                    member.detail = ""
                    return
            except TimeoutError:
                member.detail = "does not answer"
            except LookupError as error:
                member.detail = f"ended before it had drained: {error}"
                return
            await self._pause()

    def _note(self, member: Member, state: dict[str, Any]) -> None:
        member.rooms, member.handed_over = state["rooms"], state["handed_over"]
        if state["left_s"] > 0:
            member.detail = f"{member.rooms} rooms; hands over in {state['left_s']:.0f} s"
        else:
            member.detail = f"{member.rooms} rooms; handing over"

    # --- small things ---

    def _of(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    def _enter(self, member: Member, phase: Phase, detail: str = "") -> None:
        if member.phase is not phase:
            member.phase, member.since_s, member.detail = phase, self._clock.now_s(), detail

    def _done(self) -> bool:
        registered = all(m.phase is Phase.REGISTERED and not m.going for m in self.members.values())
        return registered and all(len(self._of(role)) == number for role, number in self.wanted.items())

    def _shortfalls(self) -> list[str]:
        """What keeps numbers from being met, in words."""
        lines = []
        for role, wanted in self.wanted.items():
            ours = [m for m in self._of(role) if not m.going]
            waiting = [m for m in ours if m.phase in (Phase.PLACING, Phase.STARTING) and m.detail]
            placed = sum(m.phase is not Phase.PLACING and m not in waiting for m in ours)
            if waiting:
                whats = "; ".join(f"{m.name} {m.detail}" for m in waiting)
                lines.append(f"{role}: {wanted} wanted, {placed} placed; {whats}")
        return lines + [line for line in self._missing if "could not start" in line]

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    async def _pause(self) -> None:
        """Until the next look is due, or somebody wants something else."""
        pause_s = LATER_S if self._done() else SOON_S
        waits = {asyncio.ensure_future(self._woken.wait()), asyncio.ensure_future(self._clock.sleep(pause_s))}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _spawn(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - handed to `run`, which raises it
                if self._failed is not None and not self._failed.done():
                    self._failed.set_exception(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _complete(roster: Roster) -> set[str]:
    """Instances all of whose ranks are registered. One that has lost its leader is to be started again, though its
    other ranks are there."""
    ranks = Counter(rank.instance for rank in roster.ranks)
    return {rank.instance for rank in roster.ranks if ranks[rank.instance] >= group_size(rank)}


def routers_of(progress: Mapping[str, Any]) -> list[str]:
    """Routers for new requests: those that can serve, or else whoever is there."""
    rows = [row for row in progress["instances"] if row["role"] == "router"]
    able = [row["name"] for row in rows if row["phase"] == Phase.REGISTERED.value]
    return able or [row["name"] for row in rows]


def names_of(progress: Mapping[str, Any], roles: Iterable[str]) -> list[tuple[str, str]]:
    """(role, name) of the members of these roles whose processes may answer."""
    rows = [row for row in progress["instances"] if row["role"] in roles and row["phase"] != Phase.PLACING.value]
    return [(row["role"], row["name"]) for row in rows]
