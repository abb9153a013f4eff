"""What the registry says of the ranks, and how far that can be believed: neither a new registry nor a new router knows
anybody yet.
"""

from __future__ import annotations

from kvferry.protocol.messages import Roster

#: Ranks that have lost the registry find its successor within so long.
REGISTRY_YOUNG_S = 5.0
#: What a router that is new may take to link to those of its first roster.
LINKING_S = 1.0


class RosterBook:
    """`roster` is the last one that came. Sans-IO: `now_s` is passed in."""

    def __init__(self) -> None:
        self.roster = Roster(0, (), False, ("the registry has not answered yet",))
        self._registry = 0  # the incarnation that it is of; 0: none has come
        self._young_until_s: float | None = None
        self._linking_until_s = 0.0

    def came(self, registry: int, roster: Roster, now_s: float) -> None:
        if not self._registry:
            self._linking_until_s = now_s + LINKING_S
        elif registry != self._registry:
            self._young_until_s = now_s + REGISTRY_YOUNG_S
        self._registry, self.roster = registry, roster

    @property
    def is_complete(self) -> bool:
        """Whoever is not in it has gone. Otherwise ranks are still registering again."""
        return self._young_until_s is None

    def grows_complete(self, now_s: float) -> bool:
        """True once, when the time for that is over."""
        over = self._young_until_s is not None and now_s >= self._young_until_s
        if over:
            self._young_until_s = None
        return over

    def is_new(self, all_linked: bool, now_s: float) -> bool:
        """The router has only just been started: it knows nobody, or is not linked to them yet."""
        return not self._registry or (now_s < self._linking_until_s and not all_linked)
