"""Which DP rank of its group a room's prefill is: kept for those who must ask, for a while and of so many rooms."""

from __future__ import annotations

from collections import OrderedDict

#: Ids of rooms have 63 bits.
ROOMS_END = 1 << 63


class RoomRanks:
    """Pure: `now_s` is the registry's own clock. A room has one rank for good; of too many rooms the oldest is dropped.

    `follow`: rooms go to rank room % dp_size, which nobody need tell or ask, and no other rank is accepted.
    """

    def __init__(self, limit: int = 65_536, keep_s: float = 120.0, follow: bool = True) -> None:
        self.follow = follow
        self._limit, self._keep_s = limit, keep_s
        self._rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()  # rank, and until when

    def __len__(self) -> int:
        return len(self._rooms)

    def refuse(self, room: int, dp_rank: int, dp_size: int, now_s: float) -> str | None:
        """Why the room's rank can't be this one of `dp_size`, or None."""
        if not 0 <= room < ROOMS_END:
            return f"bootstrap_room is {room}; allowed: 0 to 2^63 - 1"
        if not 0 <= dp_rank < dp_size:
            return f"dp_rank is {dp_rank}; allowed: 0 to {dp_size - 1}"
        if self.follow and dp_rank != room % dp_size:
            return f"follow_bootstrap_room conflict: room {room} belongs to rank {room % dp_size}, not {dp_rank}"
        self.drop_old(now_s)
        known = self._rooms.get(room)
        if known is not None and known[0] != dp_rank:
            return f"room {room} is rank {known[0]}'s already"
        return None

    def keep(self, room: int, dp_rank: int, now_s: float) -> None:
        """What `refuse` has not refused. Once more changes nothing, and prolongs nothing."""
        self._rooms.setdefault(room, (dp_rank, now_s + self._keep_s))
        if len(self._rooms) > self._limit:
            self._rooms.popitem(last=False)

    def of(self, rooms: list[int], now_s: float) -> dict[int, int]:
        """The ranks of those that are known."""
        self.drop_old(now_s)
        return {room: self._rooms[room][0] for room in rooms if room in self._rooms}

    def drop_old(self, now_s: float) -> None:
        while self._rooms and next(iter(self._rooms.values()))[1] <= now_s:
            self._rooms.popitem(last=False)
