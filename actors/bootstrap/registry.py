"""The registry actor. It starts empty; ranks register, and register again when it was replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.actors.actor import Actor
from kvferry.actors.ports import Clock, LostReason, Network
from kvferry.protocol.address import Address
from kvferry.protocol.messages import OverBudget, Register, Registered, RegistrationRefused, Roster, Watch
from kvferry.protocol.rank import Layout, RankInfo

#: A request needs one instance of each, or a unified one.
PAIR = ("prefill", "decode")

#: Coordinates of a rank: (instance, dp, cp, tp, pp).
Place = tuple[str, int, int, int, int]


def place_of(info: RankInfo) -> Place:
    return (info.instance, info.dp_rank, info.cp_rank, info.tp_rank, info.pp_rank)


def group_size(info: RankInfo) -> int:
    """Ranks that make the instance's group complete: DP x CP x TP x PP."""
    return info.dp_size * info.cp_size * info.tp_size * info.pp_size


@dataclass
class RankTable:
    """The registered ranks, by place; pure. A place has one holder until that holder's link is lost.

    `one_host`: bytes go from process to process only, so a rank on another host could move none.
    """

    one_host: bool = False
    ranks: dict[Place, RankInfo] = field(default_factory=dict)

    def refuse(self, info: RankInfo) -> RegistrationRefused | None:
        """Why `info` can't be registered, or None. Repeating a registration is fine."""
        holder = self.ranks.get(place_of(info))
        if holder is not None and holder.address.incarnation != info.address.incarnation:
            return RegistrationRefused(
                f"{info.instance} rank {place_of(info)[1:]} is held by live process {holder.address.incarnation:016x}",
                retry=True,
            )
        for name in ("dp", "cp", "tp", "pp"):
            rank, size = getattr(info, f"{name}_rank"), getattr(info, f"{name}_size")
            if not 0 <= rank < size:
                return RegistrationRefused(f"{name}_rank is {rank}; allowed: 0 to {size - 1}", retry=False)
        for place, other in self.ranks.items():
            if other.address.incarnation == info.address.incarnation and place != place_of(info):
                text = f"process {info.address.incarnation:016x} is {other.instance} rank {place[1:]} already"
                return RegistrationRefused(text, retry=False)
            problem = _mismatch(info, other) or (self._elsewhere(info, other) if self.one_host else None)
            if problem:
                return RegistrationRefused(problem, retry=False)
        return None

    @staticmethod
    def _elsewhere(info: RankInfo, other: RankInfo) -> str | None:
        if info.address.host == other.address.host or "unified" in (info.role, other.role):
            return None  # a unified instance moves no bytes
        where = f"{info.instance} is at {info.address.endpoint}, {other.instance} at {other.address.endpoint}"
        return f"transfer.transports is host, which works within one host, but {where}; set it to tcp"

    def missing(self, wanted: dict[str, int]) -> tuple[str, ...]:
        """What keeps the service from being ready: one line per role that lacks complete instances, or has none.

        An instance that drains takes no new rooms, so it does not count.
        """
        lines = []
        for role, count in wanted.items():
            if count == 0 and role in PAIR and not wanted.get("unified"):
                lines.append(f"{role}: none is wanted; `kvferry scale {role}=1` asks for one")
            groups: dict[str, set[Place]] = {}
            sizes: dict[str, int] = {}
            for place, info in self.ranks.items():
                if info.role == role and not info.draining:
                    groups.setdefault(info.instance, set()).add(place)
                    sizes[info.instance] = group_size(info)
            complete = sum(len(places) >= sizes[name] for name, places in groups.items())
            if complete < count:
                lines.append(f"{role}: {complete} of {count} instances are complete")
        return tuple(lines)


def _mismatch(info: RankInfo, other: RankInfo) -> str | None:
    """The first thing on which two ranks disagree, with both values."""
    for name in Layout.__struct_fields__:
        ours, theirs = getattr(info.layout, name), getattr(other.layout, name)
        if ours != theirs:
            return f"{name} of {info.instance} is {ours!r}, but {other.instance} registered with {theirs!r}"
    if info.instance == other.instance:
        for name in ("role", "dp_size", "cp_size", "tp_size", "pp_size"):
            ours, theirs = getattr(info, name), getattr(other, name)
            if ours != theirs:
                return f"{name} of {info.instance} is {ours!r}, but another rank of it registered with {theirs!r}"
    return None


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


class Registry(Actor):
    """`wanted`: instances of each role that make the service ready; None until the controller, whose numbers they are,
    has told them. What keeps an instance from starting is told with what is missing, until it registers. `one_host`:
    as in `RankTable`.
    """

    def __init__(
        self, network: Network, clock: Clock, mailbox: int, wanted: dict[str, int] | None = None, one_host: bool = False
    ) -> None:
        super().__init__(network, clock, mailbox)
        self.table = RankTable(one_host)
        self._wanted = wanted
        self._version = 0
        self._watchers: dict[int, str] = {}
        self._overdue: dict[tuple[int, int], tuple[float, str, OverBudget]] = {}  # by who says it, and of whom
        self._failures: dict[str, tuple[int, str]] = {}  # by instance: how often in a row, and the last error
        self._on_message = {Register: self._register, Watch: self._watch, OverBudget: self._over_budget}

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
            "counts": dict(self.counts),
        }

    def receive(self, item: Any) -> None:
        if isinstance(item, StartFailed):
            self._could_not_start(item.instance, item.error)
        elif isinstance(item, Wanted):
            self._told(item)
        else:
            super().receive(item)

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
        if info.address.incarnation != peer.incarnation:
            self.counts["registrations for another process"] += 1
            refusal: RegistrationRefused | None = RegistrationRefused("a process registers itself only", retry=False)
        else:
            refusal = self.table.refuse(info)
            if refusal is not None and not refusal.retry:  # its process ends now, as often as it is started
                self._could_not_start(info.instance, refusal.reason)
        if refusal is not None:
            self.counts["registrations refused"] += 1
            self.network.send(peer.incarnation, refusal)
            return
        is_new = self.table.ranks.get(place_of(info)) != info
        self.table.ranks[place_of(info)] = info
        self._failures.pop(info.instance, None)
        self.network.send(peer.incarnation, Registered(self._version))
        if is_new:
            self._changed()

    def _watch(self, peer: Address, message: Watch) -> None:
        self._watchers[peer.incarnation] = message.name
        self.network.send(peer.incarnation, self.roster())

    def _changed(self) -> None:
        self._version += 1
        roster = self.roster()
        for incarnation in self._watchers:
            self.network.send(incarnation, roster)
