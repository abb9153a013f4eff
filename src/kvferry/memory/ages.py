"""The order of arrival, which a retracted request keeps for its next attempt."""

from __future__ import annotations

from collections import OrderedDict

#: Retracted requests that are remembered, and for how long: their fronts open the next attempt at once, and give up
#: after a while.
KEPT = 1024
KEPT_S = 120.0


class Ages:
    """Smaller is older; no two requests have the same age. Sans-IO: `now_s` is passed in."""

    def __init__(self, kept: int = KEPT, kept_s: float = KEPT_S) -> None:
        self._kept, self._kept_s = kept, kept_s
        self._next = 1
        self._retracted: OrderedDict[int, tuple[int, float]] = OrderedDict()  # request -> (age, until)

    def __len__(self) -> int:
        return len(self._retracted)

    def arrived(self, request: int, now_s: float) -> int:
        """The age of a request that arrives now. It stays remembered: this attempt, too, may end before it runs."""
        self._expire(now_s)
        if (known := self._retracted.get(request)) is not None:
            return known[0]
        age, self._next = self._next, self._next + 1
        return age

    def retracted(self, request: int, age: int, now_s: float) -> None:
        self._retracted.pop(request, None)
        self._retracted[request] = (age, now_s + self._kept_s)
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        while self._retracted:
            request, (_, until_s) = next(iter(self._retracted.items()))
            if until_s > now_s and len(self._retracted) <= self._kept:
                return
            del self._retracted[request]
