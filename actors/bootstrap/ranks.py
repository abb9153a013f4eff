"""The registered ranks, by place: who may register, and what is missing. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from kvferry.protocol.address import Address
from kvferry.protocol.messages import RegistrationRefused
from kvferry.protocol.rank import Layout, RankInfo

#: Of each coordinate; a size is a number in a message, and nobody has more processes.
MAX_SIZE = 4096

#: A request needs one instance of each, or a unified one.
PAIR = ("prefill", "decode")

#: Fields of the layout in which instances may differ from each other.
FREE = ("page_size",)

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
            if size > MAX_SIZE:
                return RegistrationRefused(f"{name}_size is {size}; allowed: 1 to {MAX_SIZE}", retry=False)
            if not 0 <= rank < size:
                return RegistrationRefused(f"{name}_rank is {rank}; allowed: 0 to {size - 1}", retry=False)
        try:
            _ = info.slice
        except ValueError as error:
            return RegistrationRefused(f"{info.instance}: {error}", retry=False)
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
        return f"transfer.transports is host, which works within one host, but {where}; set it to auto or tcp"

    def members(self, instance: str) -> list[RankInfo]:
        """The ranks of one instance."""
        return [info for info in self.ranks.values() if info.instance == instance]

    def outside(self, info: RankInfo, sender: str, own: str) -> str | None:
        """Why `info`, told by somebody at the IP address `sender`, is not their group's to tell, or None.

        A group has the sender's own address, and where it is one of a group's, those of all its ranks. `own` is the
        registry's own, by which it may be reached from its own host too.
        """
        for known in self.ranks.values():
            there, told = known.address, info.address
            same = (there.endpoint, there.host, there.pid) == (told.endpoint, told.host, told.pid)
            if there.incarnation == told.incarnation and not same:
                return f"process {there.incarnation:016x} of {there.host} is at {there.endpoint}, and does not move"
        hosts = {host_of(member.address) for member in self.members(info.instance)}
        own_group = {sender, own} if is_loopback(sender) else {sender}
        allowed = own_group | (hosts if hosts & own_group else set())
        if host_of(info.address) in allowed:
            return None
        return f"{host_of(info.address)} is not an address of the sender's group ({', '.join(sorted(allowed))})"

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
    """The first thing on which two ranks disagree, with both values. Pages have one size within an instance; two
    instances may have two.
    """
    same = info.instance == other.instance
    for name in Layout.__struct_fields__:
        ours, theirs = getattr(info.layout, name), getattr(other.layout, name)
        if ours != theirs and (same or name not in FREE):
            return f"{name} of {info.instance} is {ours!r}, but {other.instance} registered with {theirs!r}"
    if same:
        for name in ("role", "dp_size", "cp_size", "tp_size", "pp_size", "stages"):
            ours, theirs = getattr(info, name), getattr(other, name)
            if ours != theirs:
                return f"{name} of {info.instance} is {ours!r}, but another rank of it registered with {theirs!r}"
    return None


def host_of(address: Address) -> str:
    """The IP address or name in the endpoint."""
    return address.endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """All of 127.0.0.0/8, ::1 (also as an IPv4 address), and the name."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)
