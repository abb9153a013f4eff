"""The registry actor. It starts empty; ranks register, and register again when it was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.actors.actor import Actor
from kvferry.actors.bootstrap.ranks import RankTable, host_of, place_of
from kvferry.actors.bootstrap.room_ranks import RoomRanks
from kvferry.actors.ports import Clock, LostReason, Network
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause, Overloaded
from kvferry.protocol.messages import (
    OverBudget,
    Register,
    RegisterDpRank,
    Registered,
    RegistrationRefused,
    Roster,
    Watch,
)
from kvferry.protocol.rank import RankInfo

T = TypeVar("T")


#: What a decode says of its quarantine it says once a second; older news may be over.
FRESH_S = 3.0


@dataclass(frozen=True)
class StartFailed:
    """Item: an instance's process could not be started."""

    instance: str
    error: str


@dataclass(frozen=True)
class Wanted:
    """Item: how many instances of each role there should be, and the names of those that there are."""

    numbers: dict[str, int]
    names: frozenset[str]


@dataclass(frozen=True)
class Asked:
    """Item: a call that reads or writes the registry's state, in a turn of its own."""

    do: Callable[[], Any]
    answer: asyncio.Future[Any]


class Registry(Actor):
    """`wanted`: instances of each role that make the service ready; None until the controller, whose numbers they are,
    has told them. What keeps an instance from starting is told with what is missing, until it registers. `one_host`:
    as in `RankTable`. `rooms`: the DP ranks of rooms.
    """

    def __init__(
        self, network: Network, clock: Clock, mailbox: int, wanted: dict[str, int] | None = None,
        one_host: bool = False, rooms: RoomRanks | None = None,
    ) -> None:  # fmt: skip
        super().__init__(network, clock, mailbox)
        self.table = RankTable(one_host)
        self.rooms = rooms if rooms is not None else RoomRanks()
        self._wanted = wanted
        self._version = 0
        self._watchers: dict[int, str] = {}
        self._overdue: dict[tuple[int, int], tuple[float, str, OverBudget]] = {}  # by who says it, and of whom
        self._failures: dict[str, tuple[int, str]] = {}  # by instance: how often in a row, and the last error
        self._on_message = {
            Register: self._register, Watch: self._watch, RegisterDpRank: self._room_of_router,
            OverBudget: self._over_budget,
        }  # fmt: skip

    def roster(self) -> Roster:
        failures = (f"{name} could not start ({n} times): {error}" for name, (n, error) in self._failures.items())
        missing: tuple[str, ...] = ("the controller has not yet said how many instances there should be",)
        if self._wanted is not None:
            missing = self.table.missing(self._wanted)
        missing += tuple(failures) if missing else ()
        return Roster(self._version, tuple(self.table.ranks.values()), not missing, missing)

    async def start_failed(self, instance: str, error: str) -> None:
        """Called by the host of an instance before its process ends."""
        self._mailbox.put(StartFailed(instance, error))

    async def want(self, numbers: dict[str, int], names: list[str]) -> Roster:
        """Called by the controller, again and again, since a registry that was started again knows nothing. The roster
        that it gets is the one before this call's news.
        """
        self._mailbox.put(Wanted(dict(numbers), frozenset(names)))
        return self.roster()

    async def over_budget(self) -> list[tuple[str, OverBudget]]:
        """Called by the controller: (who says it, what), if it was said just now, and told to nobody yet."""
        fresh_s = self.clock.now_s() - FRESH_S
        found = [(name, overdue) for at_s, name, overdue in self._overdue.values() if at_s >= fresh_s]
        self._overdue.clear()
        return found

    def _over_budget(self, peer: Address, message: OverBudget) -> None:
        self._overdue[peer.incarnation, message.incarnation] = (self.clock.now_s(), peer.name, message)

    async def status(self) -> dict[str, Any]:
        address = self.network.address
        return {
            "id": address.name,
            "incarnation": f"{address.incarnation:016x}",
            "pid": address.pid,
            "version": self._version,
            "ranks": len(self.table.ranks),
            "rooms": len(self.rooms),
            "counts": dict(self.counts),
        }

    # --- calls of the HTTP routes ---

    async def register(self, info: RankInfo, sender: str) -> RegistrationRefused | str | None:
        """A rank that somebody at the IP address `sender` tells of. We dial it: it is held as long as that link lives.
        Refused: the text where it is not the sender's to tell, else what the rank itself would be answered.
        """
        return await self._in_turn(lambda: self._register_told(info, sender))

    async def register_room(self, room: int, dp_rank: int, instance: str | None) -> str | None:
        """The DP rank of a room's prefill, of the group `instance` or of any. Why it is refused, or None. Raises
        LookupError where there is no such group."""
        return await self._in_turn(lambda: self._register_room(room, dp_rank, instance))

    async def ranks_of_rooms(self, rooms: list[int]) -> dict[int, int]:
        """Of those that are known."""
        return await self._in_turn(lambda: self.rooms.of(rooms, self.clock.now_s()))

    async def _in_turn(self, do: Callable[[], T]) -> T:
        """Raises Overloaded when the mailbox is full."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self._mailbox.post(Asked(do, answer)):
            raise Overloaded(Cause("overloaded", "the registry's mailbox is full"))
        return await answer

    def busy(self) -> bool:
        """What is told of rooms may be forgotten a little late; nothing else waits for a time."""
        return False

    def receive_other(self, item: Any) -> None:
        if isinstance(item, Asked):
            self._answer(item)
        elif isinstance(item, StartFailed):
            self._could_not_start(item.instance, item.error)
        elif isinstance(item, Wanted):
            self._told(item)
        else:
            super().receive_other(item)

    def _could_not_start(self, instance: str, error: str) -> None:
        count = self._failures.get(instance, (0, ""))[0] + 1
        self._failures[instance] = (count, error)
        self._changed()

    def _told(self, item: Wanted) -> None:
        failures = {name: told for name, told in self._failures.items() if name in item.names}
        if item.numbers != self._wanted or failures != self._failures:
            self._wanted, self._failures = item.numbers, failures
            self._changed()

    def link_lost(self, peer: Address, reason: LostReason) -> None:
        self._watchers.pop(peer.incarnation, None)
        gone = [p for p, info in self.table.ranks.items() if info.address.incarnation == peer.incarnation]
        for place in gone:
            del self.table.ranks[place]
        if gone:
            self._changed()

    def _register(self, peer: Address, message: Register) -> None:
        info = message.info
        if info.address != peer:
            self.counts["registrations for another process"] += 1
            refusal: RegistrationRefused | None = RegistrationRefused("a process registers itself only", retry=False)
        else:
            refusal = self._admit(info)
            if refusal is not None and not refusal.retry:  # its process ends now, as often as it is started
                self._could_not_start(info.instance, refusal.reason)
        if refusal is not None:
            self.counts["registrations refused"] += 1
            self.network.send(peer.incarnation, refusal)
            return
        self.network.send(peer.incarnation, Registered(self._version))

    def _admit(self, info: RankInfo) -> RegistrationRefused | None:
        refusal = self.table.refuse(info)
        if refusal is not None:
            return refusal
        is_new = self.table.ranks.get(place_of(info)) != info
        self.table.ranks[place_of(info)] = info
        self._failures.pop(info.instance, None)
        if is_new:
            self._changed()
        return None

    def _register_told(self, info: RankInfo, sender: str) -> RegistrationRefused | str | None:
        us = self.network.address
        refusal: RegistrationRefused | str | None = self.table.outside(info, sender, host_of(us))
        if refusal is None and info.address.incarnation == us.incarnation:
            refusal = "this incarnation is the registry's own"
        if refusal is None:
            refusal = self._admit(info)
        if refusal is not None:
            self.counts["registrations refused"] += 1
            return refusal
        self.network.dial(info.address)
        return None

    def _room_of_router(self, _peer: Address, message: RegisterDpRank) -> None:
        try:
            refusal = self._register_room(message.room, message.dp_rank, message.instance)
        except LookupError:  # it has left while the message was on its way
            refusal = "no such group"
        self.counts["dp ranks refused"] += refusal is not None

    def _register_room(self, room: int, dp_rank: int, instance: str | None) -> str | None:
        sizes = {info.dp_size for info in self.table.ranks.values() if info.role != "decode"}
        if instance is not None:
            sizes = {info.dp_size for info in self.table.members(instance)}
        if not sizes:
            raise LookupError(f"{instance or 'a prefill'} is not registered")
        now_s = self.clock.now_s()
        refusals = [self.rooms.refuse(room, dp_rank, size, now_s) for size in sorted(sizes)]
        if None not in refusals:
            return refusals[-1]
        self.rooms.keep(room, dp_rank, now_s)
        return None

    @staticmethod
    def _answer(item: Asked) -> None:
        if item.answer.done():  # who asked has gone
            return
        try:
            item.answer.set_result(item.do())
        except LookupError as error:
            item.answer.set_exception(error)

    def tick(self, now_s: float) -> None:
        self.rooms.drop_old(now_s)

    def _watch(self, peer: Address, message: Watch) -> None:
        self._watchers[peer.incarnation] = message.name
        self.network.send(peer.incarnation, self.roster())

    def _changed(self) -> None:
        self._version += 1
        roster = self.roster()
        for incarnation in self._watchers:
            self.network.send(incarnation, roster)
